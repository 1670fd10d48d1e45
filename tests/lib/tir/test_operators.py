import ast
from collections.abc import Callable

import numpy as np
import onnx
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper
from tvm import relax, te, tirx, topi
from tvm.relax import op

from lib.graph import concatenation, fusion
from lib.graph.subgraphs import Subgraph, extract_subgraphs
from lib.machine import targets
from lib.models import onnx_import
from lib.models.zoo import catalogue
from lib.tir.operators import core_operator, operators
from lib.tir.workload import as_workload, load_module, workload_id
from tests.helpers import matmul


def cores(model, cpu):
    return {s.core_operator for s in extract_subgraphs(fusion.fuse(model.module, cpu.tvm()))}


def chosen(choose):
    """A product, and one of several values by the row of the result."""
    data, weight, other = (
        te.placeholder(shape, name=name) for shape, name in (((8, 4), "a"), ((4, 6), "b"), ((8, 6), "c"))
    )
    product = topi.matmul(data, weight)
    out = te.compute((8, 6), lambda i, j: choose(i, product[i, j], other[i, j]), name="chosen")
    return as_workload(te.create_prim_func([data, weight, other, out]))


@pytest.mark.parametrize(
    ("choose", "name"),
    [
        (lambda i, x, y: tirx.Select(tirx.EQ(i, 0), x + x, x), "strassen_matmul"),
        (lambda i, x, y: tirx.Select(tirx.EQ(i, 0), x, x), "matmul"),  # nothing is summed
        (lambda i, x, y: tirx.Select(tirx.EQ(i, 0), x + y, x), "matmul"),  # of another tensor, as where rows are put in
        (lambda i, x, y: tirx.Select(i < 4, x + x, x), "matmul"),  # a mask
        (lambda i, x, y: tirx.Select(tirx.EQ(x, 0.0), x + x, x), "matmul"),  # by the value
    ],
)
def test_only_sums_that_the_place_chooses_make_a_product_one_of_strassens(choose, name):
    assert core_operator(operators(chosen(choose))) == name


def conv_model(tmp_path, groups, kernel, n_in=8, n_out=8):
    """One convolution; its kind is known from the ONNX attributes."""
    weight = np.ones((n_out, n_in // groups, kernel, kernel), np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], group=groups, pads=[kernel // 2] * 4, strides=[1, 1])
    made = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, n_in, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, n_out, 8, 8])],
        [onnx.numpy_helper.from_array(weight, "w")],
    )
    path = tmp_path / "conv.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return onnx_import.load(path)


@pytest.mark.parametrize(
    ("groups", "kernel", "expected"),
    [(1, 3, "conv2d"), (1, 1, "conv2d_1x1"), (8, 3, "depthwise_conv2d"), (2, 3, "group_conv2d")],
)
def test_convolutions_are_told_apart_by_their_indices(tmp_path, cpu, groups, kernel, expected):
    assert expected in cores(conv_model(tmp_path, groups, kernel), cpu)


Shape = tuple[int, ...]


def described(cpu, make: Callable[..., relax.Expr], *inputs: Shape | tuple[Shape, str]) -> str:
    """The subgraphs of one expression over float32 tensors, or of the types given: `core: operators; ...`."""
    types = [(shape, "float32") if isinstance(shape[0], int) else shape for shape in inputs]
    params = [relax.Var(f"x{n}", relax.TensorType(shape, kind)) for n, (shape, kind) in enumerate(types)]
    builder = relax.BlockBuilder()
    with builder.function("main", params, attrs={"num_input": len(params)}):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(make(*params)))
        builder.emit_func_output(out)
    found = extract_subgraphs(fusion.fuse(builder.get(), cpu.tvm()))
    return "; ".join(f"{s.core_operator}: {' '.join(s.operators)}" for s in found)


def conv(layout: str = "NHWC", **attrs: object) -> Callable[..., relax.Expr]:
    kernel = {"NHWC": "HWIO", "NCHW": "OIHW"}[layout]
    return lambda x, w: op.nn.conv2d(x, w, data_layout=layout, kernel_layout=kernel, **attrs)


@pytest.mark.parametrize(
    ("attrs", "kernel", "channels", "expected"),
    [  # channels: in, out
        ({"padding": 1}, 3, (32, 16), "conv2d: pad conv2d"),
        ({"padding": 2, "dilation": 2}, 3, (32, 16), "conv2d: pad conv2d"),
        ({"strides": 2}, 3, (32, 16), "conv2d: conv2d"),
        ({}, 8, (32, 16), "conv2d: conv2d"),  # the whole image
        ({}, 3, (1, 16), "conv2d: conv2d"),
        ({}, 3, (32, 1), "conv2d: conv2d"),
        ({}, 1, (32, 16), "conv2d_1x1: conv2d_1x1"),
        ({"strides": 2}, 1, (32, 16), "conv2d_1x1: conv2d_1x1"),
        ({"groups": 32}, 3, (32, 32), "depthwise_conv2d: depthwise_conv2d"),
        ({"groups": 32}, 3, (32, 64), "depthwise_conv2d: depthwise_conv2d"),
        ({"groups": 4}, 3, (32, 16), "group_conv2d: group_conv2d"),
        ({"groups": 4}, 1, (32, 16), "group_conv2d: group_conv2d"),
    ],
)
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_a_convolutions_kind_does_not_depend_on_its_layout(cpu, layout, attrs, kernel, channels, expected):
    n_in, n_out = channels
    own = n_in // attrs.get("groups", 1)
    shapes = [(1, 8, 8, n_in), (kernel, kernel, own, n_out)]
    if layout == "NCHW":
        shapes = [(1, n_in, 8, 8), (n_out, own, kernel, kernel)]

    assert described(cpu, conv(layout, **attrs), *shapes) == expected


