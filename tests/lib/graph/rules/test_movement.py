import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import rewrite
from lib.graph.rules import movement as rules
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, stays

ROW = const(np.array([0.5, -2, 3], np.float32))
SLICES = [rule for rule in rules.RULES if rule.name == "slice_of_split"]
MOVES = [rules.one_movement]


@pytest.mark.parametrize(
    ("build", "after"),
    [
        (lambda x: op.reshape(op.flatten(x), (4, 3, 2)), ["reshape"]),
        (lambda x: op.squeeze(op.expand_dims(x, [0, -1]), [0, -1]), []),
        (lambda x: op.permute_dims(op.permute_dims(x, [0, 2, 1]), [0, -1, 1]), []),
        (lambda x: op.permute_dims(op.permute_dims(x), [1, 2, 0]), ["permute_dims"]),
        (lambda x: op.permute_dims(op.expand_dims(x, [0]), [1, 0, 2, 3]), ["reshape"]),
        (lambda x: op.reshape(op.reshape(op.permute_dims(x, [0, 2, 1]), (8, 3)), (2, 4, 3)), ["permute_dims"]),
        (lambda x: op.reshape(x, (2, 3, 4)), []),
        (lambda x: op.nn.batch_flatten(op.reshape(x, (4, 3, 2))), ["reshape"]),
    ],
)
def test_a_chain_of_movements_is_as_short_as_can_be(build, after):
    assert becomes(MOVES, build, (2, 3, 4))[1] == after


def test_scalars_can_be_reshaped():
    assert becomes(MOVES, lambda x: op.reshape(op.expand_dims(x, [0]), (1, 1)), ())[1] == ["reshape"]


@pytest.mark.parametrize("shape", [(2, 0, 4), ("n", 3, 4)])
def test_empty_tensors_and_unknown_shapes_stay(shape):
    assert stays(MOVES, lambda x: op.permute_dims(op.permute_dims(x, [0, 2, 1]), [0, 2, 1]), shape)


def test_a_transpose_that_others_read_is_passed_if_that_needs_none():
    def back(x):
        moved = op.permute_dims(op.exp(x), [1, 0])
        return [op.permute_dims(moved, [1, 0]), op.tanh(moved)]

    def on(x):
        moved = op.permute_dims(op.exp(x), [2, 0, 1])
        return [op.permute_dims(moved, [1, 0, 2]), op.tanh(moved)]

    assert becomes(MOVES, back, (2, 3))[1] == ["exp", "permute_dims", "tanh"]
    assert stays(MOVES, on, (2, 3, 4))


@pytest.mark.parametrize(
    ("shape", "order", "flat"), [((2, 3, 4), [0, 2, 1], (2, 12)), ((1, 2, 3, 2), [0, 3, 1, 2], (1, 12))]
)
def test_a_flattened_transpose_reorders_the_rows_of_the_weights(shape, order, flat):
    def build(x):
        return op.matmul(op.reshape(op.permute_dims(x, order), flat), const(random((12, 3), 1)))

    before, after = becomes([rules.flatten_in_order], build, shape)
    assert (before, after) == (["permute_dims", "reshape", "matmul"], ["reshape", "matmul"])


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.matmul(op.reshape(op.permute_dims(x, [1, 0, 2]), (3, 8)), const(random((8, 3)))),  # batch moved
        lambda x: op.matmul(op.reshape(op.permute_dims(x, [0, 2, 1]), (4, 6)), const(random((6, 3)))),
        lambda x: op.matmul(op.reshape(x, (2, 12)), const(random((12, 3)))),  # in order already
        lambda x: op.matmul(op.reshape(op.permute_dims(x, [0, 2, 1]), (2, 12)), op.reshape(op.exp(x), (12, 2))),
    ],
)
def test_other_flattenings_stay(build):
    assert stays([rules.flatten_in_order], build, (2, 3, 4))


