"""Operators of ONNX as ONNX's own backend tests have them: imported, compiled untuned, and run on the tests' inputs."""

import sys

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.graph import fusion, precision, recurrence
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.models import onnx_import
from lib.models.source import Source
from lib.tir.numerics import relative_error
from stages import extract
from tests.helpers import ROOT, computed

sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other so
import wall_operators
from wall_stages import Stages

BY_DEFINITION = [
    "attention_3d_gqa_causal", "attention_4d_causal_with_past_and_present", "attention_4d_attn_mask_bool",
    "attention_4d_softcap", "attention_causal_boolmask_nan_robustness",
    "attention_24_qk_matmul_output_mode3_softmax_precision", "celu", "center_crop_pad_crop_axes_hwc",
    "layer_normalization_2d_axis0",
    "layer_normalization_3d_axis1_epsilon", "rms_normalization_2d_axis0", "rotary_embedding",
    "rotary_embedding_with_rotary_dim", "swish",
]  # fmt: skip
BY_RULE = [
    "bitshift_left_int32_negative_shift", "bitshift_left_int32_shift_ge_width", "bitshift_right_int8_shift_ge_width",
    "mod_float_edge_cases_fmod_0_float32", "mod_mixed_sign_float64", "pow_types_int32_int32",
    "sum_example", "mean_example", "max_example", "max_float64", "min_int32", "isinf_positive", "isinf_negative",
    "pow_types_int32_float32", "pow_types_float32_int64", "reduce_max_bool_inputs", "reduce_min_bool_inputs",
    "convtranspose_output_shape", "spacetodepth_crd_mode_example", "spacetodepth_example", "tile",
    "col2im", "col2im_5d", "col2im_dilations", "col2im_pads", "col2im_strides",
    "l1normalization_axis_0", "l2normalization_axis_1", "dft", "dft_axis", "dft_inverse", "dft_rfft", "dft_opset19",
    "stft", "stft_with_window", "reversesequence_time", "reversesequence_batch", "tensorscatter",
    "cumprod_1d", "cumprod_1d_exclusive", "cumprod_1d_reverse_exclusive", "cumprod_2d_negative_axis",
    "cumprod_2d_int32", "tensorscatter_circular", "tensorscatter_3d", "basic_deform_conv_with_padding",
    "basic_deform_conv_without_padding", "deform_conv_with_mask_bias", "deform_conv_with_multiple_offset_groups",
]  # fmt: skip
RECURRENT = [
    "lstm_defaults", "lstm_with_initial_bias", "lstm_batchwise", "gru_defaults", "gru_with_initial_bias",
    "gru_seq_length", "gru_batchwise", "simple_rnn_defaults", "simple_rnn_with_initial_bias", "simple_rnn_batchwise",
]  # fmt: skip
RESIZED = [
    "resize_downsample_scales_cubic", "resize_downsample_scales_cubic_A_n0p5_exclude_outside",
    "resize_downsample_scales_cubic_align_corners", "resize_downsample_scales_cubic_antialias",
    "resize_downsample_scales_linear", "resize_downsample_scales_linear_align_corners",
    "resize_downsample_scales_linear_antialias", "resize_downsample_scales_linear_half_pixel_symmetric",
    "resize_downsample_sizes_cubic_antialias", "resize_downsample_sizes_linear_antialias",
    "resize_downsample_sizes_linear_pytorch_half_pixel", "resize_downsample_sizes_nearest",
    "resize_downsample_sizes_nearest_not_larger", "resize_tf_crop_and_resize_axes_3_2",
    "resize_tf_crop_and_resize_extrapolation_value", "resize_upsample_scales_linear", "resize_upsample_scales_nearest",
    "resize_upsample_scales_nearest_axes_2_3", "resize_upsample_sizes_nearest_ceil_half_pixel",
    "resize_upsample_sizes_nearest_floor_align_corners", "resize_upsample_sizes_nearest_not_smaller",
    "resize_upsample_sizes_nearest_round_prefer_ceil_asymmetric",
]  # fmt: skip


@pytest.fixture(scope="module")
def known():
    return wall_operators.tests()


