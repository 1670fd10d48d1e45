"""Pooling that says where the largest elements were, against torch."""

import pytest

from tests.lib.models.torch_helpers import assert_like_torch


@pytest.mark.parametrize(
    ("rank", "options"),
    [
        (2, {"kernel_size": 2}),
        (2, {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
        (2, {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
        (1, {"kernel_size": 3, "stride": 2, "padding": 1}),
        (3, {"kernel_size": 2, "stride": (2, 1, 2)}),
    ],
    ids=["windows", "dilation", "ceiling", "signals", "volumes"],
)
def test_places_are_those_of_the_largest_elements(tmp_path, cpu, torch, models, rank, options):
    pool = getattr(torch.nn.functional, f"max_pool{rank}d")
    shape = (2, 3, *(9, 7, 6)[:rank])

    def both(self, x):
        values, places = pool(x, **options, return_indices=True)
        return values + 1000.0 * places

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", models["function"](both), torch.randn(shape))


def test_without_places_pooling_is_one_operator(tmp_path, cpu, torch, models):
    from lib.models import torch_import
    from tests.lib.models.torch_helpers import save

    model = models["function"](lambda self, x: torch.nn.functional.max_pool2d(x, 2) * 2)

    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 3, 8, 8))

    assert "R.nn.max_pool2d" in torch_import.load(path).module.script(show_meta=False)
