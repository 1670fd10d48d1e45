"""Elements that are read where tensors say, against torch."""

import pytest

from tests.lib.models.torch_helpers import assert_like_torch, names


def reads(torch):
    """By name: what reads a tensor of 4 x 5 x 6 x 7 at places that are inputs, i and j, below four."""
    return {
        "one axis": lambda x, i, j: x[:, i],
        "two neighbours together": lambda x, i, j: x[:, i, j],
        "two neighbours of places of one shape, of three axes": lambda x, i, j: x[i, j, j],
        "two that are apart": lambda x, i, j: x[i, :, j],
        "places of two shapes": lambda x, i, j: x[:, :, i.unsqueeze(-1), j],
        "crossed, of higher ranks": lambda x, i, j: x[:, :, i.reshape(3, 1, 1), j.reshape(1, 3)],
        "constants from the end": lambda x, i, j: x[:, torch.tensor([-1, 0]), torch.tensor([2, -2])],
        "constants and inputs": lambda x, i, j: x[torch.tensor([[-1], [1]]), i],
        "inputs from the end": lambda x, i, j: x[:, i - 4, j],
        "windows of an image": lambda x, i, j: torch.nn.functional.unfold(x, 2, padding=1, stride=2),
        "integers of 32 bits": lambda x, i, j: x[:, i.int(), j.int()],
    }


@pytest.mark.parametrize("name", names(reads))
def test_elements_are_those_that_torch_reads(tmp_path, cpu, torch, models, name):
    read = reads(torch)[name]
    model = models["function"](lambda self, x, i, j: read(x, i, j) * 2)
    i, j = torch.tensor([3, 0, 2]), torch.tensor([1, 1, 3])

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(4, 5, 6, 7), i, j)


# By name: where values are written into such a tensor, and of which shape they are.
WRITES = {
    "rows": (lambda x, i, j: (i,), (3, 5, 6, 7)),
    "one value": (lambda x, i, j: (i, j), ()),
    "a middle axis": (lambda x, i, j: (slice(None), i), (4, 3, 6, 7)),
    "a middle axis, of a broadcast": (lambda x, i, j: (slice(None), i), (3, 1, 7)),
    "rows from the end": (lambda x, i, j: (i - 4,), (3, 5, 6, 7)),
    "two neighbours": (lambda x, i, j: (slice(None), i, j), (4, 3, 7)),
    "two that are apart": (lambda x, i, j: (i, slice(None), j), (3, 5, 7)),
    "places of two shapes": (lambda x, i, j: (i.unsqueeze(-1), j), (3, 3, 6, 7)),
}


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_elements_are_written_where_torch_writes_them(tmp_path, cpu, torch, models, name, is_added):
    places, shape = WRITES[name]

    def put(self, x, values, i, j):
        given = tuple(None if isinstance(each, slice) else each for each in places(x, i, j))
        return torch.ops.aten.index_put(x, given, values, is_added)

    i, j = torch.tensor([3, 0, 2]), torch.tensor([1, 1, 3]) if is_added else torch.tensor([1, 0, 3])

    assert_like_torch(
        torch, cpu, tmp_path / "m.pt2", models["function"](put), torch.randn(4, 5, 6, 7), torch.randn(shape), i, j
    )
