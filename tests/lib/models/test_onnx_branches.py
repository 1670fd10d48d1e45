"""Branches and loops that shapes decide, against ONNX Runtime, which decides when it runs."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.models import onnx_import
from tests import helpers

X = np.random.default_rng(0).normal(size=(2, 1, 6)).astype(np.float32)


def value(name, kind=TensorProto.FLOAT, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def tensor(name, array):
    return numpy_helper.from_array(np.array(array), name)


def graph(nodes, outputs, inputs=(), weights=()):
    return helper.make_graph(
        nodes, "body", list(inputs), [value(name, *rest) for name, *rest in outputs], list(weights)
    )


def is_one(axis):
    """Whether an axis of `x` has one element, as torch's older exporter asks before it squeezes."""
    return [
        helper.make_node("Shape", ["x"], [f"shape{axis}"]),
        helper.make_node("Gather", [f"shape{axis}", f"axis{axis}"], [f"extent{axis}"], axis=0),
        helper.make_node("Equal", [f"extent{axis}", "one"], [f"is_one{axis}"]),
    ], [tensor(f"axis{axis}", axis)]


def check(path, cpu, nodes, weights=(), version=13, outputs=("y",)):
    made = helper.make_graph(
        nodes, "g", [value("x", shape=X.shape)], [value(name) for name in outputs], [tensor("one", 1), *weights]
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", version)], ir_version=7), path)
    found = helpers.computed(onnx_import.load(path), cpu, X)
    expected = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": X})
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def squeezed(axis, output="y"):
    """An If, whose other branch leaves the tensor; both read it from around them. ONNX Runtime looks into both."""
    squeeze = helper.make_node("Squeeze" if axis == 1 else "Neg", ["x", "axes"] if axis == 1 else ["x"], ["s"])
    return helper.make_node(
        "If", [f"is_one{axis}"], [output],
        then_branch=graph([squeeze], ["s"], weights=[tensor("axes", [axis])]),
        else_branch=graph([helper.make_node("Identity", ["x"], ["s"])], ["s"]),
    )  # fmt: skip


@pytest.mark.parametrize("axis", [1, 2])
def test_the_branch_that_shapes_choose_is_taken(tmp_path, cpu, axis):
    nodes, weights = is_one(axis)

    check(
        tmp_path / "m.onnx",
        cpu,
        [
            *nodes,
            squeezed(axis),
        ],
        weights,
    )


def test_branches_within_branches_and_names_that_both_have(tmp_path, cpu):
    first, second = is_one(1), is_one(2)
    scaled = helper.make_node("Mul", ["x", "s"], ["m"])
    inner = helper.make_node(
        "If", ["is_one2"], ["m2"],
        then_branch=graph([scaled], ["m"], weights=[tensor("s", np.float32(2))]),
        else_branch=graph([scaled], ["m"], weights=[tensor("s", np.float32(3))]),
    )  # fmt: skip
    outer = helper.make_node(
        "If", ["is_one1"], ["y"],
        then_branch=graph([inner, helper.make_node("Neg", ["m2"], ["n"])], ["n"]),
        else_branch=graph([helper.make_node("Identity", ["x"], ["n"])], ["n"]),
    )  # fmt: skip
    check(tmp_path / "m.onnx", cpu, [*first[0], *second[0], outer], [*first[1], *second[1]])


@pytest.mark.parametrize(("version", "goes_on"), [(11, "constant"), (13, "as it was"), (13, "constant")])
def test_a_loop_of_a_known_count_is_as_many_copies(tmp_path, cpu, version, goes_on):
    """It carries a sum, and gives a row for each turn; the count is an extent."""
    body = [
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["total", "f"], ["a"]),
        helper.make_node("Mul", ["a", "x"], ["next"]),
        helper.make_node("ReduceSum" if version >= 13 else "ReduceMean", ["next"], ["row"], keepdims=0),
        helper.make_node("Identity", ["on"], ["on_next"]) if goes_on == "as it was" else
        helper.make_node("Constant", [], ["on_next"], value=tensor("", True)),
    ]  # fmt: skip
    inner = graph(
        body, [("on_next", TensorProto.BOOL), ("next",), ("row",)],
        [value("i", TensorProto.INT64, []), value("on", TensorProto.BOOL, []), value("total")],
    )  # fmt: skip
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "last"], ["count"], axis=0),
        helper.make_node("Loop", ["count", "begin", "x"], ["y", "rows"], body=inner),
    ]
    weights = [tensor("last", 2), tensor("begin", True)]
    check(tmp_path / "m.onnx", cpu, nodes, weights, version, ("y", "rows"))


