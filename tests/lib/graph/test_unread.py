import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.relax import op

from lib.graph.rewrite import static_shape
from lib.graph.unread import left_out
from lib.models import onnx_import
from tests.lib.graph.rules.helpers import becomes, const, module, random

TOKENS, WIDTH = 10, 8
X = (2, TOKENS, WIDTH)


def weight(*shape, seed=1):
    return const(random(shape or (WIDTH, WIDTH), seed))


def normed(x):
    return op.nn.layer_norm(x, weight(WIDTH, seed=3), weight(WIDTH, seed=4), axes=[-1])


def part(x, axis=1, begin=0, end=1):
    return op.strided_slice(x, [axis], [begin], [end])


def made(found):
    """What a module calls but slices, with the shapes of the results."""
    bindings = [binding for block in found["main"].body.blocks for binding in block.bindings]
    calls = [(each.value.op.name, static_shape(each.var)) for each in bindings if isinstance(each.value, relax.Call)]
    return [(name.removeprefix("relax."), shape) for name, shape in calls if name != "relax.strided_slice"]


@pytest.mark.parametrize(
    ("build", "axis"),
    [
        (lambda x: op.nn.gelu(x), 1),
        (lambda x: op.clip(x, -0.5, 0.5), 2),
        (lambda x: op.nn.leakyrelu(x, 0.3), 1),
        (lambda x: op.add(x, weight(WIDTH)), 1),
        (lambda x: op.add(x, weight(WIDTH)), 2),
        (lambda x: op.multiply(weight(TOKENS, 1), x), 1),
        (lambda x: op.where(const(np.arange(TOKENS * WIDTH).reshape(TOKENS, WIDTH) % 3 > 0), x, const(-1.0)), 1),
        (lambda x: op.astype(x, "int32"), 1),
        (normed, 1),
        (lambda x: op.nn.softmax(x, -1), 1),
        (lambda x: op.matmul(x, weight()), 1),
        (lambda x: op.matmul(x, weight(2, WIDTH, 5)), 1),
        (lambda x: op.matmul(weight(1, 6, TOKENS), x), 2),
        (lambda x: op.einsum((x, weight(2, 3, WIDTH)), "bnk,bmk->bnm"), 1),
        (lambda x: op.mean(x, [2], keepdims=True), 1),
        (lambda x: op.max(x, [0, -1]), 0),
        (lambda x: op.permute_dims(x, [2, 1, 0]), 1),
        (lambda x: op.reshape(x, (2, TOKENS, 2, WIDTH // 2)), 1),
        (lambda x: op.reshape(x, (2, 1, TOKENS, WIDTH)), 2),
        (lambda x: op.expand_dims(x, [1]), 2),
        (lambda x: op.broadcast_to(x, (3, *X)), 2),
        (lambda x: op.concat([x, weight(2, TOKENS, 3)], 2), 1),
    ],
)  # fmt: skip
def test_a_part_of_a_result_is_made_of_a_part_of_what_an_operator_reads(build, axis):

    def two(x):
        return part(build(op.negative(x)), axis, 2, 4)

    becomes(left_out, two, X)

    [*_, (_, whole)], [(_, before), *_, (_, after)] = made(module(build, X)), made(left_out(module(two, X)))
    assert after == (*whole[:axis], 2, *whole[axis + 1 :])
    assert before < X


def test_a_slice_of_a_slice_is_one_slice():
    _, after = becomes(left_out, lambda x: part(op.strided_slice(x, [1, 2], [-9, 1], [9, 100]), 1, 2, 4), X)

    assert after == ["strided_slice"]


def test_columns_of_a_product_are_made_of_columns_of_its_weights():
    becomes(left_out, lambda x: part(op.matmul(x, weight()), 2, 2, 4), X)

    assert made(left_out(module(lambda x: part(op.matmul(x, weight()), 2, 2, 4), X))) == [("matmul", (2, TOKENS, 2))]


def test_a_block_behind_which_one_token_is_read_computes_that_token():
    def block(x):
        y = op.add(x, op.matmul(op.nn.gelu(op.matmul(normed(x), weight(WIDTH, 32))), weight(32, WIDTH)))
        return op.matmul(op.reshape(part(normed(y)), (2, WIDTH)), weight(WIDTH, 3))

    becomes(left_out, block, X)

    assert made(left_out(module(block, X)))[:4] == [
        ("nn.layer_norm", (2, 1, WIDTH)), ("matmul", (2, 1, 32)), ("nn.gelu", (2, 1, 32)), ("matmul", (2, 1, WIDTH)),
    ]  # fmt: skip


def test_of_parts_that_are_joined_only_those_are_made_that_are_read():
    def classes(x):
        joined = op.concat([op.tanh(part(x, 1, 0, 2)), op.nn.gelu(op.matmul(x, weight()))], 1)
        return op.exp(part(joined))

    becomes(left_out, classes, X)

    assert [name for name, _ in made(left_out(module(classes, X)))] == ["tanh", "concat", "exp"]


def test_the_smallest_range_around_all_that_is_read_is_computed():
    def ends(x):
        y = op.exp(x)
        return [part(y, 1, 3, 4), op.tanh(part(y, 1, 5, 7))]

    becomes(left_out, ends, X)

    assert made(left_out(module(ends, X)))[0] == ("exp", (2, 4, WIDTH))


def test_the_words_before_the_first_one_are_none_and_what_they_are_taken_of_stays():
    def first_step(x):
        first = part(op.exp(x))
        before = op.matmul(part(op.sin(first), 1, 1, 9), weight())  # (2, 0, 8)
        return op.concat([first, op.tanh(before)], 1)

    becomes(left_out, first_step, X)

    after = left_out(module(first_step, X))
    relax.analysis.well_formed(after)  # raises where a variable is read that nothing defines
    assert made(after)[:2] == [("exp", (2, 1, WIDTH)), ("sin", (2, 1, WIDTH))]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: part(op.exp(x), 1, 0, 6),  # more than half
        lambda x: [part(y := op.exp(x)), part(y, 1, 9, 10)],
        lambda x: [op.tanh(y := op.exp(x)), part(y)],
        lambda x: part(op.nn.softmax(x, 1)),
        lambda x: part(normed(x), 2),
        lambda x: part(op.cumsum(x, 1)),
        lambda x: part(op.reshape(x, (2, WIDTH, TOKENS)), 1),
        lambda x: op.strided_slice(op.exp(x), [1], [0], [10], [5]),
    ],
)
def test_what_is_read_or_cannot_be_told_apart_stays_whole(build):
    becomes(left_out, build, X)

    before = module(build, X)
    assert made(left_out(before)) == made(before)


def test_what_is_joined_of_a_tuple_from_elsewhere_stays_whole():
    both = relax.Var("both", relax.TupleType([relax.TensorType(X, "float32")] * 2))
    builder = relax.BlockBuilder()
    with builder.function("main", [both]):
        with builder.dataflow():
            output = builder.emit_output(part(builder.emit(op.concat(both, 1))))
        builder.emit_func_output(output)
    before = builder.get()

    tvm.ir.assert_structural_equal(left_out(before), before)


def test_a_tuple_stays_of_which_fields_are_read():
    x = relax.Var("x", relax.TensorType(X, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            places = builder.emit(relax.TupleGetItem(builder.emit(op.topk(x, k=4, ret_type="both")), 1))
            first = builder.emit(part(builder.emit(op.exp(x))))
            output = builder.emit_output(relax.Tuple([places, first]))
        builder.emit_func_output(output)

    after = left_out(builder.get())

    relax.analysis.well_formed(after)  # raises where a variable is read that nothing defines
    assert made(after) == [("topk", None), ("exp", (2, 1, WIDTH))]


def encoder(path, head):
    """Two blocks of attention with one head, and what a head reads."""
    rng, tokens, width = np.random.default_rng(0), 24, 64
    weights: dict[str, np.ndarray] = {"scale": np.float32(width**-0.5)}
    nodes, x = [], "x"

    def node(kind, *inputs, **attributes):
        nodes.append(helper.make_node(kind, inputs, [f"t{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    def product(data, rows, columns):
        name = f"w{len(weights)}"
        weights[name] = rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)
        return node("MatMul", data, name)

    for _ in range(2):
        query, key, value = (product(x, width, width) for _ in range(3))
        scores = node("Mul", node("MatMul", query, node("Transpose", key, perm=[0, 2, 1])), "scale")
        x = node("Add", x, product(node("MatMul", node("Softmax", scores, axis=-1), value), width, width))
        x = node("Add", x, product(node("Relu", product(x, width, 256)), 256, width))
    weights["token"] = np.int64(head)
    nodes.append(helper.make_node("MatMul", [node("Gather", x, "token", axis=1), "classes"], ["y"]))
    weights["classes"] = rng.normal(size=(width, 16)).astype(np.float32)
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()]
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", [1, tokens, width]), ("y", [1, 16]))
    )
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.mark.parametrize("token", [0, -1])
def test_of_an_encoders_last_block_the_token_that_is_classified_alone_passes(tmp_path, token):
    found = onnx_import.load(encoder(tmp_path / "encoder.onnx", token))

    widths = [shape for name, shape in made(found.module) if name == "matmul" and shape[-1] == 256]
    assert widths == [(1, 24, 256), (1, 1, 256)]
