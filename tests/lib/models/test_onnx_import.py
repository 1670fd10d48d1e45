import re
from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from benchmarks import light
from lib.contracts.errors import ModelError
from lib.graph import attention, fusion, inputs
from lib.graph.inputs import Values
from lib.graph.subgraphs import extract_subgraphs
from lib.models import onnx_external, onnx_import
from lib.tir.numerics import relative_error
from tests.helpers import computed


def save(path, nodes, inputs, weights=(), rank=2):
    """An ONNX file; `inputs` maps names to (dtype, shape)."""
    rng = np.random.default_rng(0)
    tensors = [
        numpy_helper.from_array(w if isinstance(w, np.ndarray) else rng.normal(0, 0.3, w).astype(np.float32), name)
        for name, w in dict(weights).items()
    ]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in inputs.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [f"d{n}" for n in range(rank)])],
        tensors,
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def block(path):
    """A residual block with all that the clean-up knows: batch norms, Clip, Sum, dropout, a scale."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c1", "gamma", "beta", "mean", "var"], ["b1"]),
        helper.make_node("Clip", ["b1", "low", "high"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2", "bias"], ["c2"]),
        helper.make_node("Mul", ["c2", "scale"], ["m2"]),
        helper.make_node("Sum", ["m2", "x"], ["s"]),
        helper.make_node("Relu", ["s"], ["r2"]),
        helper.make_node("GlobalAveragePool", ["r2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Dropout", ["f"], ["d"]),
        helper.make_node("Gemm", ["d", "w3", "b3"], ["y"], transB=1),
    ]
    weights = {
        "w1": (8, 8, 3, 3), "gamma": np.linspace(0.5, 1.5, 8, dtype=np.float32), "beta": (8,), "mean": (8,),
        "var": np.linspace(0.5, 1.5, 8, dtype=np.float32), "low": np.array(0, np.float32),
        "high": np.array(6, np.float32), "w2": (8, 8, 1, 1),
        "bias": (8,), "scale": (1, 8, 1, 1), "w3": (4, 8), "b3": (4,),
    }  # fmt: skip
    return save(path, nodes, {"x": (TensorProto.FLOAT, [1, 8, 10, 10])}, weights)


@pytest.mark.parametrize(("version", "mode"), [(16, b"half_pixel"), (16, None), (16, b"output_half_pixel"), (10, None)])
@pytest.mark.parametrize(("scale", "ratio"), [(0.25, 2), (0.25, 0), (1.0, 2)])
def test_regions_are_read_where_onnx_runtime_reads_them(tmp_path, cpu, version, mode, scale, ratio):
    given = {"coordinate_transformation_mode": mode} if mode else {}
    nodes = [helper.make_node("RoiAlign", ["x", "rois", "of"], ["y"], output_height=5, output_width=4,
                              sampling_ratio=ratio, spatial_scale=scale, **given)]  # fmt: skip
    made = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, 16, 16]),
         helper.make_tensor_value_info("rois", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([0, 1, 1]), "of")],
    )  # fmt: skip
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", version)], ir_version=8), path)
    x = np.random.default_rng(0).normal(size=(2, 3, 16, 16)).astype(np.float32)
    rois = np.array([[3, 5, 30, 41], [0, 0, 12, 9], [20, 8, 55, 60]], np.float32) * (0.25 / scale)

    [found] = computed(onnx_import.load(path), cpu, x, rois)

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(found, session.run(None, {"x": x, "rois": rois})[0], rtol=1e-4, atol=1e-5)


def test_an_imported_block_computes_what_onnx_runtime_computes(tmp_path, cpu):
    path = block(tmp_path / "block.onnx")
    x = np.random.default_rng(1).normal(size=(1, 8, 10, 10)).astype(np.float32)

    [found] = computed(onnx_import.load(path), cpu, x)

    [expected] = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_norms_scales_and_dropouts_leave_no_operator_behind(tmp_path, cpu):
    subgraphs = extract_subgraphs(fusion.fuse(onnx_import.load(block(tmp_path / "block.onnx")).module, cpu.tvm()))

    convolutions = sorted(s.operators for s in subgraphs if "conv" in s.core_operator)

    assert convolutions == [
        ["conv2d_1x1", "add", "add", "max"],  # bias and residual; the scale is in the weights
        ["pad", "conv2d", "add", "max", "min"],  # the batch norm is the bias
    ]
    assert not {"sqrt", "rsqrt", "sub"} & {name for s in subgraphs for name in s.operators}


def test_einsums_are_read_as_the_attention_that_they_are(tmp_path, cpu):
    """As einops' users write it."""
    nodes = [
        helper.make_node("Tanh", ["x"], ["v"]),
        helper.make_node("Mul", ["x", "scale"], ["q"]),
        helper.make_node("Einsum", ["q", "v"], ["scores"], equation="b h i d, b h j d -> b h i j"),
        helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
        helper.make_node("Einsum", ["weights", "v"], ["y"], equation="bhij,bhjd->bihd"),
    ]
    x = np.random.default_rng(0).normal(size=(2, 3, 7, 8)).astype(np.float32)
    path = save(
        tmp_path / "m.onnx", nodes, {"x": (TensorProto.FLOAT, x.shape)}, {"scale": np.array(0.3, np.float32)}, 4
    )

    model = onnx_import.load(path)

    [expected] = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(computed(model, cpu, x)[0], expected, rtol=1e-5, atol=1e-6)
    fused = attention.fuse(model, None, 16)
    assert any(name.name_hint.startswith(attention.FUNCTION) for name in fused.module.get_global_vars())


