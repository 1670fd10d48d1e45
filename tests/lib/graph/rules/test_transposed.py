"""Transposed convolutions against the same in loops."""

import itertools

import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rewrite import is_call, rewrite
from lib.graph.rules import transposed as rules
from lib.graph.simplify import channels_last, simplify
from tests.lib.graph.rules.helpers import const, module, operators, random, run

LAYOUTS = {1: ("NWC", "IOW"), 2: ("NHWC", "IOHW"), 3: ("NDHWC", "IODHW")}


def transposed(x, weight, **attrs):
    """A transposed convolution as ConvertLayout leaves it."""
    dims = weight.ndim - 2
    data, kernel = LAYOUTS[dims]
    return getattr(op.nn, f"conv{dims}d_transpose")(x, const(weight), data_layout=data, kernel_layout=kernel, **attrs)


def spread(x, weight, strides, padding, output_padding, groups=1):
    """The same in loops: each element adds its window to the result."""
    (n, *extents, channels), (_, out, *window) = x.shape, weight.shape
    dims, own = len(extents), channels // groups
    long = [(e - 1) * s + k + p for e, s, k, p in zip(extents, strides, window, output_padding, strict=True)]
    whole = np.zeros((n, *long, groups * out))
    for at in itertools.product(*map(range, extents)):
        for tap in itertools.product(*map(range, window)):
            place = tuple(a * s + t for a, s, t in zip(at, strides, tap, strict=True))
            for g in range(groups):
                inputs, outputs = slice(g * own, (g + 1) * own), slice(g * out, (g + 1) * out)
                added = x[(slice(None), *at, inputs)] @ weight[(inputs, slice(None), *tap)]
                whole[(slice(None), *place, outputs)] += added
    kept = (
        slice(first, long[n] - last) for n, (first, last) in enumerate(zip(padding[:dims], padding[dims:], strict=True))
    )
    return whole[(slice(None), *kept)]


