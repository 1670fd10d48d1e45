import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.models import onnx_folding

SHAPE = [2, 3, 4]
X = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
node = helper.make_node


def ints(name, *values):
    return numpy_helper.from_array(np.array(values, np.int64), name)


def scalar(name, value):
    return numpy_helper.from_array(np.array(value), name)


def model(nodes, weights=(), outputs=("y",), kind=TensorProto.FLOAT, inputs=(), version=17):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE), *inputs],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        list(weights),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)


def run(proto, **inputs):
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": X} | inputs)


def folded(proto, **inputs):
    """The operators that are left; what they compute stays the same."""
    before = run(proto, **inputs)
    onnx_folding.fold(proto)
    for found, expected in zip(run(proto, **inputs), before, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    return [each.op_type for each in proto.graph.node]


FLATTEN = [
    node("Shape", ["x"], ["shape"]),
    node("Gather", ["shape", "zero"], ["batch"]),
    node("Concat", ["batch", "rest"], ["target"], axis=0),
    node("Reshape", ["x", "target"], ["y"]),
]
PADS = [
    node("ConstantOfShape", ["six"], ["zeros"], value=ints("v", 0)),
    node("Add", ["zeros", "ones"], ["pads"]),
    node("Pad", ["x", "pads"], ["y"]),
]
POSITIONS = [
    node("Shape", ["x"], ["shape"], start=-1),
    node("Squeeze", ["shape"], ["length"]),
    node("Range", ["from", "length", "step"], ["positions"]),
    node("Cast", ["positions"], ["floats"], to=TensorProto.FLOAT),
    node("Add", ["x", "floats"], ["y"]),
]
STEPS = [scalar("from", 0), scalar("step", 1)]


@pytest.mark.parametrize(
    ("nodes", "weights", "left"),
    [
        (FLATTEN, [ints("zero", 0), ints("rest", -1)], ["Reshape"]),
        (PADS, [ints("six", 6), ints("ones", 0, 1, 1, 0, 1, 1)], ["Pad"]),
        (POSITIONS, STEPS, ["Add"]),
        ([node("Size", ["x"], ["n"]), node("Cast", ["n"], ["f"], to=1), node("Mul", ["x", "f"], ["y"])], [], ["Mul"]),
        ([node("Shape", ["x"], ["s"], start=-1, end=3), node("Expand", ["one", "s"], ["e"]),
          node("Add", ["x", "e"], ["y"])], [scalar("one", np.float32(1))], ["Add"]),
        ([node("Relu", ["x"], ["r"]), node("Shape", ["r"], ["s"]), node("Reshape", ["r", "s"], ["y"])],
         [], ["Relu", "Reshape"]),
        ([node("Constant", [], ["c"], value_float=2.0), node("Mul", ["x", "c"], ["y"])], [], ["Mul"]),
        ([node("Dropout", ["w"], ["d"]), node("Mul", ["x", "d"], ["y"])], [scalar("w", np.float32(2))], ["Mul"]),
        ([node("Split", ["w"], ["unread", "b"], axis=0), node("Mul", ["x", "b"], ["y"])],
         [numpy_helper.from_array(np.array([2, 3], np.float32), "w")], ["Mul"]),
    ],
)  # fmt: skip
def test_arithmetic_on_shapes_and_constants_is_done(nodes, weights, left):
    assert folded(model(nodes, weights)) == left


def test_axes_are_attributes_in_old_files():
    """As torch wrote shapes until ONNX 13."""
    batch = [node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "zero"], ["batch"], axis=0)]
    ends = [node("Unsqueeze", ["batch"], ["b"], axes=[0]), node("Unsqueeze", ["batch"], ["more"], axes=[-1])]
    joined = [node("Concat", ["b", "rest", "more"], ["target"], axis=0), node("Reshape", ["x", "target"], ["y"])]

    found = folded(model([*batch, *ends, *joined], [scalar("zero", 0), ints("rest", -1)], version=12))

    assert found == ["Reshape"]


def test_an_output_that_is_constant_stays_an_operator():
    proto = model([node("Shape", ["x"], ["s"]), node("Relu", ["x"], ["y"])], outputs=["y"])
    proto.graph.output.append(helper.make_tensor_value_info("s", TensorProto.INT64, [3]))

    assert folded(proto) == ["Shape", "Relu"]


def test_what_is_random_stays():
    proto = model([node("RandomNormal", [], ["r"], shape=SHAPE), node("Mul", ["x", "r"], ["y"])])

    onnx_folding.fold(proto)

    assert [each.op_type for each in proto.graph.node] == ["RandomNormal", "Mul"]


def branch(name, nodes):
    return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)])


def test_bodies_keep_what_they_read_around_them():
    nodes = [
        node("Add", ["a", "a"], ["sum"]),  # folded, and read in a body alone
        node("If", ["flag"], ["y"], then_branch=branch("then", [node("Mul", ["x", "sum"], ["out"])]),
             else_branch=branch("else", [node("Sub", ["x", "a"], ["out"])])),
    ]  # fmt: skip
    flag = helper.make_tensor_value_info("flag", TensorProto.BOOL, [])
    proto = model(nodes, [scalar("a", np.float32(3)), scalar("unread", np.float32(1))], inputs=[flag])

    assert folded(proto, flag=np.array(True)) == ["If"]
    assert {tensor.name for tensor in proto.graph.initializer} == {"a", "sum"}


def test_a_sequence_is_no_tensor():
    nodes = [
        node("SequenceConstruct", ["a", "b"], ["pair"]),
        node("ConcatFromSequence", ["pair"], ["both"], axis=0),
        node("Mul", ["x", "both"], ["y"]),
    ]
    weights = [numpy_helper.from_array(np.array(v, np.float32), n) for n, v in (("a", [1, 2, 3]), ("b", [4]))]

    assert "Mul" in folded(model(nodes, weights))


def test_weights_are_kept_once():
    """A weight that an operator reads beside an input is looked at, not added again."""
    table = numpy_helper.from_array(np.ones((3, 4), np.float32), "table")
    nodes = [
        node("Mul", ["table", "x"], ["m"]),
        node("Add", ["table", "table"], ["twice"]),
        node("Add", ["m", "twice"], ["s"]),
        node("Add", ["s", "table"], ["y"]),
    ]
    proto = model(nodes, [table])

    assert folded(proto) == ["Mul", "Add", "Add"]
    assert sorted(tensor.name for tensor in proto.graph.initializer) == ["table", "twice"]


def test_large_weights_stay_out_of_shape_inference(monkeypatch):
    large = numpy_helper.from_array(np.ones((2, 3, 1 << 15), np.float32), "large")
    nodes = [
        node("MatMul", ["t", "large"], ["m"]),
        node("Shape", ["m"], ["s"]),
        node("Reshape", ["m", "s"], ["y"]),
    ]
    proto = model([node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), *nodes], [large])
    seen = []
    infer = onnx.shape_inference.infer_shapes

    def watched(light, **options):
        seen.append(light.ByteSize())
        return infer(light, **options)

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", watched)

    assert folded(proto) == ["Transpose", "MatMul", "Reshape"]
    assert seen
    assert max(seen) < 1 << 16


def test_operators_that_onnx_cannot_evaluate_stay():
    proto = model([node("Mine", ["c"], ["m"], domain="mine"), node("Mul", ["x", "m"], ["y"])], [ints("c", 1)])

    onnx_folding.fold(proto)

    assert [each.op_type for each in proto.graph.node] == ["Mine", "Mul"]
