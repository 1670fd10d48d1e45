"""Operators that ONNX Runtime adds to ONNX (its domain `com.microsoft`), as operators of ONNX.

Its optimisers fuse norms, activations and attention into these, and its exporters of language models write them: such
files are what many models are published as. None of this asks for shapes, which nothing infers behind such operators,
where constants of the file or ranks do; what is computed of shapes here is folded afterwards (`onnx_folding`). Meanings
are those of ONNX Runtime's CPU kernels (`onnxruntime/contrib_ops/cpu`), with which the tests compare each.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import onnx
from onnx import TensorProto, helper

from lib.models import onnx_attention, onnx_experts, onnx_few_bits, onnx_folding
from lib.models.onnx_graph import Graph, Made, Nodes, attributes

DOMAIN = "com.microsoft"
_FIRST_NORM = 17  # version of ONNX that has LayerNormalization; ONNX Runtime takes it in all

Rule = Callable[[onnx.NodeProto, Graph], Nodes]


def expand(
    proto: onnx.ModelProto, *, has_loops: bool = True, instruction: str = "", lanes: int = 8, had_halves: bool = False
) -> bool:
    """Replace such operators, in place; returns whether there were any.

    Those that need a rank behind others are replaced once it is known: as often as that takes.

    Args:
        has_loops, instruction, lanes: See `Graph`.
        had_halves: Whether the file was in float16: its weights still have no more digits.
    """
    is_changed, rule_of = False, partial(_rule_of, _plain_rules(proto, had_halves))
    while any(map(rule_of, proto.graph.node)):
        graph = Graph(proto, has_loops=has_loops, instruction=instruction, lanes=lanes)
        nodes, is_replaced = list[onnx.NodeProto](), False
        for node in proto.graph.node:
            rule = rule_of(node)
            found = rule(node, graph) if rule else None
            is_replaced |= found is not None
            nodes += found or [node]
        if not is_replaced:
            break
        graph.put(proto, nodes)
        is_changed = True
    return is_changed


def _rule_of(plain: Mapping[str, Rule], node: onnx.NodeProto) -> Rule | None:
    return (RULES if node.domain == DOMAIN else plain).get(node.op_type)


def _plain_rules(proto: onnx.ModelProto, had_halves: bool) -> dict[str, Rule]:
    """Those of operators in ONNX's own domain, where a file may need them."""
    found: dict[str, Rule] = {"SimplifiedLayerNormalization": _simplified_layer_norm}
    if onnx_folding.version(proto) < _FIRST_NORM:
        found["LayerNormalization"] = _layer_norm
    if had_halves:
        found |= dict.fromkeys(("MatMul", "Gemm"), onnx_few_bits.product_of_halves)
    return found


# Activations.


def _gelu_of(made: Made, x: str) -> str:
    half = made.op("Mul", x, made.number(0.5))
    erf = made.op("Erf", made.op("Div", x, made.number(math.sqrt(2))))
    return made.op("Mul", half, made.op("Add", erf, made.number(1)))


