"""What choices depend on stays in float32."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph import choices, fusion, precision
from lib.graph.rewrite import dtype
from tests.lib.graph.rules.helpers import const, module, random, run

LANES = 16
POINTS, CHANNELS, K = 24, 16, 4


def nearest(x):
    """The rows that are nearest to each row, by distances of features."""
    features = op.matmul(x, const(random((CHANNELS, 32), 1)))
    squares = op.sum(op.multiply(features, features), [2], keepdims=True)
    distances = op.matmul(features, op.permute_dims(features, [0, 2, 1]))
    distances = op.subtract(op.multiply(distances, const(np.float32(2))), op.permute_dims(squares, [0, 2, 1]))
    rows = op.take(x, op.reshape(op.topk(distances, K, ret_type="indices", dtype="int64"), (POINTS * K,)), axis=1)
    return op.matmul(rows, const(random((CHANNELS, 32), 2)))


def routed(x):
    """Each token's best expert, by a product with a weight; a bias of the expert is added."""
    scores = op.nn.softmax(op.matmul(x, const(random((CHANNELS, 32), 1))))
    best = op.reshape(op.argmax(scores, axis=2), (POINTS,))
    bias = op.take(const(random((32, 48), 3)), best, axis=0)
    return op.add(op.matmul(x, const(random((CHANNELS, 48), 2))), bias)


def nearest_and_features(x):
    """The same without squares, and a product of the features, which reads them rounded."""
    features = op.matmul(x, const(random((CHANNELS, 32), 1)))
    distances = op.matmul(features, op.permute_dims(features, [0, 2, 1]))
    rows = op.take(x, op.reshape(op.topk(distances, K, ret_type="indices", dtype="int64"), (POINTS * K,)), axis=1)
    return [op.matmul(rows, const(random((CHANNELS, 32), 2))), op.matmul(features, const(random((32, 16), 3)))]


def told(x):
    """The best of classes, which the caller alone reads."""
    return op.argmax(op.matmul(x, const(random((CHANNELS, 32), 1))), axis=2)


def narrow(build, shape=(1, POINTS, CHANNELS)):
    return precision.in_bf16(fusion.lift_constants(module(build, shape)), LANES)


def chosen(found):
    """What `topk` and `argmax` choose from, followed to the product, with the types of its factors."""
    values = {b.var: b.value for block in found.module["main"].body.blocks for b in block.bindings}
    [choice] = [v for v in values.values() if getattr(v.op, "name", "") in ("relax.topk", "relax.argmax")]
    value = values[choice.args[0]]
    while value.op.name not in ("relax.matmul", "relax.call_tir"):
        value = values[value.args[0]]
    factors = value.args[1].fields if value.op.name == "relax.call_tir" else value.args
    return {dtype(each) for each in factors}


@pytest.mark.parametrize("build", [nearest, routed])
def test_choices_are_made_of_what_float32_gives_and_all_else_is_rounded(build, cpu):
    found = narrow(build)
    x = random((1, POINTS, CHANNELS))

    assert chosen(found) == {"float32"}
    assert "bfloat16" in found.module.script()
    [y] = run(fusion.fuse(found.module, cpu.tvm()), x, *found.weights.values())
    [exact] = run(module(build, x.shape), x)
    np.testing.assert_allclose(y, exact, atol=0.02 * np.abs(exact).max())


def test_what_a_choice_is_computed_of_is_not_rounded_for_others():
    found = narrow(nearest_and_features)
    values = {b.var: b.value for block in found.module["main"].body.blocks for b in block.bindings}
    [distances] = [v for v in values.values() if isinstance(v, relax.Call) and v.op.name == "relax.call_tir"]

    assert values[distances.args[1].fields[0]].op.name == "relax.matmul"  # not what was rounded, in float32 again


def test_what_the_caller_alone_reads_is_no_choice_of_the_model():
    assert chosen(narrow(told)) == {"bfloat16"}


def test_a_model_that_chooses_nothing_is_the_same_model():
    model = fusion.lift_constants(module(lambda x: op.nn.softmax(op.matmul(x, const(random((16, 32), 1)))), (1, 8, 16)))

    assert choices.kept(model) is model
    assert choices.tensors(model.module["main"]) == set()


def test_tensors_that_choices_are_computed_of_are_not_stored_in_bf16():
    function = fusion.lift_constants(module(nearest, (1, POINTS, CHANNELS))).module["main"]
    values = {b.var: b.value for block in function.body.blocks for b in block.bindings}
    found = {values[var].op.name for var in choices.tensors(function) if isinstance(values.get(var), relax.Call)}

    assert {"relax.matmul", "relax.sum", "relax.multiply", "relax.subtract"} <= found
    assert not {"relax.take", "relax.topk"} & found
