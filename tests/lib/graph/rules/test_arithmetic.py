import warnings

import numpy as np
import pytest
import tvm
from tvm import relax, te
from tvm.relax import op

from lib.graph import fusion, simplify
from lib.graph.rewrite import rewrite
from lib.graph.rules import arithmetic as rules
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, run, stays

POSITIVE = np.linspace(0.1, 4, 6, dtype=np.float32).reshape(2, 3)
IMAGE, KERNEL = (1, 2, 4, 4), (3, 2, 1, 1)


@pytest.mark.parametrize(
    ("exponent", "after"),
    [
        (1.0, []),
        (2.0, ["multiply"]),
        (3.0, ["multiply", "multiply"]),
        (0.5, ["sqrt"]),
        (0.25, ["sqrt", "sqrt"]),
        (0.75, ["sqrt", "sqrt", "multiply"]),
        (-0.5, ["rsqrt"]),
        (-1.0, ["divide"]),
    ],
)
def test_powers_become_products_and_roots(exponent, after):
    assert becomes([rules.cheap_power], lambda x: op.power(x, const(exponent)), POSITIVE) == (["power"], after)


@pytest.mark.parametrize(
    ("compared", "after"), [(op.not_equal, ["isnan"]), (op.equal, ["isnan", "logical_not"])], ids=["unequal", "equal"]
)
def test_what_is_compared_with_itself_is_asked_whether_it_is_a_number(compared, after):
    x = np.array([1, np.nan, -np.inf, 0], np.float32)

    changed = rewrite(module(lambda x: op.astype(compared(x, x), "float32"), x), [rules.compared_with_itself])

    assert operators(changed) == [*after, "astype"]
    [found] = run(changed, x)
    np.testing.assert_array_equal(found, (x != x) if compared is op.not_equal else (x == x))
    assert stays([rules.compared_with_itself], lambda x: compared(x, x), np.arange(3))
    assert stays([rules.compared_with_itself], lambda x: compared(x, op.add(x, x)), x)


@pytest.mark.parametrize(
    ("base", "exponent"),
    [
        (POSITIVE, const(1.7)),
        (POSITIVE, const(np.full(3, 2, np.float32))),
        (POSITIVE, const(np.full((1, 1, 1), 2, np.float32))),  # broadcasts the base
        (np.ones((2, 3), np.int32), const(2, "int32")),
    ],
)
def test_other_powers_stay(base, exponent):
    assert stays([rules.cheap_power], lambda x: op.power(x, exponent), base)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.add(x, const(0.0)),
        lambda x: op.add(const(np.zeros((2, 3), np.float32)), x),
        lambda x: op.subtract(x, const(np.zeros(3, np.float32))),
        lambda x: op.multiply(const(1.0), x),
        lambda x: op.divide(x, const(np.ones((1, 1), np.float32))),
    ],
)
def test_neutral_elements_are_dropped(build):
    assert becomes([rules.drop_neutral], build, (2, 3))[1] == []


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.add(x, const(np.zeros((4, 1, 1), np.float32))),  # broadcasts x
        lambda x: op.subtract(const(0.0), x),
        lambda x: op.divide(const(1.0), x),
        lambda x: op.multiply(x, const(np.array([1, 1, 2], np.float32))),
    ],
)
def test_what_only_looks_neutral_stays(build):
    assert stays([rules.drop_neutral], build, (2, 3))


def test_neutral_elements_of_unknown_shapes_stay():
    assert stays([rules.drop_neutral], lambda x: op.add(x, const(np.zeros(1, np.float32))), ("n",))


@pytest.mark.parametrize("operator", [op.add, op.multiply, op.maximum, op.minimum])
def test_constants_come_last(operator):
    made = module(lambda x: operator(const(np.array([1, -2, 3], np.float32)), x), (2, 3))

    turned = rewrite(made, [rules.constant_last])

    assert turned["main"].body.blocks[0].bindings[0].value.args[0] == turned["main"].params[0]
    np.testing.assert_array_equal(run(turned, POSITIVE), run(made, POSITIVE))


def test_operators_that_do_not_commute_keep_their_order():
    assert stays([rules.constant_last], lambda x: op.subtract(const(1.0), x), (2, 3))


@pytest.mark.parametrize("bias", [False, True])
def test_a_residual_is_added_to_the_product(bias):
    def build(x, w, residual):
        product = op.matmul(x, w)
        return op.add(op.exp(residual), op.add(product, const(np.ones(3, np.float32))) if bias else product)

    made = module(build, (2, 3), (3, 3), (2, 3))

    total = rewrite(made, [rules.product_first])["main"].body.blocks[0].bindings[-1].value

    assert [str(argument.name) for argument in total.args] == ["lv2" if bias else "lv1", "lv"]
    assert becomes([rules.product_first], build, (2, 3), (3, 3), (2, 3))


def test_a_sum_of_products_keeps_its_order():
    assert stays([rules.product_first], lambda x, y: op.add(op.matmul(x, y), op.matmul(y, x)), (3, 3), (3, 3))