@pytest.mark.parametrize(
    ("make", "inputs", "expected"),
    [
        (op.nn.conv1d, [(1, 8, 16), (4, 8, 3)], "conv1d: conv1d"),
        (op.nn.conv3d, [(1, 3, 8, 8, 8), (4, 3, 3, 3, 3)], "conv3d: conv3d"),
        (lambda x, w: op.nn.conv1d_transpose(x, w, strides=2), [(1, 8, 16), (8, 4, 3)],
         "transposed_conv1d: dilate pad reverse conv1d"),
        (lambda x, w: op.nn.conv2d_transpose(x, w, strides=(2, 2)), [(1, 8, 8, 8), (8, 4, 3, 3)],
         "transposed_conv2d: dilate pad reverse conv2d"),
        (op.matmul, [(1, 64), (64, 32)], "matmul: matmul"),
        (op.matmul, [(2, 8, 64), (64, 32)], "matmul: matmul"),
        (op.matmul, [(4, 8, 16), (1, 16, 8)], "matmul: matmul"),  # one weight for all
        (op.matmul, [(1, 8, 16), (1, 16, 8)], "matmul: matmul"),
        (op.matmul, [(4, 8, 16), (4, 16, 8)], "batch_matmul: batch_matmul"),
        (lambda a, b: op.einsum((a, b), "bik,bjk->bij"), [(4, 8, 16), (4, 9, 16)], "batch_matmul: batch_matmul"),
        (lambda q, k, m: op.add(op.multiply(op.matmul(q, k), relax.const(0.25)), m),
         [(1, 4, 8, 16), (1, 4, 16, 8), (1, 1, 8, 8)], "batch_matmul: batch_matmul mul add"),
        (op.nn.softmax, [(8, 16)], "softmax: reduce_max sub exp reduce_sum div"),
        (op.nn.log_softmax, [(8, 16)], "softmax: reduce_max sub exp reduce_sum log sub"),
        (lambda x, g, b: op.nn.layer_norm(x, g, b, axes=-1), [(8, 16), (16,), (16,)],
         "layer_norm: reduce_sum div reduce_sum rsqrt"),
        (lambda x, g: op.nn.rms_norm(x, g, axes=-1), [(8, 16), (16,)], "rms_norm: mul reduce_sum rsqrt mul"),
        (lambda x, g, b: op.nn.instance_norm(x, g, b, 1, [2, 3]), [(1, 16, 8, 8), (16,), (16,)],
         "group_norm: reduce_moments rsqrt"),
        (lambda x, g, b: op.nn.group_norm(x, g, b, 4, 1, [2, 3]), [(1, 16, 8, 8), (16,), (16,)],
         "group_norm: reshape reduce_moments reshape reshape rsqrt reshape"),
    ],
)  # fmt: skip
def test_contractions_and_norms_are_named_by_what_they_sum(cpu, make, inputs, expected):
    assert described(cpu, make, *inputs) == expected


