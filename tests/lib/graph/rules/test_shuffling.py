"""Pixels out of channels: which are computed in another order, and that they are the same pixels."""

import pytest
from tvm.relax import op

from lib.graph.rules import movement, shuffling
from tests.lib.graph.rules.helpers import becomes, const, module, random, rewritten, stays

IMAGE = (2, 4, 5, 6)  # N, H, W, C


def convolved(x, columns, **attrs):
    weight = const(random((3, 3, IMAGE[3] // attrs.get("groups", 1), columns), 1))
    return op.nn.conv2d(x, weight, padding=1, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def shuffled(image, channels=3, size=2, axes=(0, 1, 4, 2, 5, 3)):
    """As torch's PixelShuffle and ONNX's DepthToSpace (CRD) have it, in NHWC."""
    apart = op.reshape(image, (*IMAGE[:3], channels, size, size))
    return op.reshape(op.permute_dims(apart, list(axes)), (2, 4 * size, 5 * size, channels))


def shuffled_without_a_batch(image):
    """As it is once reshapes of neighbours were merged: pixels are one axis."""
    apart = op.reshape(image, (8, 5, 3, 2, 2))
    return op.reshape(op.permute_dims(apart, [0, 3, 1, 4, 2]), (2, 8, 10, 3))


def moves_whole_vectors(made):
    """Whether a transpose leaves the last axis where it is."""
    values = [binding.value for block in made["main"].body.blocks for binding in block.bindings]
    [call] = [value for value in values if getattr(getattr(value, "op", None), "name", "") == "relax.permute_dims"]
    return int(call.attrs.axes[-1]) == len(call.attrs.axes) - 1


@pytest.mark.parametrize(
    "computed",
    [
        lambda x: convolved(x, 12),
        lambda x: op.nn.relu(op.add(convolved(x, 12), const(random((12,), 2)))),
        lambda x: op.multiply(op.add(convolved(x, 12), const(random((1, 1, 1, 12), 2))), const(0.5)),
        lambda x: op.astype(op.nn.leakyrelu(convolved(x, 12), 0.2), "float16"),
        lambda x: op.add(op.matmul(x, const(random((6, 12), 1))), const(random((12,), 2))),
    ],
    ids=["a convolution", "bias and ReLU", "a scale", "another type", "a product"],
)
def test_pixels_out_of_channels_are_moved_as_whole_vectors(computed):
    def build(x):
        return shuffled(computed(x))

    before, after = becomes(shuffling.RULES, build, IMAGE)

    assert sorted(after) == sorted(before)
    assert not moves_whole_vectors(module(build, IMAGE))
    assert moves_whole_vectors(rewritten(shuffling.RULES, module(build, IMAGE)))


def test_pixels_of_all_images_may_be_one_axis():
    def build(x):
        return shuffled_without_a_batch(convolved(x, 12))

    becomes(shuffling.RULES, build, IMAGE)
    assert moves_whole_vectors(rewritten(shuffling.RULES, module(build, IMAGE)))


def test_a_shuffle_of_channels_is_none_after_a_convolution_that_computes_them_so():
    def build(x):
        apart = op.reshape(convolved(x, 12), (*IMAGE[:3], 3, 4))
        return op.reshape(op.permute_dims(apart, [0, 1, 2, 4, 3]), (*IMAGE[:3], 12))

    assert becomes([*shuffling.RULES, *movement.RULES], build, IMAGE)[1] == ["nn.conv2d"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: shuffled(convolved(x, 12, groups=2)),
        lambda x: [shuffled(both := op.nn.relu(convolved(x, 12))), op.exp(both)],
        lambda x: shuffled(op.add(convolved(x, 12), op.exp(convolved(x, 12)))),
        lambda x: shuffled(convolved(x, 12), axes=(0, 1, 3, 2, 4, 5)),
        lambda x: op.permute_dims(op.reshape(convolved(x, 12), (2, 20, 12)), [0, 2, 1]),
        lambda x: op.permute_dims(op.reshape(convolved(x, 12), (2, 4, 15, 4)), [0, 1, 3, 2]),
    ],
    ids=[
        "groups",
        "what is read again",
        "a sum of two",
        "vectors already",
        "channels in one piece",
        "parts of two pixels",
    ],
)
def test_others_stay(build):
    assert stays(shuffling.RULES, build, IMAGE)