def while_less(limit, count="", steps="step"):
    """A loop as TensorFlow has it: it carries a number, which it compares with a limit that it carries as well, and
    data; gives a row for each turn."""
    body = [
        helper.make_node("Add", ["n", steps], ["n_next"]),
        helper.make_node("Less", ["n_next", "limit_before"], ["on_next"]),
        helper.make_node("Cast", ["n"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["data", "f"], ["data_next"]),
        helper.make_node("Identity", ["limit_before"], ["limit_after"]),
        helper.make_node("Neg", ["data_next"], ["row"]),
    ]
    number, flag = (TensorProto.INT64, []), (TensorProto.BOOL, [])
    inner = graph(
        body, [("on_next", *flag), ("n_next", *number), ("limit_after", *number), ("data_next",), ("row",)],
        [value("i", *number), value("on", *flag), value("n", *number), value("limit_before", *number), value("data")],
    )  # fmt: skip
    nodes = [
        helper.make_node("Less", ["first", limit], ["begin"]),
        helper.make_node(
            "Loop", [count, "begin", "first", limit, "x"], ["n_last", "limit_last", "y", "rows"], body=inner
        ),
    ]
    return nodes, [tensor("first", 1), tensor("limit", 8), tensor("step", 3), tensor("count", 2)]


@pytest.mark.parametrize("count", ["", "count"])  # three turns, of which two are allowed
def test_a_loop_goes_on_until_what_it_carries_ends_it(tmp_path, cpu, count):
    check(tmp_path / "m.onnx", cpu, *while_less("limit", count), outputs=("y", "rows"))


@pytest.mark.parametrize(("limit", "steps"), [("from_data", "step"), ("limit", "from_data")])
def test_a_loop_that_data_end_is_refused_by_name(tmp_path, limit, steps):
    nodes, weights = while_less(limit, steps=steps)
    of_data = [helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
               helper.make_node("Cast", ["most"], ["from_data"], to=TensorProto.INT64)]  # fmt: skip
    made = helper.make_graph([*of_data, *nodes], "g", [value("x", shape=X.shape)], [value("y")], weights)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), tmp_path / "m.onnx")

    with pytest.raises(ModelError, match="Loop"):
        onnx_import.load(tmp_path / "m.onnx")


def test_a_loop_that_never_ends_is_refused_by_name(tmp_path):
    nodes, weights = while_less("limit")
    weights[2] = tensor("step", 0)
    made = helper.make_graph(nodes, "g", [value("x", shape=X.shape)], [value("y")], weights)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), tmp_path / "m.onnx")

    with pytest.raises(ModelError, match="Loop"):
        onnx_import.load(tmp_path / "m.onnx")


def test_a_branch_that_values_choose_is_refused_by_name(tmp_path):
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["is_one1"]), squeezed(1),
    ]  # fmt: skip
    made = helper.make_graph(nodes, "g", [value("x", shape=X.shape)], [value("y")], [tensor("zero", np.float32(0))])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), tmp_path / "m.onnx")

    with pytest.raises(ModelError, match=r"If .*'is_one1'.*one of them"):
        onnx_import.load(tmp_path / "m.onnx")
