"""Files that PyTorch quantised (PT2E), against the same arithmetic written out in torch's own operators."""

import re
import subprocess
import sys

import numpy as np
import pytest

from lib.contracts.errors import ModelError
from lib.models import torch_declared, torch_import
from tests.helpers import ROOT, computed
from tests.lib.models.torch_helpers import names, save

BYTES, SIGNED = (0, 255), (-128, 127)


def operators(torch):
    """Those of PyTorch."""
    torch_declared.declare(torch)
    return torch.ops.quantized_decomposed


class WrittenOut:
    """What they mean, as PyTorch's documentation has it."""

    def __init__(self, torch):
        self.torch = torch
        self.quantize_per_channel = self._along(self.quantize_per_tensor)
        self.dequantize_per_channel = self._along(self.dequantize_per_tensor)

    def quantize_per_tensor(self, x, scale, zero, least, most, dtype):
        return self.torch.clip(self.torch.round(x / scale) + zero, least, most).to(dtype)

    def dequantize_per_tensor(self, x, scale, zero, least, most, dtype):
        return ((x.int() - zero) * scale).float()

    def choose_qparams(self, x, least, most, eps, dtype):
        low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
        scale = max((high - low) / (most - least), eps)
        return scale, int(np.clip(least - round(low / scale), least, most))

    @staticmethod
    def _along(of_tensor):
        def of_channel(x, scale, zero, axis, *limits):
            shape = [-1 if n == axis else 1 for n in range(x.ndim)]
            return of_tensor(x, scale.reshape(shape), zero.reshape(shape), *limits)

        return of_channel


def module(torch, weight, forward, ops):
    """A module that multiplies with bytes, which have a scale for each channel; `forward(self, x, w, ops)`."""

    class Quantised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            scales = weight.abs().flatten(1).amax(1) / 127
            shape = [-1, *[1] * (weight.ndim - 1)]
            self.register_buffer("w", torch.clip(torch.round(weight / scales.reshape(shape)), *SIGNED).to(torch.int8))
            self.register_buffer("scales", scales)
            self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int64))

        def forward(self, x):
            w = ops.dequantize_per_channel(self.w, self.scales, self.zeros, 0, *SIGNED, torch.int8)
            return forward(x, w, ops)

    return Quantised().eval()


def there_and_back(ops, x, scale, zero, limits, dtype):
    given = scale, zero, *limits, dtype
    return ops.dequantize_per_tensor(ops.quantize_per_tensor(x, *given), *given)


def chosen(ops, x, limits, dtype):
    scale, zero = ops.choose_qparams(x, *limits, 2.0**-12, dtype)
    return there_and_back(ops, x, scale, zero, limits, dtype)


