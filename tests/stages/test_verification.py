"""Whether the check of whole models sees what it should: wrong queries or keys, before scores are masked."""

import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
import tvm
import tvm_ffi
from onnx import TensorProto, helper, numpy_helper
from tvm import tirx

from lib import building_process, deploy, packing
from lib.contracts.errors import VerificationError
from lib.contracts.files import ModelFiles
from lib.graph import concatenation, fusion, precision
from lib.graph.algorithms import IN_BF16, IN_THREE_BF16, AlgorithmConfig
from lib.measure.file_peer import Original
from lib.measure.protocol import BuildModel
from lib.models.source import Source
from lib.tir import lowering
from lib.verification import PLAIN_LOOPS, Built, CompileConfig, Estimate, peer_of
from stages import compile, extract
from tests.stages.conftest import PROVENANCE

CONFIG = CompileConfig(finalists=1, repeats=1, turns=1, timeout_s=60)


def attention(path, mask="mask"):
    """An ONNX file: an attention head over 24 tokens, each projection of an input of its own, masked as in BERT."""
    shapes = {"query": [1, 16, 32], "key": [1, 24, 32], "value": [1, 24, 48]}
    nodes = [
        helper.make_node("MatMul", ["query", "wq"], ["q"]),
        helper.make_node("MatMul", ["key", "wk"], ["k"]),
        helper.make_node("MatMul", ["value", "wv"], ["v"]),
        helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "kt"], ["scores"]),
        helper.make_node("Unsqueeze", [mask, "axis"], ["wide"]),
        helper.make_node("Cast", ["wide"], ["shown"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["one", "shown"], ["hidden"]),
        helper.make_node("Mul", ["hidden", "lowest"], ["shift"]),
        helper.make_node("Add", ["scores", "shift"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["share"], axis=-1),
        helper.make_node("MatMul", ["share", "v"], ["y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {
        **{name: rng.normal(size=(n, 32)).astype(np.float32) for name, n in (("wq", 32), ("wk", 32), ("wv", 48))},
        "one": np.float32(1), "lowest": np.finfo(np.float32).min, "axis": np.array([1]),
    }  # fmt: skip
    made = helper.make_graph(
        nodes,
        "g",
        [
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()),
            helper.make_tensor_value_info(mask, TensorProto.INT64, [1, 24]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 32])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def broken(module, name):
    """The module with another kernel for the projection of an input: it adds where it should multiply."""
    [gvar] = [
        found[0]
        for block in module["main"].body.blocks
        for found in [concatenation.called(binding.value) for binding in block.bindings]
        if found and any(str(getattr(argument, "name", "")) == name for argument in found[1])
    ]
    function = module[gvar]

    def add(node):
        return tirx.Add(node.a, node.b) if str(node.ty.dtype) == "float32" else node

    body = tvm_ffi.structural_map(function.body, (tirx.Mul, add))
    assert not tvm_ffi.structural_equal(body, function.body)
    wrong = tirx.PrimFunc(function.params, body, function.ret_type, attrs=function.attrs)
    return tvm.IRModule({**dict(module.functions_items()), gvar: wrong}, attrs=module.attrs)


@pytest.fixture(scope="module")
def extracted(cpu, tmp_path_factory):
    folder = tmp_path_factory.mktemp("attention")
    files = ModelFiles(folder / "model")
    extract.run(
        Source(str(attention(folder / "a.onnx", "kept"))), cpu, AlgorithmConfig(), provenance=PROVENANCE, out=files
    )
    return files


def interface_of(files):
    return deploy.interface(tvm.ir.load_json(files.module.read_text()))


def made(built, cpu, wrong=None):
    """The same with the tuned library, in which a kernel may be wrong, and the one to check it against."""
    module, reference = (tvm.ir.load_json(path.read_text()) for path in (built.module, built.reference))
    module = broken(module, wrong) if wrong else module
    deploy.build(module, {}, cpu.tvm(), built.tuned, built.packing)
    packing.write(built.packed, [built.packing], [built.weights], cpu.tvm(), None)
    deploy.build(lowering.reference(reference, cpu.tvm()), {}, cpu.tvm(), built.checked)
    return built


def verify(extracted, cpu, pool, folder, *, wrong=None, zero_mask=False):
    """The largest difference that is found; with inputs as they were once made, if asked for: masks all zero."""
    interface = interface_of(extracted)
    if zero_mask:
        interface = [{**given, "bound": 1} if given["values"] == "mask" else given for given in interface]
    built = made(Built(folder, extracted, interface), cpu, wrong)
    return compile.verify(built, Estimate(1.0), CONFIG, pool)["max_error"]


@pytest.mark.parametrize("wrong", ["query", "key", "value"])
def test_a_wrong_kernel_of_attention_is_seen_behind_a_mask(extracted, cpu, pool, tmp_path, wrong):
    with pytest.raises(VerificationError, match="outputs differ"):
        verify(extracted, cpu, pool, tmp_path, wrong=wrong)


def test_the_right_kernels_of_attention_are_verified(extracted, cpu, pool, tmp_path):
    assert verify(extracted, cpu, pool, tmp_path) < 1e-5


@pytest.mark.parametrize("wrong", ["query", "key"])
def test_behind_a_mask_of_zeros_a_wrong_kernel_would_not_be_seen(extracted, cpu, pool, tmp_path, wrong):
    assert verify(extracted, cpu, pool, tmp_path, wrong=wrong, zero_mask=True) < 1e-5


def test_the_inputs_of_attention_are_told_apart_without_names(extracted):
    module = tvm.ir.load_json(extracted.module.read_text())

    assert [(given["name"], given["values"], given["bound"]) for given in deploy.interface(module)] == [
        ("query", "real", 0), ("key", "real", 0), ("value", "real", 0), ("kept", "mask", 2),
    ]  # fmt: skip
    assert [str(param.name) for param in fusion.inputs(module)] == ["query", "key", "value", "kept"]


def scaled(path, value):
    """An ONNX file: a product whose weights are all the same."""
    made = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 32])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 32])],
        [numpy_helper.from_array(np.full((32, 32), value, np.float32), "w")],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def verified(cpu, pool, folder, value):
    files = ModelFiles(folder / "model")
    extract.run(Source(str(scaled(folder / "m.onnx", value))), cpu, AlgorithmConfig(), provenance=PROVENANCE, out=files)
    built = made(Built(folder, files, interface_of(files)), cpu)
    return compile.verify(built, Estimate(1.0), CONFIG, pool)