def test_a_flattened_image_that_others_read_stays():
    def build(x):
        flat = op.reshape(op.permute_dims(x, [0, 2, 1]), (2, 12))
        return [op.matmul(flat, const(random((12, 3)))), op.exp(flat)]

    assert stays([rules.flatten_in_order], build, (2, 3, 4))


@pytest.mark.parametrize(("shape", "joined"), [((2, 8, 4), (16, 4)), ((1, 4), (4,)), ((2, 1, 9, 4), (2, 9, 4))])
def test_a_product_keeps_the_leading_axes(shape, joined):
    def build(x, w):
        return op.matmul(op.reshape(x, joined), w)

    assert becomes([rules.keep_leading_axes], build, shape, (4, 5))[1] == ["matmul", "reshape"]


def test_a_product_keeps_leading_axes_only_if_the_last_is_whole():
    assert stays([rules.keep_leading_axes], lambda x, w: op.matmul(op.reshape(x, (2, 12)), w), (2, 3, 4), (12, 5))
    assert stays([rules.keep_leading_axes], lambda x, w: op.matmul(op.reshape(x, (6, 4)), w), (2, 3, 4), (4,))


JOINING = [rules.join_few_rows, rules.keep_leading_axes, rules.one_movement]


@pytest.mark.parametrize("shape", [(6, 1, 4), (3, 2, 4), (2, 5, 3, 4)])
def test_products_of_few_rows_are_one_of_many(shape):
    assert becomes(JOINING, op.matmul, shape, (4, 5))[1] == ["reshape", "matmul", "reshape"]


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 1, 2, 4), (2, 4, 4), (6, 4)])
def test_one_product_or_products_of_many_rows_stay(shape):
    assert stays(JOINING, op.matmul, shape, (4, 5))


def test_products_with_matrices_of_their_own_stay():
    assert stays(JOINING, op.matmul, (6, 1, 4), (6, 4, 5))


@pytest.mark.parametrize("heads", [1, 3])
def test_batched_products_keep_their_heads(heads):
    def build(a, b):
        return op.matmul(op.reshape(a, (2 * heads, 4, 5)), op.reshape(b, (2 * heads, 5, 6)))

    assert becomes([rules.keep_heads], build, (2, heads, 4, 5), (2, heads, 5, 6))[1] == ["matmul", "reshape"]


def test_products_whose_batches_were_joined_differently_stay():
    def build(a, b):
        return op.matmul(op.reshape(a, (6, 4, 5)), op.reshape(b, (6, 5, 7)))

    assert stays([rules.keep_heads], build, (2, 3, 4, 5), (3, 2, 5, 7))
    assert stays([rules.keep_heads], build, (2, 3, 5, 4), (2, 3, 5, 7))


def dense(x):
    return op.reshape(op.matmul(x, const(random((4, 3), 1))), (6, 3))


@pytest.mark.parametrize(
    "function",
    [
        op.nn.relu,
        op.sigmoid,
        lambda y: op.add(y, ROW),
        lambda y: op.multiply(const(2.0), y),
        lambda y: op.subtract(const(random((1, 3))), y),
        lambda y: op.add(y, y),
        lambda y: op.astype(y, "float16"),
    ],
)
def test_a_product_is_reshaped_last(function):
    after = becomes([rules.reshape_later], lambda x: function(dense(x)), (2, 3, 4))[1]
    assert (after[0], after[-1], len(after)) == ("matmul", "reshape", 3)


def hard_sigmoid(x):
    return op.multiply(op.minimum(op.maximum(op.add(x, const(3.0)), const(0.0)), const(6.0)), const(1 / 6))


@pytest.mark.parametrize("gate", [op.sigmoid, op.tanh, hard_sigmoid])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_product_times_its_own_gate_is_reshaped_last(gate, is_last):
    def build(x):
        y = op.add(dense(x), ROW)
        return op.multiply(*((gate(y), y) if is_last else (y, gate(y))))

    after = becomes([rules.reshape_later, rules.gate_later], build, (2, 3, 4))[1]
    assert after[:2] == ["matmul", "add"]
    assert after[-2:] == ["multiply", "reshape"]
    assert after.count("reshape") == 1


