"""Files whose end depends on values, cut: both parts by ONNX Runtime, one after the other, are the whole."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.models import onnx_import, onnx_rest

RNG = np.random.default_rng(0)
IMAGE = RNG.normal(size=(1, 3, 16, 16)).astype(np.float32)


def tensor(name, array, dtype=None):
    return numpy_helper.from_array(np.array(array, dtype), name)


def value(name, kind=TensorProto.FLOAT, shape=None):
    return helper.make_tensor_value_info(name, kind, shape)


def weight(name, *shape):
    return tensor(name, RNG.normal(size=shape), np.float32)


def save(path, nodes, outputs, weights, inputs=(), domains=()):
    graph = helper.make_graph(
        nodes, "g", [value("image", shape=["batch", 3, 16, 16]), *inputs],
        [value(name, kind, shape) for name, kind, shape in outputs], weights,
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(domain, 3) for domain in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def node(operator, inputs, outputs, **given):
    return helper.make_node(operator, inputs.split(), outputs.split(), **given)


BACKBONE = [node("Conv", "image w0", "c", pads=[1, 1, 1, 1]), node("Relu", "c", "features")]
WEIGHTS = [
    weight("w0", 8, 3, 3, 3), weight("w1", 4, 8, 1, 1), weight("w2", 2, 8, 1, 1), weight("w3", 8, 5),
    tensor("to_boxes", [1, 4, -1]), tensor("to_scores", [1, 2, -1]), tensor("flat", [8, -1]), tensor("k", [20]),
    tensor("most", [7]),
    *(tensor(name, x, np.float32) for name, x in [("iou", 0.5), ("threshold", 0.6), ("half", 0.5)]),
]  # fmt: skip
BOXES = [
    node("Conv", "features w1", "b"), node("Reshape", "b to_boxes", "flat_b"),
    node("Transpose", "flat_b", "boxes", perm=[0, 2, 1]),
    node("Conv", "features w2", "s"), node("Reshape", "s to_scores", "flat_s"), node("Sigmoid", "flat_s", "scores"),
]  # fmt: skip
KEPT = node("NonMaxSuppression", "boxes scores most iou threshold", "kept")


@pytest.fixture
def detector(tmp_path):
    """Boxes, scores, and which of them to keep."""
    kept = ("kept", TensorProto.INT64, ["n", 3])
    outputs = [kept, ("scores", TensorProto.FLOAT, [1, 2, 256]), ("found", TensorProto.FLOAT, ["n", 3])]
    ends = [KEPT, node("Cast", "kept", "found", to=TensorProto.FLOAT)]
    return save(tmp_path / "detector.onnx", [*BACKBONE, *BOXES, *ends], outputs, WEIGHTS)


def run(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {value.name: inputs[value.name] for value in session.get_inputs()}
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, given), strict=True))


def split(path, tmp_path, shape="batch=1"):
    return onnx_rest.split(path, shape, tmp_path / "split")


def check(path, tmp_path, **more):
    """Both parts are the whole; returns the operators of either."""
    head = split(path, tmp_path)
    rest, given = onnx_rest.of(head), {"image": IMAGE, **more}
    computed = run(head, given)
    computed |= run(rest.file, {**given, **computed})
    expected = run(path, given)
    assert [each["name"] for each in rest.outputs] == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(computed[name], array)
    onnx_import.load(head)
    return [[node.op_type for node in onnx.load(part).graph.node] for part in (head, rest.file)]


def test_what_comes_before_the_first_result_of_unknown_shape_is_compiled(tmp_path, detector):
    first, after = check(detector, tmp_path)

    assert after == ["NonMaxSuppression", "Cast"]
    assert first.count("Conv") == 3
    assert len(run(detector, {"image": IMAGE})["kept"]) > 3


def test_the_whole_has_the_outputs_of_the_file_and_the_user_is_told(tmp_path, detector):
    found = onnx_rest.of(split(detector, tmp_path))

    assert found.outputs == [
        {"name": "kept", "shape": ["n", 3], "dtype": "int64"},
        {"name": "scores", "shape": [1, 2, 256], "dtype": "float32"},
        {"name": "found", "shape": ["n", 3], "dtype": "float32"},
    ]
    assert found.told == (
        "2 of its 10 operators (0 of 3 products and convolutions) depend on values, from NonMaxSuppression on, and are "
        "left to ONNX Runtime"
    )


def test_the_largest_that_only_the_rest_reads_are_chosen_there(tmp_path):
    chosen = [
        node("TopK", "scores k", "best_scores places", axis=2),
        node("Greater", "best_scores threshold", "is_kept"),
        node("NonZero", "is_kept", "kept"),
    ]
    path = save(
        tmp_path / "m.onnx",
        [*BACKBONE, *BOXES[3:], *chosen],
        [("kept", TensorProto.INT64, [3, "n"]), ("places", TensorProto.INT64, None)],
        WEIGHTS,
    )

    first, after = check(path, tmp_path)

    assert after == ["TopK", "Greater", "NonZero"]
    assert first[-1] == "Sigmoid"


def test_the_largest_that_a_product_needs_are_chosen_in_the_library(tmp_path):
    """As a detector's queries are."""
    nodes = [
        *BACKBONE, node("Reshape", "features flat", "rows"), node("TopK", "rows k", "queries _", axis=1),
        node("Transpose", "queries", "turned", perm=[1, 0]), node("MatMul", "turned w3", "answers"),
        node("Greater", "answers threshold", "is_kept"), node("NonZero", "is_kept", "kept"),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, [("kept", TensorProto.INT64, [2, "n"])], WEIGHTS)

    first, after = check(path, tmp_path)

    assert after == ["Greater", "NonZero"]
    assert "TopK" in first