def test_weights_become_parameters(tmp_path):
    model = onnx_import.load(block(tmp_path / "block.onnx"))

    assert int(model.module["main"].attrs["num_input"]) == 1
    shapes = {weight.shape for weight in model.weights.values()}
    assert {(3, 3, 8, 8), (1, 1, 8, 8)} <= shapes  # HWIO, transposed here and not at each inference


@pytest.mark.parametrize("content", [b"not an onnx file at all", b"\x08\x08\x12\xff\xff\xff\xff"])
def test_a_damaged_file_is_called_damaged(tmp_path, content):
    path = tmp_path / "bad.onnx"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=r"bad\.onnx is damaged"):
        onnx_import.load(path)


def test_an_empty_file_is_called_empty(tmp_path):
    path = tmp_path / "empty.onnx"
    path.touch()

    with pytest.raises(ModelError, match="damaged or empty"):
        onnx_import.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.onnx: there is no such file"):
        onnx_import.load(tmp_path / "nowhere.onnx")


def test_shapes_of_inputs_that_do_not_fit_each_other_are_told(tmp_path):
    node = helper.make_node("Add", ["x", "mask"], ["y"])
    inputs = {name: (TensorProto.FLOAT, [1, f"of {name}"]) for name in ("x", "mask")}
    path = save(tmp_path / "m.onnx", [node], inputs)

    with pytest.raises(
        ModelError, match=r"operator Add.*: the first input shape .*T.int64\(7\).*T.int64\(8\).*--shape\.$"
    ):
        onnx_import.load(path, {"x": (1, 7), "mask": (1, 8)})


def test_an_unsupported_operator_is_named(tmp_path):
    node = helper.make_node("NoSuchOperator", ["x"], ["y"])
    path = save(tmp_path / "m.onnx", [node], {"x": (TensorProto.FLOAT, [1, 4])})

    with pytest.raises(ModelError, match="operators that cannot be imported: NoSuchOperator"):
        onnx_import.load(path)


def dynamic(tmp_path):
    """x (batch, 4) @ w, with an open batch."""
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    return save(tmp_path / "m.onnx", [node], {"x": (TensorProto.FLOAT, ["batch", 4])}, {"w": (4, 8)})


