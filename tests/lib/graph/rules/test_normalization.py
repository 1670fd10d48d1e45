import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rules.normalization import RULES
from tests.lib.graph.rules.helpers import becomes, const, random, stays

SHAPE = (2, 4, 4)  # tokens as many as features: extents alone do not tell them apart
GAMMA, BETA = random((4,), 1), random((4,), 2)


def layer_norm(x, gamma=GAMMA, beta=BETA, axis=-1, keepdims=True, other=None):
    """A layer norm in pieces; `other` takes the place of x under the root."""
    centred = op.subtract(x, op.mean(x, [axis], keepdims))
    spread = centred if other is None else op.subtract(other, op.mean(other, [axis], keepdims))
    variance = op.mean(op.multiply(spread, spread), [axis], keepdims)
    normalized = op.divide(centred, op.sqrt(op.add(variance, const(1e-5))))
    return op.add(op.multiply(normalized, const(gamma)), const(beta))


@pytest.mark.parametrize("axis", [-1, 2])
@pytest.mark.parametrize("shape", [(4,), (1, 1, 4)])
def test_a_layer_norm_in_pieces_is_one(axis, shape):
    def build(x):
        return layer_norm(x, GAMMA.reshape(shape), BETA.reshape(shape), axis)

    assert becomes(RULES, build, SHAPE)[1] == ["nn.layer_norm"]


def test_a_layer_norm_without_scale_and_shift_is_one_too():
    """Exporters drop a scale of ones and a shift of zeros, and so does the clean-up before."""

    def build(x):
        centred = op.subtract(x, op.mean(x, [-1], True))
        variance = op.mean(op.multiply(centred, centred), [-1], True)
        return op.divide(centred, op.sqrt(op.add(variance, const(1e-5))))

    assert becomes(RULES, build, SHAPE)[1] == ["nn.layer_norm"]


@pytest.mark.parametrize(
    ("gamma", "beta", "left"),
    [
        (GAMMA.reshape(4, 1), BETA, ["multiply", "add"]),  # a factor for each token
        (GAMMA, BETA.reshape(4, 1), ["add"]),
        (GAMMA, BETA.reshape(1, 1, 1, 4), ["add"]),  # one more axis
        (np.float32(2), BETA, ["multiply", "add"]),
    ],
)
def test_what_is_no_number_for_each_feature_stays_outside(gamma, beta, left):
    assert becomes(RULES, lambda x: layer_norm(x, gamma, beta), SHAPE)[1] == ["nn.layer_norm", *left]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: layer_norm(x, axis=1),
        lambda x: layer_norm(x, other=op.exp(x)),
        lambda x: op.add(op.multiply(x, const(GAMMA)), const(BETA)),
        lambda x: [norm := op.nn.layer_norm(x, const(GAMMA), const(BETA), [-1]), op.multiply(norm, const(GAMMA))],
        lambda x: op.add(op.nn.layer_norm(x, const(GAMMA), const(BETA), [1]), const(BETA)),
    ],
)
def test_what_is_no_layer_norm_over_the_last_axis_stays(build):
    assert stays(RULES, build, SHAPE)


def test_a_mean_without_its_axis_is_another_mean():
    assert stays(RULES, lambda x: layer_norm(x, axis=-1, keepdims=False), (4, 4))
