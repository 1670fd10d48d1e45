"""Images and volumes at places, against torch."""

import itertools

import pytest

from tests.lib.models.torch_helpers import assert_like_torch

BEYOND = ("zeros", "border", "reflection")
SAMPLINGS = [
    *itertools.product((2,), ("bilinear", "nearest", "bicubic"), BEYOND, (False, True)),
    *itertools.product((3,), ("bilinear", "nearest"), BEYOND, (False, True)),
]


@pytest.mark.parametrize(("rank", "mode", "beyond", "align_corners"), SAMPLINGS)
def test_what_is_read_at_places_is_what_torch_reads(tmp_path, cpu, torch, models, rank, mode, beyond, align_corners):
    def sampled(self, x, places):
        return torch.nn.functional.grid_sample(x, places, mode, beyond, align_corners)

    model = models["function"](sampled)
    extents, n_places = (5, 6, 4)[:rank], (3, 4, 5)[:rank]
    places = 1.5 * torch.randn(2, *n_places, rank)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, *extents), places)