def test_a_dynamic_shape_is_named_with_what_to_type(tmp_path):
    with pytest.raises(ModelError, match=r"leaves dimensions open: x \(batch, 4\).* --shape 'batch=N' with numbers"):
        onnx_import.load(dynamic(tmp_path))


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (
            {},
            r": ids \(batch, length\), mask \(batch, past \+ length\), x \(\?, 4\)\. .*'batch=N length=N past=N x=N,4'",
        ),
        ({"batch": (2,), "length": (8,)}, r"open: mask \(batch, past \+ length\), x \(\?, 4\)\. .*'past=N x=N,4' with"),
        ({"ids": (2, 8), "past": (1,)}, r"open: mask \(batch, past \+ length\), x .*'batch=N length=N x=N,4' with"),
    ],
)
def test_all_that_is_open_is_named_at_once(tmp_path, shapes, told):
    inputs = {"ids": ["batch", "length"], "mask": ["batch", "past + length"], "x": [None, 4]}
    nodes = [helper.make_node("ReduceMax", [name], [f"most_{name}"]) for name in inputs]
    nodes += [helper.make_node("Sum", [f"most_{name}" for name in inputs], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {name: (TensorProto.FLOAT, dims) for name, dims in inputs.items()}, {})

    with pytest.raises(ModelError, match=told):
        onnx_import.load(path, shapes)


@pytest.mark.parametrize("shapes", [{"x": (3, 4)}, {"batch": (3,)}])
def test_open_dimensions_get_values_by_input_or_by_name(tmp_path, cpu, shapes):
    path = dynamic(tmp_path)
    x = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32)

    [found] = computed(onnx_import.load(path, shapes), cpu, x)

    [expected] = onnxruntime.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("dim", "extent"),
    [("past + new", 7), ("past+2*new", 9), ("past - new", 3), ("(past + 1) // new", 3), ("2", 2), ("new", 2)],
)
def test_a_dimension_that_is_computed_of_others_follows_from_them(tmp_path, dim, extent):
    """As exporters write how long a mask is, of a decoder with a cache."""
    inputs = {"x": (TensorProto.FLOAT, [dim, 4]), "cache": (TensorProto.FLOAT, ["past", "new"])}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("ReduceMax", ["cache"], ["most"])]
    path = save(tmp_path / "m.onnx", [*nodes, helper.make_node("Add", ["h", "most"], ["y"])], inputs, {"w": (4, 8)})

    model = onnx_import.load(path, {"past": (5,), "new": (2,)})

    assert [int(n) for n in model.module["main"].params[0].ty.shape.values] == [extent, 4]


@pytest.mark.parametrize("dim", ["past + other", "past / new", "past % new", "past - new", "past + 1.5", "f(past)"])
def test_one_that_does_not_follow_is_asked_for(tmp_path, dim):
    inputs = {"x": (TensorProto.FLOAT, [dim, 4]), "cache": (TensorProto.FLOAT, ["past", "new"])}
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "cache"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, inputs, {"w": (4, 8)})

    with pytest.raises(ModelError, match=r"leaves dimensions open: x"):
        onnx_import.load(path, {"past": (5,), "new": (8,)})


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": (3, 4)}, "has the inputs x and the open dimensions batch"),
        ({"batch": (3, 4)}, "one extent each"),
        ({"x": (3, 5)}, r"the file .* has \(batch, 4\) there"),
        ({"x": (3,)}, r"the file .* has \(batch, 4\) there"),
    ],
)
def test_a_shape_that_the_file_contradicts_is_refused(tmp_path, shapes, message):
    with pytest.raises(ModelError, match=message):
        onnx_import.load(dynamic(tmp_path), shapes)


def test_external_weights_are_read(tmp_path, cpu):
    weight = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)
    path = save(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, [1, 4])},
        {"w": weight},
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    x = np.ones((1, 4), np.float32)

    np.testing.assert_allclose(computed(onnx_import.load(path), cpu, x)[0], x @ weight, rtol=1e-5)


# Subgraphs that can be tuned; in DenseNet each of 62 norms has a shape of its own.
LIGHT = {
    "bvlc_alexnet": 18,
    "densenet121": 139,
    "inception_v1": 73,
    "inception_v2": 60,
    "resnet50": 28,
    "shufflenet": 31,
    "squeezenet": 23,
    "vgg19": 18,
    "zfnet512": 17,
}
CORES = ("conv2d", "conv2d_1x1", "group_conv2d", "depthwise_conv2d", "matmul", "max_pool", "avg_pool", "reduce")


