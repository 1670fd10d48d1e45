"""Files that are quantised here: with samples, by ONNX Runtime, once."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from lib.contracts.errors import ConfigError, ModelError
from lib.models import onnx_quantization
from lib.tir import small_weights
from tests import range_files
from tests.helpers import small_network

onnxruntime = pytest.importorskip("onnxruntime")
SHAPE = (1, 8, 8, 8)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    return small_network(tmp_path_factory.mktemp("net") / "net.onnx")


def samples(path, n=3, **arrays):
    np.savez(path, **(arrays or {"x": np.random.default_rng(0).normal(size=(n, *SHAPE)).astype(np.float32)}))
    return path


def outputs(file, x):
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def test_a_quantised_file_computes_nearly_the_same_with_bytes_in_its_products(network, tmp_path):
    made = onnx_quantization.quantized(network, samples(tmp_path / "samples.npz"), tmp_path / "out")

    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    assert onnx_quantization.is_quantized(made)
    assert not onnx_quantization.is_quantized(network)
    assert np.abs(outputs(made, x) - outputs(network, x)).max() < 0.05
    weights = {tensor.data_type for tensor in onnx.load(made).graph.initializer}
    assert onnx.TensorProto.INT8 in weights


@pytest.mark.parametrize(("bits", "words"), [(8, 0), (7, 2)])
def test_weights_of_seven_bits_have_room_for_sums_of_two_words(network, tmp_path, bits, words):
    made = onnx_quantization.quantized(network, samples(tmp_path / "samples.npz"), tmp_path / "out", bits)

    weights = [numpy_helper.to_array(tensor) for tensor in onnx.load(made).graph.initializer
               if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) > 1]  # fmt: skip
    by_columns = [weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight for weight in weights]
    assert [small_weights.words_together(weight) for weight in by_columns] == [words, words]
    assert max(np.abs(weight.astype(np.int16)).max() for weight in weights) == (127 if bits == 8 else 64)


def test_a_scale_grows_no_more_than_a_column_takes():
    column = np.zeros((16, 1), np.float32)
    column[:4] = 1.0  # of four in two words, two in each sum

    assert onnx_quantization._end_with_room(column) == 1.0
    column[:8] = 1.0  # four in each sum: twice the scale
    assert onnx_quantization._end_with_room(column) == pytest.approx(2.0, rel=0.02)
    assert onnx_quantization._end_with_room(np.zeros((8, 1), np.float32)) == 1.0


def test_it_is_made_once_for_the_same_samples_and_anew_for_others(network, tmp_path):
    first = onnx_quantization.quantized(network, samples(tmp_path / "a.npz"), tmp_path / "out")
    before = first.stat().st_mtime_ns

    again = onnx_quantization.quantized(network, samples(tmp_path / "a.npz"), tmp_path / "out")
    other = onnx_quantization.quantized(network, samples(tmp_path / "b.npz", n=2), tmp_path / "out")

    assert again == first != other
    assert first.stat().st_mtime_ns == before
    assert sorted((tmp_path / "out").iterdir()) == sorted([first, other])


def test_a_folder_has_a_sample_in_each_file(network, tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    for n in range(2):
        samples(folder / f"{n}.npz", x=np.full(SHAPE, n, np.float32))

    assert onnx_quantization.quantized(network, folder, tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        ({"y": np.zeros(SHAPE, np.float32)}, "has y; expected one for each input of .*: x"),
        ({"x": np.zeros(3, np.float32)}, "have the ranks .*'x': 4.*one axis more"),
    ],
)
def test_samples_that_do_not_fit_are_refused(network, tmp_path, arrays, told):
    with pytest.raises(ConfigError, match=told):
        onnx_quantization.quantized(network, samples(tmp_path / "a.npz", **arrays), tmp_path / "out")


def test_an_empty_folder_is_refused(network, tmp_path):
    with pytest.raises(ConfigError, match="names no samples"):
        onnx_quantization.quantized(network, tmp_path, tmp_path / "out")


def test_products_whose_nodes_have_no_names_are_quantised_too(tmp_path):
    file = range_files.attention(tmp_path / "causal.onnx", "causal")
    ids = np.random.default_rng(0).integers(0, range_files.VOCABULARY, (3, 1, 12))

    made = onnx_quantization.quantized(file, samples(tmp_path / "samples.npz", ids=ids), tmp_path / "out")

    weights = [tensor for tensor in onnx.load(made).graph.initializer if tensor.data_type == onnx.TensorProto.INT8]
    assert len([tensor for tensor in weights if len(tensor.dims) == 2]) == 6  # and products of two activations are not
    found, expected = (onnxruntime.InferenceSession(str(path)).run(None, {"ids": ids[0]})[0] for path in (made, file))
    assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()


def test_a_file_without_products_of_weights_is_refused(tmp_path):
    value = onnx.helper.make_tensor_value_info
    nodes = [onnx.helper.make_node("MatMul", ["x", "x"], ["y"])]
    x, y = (value(name, onnx.TensorProto.FLOAT, (4, 4)) for name in "xy")
    file = tmp_path / "products.onnx"
    graph = onnx.helper.make_graph(nodes, "graph", [x], [y])
    onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)]), file)

    with pytest.raises(ModelError, match="has nothing to quantise"):
        onnx_quantization.quantized(
            file, samples(tmp_path / "samples.npz", x=np.ones((1, 4, 4), np.float32)), tmp_path / "out"
        )
    assert not list((tmp_path / "out").iterdir())
