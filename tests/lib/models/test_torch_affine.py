"""What torchao leaves in a file once its tensors are unwrapped, against NumPy."""

import numpy as np
import pytest

from lib.contracts.errors import ModelError
from lib.models import torch_declared, torch_import
from tests.helpers import computed
from tests.lib.models.torch_helpers import save

K, N = 64, 24
SMALLEST = 1.1920929e-07


def rounded(x, scale, zero, least=-128, most=127):
    return np.clip(np.round(x / scale) + zero, least, most)


class Bytes:
    """A weight (n, k) in bytes, with a scale for each block along k."""

    def __init__(self, block, least, most, has_zeros):
        rng = np.random.default_rng(0)
        self.block, self.limits = block, (least, most)
        self.values = rng.integers(least, most + 1, (N, K)).astype(np.int8)
        self.scales = rng.uniform(0.01, 0.02, (N, K // block)).astype(np.float32)
        self.zeros = rng.integers(-4, 4, (N, K // block)).astype(np.int8) if has_zeros else None

    def in_floats(self):
        zeros = 0 if self.zeros is None else np.repeat(self.zeros, self.block, 1)
        return (self.values.astype(np.float32) - zeros) * np.repeat(self.scales, self.block, 1)


def module(torch, weight, forward):
    class Quantised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("values", "scales", "zeros"):
                value = getattr(weight, name)
                kept = None if value is None else torch.nn.Parameter(torch.tensor(value), False)
                self.register_parameter(name, kept)

        def dequantized(self):
            return torch.ops.torchao.dequantize_affine(
                self.values, [1, weight.block], self.scales, self.zeros, torch.int8, *weight.limits
            )

        def forward(self, x):
            return forward(self, x)

    torch_declared.declare(torch)
    return Quantised().eval()


@pytest.mark.parametrize(("block", "least", "most", "has_zeros"), [(K, -128, 127, False), (16, -8, 7, True)])
def test_weights_alone_are_dequantised_when_the_file_is_read(tmp_path, cpu, torch, block, least, most, has_zeros):
    weight = Bytes(block, least, most, has_zeros)
    model = module(torch, weight, lambda self, x: torch.nn.functional.linear(x, self.dequantized()))
    x = torch.randn(3, K)

    imported = torch_import.load(save(torch, tmp_path / "m.pt2", model, x))
    [found] = computed(imported, cpu, x)

    np.testing.assert_allclose(found, x.numpy() @ weight.in_floats().T, rtol=1e-4, atol=1e-5)
    assert [kept.dtype for kept in imported.weights.values()] == [np.float32]


@pytest.mark.parametrize("mapping", ["ASYMMETRIC", "SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR"])
@pytest.mark.parametrize("keepdim", [True, False])
def test_units_of_each_row_are_chosen_when_its_values_are_known(tmp_path, cpu, torch, mapping, keepdim):
    weight = Bytes(K, -128, 127, has_zeros=False)

    def forward(self, x):
        ops, size = torch.ops.torchao, [1, 1, K]
        limits = torch.int8, -128, 127
        scale, zero = ops.choose_qparams_affine(
            x, mapping, size, *limits, SMALLEST, torch.float32, torch.int8, keepdim=keepdim
        )
        x = ops.dequantize_affine(ops.quantize_affine(x, size, scale, zero, *limits), size, scale, zero, *limits)
        return torch.nn.functional.linear(x, self.dequantized())

    torch.manual_seed(0)
    x = torch.randn(2, 5, K)
    path = save(torch, tmp_path / "m.pt2", module(torch, weight, forward), x)

    [found] = computed(torch_import.load(path), cpu, x)

    given = x.numpy()
    low, high = given.min(-1, keepdims=True).clip(max=0), given.max(-1, keepdims=True).clip(min=0)
    if mapping == "ASYMMETRIC":
        scale = (high - low) / 255
        zero = np.clip(-128 - np.round(low / scale), -128, 127)
    else:
        zero = 0
        scale = np.maximum(-low, high) / 127.5 if mapping == "SYMMETRIC" else np.maximum(low / -128, high / 127)
    expected = (rounded(given, scale, zero) - zero) * scale @ weight.in_floats().T
    # The largest of a row lies between two bytes where they are symmetric, and may become either.
    one_step = (scale * np.abs(weight.in_floats()).max()).max() if mapping == "SYMMETRIC" else 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max() + one_step)


def test_products_of_bytes_are_of_integers(tmp_path, cpu, torch):
    weight = Bytes(K, -128, 127, has_zeros=False)

    def forward(self, x):
        size, limits = [1, K], (torch.int8, -128, 127)
        scale = x.abs().amax(1, keepdim=True) / 127
        bytes_ = torch.ops.torchao.quantize_affine(x, size, scale, None, *limits)
        return torch._int_mm(bytes_, self.values.t()).float() * scale * self.scales.flatten()

    torch.manual_seed(0)
    x = torch.randn(18, K)  # torch has no such product of fewer rows than 17

    model = torch_import.load(save(torch, tmp_path / "m.pt2", module(torch, weight, forward), x))
    [found] = computed(model, cpu, x)

    scale = np.abs(x.numpy()).max(1, keepdims=True) / np.float32(127)
    expected = (rounded(x.numpy(), scale, 0) * scale) @ weight.in_floats().T
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    assert 'dtype="int32") = R.matmul(' in model.module.script()


def test_weights_in_floats_of_eight_bits_are_widened(tmp_path, cpu, torch):
    class Narrow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(K, N).to(torch.float8_e4m3fn), False)
            self.scale = torch.nn.Parameter(torch.rand(1, N), False)

        def forward(self, x):
            return x @ (self.w.to(torch.float32) * self.scale)

    model, x = Narrow(), torch.randn(3, K)

    [found] = computed(torch_import.load(save(torch, tmp_path / "m.pt2", model, x)), cpu, x)

    expected = x.numpy() @ (model.w.float() * model.scale).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_tensors_of_torchaos_own_are_refused_with_what_to_do(tmp_path, torch, models, monkeypatch):
    path = save(torch, tmp_path / "m.pt2", models["function"](lambda self, x: x + 1), torch.randn(2))

    def load(_path):
        raise ModuleNotFoundError("No module named 'torchao'")

    monkeypatch.setattr(torch.export, "load", load)
    with pytest.raises(ModelError, match=r"unwrap_tensor_subclass\(model\)"):
        torch_import.load(path)
