from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from lib.contracts.conditions import Conditions, require_equal
from lib.contracts.errors import ContractError
from lib.contracts.schemas import MEASUREMENTS
from tests.helpers import CONDITIONS


@pytest.mark.parametrize("name", [field.name for field in fields(Conditions)])
def test_each_field_tells_latencies_apart(name):
    other = replace(CONDITIONS, **{name: 9 if isinstance(getattr(CONDITIONS, name), int) else "another"})

    assert other.id != CONDITIONS.id
    assert [line.partition(":")[0] for line in other.differences(CONDITIONS)] == [name]
    with pytest.raises(ContractError, match=f"m.parquet holds latencies that cannot be compared.*\\n  {name}: "):
        require_equal([CONDITIONS, other], None, Path("m.parquet"))


def test_a_table_has_a_column_for_each_field():
    struct = MEASUREMENTS.field("conditions").type

    assert [struct.field(n).name for n in range(struct.num_fields)] == list(asdict(CONDITIONS))


def test_equal_conditions_are_shared_and_no_rows_leave_them_as_they_are():
    assert require_equal([CONDITIONS, replace(CONDITIONS)], None, Path("m")) == CONDITIONS
    assert require_equal([], CONDITIONS, Path("m")) == CONDITIONS
