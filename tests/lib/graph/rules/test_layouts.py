"""Operators that ConvertLayout does not know: no transposes stay around them, and they compute what they did."""

from functools import partial

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import simplify
from lib.graph.rules import layouts
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, run, stays

IMAGE, VOLUME = (2, 8, 6, 5), (2, 8, 3, 6, 5)
SQUARE = random((12, 12, 1, 1), 3)


def convolved(x, outputs=12, inputs=8):
    return op.nn.conv2d(x, const(random((outputs, inputs, 1, 1), outputs)))


def shuffled(x, groups, channels=12, spatial=(6, 5)):
    apart = op.reshape(x, (2, groups, channels // groups, *spatial))
    return op.reshape(op.permute_dims(apart, [0, 2, 1, *range(3, 3 + len(spatial))]), (2, channels, *spatial))


def halves(x):
    return [op.strided_slice(x, [1], [begin], [begin + 6], [1]) for begin in (0, 6)]


def with_channels_last(build, *shapes):
    """What a model calls with its channels last, after checking that it computes the same as it did."""
    before = module(build, *shapes)
    after = simplify.channels_last(simplify.simplify(before))
    arrays = [random(shape, n) for n, shape in enumerate(shapes)]
    np.testing.assert_allclose(run(after, *arrays)[0], run(before, *arrays)[0], rtol=1e-4, atol=1e-5)
    return operators(after)


def transposes_of_images(after):
    """How many there are beside the two of the model's input and result."""
    return after.count("permute_dims") - 2


@pytest.mark.parametrize("groups", [2, 3, 4])
def test_a_shuffle_between_convolutions_is_one_of_the_last_axis(groups):
    after = with_channels_last(lambda x: convolved(shuffled(op.exp(convolved(x)), groups), 12, 12), IMAGE)

    middle = after[after.index("exp") + 1 : len(after) - after[::-1].index("nn.conv2d") - 1]
    assert middle == ["reshape", "permute_dims", "reshape"]


def test_a_shuffle_of_what_a_convolution_computes_is_in_its_weights():
    after = with_channels_last(lambda x: convolved(shuffled(op.nn.relu(convolved(x)), 3), 12, 12), IMAGE)

    assert after == ["permute_dims", "nn.conv2d", "nn.relu", "nn.conv2d", "permute_dims"]


def test_a_shuffle_of_a_volume_is_one_of_the_last_axis():
    def build(x):
        weight = const(random((8, 8, 1, 1, 1), 1))
        return op.nn.conv3d(shuffled(op.exp(op.nn.conv3d(x, weight)), 2, 8, (3, 6, 5)), weight)

    assert with_channels_last(build, VOLUME).count("permute_dims") == 3


def test_units_of_shufflenet_stay_channels_last():
    def unit(x):
        left, right = halves(x)
        return shuffled(op.concat([left, op.nn.relu(convolved(right, 6, 6))], 1), 2)

    after = with_channels_last(lambda x: convolved(unit(unit(unit(convolved(x)))), 12, 12), IMAGE)

    assert transposes_of_images(after) == 3  # one within each shuffle
    assert "take" not in after


def test_an_order_of_channels_that_is_no_shuffle_is_looked_up():
    def build(x):  # the first axis of three is turned alone
        apart = op.permute_dims(op.reshape(convolved(x), (2, 2, 3, 2, 6, 5)), [0, 3, 1, 2, 4, 5])
        turned = op.permute_dims(op.reshape(apart, (2, 2, 2, 3, 6, 5)), [0, 2, 1, 3, 4, 5])
        return convolved(op.reshape(turned, (2, 12, 6, 5)), 12, 12)

    after = with_channels_last(build, IMAGE)

    assert after.count("take") == 1
    assert transposes_of_images(after) == 0


def test_what_moves_pixels_is_no_shuffle():
    """Pixels out of channels and back: an image of the same shape, where height and width are one axis's parts."""

    def build(x):
        moved = op.permute_dims(op.reshape(convolved(x), (2, 12, 5, 6)), [0, 1, 3, 2])
        return convolved(moved, 12, 12)

    assert "take" not in with_channels_last(build, IMAGE)


def test_what_moves_images_is_no_shuffle():
    def build(x):
        moved = op.reshape(op.permute_dims(op.reshape(convolved(x), (2, 12, 30)), [1, 0, 2]), (2, 12, 6, 5))
        return convolved(moved, 12, 12)

    assert "take" not in with_channels_last(build, IMAGE)


@pytest.mark.parametrize("other", [const(0.0), const(random((2, 12, 6, 5), 4)), const(random((2, 12, 1, 5), 5))])
def test_a_choice_between_images_leaves_no_transposes(other):
    def build(x):
        image = convolved(x)
        chosen = op.where(op.greater(image, const(0.1)), op.exp(image), op.add(image, other))
        return convolved(op.where(op.greater(chosen, other), other, image), 12, 12)

    after = with_channels_last(build, IMAGE)

    assert "where" in after
    assert transposes_of_images(after) == 0


@pytest.mark.parametrize("pool", [op.nn.max_pool2d, partial(op.nn.avg_pool2d, count_include_pad=True)])
def test_tokens_that_are_pooled_as_an_image_are_not_transposed(pool):
    """Between two layers of a transformer, far from any convolution; 13 tokens a line, so that windows are cut."""

    def build(x, y, others):
        image = op.permute_dims(op.reshape(y, (2, 6, 13, 8)), [0, 3, 1, 2])
        pooled = pool(image, (3, 3), (2, 2), (1, 1, 1, 1), ceil_mode=True)
        tokens = op.permute_dims(op.reshape(pooled, (2, 8, 4 * 7)), [0, 2, 1])
        return op.add(op.sum(convolved(x)), op.add(others, tokens))

    after = with_channels_last(build, IMAGE, (2, 78, 8), (2, 28, 8))

    assert after.count("permute_dims") == 1  # for the convolution
    assert after.count(f"nn.{getattr(pool, 'func', pool).__name__}") == 1


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_pixels_between_pixels_are_read_with_all_their_channels(padding, align_corners):
    """And what pads, cuts and convolves them stays channels last as well."""

    def build(x, grid):
        moved = op.image.grid_sample(convolved(x), grid, "bilinear", "NCHW", padding, align_corners)
        wide = op.nn.pad(moved, [0, 0, 0, 0, 1, 1, 1, 1])
        return convolved(op.strided_slice(wide, [2, 3], [1, 2], [5, 6], [1, 1]), inputs=12)

    after = with_channels_last(build, IMAGE, (2, 2, 4, 7))

    assert after.count("permute_dims") == 2  # of the model's input and result
    assert "grid_sample" in after  # a function in TIR


@pytest.mark.parametrize("has_convolutions", [True, False])
def test_heads_of_tokens_that_are_sampled_as_images_keep_their_channels_together(has_convolutions):
    """As in deformable attention: 6 heads of 4 channels, tokens of images of 3x5."""

    def build(x, tokens, grid):
        images = op.reshape(op.permute_dims(tokens, [0, 2, 1]), (12, 4, 3, 5))
        seen = op.image.grid_sample(images, grid, "bilinear", "NCHW", "zeros", False)
        return op.add(op.sum(convolved(x) if has_convolutions else x), seen)

    after = with_channels_last(build, IMAGE, (2, 15, 24), (12, 2, 7, 2))

    assert "grid_sample" in after  # a function in TIR
    assert (
        after.count("permute_dims") == 2 + has_convolutions
    )  # of tokens, of what was seen, of the convolution's image


def test_a_choice_by_something_else_stays_where_it_is():
    """A line of flags for each column broadcasts along other axes: nothing is known of it in NHWC."""

    def build(x, line):
        image = convolved(x)
        return convolved(op.where(op.greater(line, const(0.0)), image, op.exp(image)), 12, 12)

    assert "where" in with_channels_last(build, IMAGE, (5,))


def test_a_matrix_that_is_transposed_is_no_image():
    """It broadcasts over images: its two last axes are lines and columns, not channels."""

    def build(x, matrices):
        image, flags = convolved(x), op.greater(op.permute_dims(matrices, [0, 2, 1]), const(0.0))
        return convolved(op.where(flags, image, op.exp(image)), 12, 12)

    assert "where" in with_channels_last(build, IMAGE, (12, 5, 6))


@pytest.mark.parametrize("several", [2, 3])
def test_a_depthwise_convolution_of_several_results_a_channel_is_as_many_and_a_shuffle(several):
    weight = const(random((several * 12, 1, 3, 3), several))

    def build(x):
        return convolved(op.nn.conv2d(convolved(x), weight, strides=2, padding=1, groups=12), 5, several * 12)

    after = with_channels_last(build, IMAGE)

    assert after.count("nn.conv2d") == 2 + several
    assert transposes_of_images(after) == 1  # the shuffle's


@pytest.mark.parametrize(("channels", "several"), [(6, 2), (12, 8)], ids=["no whole vectors", "many"])
def test_other_depthwise_convolutions_of_several_results_stay(channels, several):
    weight = const(random((several * channels, 1, 3, 3)))

    after = with_channels_last(lambda x: op.nn.conv2d(convolved(x, channels), weight, groups=channels), IMAGE)

    assert after.count("nn.conv2d") == 2


def several(x, *others, axis=1):
    return op.concat([op.tanh(x), *(op.exp(other) for other in others)], axis)


@pytest.mark.parametrize(
    ("shapes", "axis"),
    [([(2, 60, 85), (2, 30, 85), (2, 15, 85)], 1), ([(1, 3, 40, 40, 2), (1, 3, 40, 40, 1), (1, 3, 40, 40, 9)], -1)],
    ids=["predictions", "coordinates and classes"],
)
def test_several_parts_along_any_axis_are_joined_as_channels(shapes, axis):
    before, after = becomes(layouts.LAST, partial(several, axis=axis), *shapes)

    assert before.count("reshape") == 0
    assert after == ["tanh", "exp", "exp", *["reshape"] * 3, "concat", "reshape"]


@pytest.mark.parametrize("shapes", [[(2, 90, 85), (2, 15, 85)], [(2, 6, 5)] * 3], ids=["two parts", "small ones"])
def test_others_are_joined_as_they_are(shapes):
    assert stays(layouts.LAST, several, *shapes)


def test_parts_that_nothing_computes_are_joined_as_they_are():
    assert stays(layouts.LAST, lambda x, y, z: op.concat([x, y, z], 1), *[(2, 90, 85)] * 3)


def test_a_part_that_nothing_computes_is_joined_with_several_that_something_does():
    """Sines of places beside the places, in a model without images, as NeRF has them."""

    def build(x):
        return op.concat([x, op.sin(x), op.cos(x), op.tanh(x)], 1)

    _, after = becomes(simplify.channels_last, build, (2048, 3))

    assert after == ["sin", "cos", "tanh", *["reshape"] * 4, "concat", "reshape"]