@pytest.mark.parametrize("reduce", [op.max, op.min, op.sum, op.mean])
@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(
    ("order", "axes", "moves"), [((0, 2, 1), [-1], 0), ((2, 0, 1), [1], 1), ((2, 1, 0), [0, 2], 0)]
)
def test_what_is_reduced_is_transposed_later(reduce, keepdims, order, axes, moves):
    def build(x):
        return reduce(op.permute_dims(x, order), axes, keepdims)

    after = becomes([rules.transpose_after_reduction, *MOVES], build, (2, 3, 4))[1]
    assert after[0] == reduce.__name__
    assert after.count("permute_dims") <= moves


def test_what_is_reshaped_for_a_gate_without_a_product_stays():
    def build(x):
        y = op.reshape(op.exp(x), (6, 4))
        return op.multiply(y, op.sigmoid(y))

    assert stays([rules.gate_later], build, (2, 3, 4))


def test_what_is_reshaped_for_a_gate_of_something_else_as_well_stays():
    def build(x, other):
        y = op.reshape(op.matmul(x, const(random((4, 4)))), (6, 4))
        return op.multiply(y, op.sigmoid(op.add(y, other)))

    assert stays([rules.gate_later], build, (2, 3, 4), (6, 4))


def test_a_function_of_nothing_else_goes_before_any_reshape_and_the_transposes_around_it_cancel_out():
    def build(x):  # as in SegFormer: an image in NCHW between tokens
        image = op.permute_dims(op.reshape(op.matmul(x, const(random((4, 3)))), (2, 2, 3, 3)), [0, 3, 1, 2])
        return op.permute_dims(op.nn.gelu(op.reshape(image, (2, 3, 6))), [0, 2, 1])

    after = becomes(rules.RULES, build, (2, 6, 4))[1]
    assert after == ["matmul", "nn.gelu"]


def test_two_reshaped_products_are_added_and_then_reshaped():
    after = becomes([rules.reshape_later], lambda x, y: op.add(dense(x), dense(y)), (2, 3, 4), (2, 3, 4))[1]
    assert after == ["matmul", "matmul", "add", "reshape"]


def flat_dense(x):
    return op.reshape(op.matmul(x, const(random((4, 3), 1))), (2, 3, 3))


def test_a_residual_sum_is_taken_in_the_shape_of_the_product():
    after = becomes([rules.reshape_later], lambda x, y: op.add(y, flat_dense(x)), (6, 4), (2, 3, 3))[1]
    assert after == ["matmul", "reshape", "add", "reshape"]  # of the other summand, which is a view


def test_a_vector_of_more_axes_than_the_product_loses_them():
    after = becomes([rules.reshape_later], lambda x: op.add(flat_dense(x), const(random((1, 1, 3)))), (6, 4))[1]
    assert after == ["matmul", "add", "reshape"]


@pytest.mark.parametrize(
    ("apart", "mask"),
    [((1, 4, 2, 3, 3), (1, 4, 1, 3, 3)), ((1, 4, 2, 3, 3), (4, 1, 3, 3)), ((4, 2, 1, 3, 3), (4, 1, 1, 1, 3))],
)
def test_a_mask_of_windows_is_added_in_the_shape_of_the_product(apart, mask):
    def build(x, y):  # as Swin adds one: the scores of a batch's windows get an axis for the batch
        masked = op.add(op.reshape(op.matmul(x, y), apart), const(random(mask)))
        return op.nn.softmax(op.reshape(masked, (4, 2, 3, 3)))

    after = becomes(rules.RULES, build, (4, 2, 3, 5), (4, 2, 5, 3))[1]
    assert after[-2:] == ["add", "nn.softmax"]  # after the product, and a view of the mask


def test_a_mask_of_the_windows_of_two_images_stays_where_it_is():
    def build(x, y):
        return op.add(op.reshape(op.matmul(x, y), (2, 2, 2, 3, 3)), const(random((1, 2, 1, 3, 3))))

    assert stays([rules.reshape_later], build, (4, 2, 3, 5), (4, 2, 5, 3))


