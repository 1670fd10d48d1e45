"""Operators that ONNX Runtime adds, against ONNX Runtime itself: each alone, in the forms that its optimisers write."""

import itertools

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from lib.contracts.errors import ModelError
from lib.graph import attention, fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.models import onnx_import
from tests import helpers

B, S, H, K, P, G = 2, 6, 4, 16, 5, 2  # batch, tokens, heads, extent of one, tokens of before, heads of keys
C = H * K
RNG = np.random.default_rng(0)
KINDS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64,
         "uint8": TensorProto.UINT8, "float16": TensorProto.FLOAT16}  # fmt: skip


def floats(*shape, scale=1.0):
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def file(path, operator, inputs, weights, n_outputs=1, version=18, domain="com.microsoft", **attrs):
    """One node; its inputs are those of both tables, in the order of `inputs`, where None leaves one out."""
    names = [name or "" for name in inputs]
    given = {name: value for name, value in inputs.items() if name and value is not None and name not in weights}
    names = [name if name in given or name in weights else "" for name in names]
    while names and not names[-1]:
        names.pop()
    outputs = [f"y{n}" for n in range(n_outputs)]
    node = helper.make_node(operator, names, outputs, domain=domain, **attrs)
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(name, KINDS[str(value.dtype)], value.shape) for name, value in given.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", version), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return given


def computed(path, given, cpu):
    """What the imported file computes, without schedules, and the core operators of its kernels."""
    model = onnx_import.load(path)
    module = fusion.fuse(model.module, cpu.tvm())
    found = helpers.results(module, cpu, *given.values(), *model.weights.values())
    return found, {s.core_operator for s in extract_subgraphs(module)}


def check(path, given, cpu, *, atol=2e-6):
    """Against ONNX Runtime, which computes in float32 on one thread."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    expected = session.run(None, given)
    found, operators = computed(path, given, cpu)
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == theirs.shape
        assert np.abs(theirs).max() > 0.01
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol * max(1.0, float(np.abs(theirs).max())))
    return operators


X = floats(B, S, C)
SIMPLE = {
    "Gelu": ({"x": X}, {}, {}),
    "BiasGelu": ({"x": X, "b": None}, {"b": floats(C)}, {}),
    "FastGelu": ({"x": X}, {}, {}),
    "FastGelu, biased": ({"x": X, "b": None}, {"b": floats(C)}, {}),
    "QuickGelu": ({"x": X}, {}, {"alpha": 1.702}),
    "QuickGelu, 1": ({"x": X}, {}, {"alpha": 1.0}),
    "SkipLayerNormalization": (
        {"x": X, "s": floats(B, S, C), "g": None, "b": None}, {"g": floats(C), "b": floats(C)}, {"epsilon": 1e-5},
    ),
    "SkipLayerNormalization, biased": (
        {"x": X, "s": floats(B, S, C), "g": None, "b": None, "c": None},
        {"g": floats(C), "b": floats(C), "c": floats(C)}, {"epsilon": 1e-5, "n": 4},
    ),
    "SkipLayerNormalization, broadcast": (
        {"x": X, "s": None, "g": None, "": None, "c": None},
        {"s": floats(S, C), "g": floats(C), "c": floats(C)}, {"epsilon": 1e-5},
    ),
    "SkipSimplifiedLayerNormalization": (
        {"x": X, "s": floats(B, S, C), "g": None}, {"g": floats(C)}, {"epsilon": 1e-6, "n": 4},
    ),
    "FusedMatMul": ({"a": floats(B, S, K), "b": floats(B, S, K)}, {}, {"alpha": 0.125, "transB": 1}),
    "FusedMatMul, both": ({"a": floats(B, K, S), "b": floats(B, S, K)}, {}, {"transA": 1, "transB": 1}),
    "FusedGemm": (
        {"a": floats(S, C), "b": None, "c": None}, {"b": floats(K, C), "c": floats(K)},
        {"transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.2},
    ),
    "FusedConv": (
        {"x": floats(1, 4, 9, 9), "w": None, "b": None}, {"w": floats(8, 4, 3, 3, scale=0.2), "b": floats(8)},
        {"pads": [1, 1, 1, 1], "activation": "Relu"},
    ),
    "FusedConv, a sum": (
        {"x": floats(1, 4, 9, 9), "w": None, "b": None, "z": floats(1, 8, 7, 7)},
        {"w": floats(8, 4, 3, 3, scale=0.2), "b": floats(8)}, {"activation": "Relu"},
    ),
    "FusedConv, clipped": (
        {"x": floats(1, 4, 9, 9), "w": None}, {"w": floats(8, 4, 3, 3, scale=0.2)},
        {"activation": "Clip", "activation_params": [-0.5, 0.75]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("version", [14, 18])
def test_norms_activations_and_products(tmp_path, cpu, name, version):
    inputs, weights, attrs = SIMPLE[name]
    attrs = dict(attrs)
    n_outputs = attrs.pop("n", 1)
    operator = name.partition(",")[0]
    path = tmp_path / "model.onnx"
    given = file(path, operator, inputs, weights, 1, version, **attrs)
    if n_outputs == 4:
        proto = onnx.load(path)
        proto.graph.node[0].output.extend(["", "", "sum"])
        proto.graph.output.append(helper.make_tensor_value_info("sum", TensorProto.FLOAT, None))
        onnx.save(proto, path)
    check(path, given, cpu)


@pytest.mark.parametrize("operator", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_norms_of_files_that_onnx_runtime_rewrote(tmp_path, cpu, operator):
    """It puts them into ONNX's own domain, whatever the version."""
    path = tmp_path / "model.onnx"
    weights = {"g": floats(C), "b": floats(C)} if operator == "LayerNormalization" else {"g": floats(C)}
    given = file(
        path, operator, {"x": X, **dict.fromkeys(weights)}, weights, version=14, domain="", epsilon=1e-5, axis=-1
    )
    check(path, given, cpu)


