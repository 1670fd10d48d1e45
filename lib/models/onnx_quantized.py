"""Operators of ONNX, and of ONNX Runtime, on bytes: as DequantizeLinear, the operator in floats, QuantizeLinear (QDQ).

`lib.graph.rules.quantization` makes integers of these again, all in one way. What is exact in integers stays so:
`ConvInteger` and `MatMulInteger` are dequantised with a scale of one, and their sums cast back, which those rules undo.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

from lib.graph import byte_units
from lib.models.onnx_converter import Converter
from lib.models.onnx_graph import Graph, Nodes, attributes

_EXACT = "is_exact"  # attribute of casts of integers


def qlinear_conv(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The scale of the bias is that of the products, which must be constant."""
    data, weight, result = node.input[:3], node.input[3:6], node.input[6:8]
    scales = [graph.value(data[1]), graph.value(weight[1])]
    bias = [name for name in node.input[8:9] if name]
    nodes = [_dequantized(graph, data), _dequantized(graph, weight, axis=0)]
    if bias:
        if scales[0] is None or scales[1] is None:
            return None
        scale = np.asarray(scales[0].reshape(()) * scales[1], np.float32)
        zero = np.zeros(scale.shape, np.int32)
        nodes.append(_dequantized(graph, [bias[0], graph.constant(scale), graph.constant(zero)], axis=0))
    convolution = _as(graph.like(node, *(each.output[0] for each in nodes)), "Conv")
    return graph.ending(node, [*nodes, convolution, _quantized(graph, convolution, *result)])