# The others take minutes, most of them to write half a gigabyte of weights.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in ("resnet50", "shufflenet", "squeezenet") else pytest.mark.acceptance)
        for name in light.NAMES
    ],
)
def light_file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("light") / f"{request.param}.onnx"
    onnx.save(light.with_random_weights(request.param), path)
    yield path
    path.unlink()  # half a gigabyte, some of them


def test_every_light_model_imports_without_norms_dropouts_and_needless_transposes(light_file, cpu):
    subgraphs = extract_subgraphs(fusion.fuse(onnx_import.load(light_file).module, cpu.tvm()))

    nodes = Counter(node.op_type for node in onnx.load(light_file, load_external_data=False).graph.node)
    cores = Counter({core: sum(s.weight for s in subgraphs if s.core_operator == core) for core in CORES})
    found = {name for s in subgraphs for name in s.operators}
    assert sum(s.tunable for s in subgraphs) == LIGHT[light_file.stem]
    assert sum(cores[core] for core in CORES if "conv" in core) == nodes["Conv"]
    assert cores["matmul"] == nodes["Gemm"]
    assert cores["max_pool"] == nodes["MaxPool"]
    averages = nodes["AveragePool"] + nodes["GlobalAveragePool"] + nodes["ReduceMean"]
    assert cores["avg_pool"] + cores["reduce"] == averages + nodes["LRN"]  # with one window, it is a reduction
    assert not {"sqrt", "rsqrt", "concat"} & found - ({"sqrt"} if nodes["LRN"] else set())
    # NCHW to NHWC at the input, and what shuffles channels.
    assert all(s.operators == ["transpose"] for s in subgraphs if s.operators[:1] == ["transpose"])
    assert sum("transpose" in s.operators for s in subgraphs) == (5 if light_file.stem == "shufflenet" else 1)


@pytest.mark.parametrize("name", ["shufflenet", "squeezenet"])
def test_a_light_model_computes_what_onnx_runtime_computes(tmp_path, cpu, name):
    path = tmp_path / f"{name}.onnx"
    onnx.save(light.with_random_weights(name), path)
    session = onnxruntime.InferenceSession(path)
    x = np.random.default_rng(1).normal(size=(1, 3, 224, 224)).astype(np.float32)

    [found] = computed(onnx_import.load(path), cpu, x)

    [expected] = session.run(None, {session.get_inputs()[0].name: x})
    assert expected.std() > 0.1
    assert relative_error(found, expected) < 1e-5


def test_a_file_that_computes_its_shapes_is_folded(tmp_path, cpu):
    """Flatten as exporters write it: Shape, Gather, Concat, Reshape."""
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"]),
        helper.make_node("Concat", ["n", "rest"], ["to"], axis=0),
        helper.make_node("Reshape", ["x", "to"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    weights = {"zero": np.array([0], np.int64), "rest": np.array([-1], np.int64), "w": (12, 5)}
    path = save(tmp_path / "m.onnx", nodes, {"x": (TensorProto.FLOAT, [2, 3, 4])}, weights)

    [matmul, view] = extract_subgraphs(fusion.fuse(onnx_import.load(path).module, cpu.tvm()))

    assert (matmul.operators, view.note) == (["matmul"], "a reshape: a view, no kernel")


@pytest.fixture
def external(tmp_path):
    """A product whose 64 bytes of weights are in `weights.bin`."""
    path = save(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        {"x": (TensorProto.FLOAT, [1, 4])},
        {"w": np.ones((4, 4), np.float32)},
    )
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_missing_external_weights_are_told(external):
    external.with_name("weights.bin").unlink()

    with pytest.raises(ModelError, match=r"is incomplete: w is in weights\.bin, which is not there"):
        onnx_import.load(external)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("length", str(50 << 30), "w should be 53,687,091,200 bytes of weights.bin from byte 0 on, but that has 64"),
        ("offset", "8", "w should be 64 bytes of weights.bin from byte 8 on, but that has 64"),
        ("length", "-4", "is incomplete: External data length must be non-negative"),
    ],
)
def test_external_weights_that_are_not_all_there_are_told_before_any_is_read(external, key, value, told):
    proto = onnx.load(external, load_external_data=False)
    [entry] = [entry for entry in proto.graph.initializer[0].external_data if entry.key == key]
    entry.value = value
    external.write_bytes(proto.SerializeToString())

    assert onnx_external.files(external) == ([] if value == "-4" else [external.with_name("weights.bin")])
    with pytest.raises(ModelError, match=re.escape(told)):
        onnx_import.load(external)