MASKS = {
    "none": None,
    "keys": np.array([[1] * S, [1] * 4 + [0] * 2], np.int32),
    "lengths": np.array([S, 3], np.int32),
    "ends and beginnings": np.array([S, 5, 0, 2], np.int32),
    "queries": np.tril(np.ones((B, S, S), np.int32)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention_with_packed_weights(tmp_path, cpu, mask, unidirectional):
    path, masked = tmp_path / "model.onnx", MASKS[mask]
    inputs = {"x": X, "w": None, "b": None, "m": masked}
    weights = {"w": floats(C, 3 * C, scale=0.2), "b": floats(3 * C)}
    given = file(path, "Attention", inputs, weights, num_heads=H, unidirectional=unidirectional)
    check(path, given, cpu)


def test_attention_with_a_past_and_with_values_of_another_width(tmp_path, cpu):
    weights = {"w": floats(C, 3 * C, scale=0.2), "b": floats(3 * C)}
    past = {"x": X, "w": None, "b": None, "m": None, "past": floats(2, B, H, P, K)}
    path = tmp_path / "past.onnx"
    given = file(path, "Attention", past, weights, 2, num_heads=H, unidirectional=1)
    check(path, given, cpu)
    weights = {"w": floats(C, 2 * C + H * 3, scale=0.2), "b": floats(2 * C + H * 3)}
    more = {"x": X, "w": None, "b": None, "m": None, "past": None, "bias": floats(1, H, S, S)}
    path = tmp_path / "widths.onnx"
    given = file(path, "Attention", more, weights, num_heads=H, qkv_hidden_sizes=[C, C, H * 3], scale=0.3)
    check(path, given, cpu)


HEADS = {
    "itself": ({"q": X, "k": floats(B, S, C), "v": floats(B, S, C)}, {}, 1, {}),
    "another": ({"q": X, "k": floats(B, 9, C), "v": floats(B, 9, 2 * C)}, {}, 1, {"scale": 0.2}),
    "biased": ({"q": X, "k": floats(B, S, C), "v": floats(B, S, C), "b": None}, {"b": floats(3 * C)}, 1, {}),
    "causal": ({"q": X, "k": floats(B, S, C), "v": floats(B, S, C)}, {}, 1, {"unidirectional": 1}),
    "masked": (
        {"q": X, "k": floats(B, S, C), "v": floats(B, S, C), "b": None, "m": MASKS["keys"]}, {}, 1, {},
    ),
    "with lengths and a bias": (
        {"q": X, "k": floats(B, S, C), "v": floats(B, S, C), "b": None, "m": MASKS["lengths"],
         "bias": floats(1, H, S, S)}, {}, 1, {},
    ),
    "in heads": ({"q": X, "k": floats(B, H, 9, K), "v": floats(B, H, 9, K)}, {}, 1, {}),
    "with a past": (
        {"q": X, "k": floats(B, S, C), "v": floats(B, S, C), "b": None, "m": None, "bias": None,
         "pk": floats(B, H, P, K), "pv": floats(B, H, P, K)}, {}, 3, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADS)
def test_multi_head_attention(tmp_path, cpu, case):
    inputs, weights, n_outputs, attrs = HEADS[case]
    given = file(tmp_path / "model.onnx", "MultiHeadAttention", inputs, weights, n_outputs, num_heads=H, **attrs)
    check(tmp_path / "model.onnx", given, cpu)


def caches(width, n=32):
    angles = np.arange(n)[:, None] / 10.0 ** (np.arange(width // 2) / width)
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


@pytest.mark.parametrize(
    ("interleaved", "form"), [*itertools.product([0, 1], ["tokens", "heads", "partly", "one place"])]
)
def test_rotations_of_positions(tmp_path, cpu, interleaved, form):
    x = floats(B, H, S, K) if form == "heads" else X
    width = K // 2 if form == "partly" else K
    positions = np.array([3]) if form == "one place" else RNG.integers(0, 32, (B, S))
    attrs = {"num_heads": H, "rotary_embedding_dim": width} if form == "partly" else {}
    path = tmp_path / "model.onnx"
    inputs = {"x": x, "p": positions, "cos": None, "sin": None}
    given = file(path, "RotaryEmbedding", inputs, caches(width), interleaved=interleaved, **attrs)
    check(path, given, cpu)


def grouped(path, batch, seq, before, total, lengths, packed=False, rotary=True, past=True, **attrs):
    inputs = {"q": floats(batch, seq, C + 2 * G * K if packed else C)}
    inputs |= {name: None if packed else floats(batch, seq, G * K) for name in ("k", "v")}
    inputs |= {name: floats(batch, G, before, K) if past else None for name in ("pk", "pv")}
    inputs |= {"lengths": np.array(lengths, np.int32), "total": None}
    weights = {"total": np.array(total, np.int32)}
    if rotary:
        weights |= caches(K)
        inputs |= {"cos": None, "sin": None}
    return file(path, "GroupQueryAttention", inputs, weights, 3, num_heads=H, kv_num_heads=G,
                do_rotary=int(rotary), **attrs)  # fmt: skip


GROUPED = {
    "a prompt": {"batch": B, "seq": S, "before": 0, "total": S, "lengths": [S - 1, S - 1], "past": False},
    "a token": {"batch": 1, "seq": 1, "before": P, "total": P + 1, "lengths": [P]},
    "a token each, one with fewer": {"batch": B, "seq": 1, "before": P, "total": P + 1, "lengths": [P, 3]},
    "a token into a larger cache": {"batch": 1, "seq": 1, "before": 12, "total": P + 1, "lengths": [P]},
    "some tokens": {"batch": 1, "seq": 3, "before": P, "total": P + 3, "lengths": [P + 2]},
    "packed": {"batch": 1, "seq": 1, "before": P, "total": P + 1, "lengths": [P], "packed": True},
    "interleaved": {"batch": 1, "seq": 1, "before": P, "total": P + 1, "lengths": [P], "rotary_interleaved": 1},
    "as they are": {"batch": 1, "seq": 1, "before": P, "total": P + 1, "lengths": [P], "rotary": False, "scale": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("case", GROUPED)
def test_grouped_queries(tmp_path, cpu, case):
    given = grouped(tmp_path / "model.onnx", **GROUPED[case])
    check(tmp_path / "model.onnx", given, cpu)


def test_queries_see_as_many_keys_as_a_window_has(tmp_path, cpu):
    """Against NumPy: ONNX Runtime 1.23 counts one more than its name says, 1.31 does not."""
    window, path = 3, tmp_path / "model.onnx"
    given = grouped(path, B, S, 0, S, [S - 1] * 2, past=False, rotary=False, local_window_size=window)
    q = given["q"].reshape(B, S, H, K).transpose(0, 2, 1, 3)
    k, v = (np.repeat(given[n].reshape(B, S, G, K).transpose(0, 2, 1, 3), H // G, 1) for n in ("k", "v"))
    n = np.arange(S)
    is_seen = (n <= n[:, None]) & (n > n[:, None] - window)
    weights = np.where(is_seen, np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(K)), 0)
    expected = (weights / weights.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(B, S, C)
    np.testing.assert_allclose(computed(path, given, cpu)[0][0], expected, rtol=0, atol=1e-5)


def test_what_is_not_known_of_them_is_refused_by_name(tmp_path):
    grouped(tmp_path / "model.onnx", 1, 1, P, P + 1, [P], softcap=30.0)
    with pytest.raises(ModelError, match="GroupQueryAttention"):
        onnx_import.load(tmp_path / "model.onnx")


def test_embeddings_and_their_norm(tmp_path, cpu):
    weights = {"words": floats(30, C), "places": floats(10, C), "kinds": floats(2, C), "g": floats(C), "b": floats(C)}
    ids = RNG.integers(0, 30, (B, S)).astype(np.int32)
    segments = RNG.integers(0, 2, (B, S)).astype(np.int32)
    inputs = {"ids": ids, "segments": segments, **dict.fromkeys(weights), "mask": MASKS["keys"]}
    path = tmp_path / "model.onnx"
    given = file(path, "EmbedLayerNormalization", inputs, weights, 3)
    proto = onnx.load(path)
    proto.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32
    onnx.save(proto, path)
    check(path, given, cpu)


def test_attention_behind_attention_is_read_as_such(tmp_path, cpu):
    """Nothing infers shapes behind such operators: a second one can still be replaced."""
    weights = {"w": floats(C, 3 * C, scale=0.2), "b": floats(3 * C), "g": floats(C)}
    nodes = [
        helper.make_node("Attention", ["x", "w", "b", "m"], ["a"], domain="com.microsoft", num_heads=H),
        helper.make_node("SkipLayerNormalization", ["a", "x", "g"], ["n"], domain="com.microsoft"),
        helper.make_node("Attention", ["n", "w", "b", "m"], ["y"], domain="com.microsoft", num_heads=H),
    ]
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (B, 32, C)),
         helper.make_tensor_value_info("m", TensorProto.INT32, (B, 32))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), tmp_path / "model.onnx")
    given = {"x": floats(B, 32, C), "m": np.tril(np.ones((32, 32), np.int32))[[31, 20]]}
    check(tmp_path / "model.onnx", given, cpu)
    fused = attention.fuse(onnx_import.load(tmp_path / "model.onnx"), None, 16)
    assert sum(gvar.name_hint.startswith(attention.FUNCTION) for gvar in fused.module.get_global_vars()) == 1


def test_products_of_bytes_that_onnx_runtime_fused(tmp_path, cpu):
    bytes_ = RNG.integers(0, 256, (C, 24)).astype(np.uint8)
    scales, zeros = RNG.uniform(0.002, 0.01, 24).astype(np.float32), RNG.integers(100, 150, 24).astype(np.uint8)
    weights = {"w": bytes_, "s": scales, "z": zeros, "b": floats(24)}
    path = tmp_path / "model.onnx"
    given = file(path, "DynamicQuantizeMatMul", {"x": X, **dict.fromkeys(weights)}, weights)
    assert "matmul_int8" in check(path, given, cpu)
    weights |= {"sx": np.array(0.02, np.float32), "zx": np.array(120, np.uint8)}
    order = {"x": RNG.integers(0, 256, (S, C)).astype(np.uint8), **dict.fromkeys(["w", "sx", "s", "zx", "z", "b"])}
    given = file(path, "MatMulIntegerToFloat", order, weights)
    assert "matmul_int8" in check(path, given, cpu)


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
def test_an_lstm_of_bytes_is_that_of_its_weights_in_floats(tmp_path, cpu, kind, direction):
    n, hidden = 1 + (direction == "bidirectional"), 8
    zero = 0 if kind == np.int8 else 128  # weights of seven bits, whose products ONNX Runtime adds rightly everywhere
    w, r = (RNG.integers(zero - 64, zero + 64, (n, extent, 4 * hidden)).astype(kind) for extent in (C, hidden))
    units = np.full(n, 0.004, np.float32), np.full(n, zero, kind)
    weights = {"w": w, "r": r, "b": floats(n, 8 * hidden), "ws": units[0], "wz": units[1], "rs": units[0],
               "rz": units[1]}  # fmt: skip
    order = {"x": X, "w": None, "r": None, "b": None, **dict.fromkeys("1234"), "ws": None, "wz": None, "rs": None,
             "rz": None}  # fmt: skip
    path, plain = tmp_path / "bytes.onnx", tmp_path / "floats.onnx"
    given = file(path, "DynamicQuantizeLSTM", order, weights, hidden_size=hidden, direction=direction)
    whole = {name: ((weights[name].astype(np.float32) - zero) * np.float32(0.004)).transpose(0, 2, 1) for name in "wr"}
    whole |= {"b": weights["b"]}
    file(plain, "LSTM", {"x": X, **dict.fromkeys("wrb")}, whole, domain="", hidden_size=hidden, direction=direction)

    [found], _ = computed(path, given, cpu)

    exact, rounded = (
        onnxruntime.InferenceSession(each, providers=["CPUExecutionProvider"]).run(None, given)[0]
        for each in (plain, path)
    )
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)
    assert np.abs(found - rounded).max() < 0.1  # inputs and states are in bytes there


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"k": 2, "normalize_routing_weights": 1},
        {"k": 2, "activation_type": "silu"},
        {"k": 1, "activation_type": "gelu"},
        {"k": 3, "activation_type": "identity", "normalize_routing_weights": 1},
        {
            "k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "swiglu_limit": 0.7,
            "activation_alpha": 1.7, "activation_beta": 1.0,
        },
    ],
    ids=lambda given: given.get("activation_type", "relu"),
)  # fmt: skip
def test_mixtures_of_experts_agree_with_onnx_runtime(tmp_path, cpu, given, has_bias):
    n_experts, units = 5, 24
    hidden = 2 * units if "swiglu_fusion" in given else units
    weights = {"w1": floats(n_experts, hidden, C, scale=0.2), "w2": floats(n_experts, C, units, scale=0.2)}
    if has_bias:
        weights |= {"b1": floats(n_experts, hidden), "b2": floats(n_experts, C)}
    names = {"x": X, "router": floats(B * S, n_experts), "w1": 0, "b1": None, "w2": 0, "b2": None}
    path = tmp_path / "m.onnx"
    inputs = file(path, "MoE", names, weights, **given)

    assert "grouped_matmul" in check(path, inputs, cpu, atol=1e-5)


def test_a_mixture_with_a_third_product_is_refused_by_name(tmp_path):
    """ONNX Runtime does not compute it on CPUs, so that nothing could be compared."""
    weights = {"w1": floats(2, 8, C), "w2": floats(2, C, 8), "w3": floats(2, 8, C)}
    names = {"x": X, "router": floats(B * S, 2), "w1": 0, "b1": None, "w2": 0, "b2": None, "w3": 0}
    file(tmp_path / "m.onnx", "MoE", names, weights, k=1, activation_type="silu")

    with pytest.raises(ModelError, match="operators that cannot be imported: MoE"):
        onnx_import.load(tmp_path / "m.onnx")