def test_products_after_it_are_counted(tmp_path):
    """As a second stage looks at what the first one found."""
    nodes = [
        *BACKBONE, node("Reshape", "features flat", "rows"), node("Greater", "rows threshold", "is_kept"),
        node("NonZero", "is_kept", "places"), node("Cast", "places", "found", to=TensorProto.FLOAT),
        node("MatMul", "found more", "answers"),
    ]  # fmt: skip
    path = tmp_path / "m.onnx"
    n = len(
        run(save(path, nodes[:-2], [("places", TensorProto.INT64, [2, "n"])], WEIGHTS), {"image": IMAGE})["places"][0]
    )
    save(path, nodes, [("answers", TensorProto.FLOAT, [2, 3])], [*WEIGHTS, weight("more", n, 3)])

    check(path, tmp_path)

    assert "(1 of 2 products and convolutions)" in onnx_rest.of(split(path, tmp_path)).told


def test_inputs_that_only_the_rest_reads_stay_the_models(tmp_path):
    """The size that boxes are scaled to."""
    ends = [KEPT, node("Cast", "kept", "as_floats", to=TensorProto.FLOAT), node("Mul", "as_floats size", "found")]
    size = value("size", shape=[1, 3])
    path = save(
        tmp_path / "m.onnx", [*BACKBONE, *BOXES, *ends], [("found", TensorProto.FLOAT, ["n", 3])], WEIGHTS, [size]
    )

    check(path, tmp_path, size=np.array([[1, 2, 3]], np.float32))

    assert [value.name for value in onnx.load(split(path, tmp_path)).graph.input] == ["image", "size"]


def test_branches_by_values_are_left(tmp_path):
    def branch(operator):
        return helper.make_graph([node(operator, "features", "y")], operator, [], [value("y")])

    nodes = [
        *BACKBONE, node("ReduceMax", "features", "largest", keepdims=0), node("Greater", "largest half", "is_large"),
        helper.make_node("If", ["is_large"], ["y"], then_branch=branch("Exp"), else_branch=branch("Neg")),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, [("y", TensorProto.FLOAT, None)], WEIGHTS)

    first, after = check(path, tmp_path)

    assert (first[-1], after) == ("ReduceMax", ["Greater", "If"])


def test_operators_that_nobody_compiles_are_left(tmp_path):
    """Those of classical learning, behind a network that makes features."""
    nodes = [
        *BACKBONE, node("GlobalAveragePool", "features", "pooled"), node("Flatten", "pooled", "row"),
        helper.make_node(
            "TreeEnsembleRegressor", ["row"], ["y"], domain="ai.onnx.ml", n_targets=1, nodes_treeids=[0] * 3,
            nodes_nodeids=[0, 1, 2], nodes_featureids=[0] * 3, nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values=[0.1, 0.0, 0.0], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0],
            target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], target_weights=[1.0, 2.0],
        ),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, [("y", TensorProto.FLOAT, [1, 1])], WEIGHTS, domains=["ai.onnx.ml"])

    first, after = check(path, tmp_path)

    assert (first[-1], after) == ("GlobalAveragePool", ["Flatten", "TreeEnsembleRegressor"])


def test_what_shapes_decide_is_not_left(tmp_path):
    """torch writes shapes with operators whose results depend on values, of constants."""
    nodes = [
        node("Shape", "image", "shape"), node("NonZero", "shape", "places"), node("Shape", "places", "how_many"),
        node("Conv", "image w0", "wide"), node("Slice", "wide zero how_many", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, [("y", TensorProto.FLOAT, None)], [*WEIGHTS, tensor("zero", [0, 0])])

    assert split(path, tmp_path) == path
    assert split(path, tmp_path) == path  # as it was found to be
    assert onnx_rest.of(path) is None


def test_a_file_with_all_products_behind_such_results_is_not_cut(tmp_path):
    nodes = [
        node("NonZero", "image", "places"), node("Cast", "places", "found", to=TensorProto.FLOAT),
        node("MatMul", "w4 found", "y"),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, [("y", TensorProto.FLOAT, None)], [weight("w4", 5, 4)])

    assert split(path, tmp_path) == path


def test_another_rest_makes_another_model(tmp_path, detector):
    """The rest comes along with the library of what is before it, whose file therefore names it."""
    before = split(detector, tmp_path)
    model = onnx.load(detector)
    [threshold] = [each for each in model.graph.initializer if each.name == "threshold"]
    threshold.CopyFrom(tensor("threshold", 0.9, np.float32))
    onnx.save(model, detector)

    after = split(detector, tmp_path)

    said = [json.loads(onnx.load(each).metadata_props[0].value)["digest"] for each in (before, after)]
    assert said[0] != said[1]
    assert before.parent != after.parent