def test_a_model_of_nothing_but_nan_is_refused_rather_than_called_verified(cpu, pool, tmp_path):
    with pytest.raises(VerificationError, match="Output 0 of the model has not one finite element"):
        verified(cpu, pool, tmp_path, np.nan)


def test_outputs_that_vanish_pass_and_their_size_is_told(cpu, pool, tmp_path):
    facts = verified(cpu, pool, tmp_path, np.float32(1e-40))

    assert facts["largest_output"] < 1e-38
    assert facts["max_error"] <= CONFIG.tolerance


def beside(file, built, cpu, pool, check=lambda _library: None):
    """What is found of a model beside the file that it came from."""
    with peer_of(Original(file, cpu, is_timed=True)) as peer:
        peer.infer(built.inputs, built.folder / "outputs-onnx.npz")
        return compile.verify(built, Estimate(1.0), CONFIG, pool, peer, check=check)


def save(path, nodes, x, y, weights):
    """A file that makes an image of another."""
    made = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def built_of(file, folder, cpu):
    files = ModelFiles(folder / "model")
    extract.run(Source(str(file)), cpu, AlgorithmConfig(), provenance=PROVENANCE, out=files)
    return made(Built(folder, files, interface_of(files)), cpu)


def pooled_behind_zeros(path):
    """A pooling for the largest of negative numbers with zeros around, which ONNX Runtime forgets as it optimises."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"]),
        helper.make_node("Pad", ["c", "pads"], ["p"]),
        helper.make_node("MaxPool", ["p"], ["y"], kernel_shape=[3, 3], strides=[2, 2]),
    ]
    weights = {
        "w": np.random.default_rng(0).normal(size=(16, 3, 1, 1)).astype(np.float32),
        "b": np.full(16, -20, np.float32), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]),
    }  # fmt: skip
    return save(path, nodes, [1, 3, 12, 12], [1, 16, 6, 6], weights)


def test_a_file_means_what_its_operators_say_where_onnx_runtime_optimises_that_away(cpu, pool, tmp_path):
    file = pooled_behind_zeros(tmp_path / "p.onnx")
    built = built_of(file, tmp_path, cpu)

    found = beside(file, built, cpu, pool, check=refuse)

    assert found["compared_with"] == found["onnx"]["by"]
    assert found["compared_with"].endswith("without its optimisations")
    assert found["max_error"] < 1e-5


def detector_of_nothing(path, bias=-17):
    """Probabilities of about 1e-7."""
    nodes = [helper.make_node("Conv", ["x", "w", "b"], ["c"]), helper.make_node("Sigmoid", ["c"], ["y"])]
    weights = {
        "w": np.random.default_rng(0).normal(size=(16, 16, 1, 1)).astype(np.float32),
        "b": np.full(16, bias, np.float32),
    }
    return save(path, nodes, [1, 16, 12, 12], [1, 16, 12, 12], weights)


def test_probabilities_that_vanish_are_compared_as_far_as_onnx_runtime_has_them(cpu, pool, tmp_path):
    file = detector_of_nothing(tmp_path / "d.onnx")
    built = built_of(file, tmp_path, cpu)

    found = beside(file, built, cpu, pool)

    assert found["compared_with"] == PLAIN_LOOPS
    assert found["max_error"] <= CONFIG.tolerance < found["onnx"]["max_error"]
    assert found["largest_output"] < 1e-5
    with pytest.raises(VerificationError, match="imported model's outputs"):
        beside(detector_of_nothing(tmp_path / "other.onnx", bias=-8.5), built, cpu, pool)


def with_other_weights(path):
    """The attention with a projection that has the other sign."""
    other = onnx.load(attention(path, "kept"))
    [wq] = [tensor for tensor in other.graph.initializer if tensor.name == "wq"]
    wq.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(wq), "wq"))
    onnx.save(other, path)
    return path


def test_a_model_that_computes_what_its_file_does_needs_no_other_reference(extracted, cpu, pool, tmp_path):
    built = made(Built(tmp_path, extracted, interface_of(extracted)), cpu)

    found = beside(attention(tmp_path / "a.onnx", "kept"), built, cpu, pool, check=refuse)

    assert found["compared_with"] == found["onnx"]["by"]
    assert found["compared_with"].startswith("ONNX Runtime")
    assert found["max_error"] == found["onnx"]["max_error"] < 1e-4
    assert len(found["latencies_s"]["onnxruntime"]) == CONFIG.turns


def refuse(_library):
    raise AssertionError("plain loops were asked for")


def test_a_model_that_was_imported_wrongly_is_refused(extracted, cpu, pool, tmp_path):
    built = made(Built(tmp_path, extracted, interface_of(extracted)), cpu)

    with pytest.raises(VerificationError, match=r"imported model's outputs, .* differ from what ONNX Runtime"):
        beside(with_other_weights(tmp_path / "b.onnx"), built, cpu, pool)


def test_a_wrong_kernel_is_told_from_a_wrong_import(extracted, cpu, pool, tmp_path):
    built = made(Built(tmp_path, extracted, interface_of(extracted)), cpu, wrong="value")

    with pytest.raises(VerificationError, match="The tuned model's outputs differ from the untuned model's"):
        beside(attention(tmp_path / "a.onnx", "kept"), built, cpu, pool)


@pytest.mark.parametrize(
    ("rounded", "limit"), [(IN_BF16, {"tolerance_narrow": 1e-5}), (IN_THREE_BF16, {"tolerance": 1e-5})]
)
def test_a_model_may_be_as_far_off_as_its_roundings_bring_it(extracted, cpu, pool, tmp_path, rounded, limit):
    """Here the model in plain loops has the same roundings; one that has fewer shows that the kernels are wrong."""
    files = ModelFiles(tmp_path / "narrow")
    source = Source(str(attention(tmp_path / "a.onnx", "kept")))
    shutil.copytree(extracted.folder, files.folder)
    loaded = extract.load(source)
    narrow = precision.in_bf16(loaded, 2)
    extract._write_module(fusion.fuse(narrow.module, cpu.tvm()), files.module)
    extract._write_weights(narrow.weights, files.weights)
    extract._write_module(fusion.fuse(loaded.module, cpu.tvm()), files.reference)
    extract._write_weights({n: v for n, v in loaded.weights.items() if v is not narrow.weights[n]}, files.kernels)
    built = made(Built(tmp_path, files, interface_of(files), rounded), cpu)
    config, asked = replace(CONFIG, **limit), []

    def check(library):
        asked.append(library.stem)
        module = built.module if library == built.rounded else built.reference
        building_process.Builder(cpu.tvm()).build(BuildModel(module, library, in_plain_loops=True))

    found = compile.verify(built, Estimate(1.0), config, pool, check=check)

    assert asked[-1] == "rounded"
    assert 1e-4 < found["max_error"] <= found["tolerance"] < 0.05
    with pytest.raises(VerificationError, match="differ from the untuned model's"):
        compile.verify(made(built, cpu, wrong="kept"), Estimate(1.0), config, pool, check=check)


def test_a_file_that_onnx_runtime_does_not_run_costs_the_comparison_alone(extracted, cpu, pool, tmp_path):
    built = made(Built(tmp_path, extracted, interface_of(extracted)), cpu)
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    asked = []

    found = beside(tmp_path / "broken.onnx", built, cpu, pool, check=lambda _library: asked.append("plain loops"))

    assert asked == ["plain loops"]
    assert found["compared_with"] == PLAIN_LOOPS
    assert found["onnx"]["max_error"] is None
    assert "Protobuf" in found["onnx"]["failure"]
    assert "onnxruntime" not in found["latencies_s"]


def exported(torch, path, factor):
    """A program of torch: a product, times a factor."""

    class Product(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 8)
            torch.nn.init.ones_(self.layer.weight)

        def forward(self, x):
            return self.layer(x) * factor

    torch.manual_seed(0)
    torch.export.save(torch.export.export(Product().eval(), (torch.randn(4, 16),)), path)
    return path


def test_a_program_of_torch_is_compared_with_torch(cpu, pool, tmp_path):
    torch = pytest.importorskip("torch")
    file, files = exported(torch, tmp_path / "m.pt2", 2.0), ModelFiles(tmp_path / "model")
    extract.run(Source(str(file)), cpu, AlgorithmConfig(), provenance=PROVENANCE, out=files)
    built = made(Built(tmp_path, files, interface_of(files)), cpu)

    found = beside(file, built, cpu, pool, check=refuse)

    assert found["compared_with"] == f"torch {torch.__version__}"
    assert found["max_error"] < 1e-5
    assert "onnxruntime" not in found["latencies_s"]
    with pytest.raises(VerificationError, match=r"imported model's outputs, .* differ from what torch"):
        beside(exported(torch, tmp_path / "other.pt2", 2.1), built, cpu, pool)
