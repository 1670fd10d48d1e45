"""Images in other sizes, against torch."""

import pytest

from lib.models import torch_import
from tests.lib.models.torch_helpers import assert_like_torch, save

SIZES = {
    "twice": {"scale_factor": 2},
    "a factor that is no quotient": {"scale_factor": 1.7},
    "another factor of each axis": {"scale_factor": (1.7, 0.6)},
    "a factor that is the quotient of sizes": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "a size": {"size": (5, 11)},
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_images_are_enlarged_as_torch_does_it(tmp_path, cpu, torch, models, mode, size):
    model = models["function"](lambda self, x: torch.nn.functional.interpolate(x, mode=mode, **SIZES[size]) * 2)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, 8, 7))


@pytest.mark.parametrize("size", [{"size": (3, 12)}, {"scale_factor": 0.4}])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_smaller_images_are_made_of_all_pixels_where_that_is_asked_for(tmp_path, cpu, torch, models, mode, size):
    resized = torch.nn.functional.interpolate
    model = models["function"](lambda self, x: resized(x, mode=mode, antialias=True, **size) * 2)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, 11, 8))


def test_what_the_importer_does_right_is_left_to_it(tmp_path, torch, models):
    model = models["function"](lambda self, x: torch.nn.functional.interpolate(x, scale_factor=2, mode="bilinear") * 2)

    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 3, 8, 8))

    assert "R.matmul" not in torch_import.load(path).module.script(show_meta=False)