@pytest.mark.parametrize("divisor", [3.0, -0.7])
def test_division_by_a_constant_is_a_product(divisor):
    assert becomes([rules.divide_by_constant], lambda x: op.divide(x, const(divisor)), (2, 3))[1] == ["multiply"]


@pytest.mark.parametrize(
    ("x", "divisor"),
    [
        (POSITIVE, const(0.0)),
        (POSITIVE, const(np.array([1, 0, 2], np.float32))),
        (POSITIVE, const(float("inf"))),
        (POSITIVE, const(1e-39)),  # 1e39 is no float32
        (POSITIVE, const(3e38)),  # the reciprocal has lost digits
        (POSITIVE.astype(np.float16), const(1e-6, "float16")),
        (np.ones((2, 3), np.int32), const(2, "int32")),
    ],
)
def test_division_stays_where_the_reciprocal_is_not_as_good(x, divisor):
    assert stays([rules.divide_by_constant], lambda x: op.divide(x, divisor), x)


@pytest.mark.parametrize("terms", [1, 2, 3])
def test_a_sum_of_stacked_terms_is_added_up(terms):
    def build(*xs):
        return op.sum(op.stack([op.broadcast_to(x, (2, 3)) for x in xs], 0), [0])

    assert becomes([rules.unstack_sum], build, *[(2, 3)] * terms)[1] == ["add"] * (terms - 1)


def test_a_stacked_term_is_still_broadcast():
    def build(x, y):
        return op.sum(op.stack([op.broadcast_to(y, (2, 3)), x], 0), [0])

    assert becomes([rules.unstack_sum], build, (2, 3), (3,))[1] == ["broadcast_to", "add"]


def test_the_same_term_twice_counts_twice():
    assert becomes([rules.unstack_sum], lambda x: op.sum(op.stack([x, x], 0), [0]), (2, 3))[1] == ["add"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x, y: op.sum(op.stack([x, y], 0), [1]),
        lambda x, y: op.sum(op.stack([x, y], 1), [0]),
        lambda x, y: op.sum(op.stack([x, y], 0), [0], keepdims=True),
        lambda x, y: op.sum(op.stack([x, y], 0)),
    ],
)
def test_other_sums_of_stacks_stay(build):
    assert stays([rules.unstack_sum], build, (2, 3), (2, 3))


def clipped(bound_is_known=True, name="maximum"):
    """A bound as the ONNX importer writes it: a TIR function named after what it does."""
    x, bound = te.placeholder((2, 3), name="x"), te.placeholder((), name="bound")
    result = te.compute((2, 3), lambda *i: te.max(x(*i), bound()))
    builder = relax.BlockBuilder()
    params = [relax.Var("x", relax.TensorType((2, 3), "float32"))]
    if not bound_is_known:
        params.append(relax.Var("bound", relax.TensorType((), "float32")))
    with builder.function("main", params):
        with builder.dataflow():
            function = builder.add_func(te.create_prim_func([x, bound, result]).without_attr("global_symbol"), name)
            low = const(0.3) if bound_is_known else params[1]
            output = builder.emit_output(
                relax.call_tir(function, [params[0], low], relax.TensorType((2, 3), "float32"))
            )
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.parametrize("name", ["maximum", "maximum12"])
def test_a_bound_in_raw_tir_is_an_operator(name):
    found = rewrite(clipped(name=name), [rules.plain_clip])

    assert operators(found) == ["maximum"]
    np.testing.assert_array_equal(run(found, POSITIVE), [np.maximum(POSITIVE, np.float32(0.3))])


@pytest.mark.parametrize("made", [clipped(bound_is_known=False), clipped(name="softplus")])
def test_other_raw_tir_stays(made):
    assert operators(rewrite(made, [rules.plain_clip])) == operators(made)


@pytest.mark.parametrize(
    ("low", "high", "after"),
    [
        (-0.5, 0.5, ["maximum", "minimum"]),
        (0, float("inf"), ["maximum"]),
        (float("-inf"), 0.5, ["minimum"]),
        (float("-inf"), float("inf"), []),
    ],
)
def test_clips_become_their_bounds(low, high, after):
    bounds = [tvm.tirx.FloatImm("float32", bound) for bound in (low, high)]

    found = rewrite(module(lambda x: op.clip(x, *bounds), (2, 3)), [rules.two_sided_clip])

    assert operators(found) == after
    np.testing.assert_array_equal(run(found, random((2, 3)))[0], np.clip(random((2, 3)), low, high))