def test_external_weights_outside_the_model_s_folder_are_refused(external):
    proto = onnx.load(external, load_external_data=False)
    [entry] = [entry for entry in proto.graph.initializer[0].external_data if entry.key == "location"]
    entry.value = "../weights.bin"
    external.write_bytes(proto.SerializeToString())
    external.with_name("weights.bin").rename(external.parent.parent / "weights.bin")

    with pytest.raises(ModelError, match="is incomplete"):
        onnx_import.load(external)


def set_the_future(proto):
    proto.opset_import[0].version = 99


def double_the_input(proto):
    proto.graph.input.append(proto.graph.input[0])


def drop_the_weights(proto):
    del proto.graph.initializer[:]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (set_the_future, "has operator set 99; known are those up to"),
        (double_the_input, "several inputs of one name: x"),
        (drop_the_weights, "MatMul '' reads 'w', which nothing before it makes"),
    ],
)
def test_what_the_importer_would_take_without_a_word_is_refused(tmp_path, damage, told):
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = save(tmp_path / "m.onnx", [node], {"x": (TensorProto.FLOAT, [1, 4])}, {"w": (4, 4)})
    proto = onnx.load(path)
    damage(proto)
    path.write_bytes(proto.SerializeToString())

    with pytest.raises(ModelError, match=told):
        onnx_import.load(path)


def test_token_ids_keep_their_bound_through_a_gather(tmp_path, cpu):
    node = helper.make_node("Gather", ["table", "ids"], ["y"])
    path = save(tmp_path / "m.onnx", [node], {"ids": (TensorProto.INT64, [1, 6])}, {"table": (50, 8)}, rank=3)

    module = fusion.fuse(onnx_import.load(path).module, cpu.tvm())

    assert list(inputs.values(module).values()) == [Values("ids", 50)]


def test_truth_values_are_compared(tmp_path, cpu):
    nodes = [
        helper.make_node("Greater", ["x", "v"], ["more"]), helper.make_node("Less", ["x", "zero"], ["less"]),
        helper.make_node("Equal", ["more", "less"], ["both"]), helper.make_node("Where", ["both", "x", "zero"], ["y"]),
    ]  # fmt: skip
    inputs = {"x": (TensorProto.FLOAT, [3, 5]), "v": (TensorProto.FLOAT, [5])}
    path = save(tmp_path / "m.onnx", nodes, inputs, {"zero": (1,)})
    x, v = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((3, 5), (5,)))
    [expected] = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x, "v": v})

    [found] = computed(onnx_import.load(path), cpu, x, v)

    np.testing.assert_array_equal(found, expected)


def test_an_axis_that_is_no_list_is_one(tmp_path, cpu):
    """As JAX's exporter writes it; ONNX Runtime takes it, too."""
    nodes = [
        helper.make_node("Constant", [], ["axis"], value=numpy_helper.from_array(np.array(1))),
        helper.make_node("Unsqueeze", ["x", "axis"], ["h"]), helper.make_node("Exp", ["h"], ["e"]),
        helper.make_node("Squeeze", ["e", "axis"], ["y"]),
    ]  # fmt: skip
    path = save(tmp_path / "m.onnx", nodes, {"x": (TensorProto.FLOAT, [3, 5])}, {})
    x = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)

    [found] = computed(onnx_import.load(path), cpu, x)

    np.testing.assert_allclose(found, np.exp(x), rtol=1e-6)


def test_a_range_that_depends_on_values_is_refused_by_name(tmp_path):
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(value, np.float32)))
        for name, value in (("zero", 0), ("step", 1))
    ]
    nodes += [helper.make_node("Range", ["zero", "x", "step"], ["h"]), helper.make_node("Exp", ["h"], ["y"])]
    path = save(tmp_path / "m.onnx", nodes, {"x": (TensorProto.FLOAT, [])}, {})

    with pytest.raises(ModelError, match=r"uses Range \('h'\), whose extent depends on the values"):
        onnx_import.load(path)