@pytest.fixture(scope="module")
def stages():
    return Stages()


@pytest.mark.parametrize("name", [*BY_DEFINITION, *BY_RULE, *RECURRENT, *RESIZED])
def test_an_operator_computes_what_onnx_says(known, stages, tmp_path, name):
    inputs, expected = wall_operators.write(known[name], tmp_path / "m.onnx")

    found = stages.untuned(tmp_path / "m.onnx", tmp_path, inputs)

    assert [value.shape for value in found] == [value.shape for value in expected]
    limit = 5e-3 if expected[0].dtype == np.float16 else 1e-5
    assert max(map(relative_error, found, expected)) < limit


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nonzero_example", "uses NonZero, whose results have shapes that depend on the values of inputs"),
        ("nonmaxsuppression_two_batches", "uses NonMaxSuppression, whose results"),
        ("compress_0", "uses Compress, whose results"),
        ("batchnorm_example_training_mode", "is in training mode"),
        ("lstm_with_peepholes", "operators that cannot be imported: LSTM"),
        ("roialign_mode_max", "uses RoiAlign with mode `max`"),
        ("reduce_sum_empty_set", r"has the shape \(2, 0, 4\): no elements"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_the_operators_name(known, tmp_path, name, told):
    wall_operators.write(known[name], tmp_path / "m.onnx")

    with pytest.raises(ModelError, match=told):
        onnx_import.load(tmp_path / "m.onnx")


def save(path, nodes, inputs, outputs, weights):
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


def normal(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def agrees(stages, path, folder, *inputs):
    session = onnxruntime.InferenceSession(path)
    expected = session.run(None, dict(zip([value.name for value in session.get_inputs()], inputs, strict=True)))
    found = stages.untuned(path, folder, inputs)
    return max(map(relative_error, found, expected)) < 1e-5


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_all_directions_of_recurrent_networks_agree_with_onnx_runtime(stages, tmp_path, kind, direction):
    gates, d = {"LSTM": 4, "GRU": 3}[kind], 2 if direction == "bidirectional" else 1
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    outputs = ["y", "h"] + (["c"] if kind == "LSTM" else [])
    node = helper.make_node(kind, ["x", "w", "r", "b"], outputs, hidden_size=6, direction=direction, **more)
    weights = {"w": normal(d, gates * 6, 5), "r": normal(d, gates * 6, 6) / 3, "b": normal(d, 2 * gates * 6)}
    shapes = {"y": [7, d, 3, 6], "h": [d, 3, 6], "c": [d, 3, 6]}
    path = save(tmp_path / "m.onnx", [node], {"x": [7, 3, 5]}, {name: shapes[name] for name in outputs}, weights)

    assert agrees(stages, path, tmp_path, normal(7, 3, 5))


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize(
    ("kind", "states", "given", "is_whole"),
    [
        ("LSTM", False, {}, True),
        ("LSTM", True, {}, None),  # forward alone: backwards it begins with what it is given
        ("LSTM", True, {"activations": ["Softplus", "Tanh", "Tanh"]}, False),
        ("GRU", True, {"linear_before_reset": 1}, True),
        ("GRU", False, {"linear_before_reset": 0}, False),
        ("RNN", True, {}, False),
    ],
)
def test_sequences_of_a_recurrent_layer_may_end_early(stages, tmp_path, kind, states, given, is_whole, direction):
    """What it shows after that are zeros, and its states are those of the last step."""
    gates, d = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 1 + (direction == "bidirectional")
    if "activations" in given:
        given = {"activations": given["activations"] * d}
    names = ["h0", "c0"][: (1 + (kind == "LSTM")) * states]
    outputs = ["y", "h"] + (["c"] if kind == "LSTM" else [])
    inputs = ["x", "w", "r", "b", "ends", *names]
    node = helper.make_node(kind, inputs, outputs, hidden_size=6, direction=direction, **given)
    weights = {"w": normal(d, gates * 6, 5), "r": normal(d, gates * 6, 6) / 3, "b": normal(d, 2 * gates * 6)}
    shapes = {"y": [7, d, 3, 6], "h": [d, 3, 6], "c": [d, 3, 6]}
    cast = helper.make_node("Cast", ["lengths"], ["ends"], to=TensorProto.INT32)
    given_shapes = {"x": [7, 3, 5], "lengths": [3]} | {name: [d, 3, 6] for name in names}
    path = save(tmp_path / "m.onnx", [cast, node], given_shapes, {name: shapes[name] for name in outputs}, weights)

    arrays = [normal(7, 3, 5), np.array([7, 1, 4], np.float32), *(normal(d, 3, 6) for _ in names)]

    assert agrees(stages, path, tmp_path, *arrays)
    expected = direction == "forward" if is_whole is None else is_whole
    assert ("recurrence" in onnx_import.load(path).module.script()) == expected


def layer(folder, kind, seq, batch, hidden, outputs=("y",), states=(), **given):
    """A file of one forward layer; returns it and its inputs, of which the states before the first step may be some."""
    gates, names = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], ["h0", "c0"]
    more = {"linear_before_reset": 1} if kind == "GRU" else {}
    node = helper.make_node(
        kind, ["x", "w", "r", "b", *(["", *names[: len(states)]] if states else [])], list(outputs),
        hidden_size=hidden, **{**more, **given},
    )  # fmt: skip
    weights = {"w": normal(1, gates * hidden, 5), "r": normal(1, gates * hidden, hidden) / hidden,
               "b": normal(1, 2 * gates * hidden)}  # fmt: skip
    shapes = {"y": [seq, 1, batch, hidden], "h": [1, batch, hidden], "c": [1, batch, hidden]}
    inputs = {"x": [seq, batch, 5]} | {name: [1, batch, hidden] for name in names[: len(states)]}
    path = save(folder / "m.onnx", [node], inputs, {name: shapes[name] for name in outputs}, weights)
    return path, [normal(*shape) for shape in inputs.values()]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_of_many_steps_is_a_product_and_one_program(stages, cpu, tmp_path, kind):
    path, inputs = layer(tmp_path, kind, 400, 1, 20)

    found = extract_subgraphs(fusion.fuse(onnx_import.load(path).module, cpu.tvm()))

    assert [subgraph.core_operator for subgraph in found if subgraph.flop] == ["recurrence", "matmul"]
    assert agrees(stages, path, tmp_path, *inputs)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_states_before_and_after_all_steps_of_a_recurrent_layer(stages, tmp_path, kind):
    states, outputs = (("h0", "c0"), ("h", "c")) if kind == "LSTM" else (("h0",), ("h",))
    path, inputs = layer(tmp_path, kind, 3, 2, 16, outputs, states)

    assert agrees(stages, path, tmp_path, *inputs)


@pytest.mark.parametrize(("kind", "batch"), [("LSTM", 40), ("GRU", 33), ("LSTM", 37), ("RNN", 100)])
def test_a_large_batch_goes_through_a_recurrent_layer_in_parts(stages, cpu, tmp_path, kind, batch):
    """And what the parts have beyond the batch is not seen."""
    states, outputs = (("h0", "c0"), ("y", "h", "c")) if kind == "LSTM" else ((), ("y", "h"))
    path, inputs = layer(tmp_path, kind, 3, batch, 16, outputs, states)

    found = extract_subgraphs(fusion.fuse(onnx_import.load(path).module, cpu.tvm()))

    assert "recurrence" in {subgraph.core_operator for subgraph in found}
    assert agrees(stages, path, tmp_path, *inputs)


@pytest.mark.parametrize("gates", [1, 3, 4])
@pytest.mark.parametrize("batch", [1, 16, 17, 33, 50, 1000])
def test_parts_of_a_batch_are_few_and_hold_all_of_it(batch, gates):
    parts, rows = recurrence.shared_out(batch, gates)

    assert batch <= parts * rows < batch + rows
    assert rows <= 16
    assert (parts == 1) == (batch <= 16)


@pytest.mark.parametrize(
    ("kind", "batch", "given"),
    [
        ("LSTM", 2, {"activations": ["Sigmoid", "Softsign", "Tanh"]}),
        ("GRU", 2, {"linear_before_reset": 0}),
    ],
    ids=["an activation that no program has", "the reset gate before the product"],
)
def test_other_recurrent_layers_are_taken_apart(stages, cpu, tmp_path, kind, batch, given):
    path, inputs = layer(tmp_path, kind, 3, batch, 16, **given)

    found = extract_subgraphs(fusion.fuse(onnx_import.load(path).module, cpu.tvm()))

    assert "recurrence" not in {subgraph.core_operator for subgraph in found}
    assert agrees(stages, path, tmp_path, *inputs)


@pytest.mark.parametrize("hidden", [16, 21])
def test_a_recurrent_layer_in_bf16_reads_pairs_of_weights(cpu, tmp_path, hidden):
    path, [x] = layer(tmp_path, "LSTM", 4, 1, hidden)
    model = precision.in_bf16(onnx_import.load(path), lanes=16)

    [found] = computed(model, cpu, x)

    assert [w.shape for w in model.weights.values() if w.ndim == 6] == [
        (1, -(-hidden // 16), -(-hidden // 2), 4, 16, 2)
    ]
    [wanted] = onnxruntime.InferenceSession(path).run(None, {"x": x})
    assert relative_error(found, wanted) < 2**-6


def test_recurrent_layers_for_a_gpu_are_taken_apart(tmp_path):
    path, _ = layer(tmp_path, "LSTM", 3, 1, 16)

    module = extract.load(Source(str(path)), targets.target("nvidia/nvidia-h100")).module

    assert "recurrence" not in module.script()
    assert module.script().count("R.tanh(") == 6


@pytest.mark.parametrize("axes", [[-1, -2], [2, 3], None])
def test_a_squeeze_behind_a_convolution_may_count_its_axes_from_either_end(stages, tmp_path, axes):
    weights = {"k": normal(6, 4, 3, 3)} | ({} if axes is None else {"axes": np.array(axes)})
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Squeeze", ["p"] + ([] if axes is None else ["axes"]), ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 4, 8, 8]}, {"y": [2, 6]}, weights)

    assert agrees(stages, path, tmp_path, normal(2, 4, 8, 8))


def test_the_largest_of_several_beside_a_convolution(stages, tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Max", ["c", "x", "b"], ["y"]),
    ]
    path = save(
        tmp_path / "m.onnx", nodes, {"x": [1, 4, 8, 8]}, {"y": [1, 4, 8, 8]},
        {"k": normal(4, 4, 3, 3), "b": normal(4, 1, 1)},
    )  # fmt: skip

    assert agrees(stages, path, tmp_path, normal(1, 4, 8, 8))


def test_weights_are_still_there_when_operators_are_replaced_by_their_definitions(stages, tmp_path):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Celu", ["h"], ["y"], alpha=0.5)]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 512]}, {"y": [2, 300]}, {"w": normal(512, 300)})

    assert agrees(stages, path, tmp_path, normal(2, 512))


@pytest.mark.parametrize(
    "given",
    [
        {"strides": [2, 2]},  # windows side by side
        {"strides": [2, 2], "pads": [0, 1, 1, 0]},
        {"strides": [3, 2], "output_padding": [1, 0]},
        {"strides": [2, 2], "group": 2},
        {"dilations": [2, 1]},
    ],
)
def test_a_transposed_convolution_between_convolutions(stages, tmp_path, given):
    groups = given.get("group", 1)
    weights = {"k": normal(6, 4, 3, 3), "t": normal(6, 8 // groups, 2, 2), "b": normal(8), "l": normal(5, 8, 1, 1)}
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"]),
        helper.make_node("ConvTranspose", ["c", "t", "b"], ["u"], **given),
        helper.make_node("Conv", ["u", "l"], ["y"]),
    ]
    path = save(tmp_path / "m.onnx", nodes, {"x": [2, 4, 8, 7]}, {"y": ["n", "c", "h", "w"]}, weights)

    assert agrees(stages, path, tmp_path, normal(2, 4, 8, 7))
