"""Operators of floats that are given integers or truth values, against torch."""

import pytest

from tests.lib.models.torch_helpers import assert_like_torch, names


def functions(torch):
    """By name: a function of integers from 1 to 4, of floats, and of truth values."""
    return {
        "sines of places": lambda n, x, truth: torch.sin(n) + x,
        "reciprocals": lambda n, x, truth: torch.reciprocal(n) + n.rsqrt(),
        "a number by integers": lambda n, x, truth: 3 / n,
        "angles": lambda n, x, truth: torch.atan2(n, n.flip(0)),
        "integers and floats": lambda n, x, truth: torch.atan2(n, x) + x.abs().pow(n),
        "of truth values": lambda n, x, truth: truth.sigmoid() + truth.exp() + truth.sqrt(),
        "chosen by truth values": lambda n, x, truth: torch.where(truth, 1.5, 0.5) + x.masked_fill(truth, 2),
        "truth values compared": lambda n, x, truth: x * (truth == (x > 0)) + (truth <= (x < 1)) + (truth != (x > 1)),
        "truth values compared with numbers": lambda n, x, truth: x * (truth == 1) + (truth == False),  # noqa: E712
        "the larger truth value": lambda n, x, truth: x * truth.maximum(x > 0) + truth.amin(1, True) + truth.amax(0),
        "truth values in order": lambda n, x, truth: (
            sum(truth.sort(dim=1, stable=True)) + truth.argsort(dim=0, stable=True)
        ),
        "truth values at places": lambda n, x, truth: (
            x * truth.scatter_add(1, n - 1, x > 0)
            + truth.index_add(0, n[:, 0] % 2, x > 0)
            + truth.scatter_reduce(1, n - 1, x > 0, "amin")
            + truth.scatter_reduce(0, n % 3, x > 0, "sum", include_self=False)
            + n.scatter_reduce(1, n - 1, n.flip(1), "amax", include_self=False)
            + truth.index_put((n[:, 0] % 2,), x > 0, True)
        ),
        "any and all of them": lambda n, x, truth: x * truth.max() + truth.min() + (x > 0).max(),
        "powers of integers": lambda n, x, truth: 2**n + n**n + n**2,
    }


@pytest.mark.parametrize("name", names(functions))
def test_integers_are_computed_with_as_torch_does_it(tmp_path, cpu, torch, models, name):
    function = functions(torch)[name]
    model = models["function"](lambda self, *given: function(*given).float())
    inputs = torch.randint(1, 5, (3, 4)), torch.randn(3, 4), torch.rand(3, 4) > 0.5

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, *inputs)
