"""What an exported program says of its inputs and outputs, asked as ranges of shapes ask it."""

import pytest

from lib.contracts.errors import ModelError
from lib.models import file_facts, ranges
from tests.lib.models.torch_helpers import save


@pytest.fixture
def file(torch, models, tmp_path):
    """Two texts of a length that is open, a flag that the export fixed, and results of which one is no tensor."""
    model = models["function"](lambda self, ids, mask, flag, table: (table[ids] * mask[..., None], None, mask.sum(1)))
    ids, mask, table = torch.zeros(2, 6, dtype=torch.int64), torch.ones(2, 6), torch.ones(5, 3)
    length = torch.export.Dim("length", min=2, max=64)
    options = {"dynamic_shapes": (({1: length}, {1: length}, None, None),), "strict": False}
    return save(torch, tmp_path / "texts.pt2", model, ids, mask, True, table, **options)


def test_dimensions_that_are_open_have_torchs_symbols(file):
    found = file_facts.of(file)

    [symbol] = found.open_dimensions
    assert sorted(found.axes.values()) == [("", ""), ("", symbol), ("", symbol)]
    assert len(found.outputs) == 2
    assert (found.computed, found.licence) == ({}, "")


def test_a_range_is_one_of_a_symbol(file):
    [symbol] = file_facts.of(file).open_dimensions

    found, listed = (ranges.parse(str(file), f"{symbol}={text}") for text in ("2..16", "4,8,12"))

    assert found.limits == {symbol: (2, 16)}
    assert [bucket[symbol] for bucket in listed.buckets] == [12, 8, 4]
    with pytest.raises(ModelError, match=f"has no open dimension 'length'; open are {symbol}"):
        ranges.parse(str(file), "length=1..8")


def test_what_cannot_be_padded_is_told(torch, models, tmp_path):
    length = torch.export.Dim("length", max=40)
    model = models["function"](lambda self, x, y: x.sum() + y)
    options = {"dynamic_shapes": (({0: length}, {0: 2 * length}),), "strict": False}
    file = save(torch, tmp_path / "twice.pt2", model, torch.ones(6), torch.ones(12), **options)
    [symbol] = file_facts.of(file).open_dimensions

    with pytest.raises(ModelError, match=rf"an input of .* is 2\*{symbol} long, which cannot be padded"):
        ranges.parse(str(file), f"{symbol}=1..8")


def test_a_file_that_is_no_program_is_told(torch, tmp_path):
    (tmp_path / "broken.pt2").write_bytes(b"no archive")

    with pytest.raises(ModelError, match=r"is damaged or was not written by torch\.export\.save"):
        file_facts.of(tmp_path / "broken.pt2")