@pytest.mark.parametrize(
    ("window", "strides", "padding", "output_padding"),
    [
        ((4, 4), (2, 2), (1, 1, 1, 1), (0, 0)),
        ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1)),
        ((3, 3), (2, 2), (0, 0, 0, 0), (0, 0)),
        ((5, 3), (3, 1), (2, 0, 1, 1), (0, 0)),
        ((2, 3), (3, 4), (0, 0, 0, 0), (0, 0)),  # elements that no window reaches
        ((6, 6), (2, 2), (2, 2, 2, 2), (0, 0)),
        ((3, 3), (1, 1), (1, 1, 1, 1), (0, 0)),
        ((16,), (8,), (0, 0), (0,)),  # Conv-TasNet's decoder
        ((16,), (8,), (4, 4), (0,)),  # HiFi-GAN's
        ((4,), (2,), (1, 1), (1,)),
        ((3, 4, 2), (2, 2, 1), (1, 1, 0, 1, 1, 1), (1, 0, 0)),
    ],
)
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_a_transposed_convolution_is_a_convolution_of_steps(window, strides, padding, output_padding, groups):
    x, weight = random((*(2, 5, 4, 3)[: len(window) + 1], 6)), random((6, 8 if groups == 1 else 2, *window), 1)
    attrs = {"strides": strides, "padding": padding, "output_padding": output_padding, "groups": groups}

    made = rewrite(module(lambda x: transposed(x, weight, **attrs), x), rules.RULES)

    assert f"nn.conv{len(window)}d" in operators(made)
    assert not any("transpose" in name for name in operators(made))
    expected = spread(x, weight, strides, padding, output_padding, groups)
    np.testing.assert_allclose(run(made, x)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("window", "strides", "padding", "output_padding", "taps"),
    [
        ((4, 4), (2, 2), (1, 1, 1, 1), (0, 0), [(2, 2)] * 4),  # DCGAN's, of few pixels
        ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), [(1, 1), (1, 2), (2, 1), (2, 2)]),  # torchvision's decoders
        ((5, 3), (3, 1), (1, 1, 1, 1), (0, 0), [(1, 3), (2, 3), (2, 3)]),
        ((5, 5), (2, 2), (2, 2, 2, 2), (1, 1), [(2, 2), (2, 3), (3, 2), (3, 3)]),
        ((3, 1, 3), (2, 1, 2), (1, 0, 1) * 2, (1, 0, 1), [(1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)]),
        ((3, 3, 3), (2, 2, 2), (1,) * 6, (1, 1, 1), sorted(itertools.product((1, 2), repeat=3))),
    ],
)
def test_results_of_a_step_are_apart_where_that_spares_zeros(window, strides, padding, output_padding, taps):
    dims = len(window)
    x, weight = random((2, *[4] * dims, 6)), random((6, 16, *window), 1)
    attrs = {"strides": strides, "padding": padding, "output_padding": output_padding}

    made = rewrite(module(lambda x: transposed(x, weight, **attrs), x), rules.RULES)

    values = [binding.value for block in made["main"].body.blocks for binding in block.bindings]
    kernels = [value.args[1].ty.shape.values for value in values if is_call(value, f"relax.nn.conv{dims}d")]
    assert sorted(tuple(map(int, kernel[:dims])) for kernel in kernels) == taps
    np.testing.assert_allclose(
        run(made, x)[0], spread(x, weight, strides, padding, output_padding), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(("extent", "outputs"), [(32, 16), (4, 3)])
def test_results_of_a_step_stay_together_where_little_is_spared_or_vectors_are_not_filled(extent, outputs):
    weight = random((6, outputs, 4, 4), 1)
    made = rewrite(module(lambda x: transposed(x, weight, strides=2, padding=1), (1, extent, extent, 6)), rules.RULES)

    assert operators(made).count("nn.conv2d") == 1


@pytest.mark.parametrize("window", [(3,), (2, 2), (2, 1, 3)])
def test_windows_side_by_side_are_a_product(window):
    x, weight = random((*(2, 5, 4, 3)[: len(window) + 1], 6)), random((6, 8, *window), 1)

    made = rewrite(module(lambda x: transposed(x, weight, strides=window), x), rules.RULES)

    assert "matmul" in operators(made)
    assert not any("conv" in name for name in operators(made))
    none = (0,) * len(window)
    np.testing.assert_allclose(run(made, x)[0], spread(x, weight, window, 2 * none, none), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attrs", [{"dilation": 2}, {"padding": 3}])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_other_transposed_convolutions_are_taken_to_where_they_can_be_lowered(dims, attrs):
    weight = random((3, 8, *[3] * dims), 1)

    made = rewrite(module(lambda x: transposed(x, weight, **attrs), (1, *[5] * dims, 3)), rules.RULES)

    assert operators(made) == ["permute_dims", f"nn.conv{dims}d_transpose", "permute_dims"]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("begins", [False, True], ids=["alone", "after a convolution"])
def test_channels_come_last_in_models_with_and_without_other_convolutions(dims, begins):
    """Alone as in the generator of a DCGAN, and after a convolution as in a vocoder."""
    x, weight, before = random((1, 6, *[4] * dims)), random((6, 3, *[4] * dims), 1), random((6, 6, *[3] * dims), 2)
    convolve, transpose = getattr(op.nn, f"conv{dims}d"), getattr(op.nn, f"conv{dims}d_transpose")

    def build(x):
        x = convolve(x, const(before), padding=1) if begins else x
        return transpose(op.nn.relu(x), const(weight), strides=2, padding=1)

    given = module(build, x)
    made = channels_last(simplify(given))

    assert f"nn.conv{dims}d_transpose" not in operators(made)
    np.testing.assert_allclose(run(made, x)[0], run(given, x)[0], rtol=1e-4, atol=1e-4)