def qlinear_matmul(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of matrices with scales for each column, or for all."""
    first, second, result = node.input[:3], node.input[3:6], node.input[6:8]
    nodes = [_dequantized(graph, first), _dequantized(graph, second, axis=-1)]
    product = graph.node("MatMul", *(each.output[0] for each in nodes))
    return graph.ending(node, [*nodes, product, _quantized(graph, product, *result)])


def q_gemm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ONNX Runtime's; the bias is in units of the products. Without a scale for its result that is in floats."""
    names = [*node.input, *[""] * (9 - len(node.input))]
    given = attributes(node, alpha=1.0, transA=0, transB=0)
    scales = [graph.value(names[1]), graph.value(names[4])]
    if scales[0] is None or scales[1] is None:
        return None
    nodes = [_dequantized(graph, names[:3]), _dequantized(graph, names[3:6], axis=0 if given["transB"] else 1)]
    if names[6]:
        scale = np.asarray(given["alpha"] * scales[0].reshape(()) * scales[1], np.float32)
        zero = np.zeros(scale.shape, np.int32)
        nodes.append(_dequantized(graph, [names[6], graph.constant(scale), graph.constant(zero)], axis=0))
    gemm = graph.node("Gemm", *(each.output[0] for each in nodes), **given)
    ended = [*nodes, gemm]
    return graph.ending(node, [*ended, _quantized(graph, gemm, *names[7:9])] if names[7] else ended)


def qlinear_binary(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ONNX Runtime's sum or product of two tensors."""
    names = [*node.input, *[""] * (8 - len(node.input))]
    nodes = [_dequantized(graph, names[:3]), _dequantized(graph, names[3:6])]
    result = graph.node(node.op_type.removeprefix("QLinear"), *(each.output[0] for each in nodes))
    return graph.ending(node, [*nodes, result, _quantized(graph, result, *names[6:8])])


def qlinear_global_average_pool(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ONNX Runtime's, of channels in front."""
    if attributes(node, channels_last=0)["channels_last"]:
        return None
    data = _dequantized(graph, node.input[:3])
    pooled = graph.node("GlobalAveragePool", data.output[0])
    return graph.ending(node, [data, pooled, _quantized(graph, pooled, *node.input[3:5])])


def qlinear_unary(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ONNX Runtime's sigmoid, LeakyRelu, softmax over one axis, and average pooling of channels in front."""
    operator, given = node.op_type.removeprefix("QLinear"), attributes(node)
    if given.pop("channels_last", 0) or given.pop("opset", 13) < 13:
        return None  # before, a softmax was over all axes from one on
    data, result = node.input[:3], node.input[3:5]
    nodes = [_dequantized(graph, data)]
    nodes.append(graph.node(operator, nodes[0].output[0], **given))
    return graph.ending(node, [*nodes, _quantized(graph, nodes[-1], *result)])


def qlinear_concat(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ONNX Runtime's, of tensors that each have a scale of their own."""
    names = [*node.input, ""]
    parts = [_dequantized(graph, names[n : n + 3]) for n in range(2, len(node.input), 3)]
    joined = graph.node("Concat", *(part.output[0] for part in parts), axis=attributes(node)["axis"])
    return graph.ending(node, [*parts, joined, _quantized(graph, joined, *node.input[:2])])


def qlinear_where(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ONNX Runtime's choice between two tensors."""
    choices = [_dequantized(graph, node.input[n : n + 3]) for n in (1, 4)]
    chosen = graph.node("Where", node.input[0], *(each.output[0] for each in choices))
    return graph.ending(node, [*choices, chosen, _quantized(graph, chosen, *node.input[7:9])])


def of_integers(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """ConvInteger and MatMulInteger, with zero points or without; weights may have one for each output channel."""
    names = [*node.input, *[""] * (4 - len(node.input))]
    kind = node.op_type.removesuffix("Integer")
    nodes = []
    for data, zero, axis in ((names[0], names[2], None), (names[1], names[3], 0 if kind == "Conv" else -1)):
        value = graph.value(zero) if zero else np.zeros((), graph.dtype(data))
        one = np.array(1.0, np.float32)
        if value is not None and value.size > 1:
            if axis is None or value.ndim > 1:
                return None
            one = np.ones(value.size, np.float32)
        elif value is not None:
            zero = graph.constant(value.reshape(()))
        nodes.append(_dequantized(graph, [data, graph.constant(one), zero], axis))
    result = _as(graph.like(node, *(each.output[0] for each in nodes)), "Conv" if kind == "Conv" else "MatMul")
    cast = graph.node("Cast", result.output[0], to=TensorProto.INT32, **{_EXACT: 1})
    return graph.ending(node, [*nodes, result, cast])


def _as(node: onnx.NodeProto, operator: str) -> onnx.NodeProto:
    node.op_type, node.domain = operator, ""
    return node


def _dequantized(graph: Graph, names: Sequence[str], axis: int | None = None) -> onnx.NodeProto:
    """Of bytes, their scale, and their zero point, if there is one."""
    data, scale, zero = [*names, ""][:3]
    value = graph.value(scale)
    along = {} if axis is None or value is None or value.size == 1 else {"axis": axis}
    return helper.make_node("DequantizeLinear", [n for n in (data, scale, zero) if n], [graph.fresh()], **along)


def _quantized(graph: Graph, made: onnx.NodeProto, scale: str, zero: str = "") -> onnx.NodeProto:
    return graph.node("QuantizeLinear", *(n for n in (made.output[0], scale, zero) if n))


class _Cast:
    """Of sums that are integers there is nothing to be rounded, and nothing too large: TVM's cast sees to that."""

    @classmethod
    def get_converter(cls, opset: int) -> Callable[..., relax.Expr]:
        """See TVM's `OnnxOpConverter`."""
        usual: Callable[..., relax.Expr] = onnx_frontend.Cast.get_converter(opset)

        def convert(
            builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], params: object
        ) -> relax.Expr:
            if given.get(_EXACT):
                return relax.op.astype(inputs[0], "int32")
            return usual(builder, inputs, given, params)

        return convert


class _DynamicQuantizeLinear(Converter):
    """The bytes, their scale and their zero point, scalars both."""

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], _given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        found = byte_units.emit(builder, inputs[0])
        scalars = [builder.emit(relax.op.reshape(each, ())) for each in (found.scale, found.zero)]
        return relax.Tuple([found.values, *scalars])


CONVERTERS = {"Cast": _Cast, "DynamicQuantizeLinear": _DynamicQuantizeLinear}
