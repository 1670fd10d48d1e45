import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph.fusion import lift_constants
from lib.graph.rewrite import Rewriter, constant, rewrite, rule
from tests.lib.graph.rules.helpers import const, module, operators


@rule("relax.exp")
def exp_to_tanh(rewriter, call):
    return op.tanh(call.args[0])


@rule("relax.tanh")
def tanh_to_exp(rewriter, call):
    return op.exp(call.args[0])


def counting(found):
    """A rule that notes whether the argument of `exp` is read once."""

    @rule("relax.exp")
    def note(rewriter, call):
        found.append(rewriter.read_once(call.args[0]))

    return note


def test_rules_that_undo_one_another_are_named_and_left_out(caplog):
    @rule("relax.sqrt")
    def other(rewriter, call):
        return op.negative(call.args[0])

    found = rewrite(module(lambda x: op.add(op.exp(x), op.sqrt(x)), (2,)), [exp_to_tanh, other, tanh_to_exp])

    assert "does not end: exp_to_tanh, tanh_to_exp still apply after 50 passes" in caplog.text
    assert sorted(operators(found)) in (["add", "exp", "negative"], ["add", "negative", "tanh"])


def test_rules_apply_until_none_does():
    @rule("relax.tanh")
    def half(rewriter, call):
        return op.multiply(call.args[0], const(0.5))

    assert operators(rewrite(module(op.exp, (2,)), [half, exp_to_tanh])) == ["multiply"]


def test_the_first_rule_that_applies_is_taken():
    @rule("relax.exp")
    def never(rewriter, call):
        return None

    @rule("relax.exp")
    def to_sqrt(rewriter, call):
        return op.sqrt(call.args[0])

    assert operators(rewrite(module(op.exp, (2,)), [never, to_sqrt, exp_to_tanh])) == ["sqrt"]


def test_the_given_module_stays_as_it_is():
    made = module(op.exp, (2,))

    rewrite(made, [exp_to_tanh])

    assert operators(made) == ["exp"]


def test_an_item_of_a_tuple_can_be_rewritten():
    @rule("relax.split[1]")
    def second(rewriter, call):
        return op.exp(call.args[0])

    made = module(lambda x: [relax.TupleGetItem(op.split(x, [2], 0), n) for n in range(2)], (4,))

    assert operators(rewrite(made, [second])) == ["split", "exp"]


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda x: op.exp(op.sqrt(x)), True),
        (lambda x: [root := op.sqrt(x), op.exp(root)], False),  # it is an output, too
        (lambda x: [op.exp(root := op.sqrt(x)), op.tanh(root)], False),
        (lambda x: op.exp(op.add(x, x)), True),
    ],
)
def test_readers_are_counted_with_outputs_among_them(build, expected):
    found = []

    rewrite(module(build, (2,)), [counting(found)])

    assert found == [expected]


def test_a_sole_output_that_is_read_as_well_is_read_twice():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            root = builder.emit_output(op.sqrt(x))
            result = builder.emit_output(op.exp(root))
        builder.emit_func_output(relax.Tuple([root, result]))
    found = []

    rewrite(builder.get(), [counting(found)])

    assert found == [False]


def test_what_takes_the_place_of_a_variable_inherits_its_readers():
    found = []

    @rule("relax.negative")
    def drop(rewriter, call):
        return call.args[0]

    rewrite(module(lambda x: [op.exp(y := op.negative(op.sqrt(x))), op.tanh(y)], (2,)), [drop, counting(found)])

    assert not any(found)


def test_numbers_and_constants_have_values_and_variables_have_none():
    rewriter = Rewriter(tvm.IRModule(), module(op.exp, (2,))["main"], {})

    assert rewriter.value(tvm.tirx.IntImm("int64", 3)) == 3
    assert rewriter.value(tvm.tirx.FloatImm("float32", 0.5)).dtype == np.float32
    assert rewriter.value(const(np.array([1, 2]))).tolist() == [1, 2]
    assert rewriter.value(relax.Var("x", relax.TensorType((), "float32"))) is None


@pytest.mark.parametrize("value", [np.float32(2), np.array(True), np.zeros((2, 0), np.int8), np.ones((2, 3)).T])
def test_constants_keep_their_shape_and_type(value):
    found = constant(np.asarray(value)).value.numpy()

    assert (found.shape, found.dtype) == (value.shape, value.dtype)
    np.testing.assert_array_equal(found, value)


def test_equal_constants_become_one_weight():
    shared = const(np.arange(3, dtype=np.float32))
    model = lift_constants(module(lambda x: op.add(op.multiply(op.exp(x), shared), shared), (2, 3)))

    assert len(model.weights) == 1
    np.testing.assert_array_equal(model.weights["weight_0"], [0, 1, 2])


def test_scalars_stay_in_the_graph_and_weights_follow_the_inputs():
    model = lift_constants(module(lambda x: op.multiply(op.add(x, const(1.0)), const(np.ones(3, np.float32))), (2, 3)))

    assert [str(param.name) for param in model.module["main"].params] == ["x0", "weight_0"]
    assert int(model.module["main"].attrs["num_input"]) == 1