def test_products_of_two_shapes_are_added_in_one_of_them_and_rewriting_ends():
    def build(x, y):
        return op.exp(
            op.add(op.tanh(flat_dense(x)), op.reshape(op.exp(op.matmul(y, const(random((4, 3))))), (2, 3, 3)))
        )

    before, after = becomes(rules.RULES, build, (6, 4), (3, 2, 4))
    assert (before.count("reshape"), after.count("reshape")) == (2, 2)
    assert after.index("add") < len(after) - 2  # the sum is reshaped last, after what follows it


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.exp(op.reshape(op.tanh(x), (6, 4))),  # no product
        lambda x: op.add(
            op.reshape(op.matmul(x, const(random((4, 3)))), (2, 9)), const(random((9,)))
        ),  # another last axis
        lambda x: op.add(dense(x), const(random((6, 1)))),
        lambda x: op.add(dense(x), const(random((2, 6, 3)))),  # broadcasts the product
        lambda x: op.add(dense(x), const(random((2, 1, 6, 3)))),
        lambda x: [y := dense(x), op.exp(y)],
    ],
)
def test_a_reshape_stays_before_what_depends_on_it(build):
    assert stays([rules.reshape_later], build, (2, 3, 4))


@pytest.mark.parametrize(
    "build",
    [
        lambda x, y: op.tanh(op.permute_dims(x, [1, 0])),
        lambda x, y: op.add(op.permute_dims(x, [1, 0]), op.permute_dims(y, [1, 0])),
        lambda x, y: op.multiply(const(2.0), op.permute_dims(x, [1, 0])),
        lambda x, y: op.add(moved := op.permute_dims(x, [1, 0]), moved),
    ],
)
def test_a_transpose_comes_last(build):
    after = becomes([rules.transpose_later], build, (2, 3), (2, 3))[1]
    assert after[-1] == "permute_dims"
    assert len(after) == 2


@pytest.mark.parametrize("mode", ["constant", "reflect"])
def test_padding_comes_after_a_transpose(mode):
    def build(x):
        return op.permute_dims(op.nn.pad(op.permute_dims(x, [0, 2, 1]), [0, 0, 1, 2, 0, 1], mode, 7.0), [0, 2, 1])

    assert becomes([*MOVES, rules.transpose_before_padding], build, (2, 3, 4))[1] == ["nn.pad"]


def test_padding_that_others_read_stays_before_a_transpose():
    def build(x):
        padded = op.nn.pad(x, [0, 0, 1, 2], "constant", 7.0)
        return [op.permute_dims(padded, [1, 0]), op.exp(padded)]

    assert stays([rules.transpose_before_padding], build, (2, 3))


@pytest.mark.parametrize(
    "build",
    [
        lambda x, y: op.add(op.permute_dims(x, [1, 0]), y),
        lambda x, y: op.add(op.permute_dims(x, [1, 0]), const(random((2,)))),
        lambda x, y: [moved := op.permute_dims(x, [1, 0]), op.exp(moved)],
        lambda x, y: op.add(op.permute_dims(x, [1, 0]), op.permute_dims(y, [0, 1])),
    ],
)
def test_a_transpose_stays_before_what_needs_it(build):
    assert stays([rules.transpose_later], build, (2, 2), (2, 2))


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.broadcast_to(x, (2, 3)),
        lambda x: op.strided_slice(x, [0, 1], [0, 0], [2, 2**31]),
        lambda x: op.strided_slice(x, [-1], [-3], [3], [1]),
        lambda x: op.nn.pad(x, [0, 0, 0, 0]),
    ],
)
def test_broadcasts_slices_and_pads_that_do_nothing_are_dropped(build):
    assert becomes([rules.drop_identity], build, (2, 3))[1] == []


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.broadcast_to(x, (4, 2, 3)),
        lambda x: op.strided_slice(x, [1], [-1], [-4], [-1]),  # the same shape, backwards
        lambda x: op.strided_slice(x, [0], [1], [2]),
        lambda x: op.nn.pad(x, [0, 0, 1, 0]),
    ],
)
def test_broadcasts_slices_and_pads_that_do_something_stay(build):
    assert stays([rules.drop_identity], build, (2, 3))