IMAGE = (1, 8, 16, 16)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)), "max_pool: pad max_pool"),
        (lambda x: op.nn.avg_pool2d(x, (2, 2), (2, 2)), "avg_pool: avg_pool div"),
        (lambda x: op.nn.adaptive_avg_pool2d(x, (5, 5)), "avg_pool: avg_pool div"),  # windows of 3 and of 4
        (lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1)), "reduce: reduce_sum div"),
        (lambda x: op.nn.avg_pool2d(x, (16, 16)), "reduce: reduce_sum div"),
        (lambda x: op.mean(x, [2, 3], keepdims=True), "reduce: reduce_sum div"),
        (lambda x: op.sum(x, 1), "reduce: reduce_sum"),
        (lambda x: op.min(x, 1), "reduce: reduce_min"),
        (lambda x: op.prod(x, 1), "reduce: reduce_prod"),
        (lambda x: op.argmax(x, 1), "reduce: reduce_arg"),
        (lambda x: op.sum(op.multiply(x, x), 1), "reduce: mul reduce_sum"),
        (op.nn.gelu, "elementwise: mul rational mul add mul"),
        (op.nn.silu, "elementwise: mul exp add div mul"),
        (lambda x: op.astype(x, "int32"), "elementwise: cast"),
        (lambda x: op.nn.relu(op.concat([x, x], 1)), "elementwise: pad max"),  # of one tensor: its elements twice
        (lambda x: op.cumsum(x, -1), "other: opaque"),
        (lambda x: op.cumsum(x, 1), "other: opaque; data_movement: reshape; data_movement: reshape"),  # ours, and views
        (lambda x: op.sort(x, 1), "other: opaque"),
    ],
)
def test_pools_reductions_and_arithmetic_are_told_apart(cpu, make, expected):
    assert described(cpu, make, IMAGE) == expected


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x, y: op.concat([x, y], 0), "concat"),
        (lambda x, y: op.stack([x, y], 0), "concat"),
        (lambda x, _: op.strided_slice(x, [1], [0], [16], [2]), "slice"),
        (lambda x, _: op.strided_slice(x, [0], [0], [1]), "slice"),  # at plain indices
        (lambda x, _: op.permute_dims(x), "transpose"),
        (lambda x, _: op.reshape(op.permute_dims(op.reshape(x, (8, 4, 4)), (1, 0, 2)), (4, 32)),
         "reshape transpose reshape"),
        (lambda x, _: op.reshape(x, (16, 8)), "reshape"),
        (lambda x, _: op.permute_dims(op.expand_dims(x, 1), (0, 2, 1)), "reshape reshape"),  # an axis of one element
        (lambda x, _: op.flip(x, 1), "reverse"),
        (lambda x, _: op.broadcast_to(x, (3, 8, 16)), "broadcast"),
        (lambda x, _: op.repeat(x, 2, 0), "broadcast"),
        (lambda x, _: op.tile(x, (2, 1)), "broadcast"),
        (lambda x, _: op.nn.pad(x, [1, 1, 2, 2]), "pad"),
    ],
)  # fmt: skip
def test_a_movement_is_named_by_where_elements_come_from(cpu, make, names):
    assert described(cpu, make, (8, 16), (8, 16)) == f"data_movement: {names}"


def test_a_gather_is_told_from_other_movements(cpu):
    rows = relax.const(np.array([3, 1]))

    assert described(cpu, lambda x: op.take(x, rows, 0), (8, 16)) == "gather: gather"


def test_what_leaves_each_element_in_its_place_is_a_movement():
    assert core_operator([]) == "data_movement"


@pytest.mark.parametrize("offset", [0, 8, 16])
def test_a_part_of_a_concatenation_is_placed(offset):
    placing = as_workload(concatenation._place_function((1, 4, 4, 8), offset, 24, "float32"))

    assert operators(placing) == ["place"]


def test_a_transformers_operators_are_named(cpu: targets.CpuTarget):
    found = cores(catalogue.load("tiny_transformer"), cpu)

    assert found >= {"matmul", "batch_matmul", "softmax", "layer_norm", "gather", "data_movement"}


def test_a_product_is_a_product_whatever_its_names():
    assert operators(matmul()) == ["matmul"]


def renamed(workload: str, order: list[int], *, blocks: bool) -> tvm.IRModule:
    """The same program with other names for its variables and buffers and, if asked for, its blocks.

    Names are numbers, dealt out by `order` as they come up.
    """
    tree = ast.parse(load_module(workload).script(show_meta=False))
    names: dict[str, str] = {}

    def new(old: str) -> str:
        return names.setdefault(old, f"n{order[len(names) % len(order)]}_{len(names)}")

    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = new(node.arg)
        elif isinstance(node, ast.Name) and node.id not in ("T", "I"):
            node.id = new(node.id)
        elif blocks and isinstance(node, ast.Call) and ast.unparse(node.func) == "T.sblock":
            node.args = [ast.Constant(new(ast.unparse(node.args[0])))]
    return tvm.script.from_source(ast.unparse(tree))


@pytest.fixture(scope="module")
def real(cpu) -> list[Subgraph]:
    """The subgraphs of two models."""
    modules = [catalogue.load(name).module for name in ("tiny_cnn", "tiny_transformer")]
    return [subgraph for module in modules for subgraph in extract_subgraphs(fusion.fuse(module, cpu.tvm()))]


@settings(max_examples=15, deadline=None)
@given(data=st.data(), order=st.permutations(range(30)))
def test_no_name_decides_what_a_program_is(real, data, order):
    subgraph = data.draw(st.sampled_from(real))

    other = renamed(subgraph.workload, order, blocks=True)

    assert other.script() != load_module(subgraph.workload).script()
    assert operators(other) == subgraph.operators
    assert core_operator(operators(other)) == subgraph.core_operator


@settings(max_examples=15, deadline=None)
@given(data=st.data(), order=st.permutations(range(30)))
def test_the_id_follows_the_names_of_blocks_alone(real, data, order):
    subgraph = data.draw(st.sampled_from(real))

    assert workload_id(renamed(subgraph.workload, order, blocks=False)) == subgraph.subgraph_id
    assert workload_id(renamed(subgraph.workload, order, blocks=True)) != subgraph.subgraph_id
