import onnx
import pytest
from onnx import TensorProto, helper

from lib.contracts.errors import ModelError
from lib.measure.file_peer import Original
from lib.models import file_facts
from lib.probing import padding_of, probe
from tests import range_files

IDS = {"name": "ids", "shape": [1, 8], "dtype": "int64", "values": "ids", "bound": range_files.VOCABULARY}
MASK = {"name": "mask", "shape": [1, 8], "dtype": "int64", "values": "mask", "bound": 2}
IMAGE = {"name": "x", "shape": [4, 3, 8, 8], "dtype": "float32", "values": "real", "bound": 0}
LENGTHS = {"sequence": (1, 8)}


def looked_at(path, inputs, buckets, limits, cpu, tmp_path):
    return probe(
        Original(path, cpu, is_timed=False), inputs, file_facts.of(path).axes, file_facts.of(path).outputs, buckets,
        limits, tmp_path,
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs"), [("mask", [IDS, MASK]), ("causal", [IDS])])
def test_a_sequence_is_padded_where_a_mask_hides_it_or_no_position_sees_those_after_it(cpu, tmp_path, kind, inputs):
    path = range_files.attention(tmp_path / "model.onnx", kind)
    found = looked_at(path, inputs, [{"sequence": 4}, {"sequence": 8}], LENGTHS, cpu, tmp_path)

    assert [each["shape"] for each in found.inputs] == [[1, "sequence"]] * len(inputs)
    assert [(each["name"], each["shape"]) for each in found.outputs] == [("states", [1, "sequence", range_files.WIDTH])]
    assert found.checked
    assert all(each["max_error"] < 1e-5 for each in found.checked)


def test_a_sequence_that_all_positions_see_is_refused_with_the_reason(cpu, tmp_path):
    path = range_files.attention(tmp_path / "model.onnx", "open")

    with pytest.raises(ModelError, match=r"changes the output states by .* no input is a mask that hides it"):
        looked_at(path, [IDS], [{"sequence": 4}, {"sequence": 8}], LENGTHS, cpu, tmp_path)


def test_a_batch_is_padded_whatever_the_model_does_within_a_sample(cpu, tmp_path):
    buckets, limits = [{"batch": 2}, {"batch": 4}], {"batch": (1, 4)}
    path = range_files.attention(tmp_path / "model.onnx", "open")
    looked_at(path, [IDS], buckets, limits, cpu, tmp_path)
    found = looked_at(range_files.convolution(tmp_path / "conv.onnx"), [IMAGE], buckets, limits, cpu, tmp_path)

    assert [each["shape"] for each in found.outputs] == [["batch", 16]]


def test_an_output_from_which_nothing_can_be_cut_is_refused(cpu, tmp_path):
    values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
              helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", 4])]  # fmt: skip
    graph = helper.make_graph([helper.make_node("Concat", ["x", "x"], ["y"], axis=0)], "twice", values[:1], values[1:])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "twice.onnx"
    )

    with pytest.raises(ModelError, match="axis 0 of the output y is 2 and 16"):
        looked_at(
            tmp_path / "twice.onnx", [{**IMAGE, "shape": [8, 4]}], [{"n": 4}, {"n": 8}], {"n": (1, 8)}, cpu, tmp_path
        )


def test_what_needs_the_most_padding_is_looked_at():
    buckets = [{"n": extent} for extent in (8, 16, 64)]
    pairs = padding_of(buckets, {"n": (1, 64)})

    assert ({"n": 17}, {"n": 64}) in pairs
    assert ({"n": 9}, {"n": 16}) in pairs
    assert all(extents["n"] < bucket["n"] for extents, bucket in pairs)