def test_a_slice_of_unknown_extent_stays():
    assert stays([rules.drop_identity], lambda x: op.strided_slice(x, [0], [0], [2]), ("n",))


def test_a_concatenation_of_one_is_dropped_and_of_the_same_twice_is_not():
    assert becomes([rules.single_concat], lambda x: op.concat([x], 1), (2, 3))[1] == []
    assert stays([rules.single_concat], lambda x: op.concat([x, x], 1), (2, 3))


@pytest.mark.parametrize(("parts", "axis"), [(2, 0), (3, -1), ([1, 4], 1), ([3, 4, 9], -1)])
def test_the_parts_of_a_split_are_slices(parts, axis):
    """Of 10 columns in three parts, the last is the short one."""
    count = parts if isinstance(parts, int) else len(parts) + 1

    def build(x):
        made = op.split(x, parts, axis)
        return [relax.TupleGetItem(made, n) for n in range(count)]

    assert becomes(SLICES, build, (4, 10))[1] == ["strided_slice"] * count


def test_a_split_of_unknown_extent_stays():
    assert stays(SLICES, lambda x: relax.TupleGetItem(op.split(x, [2], 0), 1), ("n",))


def take_mode(made):
    return [
        str(b.value.attrs.mode)
        for b in made["main"].body.blocks[0].bindings
        if isinstance(b.value, relax.Call) and b.value.op.name == "relax.take"
    ]


IDS = np.array([[2, 0], [1, 1]], np.int64)


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_lookups_stay_inside_the_table(axis):
    def build(x, ids):
        table = op.reshape(x, (12,)) if axis is None else x
        return op.take(table, ids, axis)

    made = module(build, (4, 3), IDS)

    assert take_mode(rewrite(made, [rules.safe_take])) == ["clip"]
    assert becomes([rules.safe_take], build, (4, 3), IDS)


@pytest.mark.parametrize("mode", ["clip", "nan"])
def test_lookups_that_are_safe_stay(mode):
    assert stays([rules.safe_take], lambda x, ids: op.take(x, ids, 0, mode=mode), (4, 3), IDS)


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)])
def test_a_gather_of_parts_along_the_first_axis_is_a_lookup(shape):
    build_gather = lambda x, ids: op.gather_nd(x, op.expand_dims(ids, -1))  # noqa: E731
    assert becomes([rules.take_of_gather], build_gather, shape, IDS)[1] == ["expand_dims", "reshape", "take"]


def test_gathers_of_single_elements_and_of_batches_stay():
    assert stays([rules.take_of_gather], lambda x, ids: op.gather_nd(x, ids), (4, 3), IDS)
    batches = lambda x, ids: op.gather_nd(x, op.expand_dims(ids, -1), 1)  # noqa: E731
    assert stays([rules.take_of_gather], batches, (2, 4, 3), IDS)


@pytest.mark.parametrize("mode", ["fast", "wrap", "clip"])
@pytest.mark.parametrize(
    ("rows", "axis"), [(np.array([1, 2]), 0), (np.array(2), -1), (np.array([[0, 1, 2]]), 1), (np.array([0]), 0)]
)
def test_a_lookup_of_consecutive_rows_is_a_slice(rows, axis, mode):
    build_take = lambda x: op.take(x, const(rows), axis, mode=mode)  # noqa: E731
    assert becomes([rules.slice_of_take], build_take, (4, 3))[1] == ["strided_slice", "reshape"]


