"""Weights that a file dequantises: numbers of four bits, and scales for blocks of a weight, neither of which TVM
imports.

Quantisers of weights alone write them so (NNCF, ONNX Runtime's in its QDQ format, Olive). What multiplies bytes with
such weights is an integer product as any other (`lib.graph.rules.quantization`), once four bits are bytes. A matrix
that a few rows of floats are multiplied by stays as small as it is (`lib.graph.few_bits`); all others are widened here.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from lib.graph import few_bits
from lib.graph.few_bits import Matrix
from lib.models import onnx_few_bits
from lib.models.onnx_graph import Graph, Made, Nodes, attributes
from lib.tir.few_bits import Layout

_OPERATOR = "DequantizeLinear"
_SHORT = {
    TensorProto.INT4: np.int8,
    TensorProto.UINT4: np.uint8,
    TensorProto.INT2: np.int8,
    TensorProto.UINT2: np.uint8,
}
_KNOWN = ("int8", "uint8", "int16", "uint16", "int32")  # to TVM's importer
_MOVES = {"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice"}
_MULTIPLE = 16  # that blocks of the kernel are of

Producers = Mapping[str, onnx.NodeProto]


def in_bytes(proto: onnx.ModelProto) -> None:
    """Have constants of two and four bits that are dequantised be bytes, in place: they count the same."""
    readers = defaultdict[str, set[str]](set)
    for node in proto.graph.node:
        for name in node.input:
            readers[name].add(node.op_type)
    for tensor in proto.graph.initializer:
        if tensor.data_type in _SHORT and readers[tensor.name] == {_OPERATOR}:
            wide = numpy_helper.to_array(tensor).astype(_SHORT[tensor.data_type])
            tensor.CopyFrom(numpy_helper.from_array(wide, tensor.name))


def expand(proto: onnx.ModelProto, *, has_loops: bool = True, lanes: int = 8) -> bool:
    """Replace products of a few rows with such matrices, and what TVM does not dequantise, in place.

    Args:
        has_loops, lanes: See `Graph`.

    Returns:
        Whether there was anything.
    """
    if not any(node.op_type == _OPERATOR for node in proto.graph.node):
        return False
    made_by = {name: node for node in proto.graph.node for name in node.output}
    graph = Graph(proto, has_loops=has_loops, lanes=lanes)
    nodes, is_changed = list[onnx.NodeProto](), False
    for node in proto.graph.node:
        found = _product(node, graph, made_by) or _widened(node, graph)
        is_changed |= found is not None
        nodes += found or [node]
    if is_changed:
        graph.put(proto, nodes)
    return is_changed


@dataclass(frozen=True, slots=True)
class _Weight:
    """Constants, `(values - zeros) * scales`.

    Attributes:
        axis: Along which scales differ, if there are several.
        block: Numbers along that axis that have a scale together; 0: each has its own.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    axis: int
    block: int

    @classmethod
    def of(cls, node: onnx.NodeProto, graph: Graph) -> "_Weight | None":
        """What a node dequantises, if it is known."""
        given, found = attributes(node, axis=1, block_size=0), graph.values(node.input)
        if found is None:
            return None
        values, scales, zeros = [*found, np.zeros((), np.int8)][:3]
        axis = given["axis"] % values.ndim if values.ndim else 0
        if not given["block_size"] and scales.size > 1:  # NNCF writes (n, 1, 1), say
            if scales.size != values.shape[axis]:
                return None
            scales, zeros = scales.reshape(-1), zeros.reshape(-1)
        return cls(values, scales.astype(np.float32), zeros, axis, given["block_size"])

    def in_floats(self) -> np.ndarray:
        """Of the shape of the values, in float32."""
        around = self.values.astype(np.float32) - self._spread(self.zeros.astype(np.float32))
        return np.asarray(around * self._spread(self.scales), np.float32)

    def _spread(self, each: np.ndarray) -> np.ndarray:
        """Scales or zero points, so that they fit the values."""
        if each.size == 1:
            return each.reshape(())
        if self.block:
            return np.take(each, np.arange(self.values.shape[self.axis]) // self.block, self.axis)
        return each.reshape([-1 if n == self.axis else 1 for n in range(self.values.ndim)])


def _widened(node: onnx.NodeProto, graph: Graph) -> Nodes:
    weight = _Weight.of(node, graph) if node.op_type == _OPERATOR and not _is_known(node, graph) else None
    if weight is None:
        return None
    made = Made(graph)
    return made.ending(node, graph.constant(weight.in_floats()))


def _is_known(node: onnx.NodeProto, graph: Graph) -> bool:
    """Whether TVM's importer takes what a node dequantises; told without reading it."""
    scales = graph.shape(node.input[1]) or ()
    is_plain = not attributes(node, block_size=0)["block_size"] and (len(scales) < 2 or prod(scales) == 1)
    return is_plain and str(graph.dtype(node.input[0])) in _KNOWN


def _product(node: onnx.NodeProto, graph: Graph, made_by: Producers) -> Nodes:
    """Of a few rows of floats, `MatMul` or `Gemm`."""
    if node.op_type not in ("MatMul", "Gemm") or not graph.has_loops:
        return None
    given = attributes(node, alpha=1.0, beta=1.0, transA=0, transB=0)
    if given["transA"] or (given["alpha"], given["beta"]) != (1, 1):
        return None
    x, name, bias = [*node.input, ""][:3]
    shape = graph.shape(x)
    if shape is None or prod(shape[:-1]) > few_bits.MOST_ROWS or _is_of_bytes(x, made_by):
        return None
    weight, is_turned = _matrix_of(name, graph, made_by)
    deep = 1 if is_turned != bool(given["transB"]) else 0
    found = _in_blocks(weight, deep, prod(shape[:-1]), graph.lanes) if weight else None
    if found is None:
        return None
    made = Made(graph)
    product = onnx_few_bits.kept(made, x, shape, *found)
    return made.ending(node, made.op("Add", product, bias) if bias else product)


def _matrix_of(name: str, graph: Graph, made_by: Producers) -> tuple[_Weight | None, bool]:
    """What a tensor of rank two dequantises, and whether it is transposed then."""
    node = made_by.get(name)
    is_turned = node is not None and node.op_type == "Transpose"
    if node is not None and is_turned:
        if attributes(node, perm=[1, 0])["perm"] != [1, 0]:
            return None, is_turned
        node = made_by.get(node.input[0])
    if node is None or node.op_type != _OPERATOR or len(graph.shape(node.input[0]) or ()) != 2:
        return None, is_turned
    return _Weight.of(node, graph), is_turned


def _is_of_bytes(name: str, made_by: Producers) -> bool:
    """Whether a tensor was quantised: a product of it is one of integers."""
    while (node := made_by.get(name)) is not None and node.op_type in _MOVES:
        name = node.input[0]
    return node is not None and node.op_type == _OPERATOR


def _in_blocks(weight: _Weight, deep: int, rows: int, lanes: int) -> tuple[Layout, Matrix] | None:
    """As the kernel of few rows has it; None where it has no such blocks, or is not worth it.

    Args:
        deep: The axis along which products are summed.
        rows, lanes: See `Layout.on`.
    """
    values, scales, zeros = weight.values, weight.scales, weight.zeros
    if values.dtype not in (np.int8, np.uint8) or values.size < few_bits.WORTH:
        return None
    k, n = values.shape[deep], values.shape[1 - deep]
    if weight.block and (weight.axis != deep or weight.block % _MULTIPLE):
        return None
    if not weight.block and scales.size > 1 and weight.axis == deep:
        return None
    block = weight.block or -(-k // _MULTIPLE) * _MULTIPLE
    is_short = bool(_fits(values) and _fits(zeros))
    lowest = 0 if values.dtype == np.uint8 else -8 if is_short else -128
    layout = Layout.on(lanes, n, k, 4 if is_short else 8, block, rows)
    columns, of_blocks = (values if deep else values.T), (n, layout.blocks)
    numbers = np.zeros((n, layout.blocks * block), np.uint8)
    numbers[:, :k] = columns.astype(np.int16) - lowest
    each = [(of if deep else of.T) if of.ndim == 2 else of.reshape(-1, 1) for of in (scales, zeros)]
    matrix = Matrix(
        numbers.reshape(*of_blocks, block),
        np.broadcast_to(each[0], of_blocks),
        np.broadcast_to((each[1].astype(np.int16) - lowest).astype(np.uint8), of_blocks),
    )
    return layout, matrix


def _fits(values: np.ndarray) -> bool:
    """Whether bytes have no more than four bits."""
    least, most = (-8, 7) if values.dtype == np.int8 else (0, 15)
    return bool(values.min() >= least and values.max() <= most)
