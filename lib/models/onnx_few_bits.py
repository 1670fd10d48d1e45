"""Matrices and tables of few bits, as ONNX Runtime's operators have them: `MatMulNBits`, `MatMulBnb4` and
`GatherBlockQuantized`.

A matrix that few rows are multiplied by stays as small as it is (`lib.graph.few_bits`), and so does one of more rows,
if these may be rounded to bytes; else it is widened once, when the file is read. Rows that are looked up in a table are
widened when they are.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tvm import relax

from lib.graph import few_bits
from lib.graph.few_bits import Matrix
from lib.graph.rewrite import value_of
from lib.models.onnx_converter import Converter
from lib.models.onnx_float32 import ROUNDED_TO_BYTES
from lib.models.onnx_graph import Graph, Made, Nodes, attributes
from lib.tir import few_bits_rows
from lib.tir.few_bits import BITS, Layout

KEPT, HALVES = "FewBits", "FewHalves"  # nodes that `CONVERTERS` takes
# What four bits stand for, of the largest magnitude of a block: Dettmers et al., "QLoRA" (2023), appendix E, and
# bitsandbytes' floats of four bits.
_NORMAL = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
           -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
           0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
           1.0)  # fmt: skip
_FLOATS = (0.0, 5.208333333e-03, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_TABLES = ((*_FLOATS, *(-value for value in _FLOATS)), _NORMAL)  # by the attribute `quant_type`


def matrix_product(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`MatMulNBits`."""
    given = attributes(node, K=0, N=0, bits=4, block_size=32, weight_prepacked=0, accuracy_level=0)
    x, packed, scales, zeros, order, bias = [*node.input, *[""] * 6][:6]
    shape, values = graph.shape(x), graph.values([packed, scales, *([zeros] if zeros else [])])
    if shape is None or values is None or order or given["weight_prepacked"] or given["bits"] not in (2, 4, 8):
        return None
    rows = prod(shape[:-1])
    layout = Layout.on(graph.lanes, given["N"], given["K"], given["bits"], given["block_size"], rows)
    matrix = _matrix(layout, *values)
    made = Made(graph)
    is_known = graph.has_loops and matrix.zeros.dtype == np.uint8
    is_rounded = given["accuracy_level"] == ROUNDED_TO_BYTES and few_bits_rows.fits(layout)
    instruction = graph.instruction if is_rounded and rows > few_bits.MOST_ROWS else ""
    if is_known and ((rows <= few_bits.MOST_ROWS and layout.bits in BITS) or instruction):
        found = kept(made, x, shape, layout, matrix, instruction)
    else:
        found = made.op("MatMul", x, graph.constant(_widened(matrix, layout.k)))
    return made.ending(node, made.op("Add", found, bias) if bias else found)


def kept(made: Made, x: str, shape: Sequence[int], layout: Layout, matrix: Matrix, instruction: str = "") -> str:
    """A product of x, of such a shape, with a matrix that stays as it is; see `few_bits.emit`."""
    constants = map(made.graph.constant, (matrix.numbers, matrix.scales, matrix.zeros))
    node = helper.make_node(KEPT, [x, *constants], [""], layout=layout.text, instruction=instruction)
    made.graph.tell(found := made.add(node), TensorProto.FLOAT, (*shape[:-1], layout.n))
    return found


def _widened(matrix: Matrix, k: int) -> np.ndarray:
    """(k, n), float32."""
    around = matrix.numbers.astype(np.float32) - matrix.zeros.astype(np.float32)[..., None]
    return np.ascontiguousarray((around * matrix.scales[..., None]).reshape(len(around), -1)[:, :k].T)


