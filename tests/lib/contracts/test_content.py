import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.contracts import content

VALUES = st.fixed_dictionaries(
    {
        "text": st.none() | st.text(max_size=5),
        "whole": st.none() | st.integers(-(2**31), 2**31 - 1),
        "number": st.floats(allow_nan=False, width=32),
        "truth": st.booleans(),
        "numbers": st.none() | st.lists(st.floats(0, 1), max_size=3),
        "rows": st.lists(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=2), max_size=2),
        "inner": st.fixed_dictionaries({"a": st.none() | st.text(max_size=2), "b": st.integers(0, 9)}),
    }
)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("whole", pa.int32()),
        ("number", pa.float32()),
        ("truth", pa.bool_()),
        ("numbers", pa.list_(pa.float64())),
        ("rows", pa.list_(pa.list_(pa.field("element", pa.float32(), nullable=False), 2))),
        ("inner", pa.struct([("a", pa.string()), ("b", pa.int64())])),
    ]
)


def table(rows):
    return pa.Table.from_pylist(rows, schema=SCHEMA)


@settings(deadline=None)
@given(st.lists(VALUES, max_size=6), st.integers(0, 6))
def test_equal_rows_have_equal_digests_however_they_are_held(rows, cut):
    whole = content.digest(table(rows))
    sink = pa.BufferOutputStream()
    pq.write_table(table(rows), sink)

    assert content.digest(pa.concat_tables([table(rows[:cut]), table(rows[cut:])])) == whole
    assert content.digest(table(rows * 2).slice(len(rows))) == whole
    assert content.digest(pq.read_table(pa.BufferReader(sink.getvalue()))) == whole


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.lists(VALUES, min_size=1, max_size=4))
def test_other_rows_have_other_digests(rows, others):
    same = repr(table(rows).to_pylist()) == repr(table(others).to_pylist())

    assert (content.digest(table(rows)) == content.digest(table(others))) == same


@settings(deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=4), st.data())
def test_one_other_value_makes_another_digest(rows, data):
    n, name = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(SCHEMA.names))
    changed = [{**row, name: data.draw(VALUES)[name]} if m == n else row for m, row in enumerate(rows)]

    same = repr(table(rows).to_pylist()) == repr(table(changed).to_pylist())
    assert (content.digest(table(rows)) == content.digest(table(changed))) == same


def test_a_null_is_no_empty_value():
    for kind, empty in ((pa.string(), ""), (pa.int64(), 0), (pa.list_(pa.int64()), [])):
        null, value = (pa.table({"x": pa.array([v, empty], kind)}) for v in (None, empty))
        assert content.digest(null) != content.digest(value)


def test_the_digest_is_the_same_in_every_release_of_arrow():
    assert content.digest(table([{"text": "a", "whole": 1, "number": 0.5, "truth": True, "numbers": [1.0],
        "rows": [[1.0, 2.0]], "inner": {"a": None, "b": 3}}])) == "95552deac7c5e901"  # fmt: skip