def _gelu(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of the sum with a bias, where there is one."""
    made = Made(graph)
    x = made.op("Add", *node.input[:2]) if len(node.input) > 1 else node.input[0]
    return made.ending(node, _gelu_of(made, x))


def _fast_gelu(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """By a tanh, also of the sum with a bias."""
    made = Made(graph)
    x = made.op("Add", *node.input[:2]) if len(node.input) > 1 else node.input[0]
    cube = made.op("Mul", made.op("Mul", x, x), x)
    inner = made.op("Add", x, made.op("Mul", cube, made.number(0.044715)))
    tanh = made.op("Tanh", made.op("Mul", inner, made.number(math.sqrt(2 / math.pi))))
    half = made.op("Mul", x, made.number(0.5))
    return made.ending(node, made.op("Mul", half, made.op("Add", tanh, made.number(1))))


def _quick_gelu(node: onnx.NodeProto, graph: Graph) -> Nodes:
    made, x = Made(graph), node.input[0]
    alpha = attributes(node, alpha=1.702)["alpha"]
    scaled = x if alpha == 1 else made.op("Mul", x, made.number(alpha))
    return made.ending(node, made.op("Mul", x, made.op("Sigmoid", scaled)))


# Norms.


def _norm(made: Made, x: str, gamma: str, beta: str, epsilon: float) -> str:
    """Over the last axis."""
    if made.graph.version >= _FIRST_NORM:
        return made.op("LayerNormalization", x, gamma, *([beta] if beta else []), axis=-1, epsilon=epsilon)
    apart = made.op("Sub", x, made.mean(x))
    scale = made.op("Sqrt", made.op("Add", made.mean(made.op("Mul", apart, apart)), made.number(epsilon)))
    scaled = made.op("Mul", made.op("Div", apart, scale), gamma)
    return made.op("Add", scaled, beta) if beta else scaled


def _rms_norm(made: Made, x: str, gamma: str, epsilon: float) -> str:
    mean = made.mean(made.op("Mul", x, x))
    scale = made.op("Sqrt", made.op("Add", mean, made.number(epsilon)))
    return made.op("Mul", made.op("Div", x, scale), gamma)


def _layer_norm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """That of a file whose version of ONNX has none."""
    given = attributes(node, axis=-1, epsilon=1e-5)
    shape = graph.shape(node.input[0])
    is_last = given["axis"] == -1 or (shape is not None and given["axis"] == len(shape) - 1)
    if not is_last or any(map(graph.is_read, node.output[1:])):
        return None
    made = Made(graph)
    x, gamma, beta = [*node.input, ""][:3]
    return made.ending(node, _norm(made, x, gamma, beta, given["epsilon"]))


def _simplified_layer_norm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    given = attributes(node, axis=-1, epsilon=1e-5)
    shape = graph.shape(node.input[0])
    if given["axis"] != -1 and (shape is None or given["axis"] != len(shape) - 1):
        return None
    if any(map(graph.is_read, node.output[1:])):
        return None
    made = Made(graph)
    return made.ending(node, _rms_norm(made, node.input[0], node.input[1], given["epsilon"]))


def _skip_layer_norm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of a sum, which is the fourth output."""
    epsilon = attributes(node, epsilon=1e-12)["epsilon"]
    made, is_simple = Made(graph), node.op_type.startswith("SkipSimplified")
    names = [*node.input, "", ""]
    x, skip, gamma = names[:3]
    beta, bias = ("", names[3]) if is_simple else names[3:5]
    total = made.op("Add", x, skip)
    if bias:
        total = made.op("Add", total, bias)
    found = _rms_norm(made, total, gamma, epsilon) if is_simple else _norm(made, total, gamma, beta, epsilon)
    if any(map(graph.is_read, node.output[1:3])):
        return None
    made.rename(total, node.output[3] if len(node.output) > 3 else "")
    return made.ending(node, found)


def _embed_layer_norm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Rows of tables for words, positions and segments, their sum, and its norm; how many words a mask leaves."""
    ids, segments, words, places, kinds, gamma, beta, mask, positions = [*node.input, *[""] * 9][:9]
    made = Made(graph)
    rows = made.op("Gather", words, ids, axis=0)
    if positions:
        at = made.op("Gather", places, positions, axis=0)
    else:
        count = made.op("Squeeze", made.extent(ids, 1))
        at = made.op("Gather", places, made.op("Range", made.integer(0), count, made.integer(1)), axis=0)
    total = made.op("Add", rows, at)
    if segments and kinds:
        total = made.op("Add", total, made.op("Gather", kinds, segments, axis=0))
    found = _norm(made, total, gamma, beta, attributes(node, epsilon=1e-12)["epsilon"])
    if len(node.output) > 1 and node.output[1] and graph.is_read(node.output[1]):
        if not mask:
            return None
        made.rename(
            made.op("Squeeze", made.sum(made.op("Cast", mask, to=TensorProto.INT32)), made.axes(1)), node.output[1]
        )
    made.rename(total, node.output[2] if len(node.output) > 2 else "")
    return made.ending(node, found)


# Products.


def _fused_matmul(node: onnx.NodeProto, graph: Graph) -> Nodes:
    given = attributes(node, alpha=1.0, transA=0, transB=0, transBatchA=0, transBatchB=0)
    if given["transBatchA"] or given["transBatchB"]:
        return None
    made, factors = Made(graph), []
    for name, is_transposed in zip(node.input, (given["transA"], given["transB"]), strict=True):
        if is_transposed:
            shape = graph.shape(name)
            if shape is None:
                return None
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
            name = made.op("Transpose", name, perm=order)
        factors.append(name)
    found = made.op("MatMul", *factors)
    return made.ending(node, found if given["alpha"] == 1 else made.op("Mul", found, made.number(given["alpha"])))


def _activated(made: Made, node: onnx.NodeProto, x: str) -> str | None:
    """What `FusedConv` and `FusedGemm` end with; None if it is not known here."""
    given = attributes(node, activation=b"", activation_params=[], activation_alpha=None, activation_beta=None)
    name = given["activation"].decode()
    params = list(given["activation_params"]) or [
        value for key in ("activation_alpha", "activation_beta") if (value := given[key]) is not None
    ]
    if name in ("", "Relu", "Tanh", "Sigmoid"):
        return made.op(name, x) if name else x
    if name == "LeakyRelu":
        return made.op("LeakyRelu", x, alpha=params[0] if params else 0.01)
    if name == "HardSigmoid" and len(params) == 2:
        return made.op("HardSigmoid", x, alpha=params[0], beta=params[1])
    if name == "Clip" and len(params) == 2:
        return made.op("Min", made.op("Max", x, made.number(params[0])), made.number(params[1]))
    return None


_ACTIVATION = ("activation", "activation_params", "activation_alpha", "activation_beta", "activation_gamma")


def _fused_conv(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The fourth input is added before the activation."""
    made = Made(graph)
    x, w, bias, skip = [*node.input, *[""] * 4][:4]
    convolution = graph.changed(node, {}, without=_ACTIVATION)
    convolution.op_type, convolution.domain = "Conv", ""
    del convolution.input[:]
    convolution.input.extend([x, w, *([bias] if bias else [])])
    found = made.add(convolution)
    if skip:
        found = made.op("Add", found, skip)
    end = _activated(made, node, found)
    return None if end is None else made.ending(node, end)


def _fused_gemm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    made = Made(graph)
    gemm = graph.changed(node, {}, without=_ACTIVATION)
    gemm.op_type, gemm.domain = "Gemm", ""
    end = _activated(made, node, made.add(gemm))
    return None if end is None else made.ending(node, end)


def _of_onnx(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """An operator that ONNX has by the same name and with the same meaning."""
    made = onnx.NodeProto()
    made.CopyFrom(node)
    made.domain = ""
    return [made]


def _scaled_integers(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """MatMulIntegerToFloat: sums of products of bytes, scaled, and a bias."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = [*node.input, *[""] * 7][:7]
    made = Made(graph)
    return made.ending(node, _scaled_product(made, (a, a_scale, a_zero), (b, b_scale, b_zero), bias))


def _dynamic_product(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """DynamicQuantizeMatMul: the first factor is quantised when it is known."""
    a, b, b_scale, b_zero, bias = [*node.input, *[""] * 5][:5]
    made = Made(graph)
    quantized = helper.make_node("DynamicQuantizeLinear", [a], [graph.fresh() for _ in range(3)])
    made.nodes.append(quantized)
    return made.ending(node, _scaled_product(made, tuple(quantized.output), (b, b_scale, b_zero), bias))


def _lstm_of_bytes(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """DynamicQuantizeLSTM, with its weights in floats again: what it rounds of inputs and states stays as it is."""
    given = [*node.input, *[""] * 12][:12]
    weights = []
    for name, scale, zero in ((given[1], *given[8:10]), (given[2], *given[10:12])):
        found = graph.values([name, scale, *[zero] * bool(zero)])
        if found is None:
            return None
        whole, units, *zeros = (each.astype(np.float32) for each in found)
        for each in zeros:
            whole = whole - each.reshape(len(whole), 1, -1)
        weights.append(graph.constant((whole * units.reshape(len(whole), 1, -1)).transpose(0, 2, 1)))
    made = graph.like(node, given[0], *weights, *given[3:8])
    made.domain, made.op_type = "", "LSTM"
    made.output[:] = node.output
    return [made]


def _scaled_product(made: Made, first: tuple[str, ...], second: tuple[str, ...], bias: str) -> str:
    """Each a tensor of bytes with its scale and its zero point, if there is one."""
    (a, a_scale, a_zero), (b, b_scale, b_zero) = first, second
    zeros = [a_zero, b_zero] if b_zero else [a_zero] if a_zero else []
    sums = made.op("MatMulInteger", a, b, *zeros)
    scale = made.op("Mul", a_scale, b_scale)
    found = made.op("Mul", made.op("Cast", sums, to=TensorProto.FLOAT), scale)
    return made.op("Add", found, bias) if bias else found


RULES: dict[str, Rule] = {
    "Gelu": _gelu,
    "BiasGelu": _gelu,
    "FastGelu": _fast_gelu,
    "QuickGelu": _quick_gelu,
    "SkipLayerNormalization": _skip_layer_norm,
    "SkipSimplifiedLayerNormalization": _skip_layer_norm,
    "EmbedLayerNormalization": _embed_layer_norm,
    "FusedMatMul": _fused_matmul,
    "TransposeMatMul": _fused_matmul,
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    "MatMulIntegerToFloat": _scaled_integers,
    "DynamicQuantizeMatMul": _dynamic_product,
    "DynamicQuantizeLSTM": _lstm_of_bytes,
    "MoE": onnx_experts.mixture,
    "Attention": onnx_attention.packed,
    "MultiHeadAttention": onnx_attention.multi_head,
    "GroupQueryAttention": onnx_attention.grouped,
    "RotaryEmbedding": onnx_attention.rotary,
    "QAttention": onnx_attention.quantized,
    "MatMulNBits": onnx_few_bits.matrix_product,
    "MatMulBnb4": onnx_few_bits.product_of_floats,
    "GatherBlockQuantized": onnx_few_bits.rows_of_table,
    "DequantizeLinear": _of_onnx,
    "QuantizeLinear": _of_onnx,
    "Trilu": _of_onnx,
    "Range": _of_onnx,
}
