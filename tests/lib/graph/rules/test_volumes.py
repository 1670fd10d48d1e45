import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rewrite import rewrite
from lib.graph.rules.volumes import RULES
from tests.lib.graph.rules.helpers import becomes, const, module, random, run, stays


def conv(x, *kernel, **attrs):
    """A convolution with channels last, of kernel (taps, inputs, outputs)."""
    dims = len(kernel) - 2
    data, weights = {1: ("NWC", "WIO"), 2: ("NHWC", "HWIO"), 3: ("NDHWC", "DHWIO")}[dims]
    return getattr(op.nn, f"conv{dims}d")(x, const(random(kernel, 1)), data_layout=data, kernel_layout=weights, **attrs)


def taps(made):
    """Extents of the weights of its one convolution."""
    block = made["main"].body.blocks[0]
    [call] = [b.value for b in block.bindings if "conv" in str(getattr(b.value, "op", ""))]
    return tuple(int(n) for n in call.args[1].ty.shape.values)[:-2]


@pytest.mark.parametrize(
    ("shape", "kernel", "attrs", "left"),
    [
        ((1, 1, 5, 5, 3), (3, 3, 3, 3, 4), {"padding": 1}, (1, 3, 3)),
        ((1, 7, 7, 3), (3, 3, 3, 4), {"padding": 12, "dilation": 12}, (1, 1)),  # DeepLab's
        ((1, 9, 3), (5, 3, 4), {"padding": 6, "dilation": 3}, (5,)),
        ((1, 2, 9, 3), (5, 5, 3, 4), {"padding": 2}, (3, 5)),
        ((1, 2, 9, 3), (5, 5, 3, 4), {"padding": (2, 1, 3, 0)}, (4, 5)),
        ((1, 2, 2, 3), (3, 3, 3, 4), {"padding": 1, "strides": 2}, (2, 2)),  # the one result begins before the image
        ((2, 1, 4), (3, 2, 4), {"padding": 1, "groups": 2}, (1,)),
    ],
)
def test_taps_that_read_padding_alone_are_left_out(shape, kernel, attrs, left):
    x = random(shape)
    given = module(lambda x: conv(x, *kernel, **attrs), x)

    made = rewrite(given, RULES[:1])

    assert taps(made) == left
    np.testing.assert_allclose(run(made, x)[0], run(given, x)[0], rtol=1e-4, atol=1e-5)


def test_taps_that_read_something_stay():
    assert stays(RULES, lambda x: conv(x, 3, 3, 3, 4, padding=1), (1, 2, 2, 3))
    assert stays(RULES, lambda x: conv(x, 1, 1, 3, 4, padding=1), (1, 2, 2, 3))


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [
        ((1, 3, 3), {"padding": (0, 1, 1, 0, 1, 1)}),
        ((1, 3, 2), {"padding": (0, 1, 0, 0, 0, 1), "strides": (1, 2, 2), "dilation": (1, 2, 1)}),
        ((3, 1, 1), {"padding": (1, 0, 0, 1, 0, 0)}),
        ((2, 1, 1), {"padding": (0, 0, 0, 1, 0, 0), "strides": (2, 1, 1)}),
        ((3, 1, 1), {"padding": (1, 0, 0, 1, 0, 0), "groups": 2}),
        ((1, 1, 1), {"strides": (1, 2, 1)}),
    ],
)
def test_kernels_of_one_image_or_one_pixel_are_those_of_images(kernel, attrs):
    shape = (2, 4, 5, 6, 4)
    _, made = becomes(RULES, lambda x: conv(x, *kernel, 4 // attrs.get("groups", 1), 8, **attrs), shape)

    assert "nn.conv2d" in made
    assert "nn.conv3d" not in made


@pytest.mark.parametrize(
    ("kernel", "attrs"),
    [((3, 3, 3), {"padding": 1}), ((1, 3, 3), {"strides": (2, 1, 1)}), ((3, 1, 1), {"padding": 1})],
)
def test_other_convolutions_of_volumes_stay(kernel, attrs):
    assert stays(RULES[1:], lambda x: conv(x, *kernel, 4, 8, **attrs), (2, 4, 5, 6, 4))
