"""Floats of eight bits in ONNX files: tensors of them are float32 here, rounded as the file has it.

Quantisers for GPUs write such files (QDQ, or casts). CPUs multiply none, and halves are computed in float32 as well;
but of eight bits the rounding is what a file means. TVM 0.27 takes no zero points of these types, and its own cast to
them is wrong for numbers below the smallest normal one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from tvm import relax, te, tirx

from lib.models.onnx_converter import Converter
from lib.models.onnx_graph import Graph, Made, Nodes, attributes

_ROUND = "RoundToFloat8"  # an operator of this project
_EXPONENT = 0x7F800000  # its bits in float32


@dataclass(frozen=True, slots=True)
class _Kind:
    """A type of floats of eight bits."""

    bits: int  # of the mantissa, without the first
    least: int  # exponent of the smallest normal number
    most: float  # the largest number


_KINDS = {
    TensorProto.FLOAT8E4M3FN: _Kind(3, -6, 448.0),
    TensorProto.FLOAT8E4M3FNUZ: _Kind(3, -7, 240.0),
    TensorProto.FLOAT8E5M2: _Kind(2, -14, 57344.0),
    TensorProto.FLOAT8E5M2FNUZ: _Kind(2, -15, 57344.0),
}


def expand(proto: onnx.ModelProto) -> bool:
    """Have all tensors of such floats within a model be float32, in place; returns whether there were any.

    What asks for something that is not known here stays, and so does all else then.
    """
    if not any(each.data_type in _KINDS for each in proto.graph.initializer) and not any(map(_casts, proto.graph.node)):
        return False
    graph, nodes = Graph(proto), list[onnx.NodeProto]()
    for node in proto.graph.node:
        found = _replaced(node, graph)
        if found is None:
            return False
        nodes += found
    graph.put(proto, nodes)
    for tensor in proto.graph.initializer:
        if tensor.data_type in _KINDS:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    return True


def _casts(node: onnx.NodeProto) -> bool:
    """Whether a node says by an attribute that it makes such numbers."""
    return any(each.name in ("to", "output_dtype") and each.i in _KINDS for each in node.attribute)


def _replaced(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """A node in float32; None if that is not known."""
    given = attributes(node, axis=1, block_size=0, saturate=1)
    made = Made(graph)
    if node.op_type in ("Cast", "QuantizeLinear") and (kind := graph.elem_type(node.output[0])) in _KINDS:
        if not given["saturate"] or given["block_size"]:
            return None
        x = made.op("Cast", node.input[0], to=TensorProto.FLOAT)
        if node.op_type == "QuantizeLinear":
            x = made.op("Div", x, _along(node.input[1], node.input[0], given["axis"], graph, made))
        graph.tell(node.output[0], TensorProto.FLOAT, graph.shape(node.output[0]) or ())
        made.nodes.append(onnx.helper.make_node(_ROUND, [x], list(node.output), kind=kind))
        return made.nodes
    if node.op_type == "DequantizeLinear" and graph.elem_type(node.input[0]) in _KINDS:
        if given["block_size"]:
            return None
        scale = _along(node.input[1], node.input[0], given["axis"], graph, made)
        return made.ending(node, made.op("Mul", node.input[0], scale))
    return [node]


def _along(scale: str, of: str, axis: int, graph: Graph, made: Made) -> str:
    """A scale for each element along an axis of a tensor, or for all, as it is multiplied with."""
    ndim, count = len(graph.shape(of) or ()), graph.shape(scale)
    if not count or not ndim:
        return scale
    return made.op("Reshape", scale, made.axes(*(-1 if n == axis % ndim else 1 for n in range(ndim))))


class _Round(Converter):
    """Numbers in float32 as the nearest of a type, the even one of two that are as near; at most its largest."""

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        kind = _KINDS[given["kind"]]

        def rounded(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *at: _nearest(x(*at), kind), "rounded")

        return builder.emit(builder.call_te(rounded, inputs[0], primfunc_name_hint="round_to_float8"))


def _nearest(x: tirx.Expr, kind: _Kind) -> tirx.Expr:
    """In steps that the exponent of a number decides; those of the smallest normal one hold below it as well."""
    most, least = (tirx.const(end, "float32") for end in (kind.most, 2.0**kind.least))
    x = tirx.max(tirx.min(x, most), -most)
    power = tirx.reinterpret("float32", tirx.reinterpret("int32", x) & tirx.const(_EXPONENT, "int32"))
    step = tirx.max(power, least) * tirx.const(2.0**-kind.bits, "float32")
    return tirx.nearbyint(x / step) * step


CONVERTERS = {_ROUND: _Round}
