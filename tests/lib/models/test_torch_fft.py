"""Fourier transforms, against torch, and their matrices against NumPy's."""

import numpy as np
import pytest

from lib.contracts.errors import ModelError
from lib.models import torch_fft, torch_import
from tests.lib.models.torch_helpers import assert_function_like_torch, names, save

SIGNAL, IMAGE = (2, 3, 12), (2, 5, 6)


def functions(torch):
    """By name: a function of a tensor, and its shape."""
    fft, real = torch.fft, torch.view_as_real
    window = torch.hann_window(16).clone()

    def spectrum(x, **options):
        return torch.stft(x, 16, 6, window=window, return_complex=True, **options)

    return {
        "of real numbers": (lambda x: real(fft.rfft(x)), SIGNAL),
        "of an odd number of them": (lambda x: real(fft.rfft(x[..., :11], norm="ortho")), SIGNAL),
        "along another axis": (lambda x: fft.rfft(x, dim=1).abs(), SIGNAL),
        "whole": (lambda x: fft.fft(x).real + fft.fft(x, norm="forward").imag, SIGNAL),
        "of images": (lambda x: real(fft.rfft2(x, norm="ortho")), IMAGE),
        "of complex images, and back": (lambda x: fft.ifft2(fft.fft2(x) * 0.5).real, IMAGE),
        "and back": (lambda x: fft.irfft(fft.rfft(x) * 2, n=12), SIGNAL),
        "and back to an odd number": (lambda x: fft.irfft(fft.rfft(x), n=11), SIGNAL),
        "and back to images": (lambda x: fft.irfft2(fft.rfft2(x, norm="ortho"), s=(5, 6), norm="ortho"), IMAGE),
        "and back of what is conjugate": (lambda x: fft.hfft(fft.rfft(x).conj(), n=12), SIGNAL),
        "filtered": (lambda x: fft.irfft(fft.rfft(x) * torch.complex(x[..., :7], x[..., 5:]), n=12), SIGNAL),
        "sums and parts": (lambda x: real((fft.rfft(x) + fft.rfft(x * x))[:, 1:, 2] - fft.rfft(x)[:, :2, 3]), SIGNAL),
        "spectra of windows": (lambda x: spectrum(x).abs(), (2, 100)),
        "spectra of windows within a signal": (lambda x: real(spectrum(x, center=False)), (2, 100)),
        "spectra of windows, and back": (
            lambda x: torch.istft(spectrum(x) * 0.5, 16, 6, window=window), (2, 100),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", names(functions))
def test_transforms_are_torchs(tmp_path, cpu, torch, models, name):
    function, shape = functions(torch)[name]

    assert_function_like_torch(torch, cpu, tmp_path / "m.pt2", models, lambda x: function(x) * 1.0, [shape])


def test_matrices_are_numpys():
    x = np.random.default_rng(0).normal(size=(2, 9)) @ np.diag(np.arange(9))
    pairs = np.stack([x, x[::-1]], -1)
    numbers = pairs[..., 0] + 1j * pairs[..., 1]

    forward = np.einsum("njc,jckd->nkd", pairs, torch_fft.waves(9, -1))
    np.testing.assert_allclose(forward[..., 0] + 1j * forward[..., 1], np.fft.fft(numbers), atol=1e-12)
    half = np.einsum("nj,jkd->nkd", x, torch_fft.waves_of_real(9))
    np.testing.assert_allclose(half[..., 0] + 1j * half[..., 1], np.fft.fft(x), atol=1e-12)
    for count, known in ((9, 5), (8, 5)):
        back = np.einsum("nkd,kdj->nj", pairs[:, :known], torch_fft.waves_to_real(count, known)) / count
        np.testing.assert_allclose(back, np.fft.irfft(numbers[:, :known], count), atol=1e-12)


def test_a_long_transform_is_refused_by_its_length(tmp_path, torch, models):
    model = models["function"](lambda self, x: torch.fft.rfft(x).abs())
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 5000))

    with pytest.raises(ModelError, match="a Fourier transform of 5000 elements is not imported: those of up to 4096"):
        torch_import.load(path)
