"""Resizes in NHWC: which, and that they compute what TVM's in NCHW do."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rules import movement, resizing
from tests.lib.graph.rules.helpers import becomes, const, random, stays

RULES = [*resizing.RULES, movement.one_movement, movement.transpose_later]


each_method = pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"method": "nearest_neighbor", "coordinate_transformation_mode": "asymmetric", "rounding_method": "floor"},
        {"method": "cubic", "coordinate_transformation_mode": "align_corners", "cubic_alpha": -0.5},
    ],
    ids=["linear", "nearest", "cubic"],
)


def resized(image, size=(8, 10), **attrs):
    return op.image.resize2d(image, size, layout="NCHW", **attrs)


def from_tokens(x, height=4, width=5):
    """Tokens (N, H * W, C) as an image in NCHW."""
    return op.reshape(op.permute_dims(x, [0, 2, 1]), (2, 6, height, width))


@each_method
def test_images_that_were_channels_last_are_resized_so(attrs):
    def build(x):
        return op.permute_dims(resized(op.permute_dims(x, [0, 3, 1, 2]), **attrs), [0, 2, 3, 1])

    assert becomes(RULES, build, (2, 4, 5, 6))[1] == ["image.resize2d"]


def test_tokens_are_resized_as_images_with_channels_last():
    after = becomes(RULES, lambda x: op.permute_dims(resized(from_tokens(x)), [0, 2, 3, 1]), (2, 20, 6))[1]

    assert after == ["reshape", "image.resize2d"]


def test_a_segmentation_heads_images_are_joined_channels_last():
    def build(x, y, z):
        parts = [resized(from_tokens(x)), op.nn.relu(resized(from_tokens(y, 2, 10))), resized(from_tokens(z, 8, 10))]
        return op.permute_dims(op.concat(parts, 1), [0, 2, 3, 1])

    after = becomes(RULES, build, (2, 20, 6), (2, 20, 6), (2, 80, 6))[1]

    assert "permute_dims" not in after
    assert after.count("concat") == 1


def test_a_resize_to_the_same_size_is_none():
    assert becomes(RULES, lambda x: op.nn.relu(resized(x, (4, 5))), (2, 6, 4, 5))[1] == ["nn.relu"]


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (resized, (2, 6, 4, 5)),
        (lambda x: resized(x, (4, 5), coordinate_transformation_mode="tf_half_pixel_for_nn"), (2, 6, 4, 5)),
        (lambda x: resized(op.permute_dims(x, [0, 2, 1, 3])), (2, 4, 6, 5)),
        (lambda x: (lambda y: [resized(y), op.tanh(y)])(op.permute_dims(x, [0, 3, 1, 2])), (2, 4, 5, 6)),
    ],
    ids=["channels first", "half a pixel beside", "another transpose", "read by others"],
)
def test_others_stay(build, shape):
    assert stays(RULES, build, shape)


def test_what_is_joined_otherwise_stays():
    assert stays(RULES, lambda x, y: op.concat([op.permute_dims(x, [0, 3, 1, 2]), y], 1), (2, 4, 5, 6), (2, 3, 4, 5))


def pointwise(image, weight, **attrs):
    return op.nn.conv2d(image, const(weight), data_layout="NHWC", kernel_layout="HWIO", **attrs)


def larger(image, size=(8, 10), **attrs):
    return op.image.resize2d(image, size, layout="NHWC", **attrs)


@each_method
def test_products_of_joined_images_come_before_these_are_enlarged(attrs):
    def build(x, y, z):
        parts = [larger(x, **attrs), y, larger(z, **attrs)]
        return op.nn.relu(pointwise(op.concat(parts, 3), random((1, 1, 17, 9), 3)))

    after = becomes(RULES, build, (2, 4, 5, 6), (2, 8, 10, 4), (2, 2, 5, 7))[1]

    assert sorted(after) == sorted(["nn.conv2d"] * 3 + ["image.resize2d"] * 2 + ["add"] * 2 + ["nn.relu"])
    assert after.index("nn.conv2d") < after.index("image.resize2d")


def test_what_is_not_enlarged_stays_joined():
    def build(x, y, z):
        return pointwise(op.concat([x, larger(y), z], -1), random((1, 1, 15, 8), 3))

    after = becomes(RULES, build, (2, 8, 10, 6), (2, 4, 5, 4), (2, 8, 10, 5))[1]

    assert (after.count("concat"), after.count("nn.conv2d"), after.count("add")) == (1, 2, 1)


def test_a_product_comes_before_the_one_image_that_it_takes_is_enlarged():
    after = becomes(RULES, lambda x: pointwise(larger(x), random((1, 1, 6, 3))), (2, 4, 5, 6))[1]

    assert after == ["nn.conv2d", "image.resize2d"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: pointwise(larger(x, (2, 3)), random((1, 1, 6, 3))),  # made smaller
        lambda x: pointwise(larger(x), random((1, 1, 6, 13))),  # many more channels would be enlarged
        lambda x: pointwise(larger(x), random((3, 3, 6, 3))),
        lambda x: pointwise(larger(x), random((1, 1, 6, 3)), strides=[2, 2]),
        lambda x: pointwise(larger(x), random((1, 1, 6, 3)), padding=[1, 1]),
        lambda x: pointwise(larger(x), random((1, 1, 3, 6)), groups=2),
        lambda x: [y := larger(x), pointwise(y, random((1, 1, 6, 3)))],
        lambda x: pointwise(
            larger(op.astype(x, "int8")), np.ones((1, 1, 6, 3), np.int8), out_dtype="int32"
        ),  # of integers, which a resize rounds
    ],
)
def test_other_products_come_after_a_resize(build):
    assert stays(RULES, build, (2, 4, 5, 6))
