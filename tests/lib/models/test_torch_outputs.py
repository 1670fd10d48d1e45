"""Exported programs run by torch itself."""

import subprocess
import sys

import numpy as np

from lib.models import torch_outputs
from tests.helpers import ROOT
from tests.lib.models.torch_helpers import save


def test_torch_gives_what_the_model_returned_flat_and_in_order(tmp_path, torch, models):
    image = torch.randn(1, 8, 10, 10)
    path = save(torch, tmp_path / "block.pt2", models["block"], image)
    np.savez(tmp_path / "in.npz", image.numpy())

    torch_outputs.main([str(path), str(tmp_path / "in.npz"), str(tmp_path / "out.npz")])

    with torch.no_grad():
        expected = models["block"](image)
    found = list(np.load(tmp_path / "out.npz").values())
    for output, name in zip(found, ("features", "logits"), strict=True):
        np.testing.assert_allclose(output, expected[name].numpy(), rtol=1e-5, atol=1e-6)


def test_flags_that_the_export_fixed_are_no_inputs(tmp_path, torch, models):
    model = models["function"](lambda self, x, doubled, y: (x * (2 if doubled else 1) - y, None))
    x, y = torch.randn(3), torch.randn(3)
    program = torch.export.export(model, (x, True, y))

    [found] = torch_outputs.computed(program, [x.numpy(), y.numpy()])

    np.testing.assert_allclose(found, (2 * x - y).numpy(), rtol=1e-6)


def test_a_file_that_is_no_program_is_told_in_one_line(tmp_path, torch):
    (tmp_path / "broken.pt2").write_bytes(b"no archive")
    command = [sys.executable, "-m", "lib.models.torch_outputs", str(tmp_path / "broken.pt2"), "in.npz", "out.npz"]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert "is damaged or was not written by torch.export.save" in done.stderr.strip().splitlines()[-1]
