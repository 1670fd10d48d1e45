import pytest
from tvm.relax import op

from lib.graph.rules.joins import RULES
from lib.graph.simplify import simplify
from tests.lib.graph.rules.helpers import becomes, const, random, stays

IMAGE = (1, 6, 7, 5)
PARTS = (4, 2)


def branch(x, n, size):
    """A convolution with a kernel of its own."""
    return op.nn.conv2d(x, const(random((n, 6, size, size), size)), padding=(size // 2, size // 2))


def joined(x):
    return op.concat([branch(x, PARTS[0], 3), branch(x, PARTS[1], 5)], 1)


@pytest.mark.parametrize(
    ("activation", "names"),
    [
        (op.nn.relu, ["nn.relu"]),
        (lambda x: op.multiply(x, op.sigmoid(x)), ["sigmoid", "multiply"]),
        (lambda x: op.multiply(op.sigmoid(x), x), ["sigmoid", "multiply"]),
        (lambda x: x, []),
    ],
)
def test_a_batch_norm_and_an_activation_are_of_each_convolution_that_is_joined(activation, names):
    def build(x):
        scaled = op.multiply(joined(x), const(random((1, 6, 1, 1), 1)))
        return activation(op.add(scaled, const(random((6, 1, 1), 2))))

    _, after = becomes(simplify, build, IMAGE)

    assert after[-1] == "concat"
    assert sorted(after[:-1]) == sorted(["nn.conv2d", "add", *names] * len(PARTS))


@pytest.mark.parametrize("other", [const(2.0), const(random((5,), 1)), const(random((1, 6, 7, 5), 2))])
def test_constants_of_other_axes_are_of_all_parts(other):
    before, after = becomes(RULES, lambda x: op.maximum(joined(x), other), IMAGE)

    assert before[-1] == "maximum"
    assert after == ["nn.conv2d", "nn.conv2d", "maximum", "maximum", "concat"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: [op.nn.relu(whole := joined(x)), op.exp(whole)],  # the whole is read beside it
        lambda x: op.nn.relu(op.concat([x, branch(x, 4, 3)], 1)),  # a part that nothing computes
        lambda x: op.nn.relu(op.concat([op.nn.max_pool2d(x, (1, 1)), branch(x, 4, 3)], 1)),
        lambda x: [op.nn.relu(op.concat([part := branch(x, 4, 3), branch(x, 2, 5)], 1)), op.exp(part)],
        lambda x: op.add(joined(x), x),
    ],
)
def test_what_is_of_no_convolutions_alone_stays_behind(build):
    assert stays(RULES, build, IMAGE)