def cases(torch):
    """By name: shape of x, of the weight, what is computed, and how many products are of integers."""
    conv, linear = torch.nn.functional.conv2d, torch.nn.functional.linear
    unsigned, signed = torch.uint8, torch.int8
    image, rows = (2, 8, 9, 9), (3, 5, 32)

    def between(x, w, ops):
        x = conv(there_and_back(ops, x, 0.03, 120, BYTES, unsigned), w, padding=1).relu()
        return there_and_back(ops, x, 0.05, 0, BYTES, unsigned)

    def twice(x, w, ops):
        x = linear(there_and_back(ops, x, 0.03, 120, BYTES, unsigned), w)
        return linear(there_and_back(ops, x.relu(), 0.05, 3, BYTES, unsigned), w)

    def of_channels(x, w, ops):
        scales, zeros = torch.linspace(0.02, 0.04, 8), torch.arange(8)
        given = scales, zeros, 1, *SIGNED, signed
        return conv(ops.dequantize_per_channel(ops.quantize_per_channel(x, *given), *given), w)

    return {
        "a convolution": (image, (16, 8, 3, 3), between, 1),
        "depthwise": (image, (8, 1, 3, 3), lambda x, w, ops: conv(
            there_and_back(ops, x, 0.03, 120, BYTES, unsigned), w, groups=8), 1),
        "products": (rows, (32, 32), twice, 2),
        "signed bytes": (rows, (16, 32), lambda x, w, ops: linear(
            there_and_back(ops, x, 0.03, 5, SIGNED, signed), w), 1),
        "limits within those of bytes": (rows, (16, 32), lambda x, w, ops: linear(
            there_and_back(ops, x, 0.03, 60, (0, 127), unsigned), w), 1),
        "signed limits that are alike": (rows, (16, 32), lambda x, w, ops: linear(
            there_and_back(ops, x, 0.01, 0, (-127, 127), signed), w), 1),
        "sixteen bits": (rows, (16, 32), lambda x, w, ops: linear(
            there_and_back(ops, x, 1e-4, 0, (-20000, 20000), torch.int16), w), 0),
        "a scale for each channel of an image": (image, (16, 8, 3, 3), of_channels, 0),
        "a scale that is chosen": (rows, (16, 32), lambda x, w, ops: linear(chosen(ops, x, BYTES, unsigned), w), 1),
        "a scale that is chosen for signed bytes": (rows, (16, 32), lambda x, w, ops: linear(
            chosen(ops, x, SIGNED, signed), w, torch.ones(16)), 1),
        "one that is chosen for an image": (image, (16, 8, 3, 3), lambda x, w, ops: conv(
            chosen(ops, x.relu(), BYTES, unsigned), w, padding=1), 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", names(cases))
def test_what_stands_between_bytes_is_computed_in_integers(tmp_path, cpu, torch, name):
    shape, of_weight, forward, n_products = cases(torch)[name]
    torch.manual_seed(0)
    weight, x = torch.randn(of_weight), torch.randn(shape)
    path = save(torch, tmp_path / "m.pt2", module(torch, weight, forward, operators(torch)), x)

    model = torch_import.load(path)
    [found] = computed(model, cpu, x)

    expected = module(torch, weight, forward, WrittenOut(torch))(x).numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    products = re.findall(r'dtype="(\w+)"\) = R\.(?:matmul|nn\.conv2d)\(', model.module.script())
    assert products.count("int32") == n_products
    assert len(products) == max(n_products, 1)


def assert_refused(torch, folder, forward, told):
    """A module of a small weight is, in these words."""
    model = module(torch, torch.randn(4, 8), forward, operators(torch))
    path = save(torch, folder / "m.pt2", model, torch.randn(2, 8))

    with pytest.raises(ModelError, match=told):
        torch_import.load(path)


def test_a_choice_for_fewer_bits_than_bytes_have_is_refused(tmp_path, torch):
    def forward(x, w, ops):
        return torch.nn.functional.linear(chosen(ops, x, (0, 15), torch.uint8), w)

    assert_refused(torch, tmp_path, forward, "dynamic quantisation to uint8 in 0 to 15")


def test_a_choice_for_another_tensor_is_refused(tmp_path, torch):
    def forward(x, w, ops):
        scale, zero = ops.choose_qparams(x, *BYTES, 2.0**-12, torch.uint8)
        return torch.nn.functional.linear(there_and_back(ops, x.sin(), scale, zero, BYTES, torch.uint8), w)

    assert_refused(torch, tmp_path, forward, "dynamic quantisation to uint8")


def test_bytes_that_the_model_gives_back_are_not_chosen_here(tmp_path, torch):
    def forward(x, w, ops):
        scale, zero = ops.choose_qparams(x, *SIGNED, 2.0**-12, torch.int8)
        return ops.quantize_per_tensor(x, scale, zero, *SIGNED, torch.int8)

    assert_refused(torch, tmp_path, forward, "dynamic quantisation to int8")


def test_who_declared_these_operators_before_keeps_them(torch):
    """PyTorch's own, and nothing is declared twice: in a process of its own, since that lasts as long as one."""
    script = (
        "import torch; from torch.ao.quantization.fx import _decomposed; from lib.models import torch_declared as q; "
        "q.declare(torch); q.declare(torch); ops = torch.ops.quantized_decomposed; "
        "print(ops.dequantize_per_channel(torch.tensor([[2], [4]], dtype=torch.int8), torch.tensor([0.5, 0.25]), "
        "torch.tensor([0, 2]), 0, -128, 127, torch.int8).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, text=True, capture_output=True)
    assert done.stdout.strip() == "[[1.0], [0.5]]", done.stderr