def _matrix(layout: Layout, packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> Matrix:
    """With zero points of floats, where a file has such."""
    numbers = _unpacked(packed.reshape(layout.n, layout.blocks, -1), layout.bits)
    of_blocks = (layout.n, layout.blocks)
    around: np.ndarray
    if zeros is None:
        around = np.full(of_blocks, 1 << (layout.bits - 1), np.uint8)
    elif zeros.dtype == np.uint8:
        around = _unpacked(zeros.reshape(layout.n, -1), layout.bits)[:, : layout.blocks]
    else:
        around = zeros.reshape(of_blocks).astype(np.float32)
    return Matrix(numbers[..., : layout.block], scales.reshape(of_blocks).astype(np.float32), around)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """Numbers along the last axis, of which a byte has several; the first in its lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    apart = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(apart.reshape(*packed.shape[:-1], -1))


def product_of_halves(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """A few rows times a matrix of a file in float16 or bf16, `MatMul` or `Gemm`: it is read as it was, and nothing is
    lost."""
    given = attributes(node, alpha=1.0, beta=1.0, transA=0, transB=0)
    x, name, bias = [*node.input, ""][:3]
    shape, matrix = graph.shape(x), graph.shape(name)
    if not graph.has_loops or given["transA"] or (given["alpha"], given["beta"]) != (1, 1):
        return None
    if shape is None or matrix is None or len(matrix) != 2:
        return None
    value = graph.value(name)
    if value is None or graph.dtype(name) != np.float32:
        return None
    short = few_bits.in_halves(value, prod(shape[:-1]))
    if short is None:
        return None
    made = Made(graph)
    short = np.ascontiguousarray(short.T) if given["transB"] else short
    found = made.add(helper.make_node(HALVES, [x, graph.constant(short)], [""], lanes=graph.lanes))
    graph.tell(found, TensorProto.FLOAT, (*shape[:-1], short.shape[1]))
    return made.ending(node, made.op("Add", found, bias) if bias else found)


def product_of_floats(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`MatMulBnb4`: four bits stand for floats of a table; the first of a byte in its highest bits."""
    given = attributes(node, K=0, N=0, block_size=64, quant_type=1, transB=1, training_mode=0)
    packed, scales = (graph.value(name) for name in node.input[1:3])
    n, k = given["N"], given["K"]
    if packed is None or scales is None or not given["transB"]:
        return None
    low_first = _unpacked(packed.reshape(-1), 4).reshape(-1, 2)
    numbers = low_first[:, ::-1].reshape(-1)[: n * k]
    table = np.array(_TABLES[given["quant_type"]], np.float32)
    spread = np.repeat(scales.reshape(-1).astype(np.float32), given["block_size"])[: n * k]
    made = Made(graph)
    matrix = np.ascontiguousarray((table[numbers] * spread).reshape(n, k).T)
    return made.ending(node, made.op("MatMul", node.input[0], graph.constant(matrix)))


def rows_of_table(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`GatherBlockQuantized` of rows of bytes, which have one number or more each, quantised along the last axis."""
    given = attributes(node, bits=4, block_size=128, gather_axis=0, quantize_axis=1)
    table, at, scales, zeros = [*node.input, ""][:4]
    data, shape, scale = graph.value(table), graph.shape(at), graph.shape(scales)
    if data is None or shape is None or scale is None or data.ndim != 2 or given["gather_axis"] != 0:
        return None
    is_packed = data.dtype == np.uint8
    bits = given["bits"] if is_packed else 8  # numbers of four bits are known to NumPy as bytes
    if given["quantize_axis"] not in (1, -1) or 8 % bits:
        return None
    made = Made(graph)
    per_byte = 8 // bits
    numbers = data if is_packed else data.astype(np.int8)
    rows = made.op("Cast", made.op("Gather", graph.constant(numbers), at, axis=0), to=TensorProto.FLOAT)
    width, blocks = data.shape[1] * per_byte, scale[1]
    if per_byte > 1:
        rows = _apart(made, rows, bits, (*shape, width))
    if zeros:
        around = graph.value(zeros)
        if around is None:
            return None
        known = _unpacked(around, bits)[:, :blocks] if is_packed else around.astype(np.int8)
        zero = made.op("Cast", made.op("Gather", graph.constant(known), at, axis=0), to=TensorProto.FLOAT)
        zero = made.op("Reshape", zero, made.axes(*shape, blocks, 1))
    else:
        zero = made.number(1 << (bits - 1) if is_packed else 0)
    in_blocks = made.op("Reshape", rows, made.axes(*shape, blocks, width // blocks))
    scaled = made.op("Reshape", made.op("Gather", scales, at, axis=0), made.axes(*shape, blocks, 1))
    found = made.op("Mul", made.op("Sub", in_blocks, zero), scaled)
    return made.ending(node, made.op("Reshape", found, made.axes(*shape, width)))


def _apart(made: Made, rows: str, bits: int, shape: Sequence[int]) -> str:
    """Bytes as floats, each as several numbers, the first of which is in its lowest bits."""
    parts, rest = list[str](), rows
    for _ in range(8 // bits - 1):
        above = made.op("Floor", made.op("Mul", rest, made.number(2.0**-bits)))
        parts.append(made.op("Sub", rest, made.op("Mul", above, made.number(2.0**bits))))
        rest = above
    both = made.op("Concat", *(made.unsqueezed(part, len(shape)) for part in (*parts, rest)), axis=len(shape))
    return made.op("Reshape", both, made.axes(*shape))


class _FewBits(Converter):
    """Of a product that stays one."""

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        numbers, scales, zeros = (value_of(inputs[n]) for n in (1, 2, 3))
        layout, instruction = (given[key].decode() for key in ("layout", "instruction"))
        return few_bits.emit(builder, inputs[0], Layout.parsed(layout), Matrix(numbers, scales, zeros), instruction)


class _FewHalves(Converter):
    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        return few_bits.emit_halves(builder, inputs[0], value_of(inputs[1]), given["lanes"])


CONVERTERS = {KEPT: _FewBits, HALVES: _FewHalves}