@pytest.mark.parametrize(("row", "mode"), [(-1, "wrap"), (-1, "clip"), (4, "wrap"), (4, "clip"), (9, "clip")])
def test_a_row_outside_the_table_is_the_one_that_the_mode_says(row, mode):
    build_take = lambda x: op.take(x, const(np.array([row])), 0, mode=mode)  # noqa: E731
    assert becomes([rules.slice_of_take], build_take, (4, 3))[1] == ["strided_slice", "reshape"]


@pytest.mark.parametrize(
    ("rows", "axis"), [([0, 2], 0), ([2, 1], 0), ([1, 1], 0), ([3, 4], 0), ([-1, 0], 0), ([], 0), ([1, 2], None)]
)
def test_other_lookups_stay(rows, axis):
    shape = (4,) if axis is None else (4, 3)
    build_take = lambda x: op.take(x, const(np.array(rows, np.int64)), axis)  # noqa: E731
    assert stays([rules.slice_of_take], build_take, shape)


@pytest.mark.parametrize(
    ("build", "after"),
    [
        (lambda x, y: op.add(op.broadcast_to(x, (4, 3)), y), ["add"]),
        (lambda x, y: op.subtract(y, op.broadcast_to(x, (4, 3))), ["subtract"]),
        (lambda x, y: op.multiply(op.broadcast_to(x, (4, 3)), const(2.0)), ["multiply", "broadcast_to"]),
        (lambda x, y: op.where(op.less(y, const(0.0)), op.broadcast_to(x, (4, 3)), y), ["less", "where"]),
        (lambda x, y: op.logical_and(op.less(y, const(0.0)), op.broadcast_to(op.less(x, const(0.0)), (4, 3))),
         ["less", "less", "logical_and"]),
    ],
)  # fmt: skip
def test_operators_broadcast_themselves(build, after):
    assert becomes([rules.broadcast_unread], build, (3,), (4, 3))[1] == after


def test_a_broadcast_that_decides_the_shape_stays():
    assert stays([rules.broadcast_unread], lambda x, y: op.add(op.broadcast_to(x, (4, 3)), y), (3,), (1, 3))


def test_of_two_broadcasts_one_stays():
    def build(x):
        return op.add(spread := op.broadcast_to(x, (4, 3)), spread)

    assert becomes([rules.broadcast_unread], build, (3,))[1] == ["broadcast_to", "add"]


@pytest.mark.parametrize("other", [(1,), ()])
def test_a_broadcast_to_an_unknown_shape_stays(other):
    def build(x, y, unknown):
        return op.add(op.broadcast_to(x, relax.ShapeExpr([unknown.ty.shape[0]])), y)

    assert stays([rules.broadcast_unread], build, (1,), other, ("n",))


def test_and_true_is_the_other_operand_in_the_shape_of_both():
    x = np.array([[True], [False]])

    def build(mask):
        return op.logical_and(const(np.ones((1, 3), bool)), mask)

    assert becomes([rules.and_true], build, x)[1] == ["broadcast_to"]
    assert stays([rules.and_true], lambda m: op.logical_and(m, const(np.array([True, False]))), x)


def test_and_true_of_unknown_shape_stays():
    mask = relax.Var("mask", relax.TensorType((tvm.tirx.Var("n", "int64"),), "bool"))
    builder = relax.BlockBuilder()
    with builder.function("main", [mask]):
        with builder.dataflow():
            output = builder.emit_output(op.logical_and(mask, const(np.array(True))))
        builder.emit_func_output(output)

    assert operators(rewrite(builder.get(), [rules.and_true])) == ["logical_and"]


def test_all_rules_together_come_to_an_end():
    def build(x):
        moved = op.permute_dims(x, [0, 2, 1])
        parts = op.split(op.reshape(moved, (8, 3)), [3], 0)
        both = op.add(
            relax.TupleGetItem(parts, 0), op.take(relax.TupleGetItem(parts, 1), const(np.array([2, 3, 4])), 0)
        )
        return op.permute_dims(op.exp(op.broadcast_to(both, (3, 3))))

    assert "split" not in becomes(rules.RULES, build, (2, 3, 4))[1]
