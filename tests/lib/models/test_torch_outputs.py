"""What torch itself makes of exported programs."""

import numpy as np

from lib.models import torch_archive, torch_outputs
from tests.lib.models.torch_helpers import save


def test_torch_gives_what_the_model_returned_flat_and_in_order(tmp_path, torch, models):
    image = torch.randn(1, 8, 10, 10)
    path = save(torch, tmp_path / "block.pt2", models["block"], image)

    found = torch_outputs.computed(torch_archive.read(torch, path), [image.numpy()])

    with torch.no_grad():
        expected = models["block"](image)
    for output, name in zip(found, ("features", "logits"), strict=True):
        np.testing.assert_allclose(output, expected[name].numpy(), rtol=1e-5, atol=1e-6)


def test_flags_that_the_export_fixed_are_no_inputs(tmp_path, torch, models):
    model = models["function"](lambda self, x, doubled, y: (x * (2 if doubled else 1) - y, None))
    x, y = torch.randn(3), torch.randn(3)
    program = torch.export.export(model, (x, True, y))

    [found] = torch_outputs.computed(program, [x.numpy(), y.numpy()])

    np.testing.assert_allclose(found, (2 * x - y).numpy(), rtol=1e-6)
