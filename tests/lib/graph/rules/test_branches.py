import pytest
from tvm.relax import op

from lib.graph.rules.branches import RULES
from lib.graph.simplify import channels_last, simplify
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, stays

IMAGE = (2, 6, 5, 4)
GROUPS = (2, 3, 2, 5, 4)


def weights(*shape):
    return const(random(shape, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.sum(op.reshape(x, GROUPS), [1]),
        lambda x: op.sum(op.reshape(x, GROUPS), [1], keepdims=True),
        lambda x: op.sum(op.multiply(op.reshape(x, GROUPS), weights(2, 3, 2, 1, 1)), [1]),
        lambda x: op.sum(op.multiply(weights(2, 1, 2, 1, 1), op.reshape(x, GROUPS)), [-4]),
    ],
)
def test_a_sum_over_groups_of_channels_is_one_of_parts(build):
    _, after = becomes(RULES, build, IMAGE)

    assert "sum" not in after
    assert after.count("strided_slice") >= 3
    assert after.count("add") == 2


@pytest.mark.parametrize("weighed", [False, True])
def test_a_sum_over_what_was_stacked_is_one_of_what_was_before(weighed):
    def stacked(x, y):
        whole = op.concat([op.expand_dims(x, [1]), op.expand_dims(y, [1])], 1)
        return op.sum(op.multiply(whole, weights(2, 2, 6, 1, 1)) if weighed else whole, [1])

    _, after = becomes(RULES, stacked, IMAGE, IMAGE)

    assert not {"sum", "concat"} & set(after)
    assert after.count("add") == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.sum(op.reshape(x, GROUPS), [2]),
        lambda x: op.sum(op.reshape(x, GROUPS), [1, 2]),
        lambda x: op.sum(op.reshape(x, (2, 6, 1, 5, 4)), [1]),  # more than a few
        lambda x: op.sum(op.reshape(x, (2, 2, 3, 4, 5)), [1]),  # lines become columns
        lambda x: op.sum(op.multiply(op.reshape(x, GROUPS), weights(*GROUPS)), [1]),  # which would be copied
    ],
)
def test_other_sums_stay(build):
    assert stays(RULES, build, IMAGE)


def test_split_attention_keeps_its_images_channels_last():
    """Of ResNeSt: convolution, groups weighed by means of their sum, convolution."""

    def block(x):
        y = op.reshape(op.nn.relu(op.nn.conv2d(x, weights(16, 8, 3, 3), padding=1)), (1, 2, 8, 6, 6))
        means = op.mean(op.sum(y, [1]), [2, 3], keepdims=True)
        gates = op.reshape(op.nn.conv2d(means, weights(16, 8, 1, 1)), (1, 2, 8, 1, 1))
        return op.nn.conv2d(op.sum(op.multiply(y, op.nn.softmax(gates, 1)), [1]), weights(8, 8, 1, 1))

    after = operators(channels_last(simplify(module(block, (1, 8, 6, 6)))))

    assert after.count("permute_dims") == 2  # of the whole network's image