def test_a_bound_beyond_the_type_is_none():
    def build(x):
        return op.clip(x, tvm.tirx.FloatImm("float32", -3e38), tvm.tirx.FloatImm("float32", 1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rewrite(module(build, POSITIVE.astype(np.float16)), [rules.two_sided_clip])

    assert operators(found) == ["minimum"]


def test_a_clip_of_integers_stays():
    assert stays([rules.two_sided_clip], lambda x: op.clip(x, 0, 6), np.ones((2, 3), np.int32))


@pytest.mark.parametrize("condition", [True, False])
def test_a_decided_where_is_one_side(condition):
    def build(x, y):
        return op.where(const(np.full((2, 1), condition)), op.exp(x), op.tanh(y))

    assert becomes([rules.decided_where], build, (2, 3), (2, 3))[1] == ["exp" if condition else "tanh"]


@pytest.mark.parametrize(
    "condition", [np.array([True, False, True]), np.ones((4, 1, 1), bool), np.ones((0, 1, 1), bool)]
)
def test_an_undecided_where_or_one_that_broadcasts_stays(condition):
    assert stays([rules.decided_where], lambda x, y: op.where(const(condition), x, y), (2, 3), (2, 3))


def test_a_where_whose_other_side_broadcasts_stays():
    assert stays([rules.decided_where], lambda x, y: op.where(const(np.array(True)), x, y), (3,), (2, 3))


def test_a_cast_to_the_same_type_is_dropped():
    assert becomes([rules.same_type], lambda x: op.astype(x, "float32"), (2, 3))[1] == []
    assert stays([rules.same_type], lambda x: op.astype(x, "int32"), (2, 3))


def test_dropout_is_dropped_but_not_its_mask():
    made = module(lambda x: relax.TupleGetItem(op.nn.dropout(x, 0.5), 0), (2, 3))

    assert operators(rewrite(made, [rules.drop_dropout])) == []
    assert stays([rules.drop_dropout], lambda x: relax.TupleGetItem(op.nn.dropout(x, 0.5), 1), (2, 3))


@pytest.mark.parametrize(("slopes", "axis"), [(3, 1), (1, 1), (5, 3)])
def test_prelu_is_written_by_elements(slopes, axis):
    x, slope = random((2, 3, 4, 5)), random((slopes,), 1)
    made = rewrite(module(lambda x: op.nn.prelu(x, const(slope), axis), x), [rules.prelu_by_element])

    by_channel = slope.reshape([-1 if n == axis else 1 for n in range(4)])
    assert "nn.prelu" not in operators(made)
    np.testing.assert_allclose(run(made, x)[0], np.where(x > 0, x, x * by_channel), rtol=1e-6)


def test_prelu_is_a_convolutions_epilogue(cpu):
    def build(x):
        convolution = op.nn.conv2d(x, const(random((8, 3, 3, 3), 1)), padding=1)
        return op.nn.prelu(convolution, const(random((8,), 2)), 1)

    made = simplify.channels_last(simplify.simplify(module(build, (1, 3, 6, 6))))
    model = fusion.lift_constants(made)
    names = [gvar.name_hint for gvar, _ in fusion.fuse(model.module, cpu.tvm()).functions_items()]

    assert len([name for name in names if "conv2d" in name]) == 1
    assert not any("prelu" in name for name in names)
    assert all("conv2d" in name or "transpose" in name or name == "main" for name in names)


@pytest.mark.parametrize("slope", [0.0, 0.1, 1.0])
def test_a_leaky_relu_is_a_maximum(slope):
    x = random((2, 3, 4))
    made = rewrite(module(lambda x: op.nn.leakyrelu(x, slope), x), [rules.leaky_relu_by_element])

    assert operators(made)[-1] == "maximum"
    np.testing.assert_allclose(run(made, x)[0], np.where(x > 0, x, slope * x), rtol=1e-6, atol=1e-7)


def test_a_leaky_relu_of_another_slope_stays():
    assert stays([rules.leaky_relu_by_element], lambda x: op.nn.leakyrelu(x, 1.5), (2, 3))


def test_softplus_neither_overflows_nor_vanishes():
    x = np.array([-200, -20, -1, -1e-3, 0, 1e-3, 1, 20, 200], np.float32)
    made = rewrite(module(lambda x: op.nn.softplus(x), x), [rules.softplus_by_element])

    assert "nn.softplus" not in operators(made)
    np.testing.assert_allclose(run(made, x)[0], np.logaddexp(0, x.astype(np.float64)), rtol=1e-5, atol=2e-7)


def test_softplus_of_another_slope_stays():
    assert stays([rules.softplus_by_element], lambda x: op.nn.softplus(x, beta=2.0), (2, 3))


@pytest.mark.parametrize("activation", [lambda x: op.nn.leakyrelu(x, 0.1), lambda x: op.nn.softplus(x)])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_no_activation_stands_between_transpositions(dims, activation):
    convolve, weight = getattr(op.nn, f"conv{dims}d"), const(random((4, 4, *[3] * dims), 1))

    def build(x):
        return convolve(activation(convolve(x, weight, padding=1)), weight, padding=1)

    made = simplify.channels_last(simplify.simplify(module(build, (1, 4, *[5] * dims))))

    assert operators(made).count("permute_dims") == 2  # of what comes in and of what goes out
