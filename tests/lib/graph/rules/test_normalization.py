import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rewrite import is_call, rewrite
from lib.graph.rules import movement
from lib.graph.rules.normalization import RULES
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, run, stays

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


@pytest.mark.parametrize(("shape", "axes"), [((2, 5, 6, 8), [-2, -1]), ((3, 7, 4), [1, 2]), ((2, 3, 4), [0, 1, 2])])
def test_a_layer_norm_over_several_axes_is_one_over_rows(shape, axes):
    factors = [const(random(shape[axes[0] :], n)) for n in (1, 2)]

    after = becomes(RULES, lambda x: op.nn.layer_norm(x, *factors, axes, 1e-3), shape)[1]

    assert [name for name in after if name != "reshape"] == ["nn.layer_norm"]
    assert "reshape" in after


@pytest.mark.parametrize("axes", [[-1], [0, 2]])
def test_other_layer_norms_stay(axes):
    extents = tuple((4, 5, 6)[axis] for axis in axes)
    factors = [const(random(extents, n)) for n in (1, 2)]

    assert stays(RULES, lambda x: op.nn.layer_norm(x, *factors, axes, 1e-3), (4, 5, 6))


def test_a_mean_without_its_axis_is_another_mean():
    assert stays(RULES, lambda x: layer_norm(x, axis=-1, keepdims=False), (4, 4))


def instance_norm(x, axes, other=None):
    """As TVM imports ONNX's; `other` takes the place of x under the root."""
    centred = op.subtract(x, op.mean(x, axes, True))
    return op.divide(centred, op.sqrt(op.add(op.variance(x if other is None else other, axes, True), const(1e-5))))


def normed(x, axes):
    """By NumPy, in double precision."""
    x = x.astype(np.float64)
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize(("shape", "axes"), [((2, 4, 5, 6), (2, 3)), ((2, 5, 6, 4), (1, 2)), ((2, 4, 9), (2,))])
def test_an_instance_norm_sums_squares_of_what_is_left_of_its_mean(shape, axes):
    x = 3 + random(shape)
    made = rewrite(module(lambda x: instance_norm(x, list(axes)), x), RULES)

    assert operators(made).count("sum") == 2
    assert not {"variance", "mean"} & set(operators(made))
    np.testing.assert_allclose(run(made, x)[0], normed(x, axes), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("is_exported", [True, False], ids=["as exporters have it", "as an operator"])
def test_a_group_norm_is_computed_on_the_image(groups, is_exported):
    """Not on rows of groups, for which images with channels last would be transposed twice."""
    x, gamma, beta = 2 + random((2, 8, 5, 6)), random((8, 1, 1), 1), random((8, 1, 1), 2)

    def build(x):
        if not is_exported:
            return op.nn.group_norm(x, const(gamma.ravel()), const(beta.ravel()), groups, 1, [2, 3])
        rows = op.reshape(x, (2, groups, -1))
        return op.add(op.multiply(op.reshape(instance_norm(rows, [2]), x.ty.shape), const(gamma)), const(beta))

    made = rewrite(module(build, x), [*movement.RULES, *RULES])

    expected = normed(x.reshape(2, groups, -1), (2,)).reshape(x.shape) * gamma + beta
    np.testing.assert_allclose(run(made, x)[0], expected, rtol=1e-4, atol=1e-4)
    values = [binding.value for block in made["main"].body.blocks for binding in block.bindings]
    sums = [value for value in values if is_call(value, "relax.sum") and len(value.args[0].ty.shape.values) == 4]
    assert [[int(axis) for axis in call.attrs.axis] for call in sums] == [[2, 3], [2, 3]]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: instance_norm(x, [2, 3], op.exp(x)),
        lambda x: op.divide(op.subtract(x, op.mean(x, [2, 3], True)),
                            op.sqrt(op.add(op.variance(x, [1, 2], True), const(1e-5)))),
    ],
)  # fmt: skip
def test_what_is_no_instance_norm_stays(build):
    assert stays(RULES, build, (2, 5, 5, 5))


@pytest.mark.parametrize("softmax", [op.nn.softmax, op.nn.log_softmax])
@pytest.mark.parametrize(("shape", "axis"), [((2, 5, 7), 1), ((6, 4), 0), ((2, 3, 4, 5), -3)])
def test_a_softmax_over_another_axis_is_one_over_the_last(softmax, shape, axis):
    _, after = becomes(RULES, lambda x: softmax(x, axis), shape)

    assert after == ["permute_dims", f"nn.{softmax.__name__}", "permute_dims"]


def test_a_softmax_over_the_last_axis_stays():
    assert stays(RULES, lambda x: op.nn.softmax(x, 1), (3, 4))
