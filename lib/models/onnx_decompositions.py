"""Operators of ONNX that TVM's importer lacks or gets wrong, and that ONNX defines by no function: as simpler ones.

Each rule takes a node and returns nodes that compute the same, or None where it does not apply; what is left then is
for the importer to refuse by name. Shapes are static, and what says how to compute is constant, by then: `onnx_folding`
ran before. All of this was seen on the backend tests of the onnx package with TVM 0.27.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from lib.models import onnx_deformed, onnx_quantized, onnx_recurrence, onnx_resize, onnx_signals
from lib.models.onnx_graph import Graph, Made, Nodes, attributes


def decompose(proto: onnx.ModelProto, *, has_loops: bool = True) -> bool:
    """Replace such nodes, in place; returns whether there may be any.

    Args:
        has_loops: See `Graph`.
    """
    if not any(map(_rule_of, proto.graph.node)):
        return False
    graph = Graph(proto, has_loops=has_loops)
    nodes: list[onnx.NodeProto] = []
    for node in proto.graph.node:
        rule = _rule_of(node)
        nodes += (rule(node, graph) if rule else None) or [node]
    graph.put(proto, nodes)
    return True


def _rule_of(node: onnx.NodeProto) -> "Rule | None":
    return _RULES_OF.get(node.domain, {}).get(node.op_type)


def _sum(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """One at a time: TVM stacks all of them, which its layouts cannot follow."""
    nodes, last = [], node.input[0]
    for name in node.input[1:]:
        nodes.append(graph.node("Add", last, name))
        last = nodes[-1].output[0]
    return graph.ending(node, [*nodes, graph.node("Identity", last)])


def _mean(node: onnx.NodeProto, graph: Graph) -> Nodes:
    nodes = list(_sum(node, graph) or [])
    total = graph.fresh()
    nodes[-1].output[0] = total
    count = graph.constant(np.array(len(node.input), graph.dtype(node.input[0])))
    return graph.ending(node, [*nodes, graph.node("Div", total, count)])


def _is_inf(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of one sign alone: TVM looks at the magnitude."""
    signs = attributes(node, detect_negative=1, detect_positive=1)
    if signs["detect_negative"] == signs["detect_positive"] == 1:
        return None
    sign = 1 if signs["detect_positive"] else -1
    value = np.inf * sign if signs["detect_positive"] or signs["detect_negative"] else np.nan
    bound = graph.constant(np.array(value, graph.dtype(node.input[0])))
    return graph.ending(node, [graph.node("Equal", node.input[0], bound)])


def _pow(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of two types: the result has that of the base. Of integers, in double precision, which TVM's power wants."""
    base, exponent = (graph.elem_type(name) for name in node.input)
    of_integers = np.dtype(graph.dtype(node.input[0])).kind in "iu"
    if not base or not exponent or (base == exponent and not of_integers):
        return None
    between = TensorProto.DOUBLE if of_integers or base == TensorProto.DOUBLE else TensorProto.FLOAT
    casts = [graph.node("Cast", name, to=between) for name in node.input]
    power = graph.node("Pow", *(cast.output[0] for cast in casts))
    return graph.ending(node, [*casts, power, graph.node("Cast", power.output[0], to=base)])


def _of_booleans(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The largest or smallest of them, as integers."""
    if graph.elem_type(node.input[0]) != TensorProto.BOOL:
        return None
    cast = graph.node("Cast", node.input[0], to=TensorProto.INT32)
    inner = graph.like(node, cast.output[0], *node.input[1:])
    return graph.ending(node, [cast, inner, graph.node("Cast", inner.output[0], to=TensorProto.BOOL)])


def _equal(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Truth values, which TVM 0.27 compiles no comparison of."""
    if graph.elem_type(node.input[0]) != TensorProto.BOOL:
        return None
    differs = graph.node("Xor", *node.input)
    return graph.ending(node, [differs, graph.node("Not", differs.output[0])])


def _axes(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """A single axis that is no list of one, which JAX's exporter writes and ONNX Runtime takes."""
    axes = graph.value(node.input[1]) if len(node.input) > 1 else None
    if axes is None or axes.ndim:
        return None
    return graph.ending(node, [graph.like(node, node.input[0], graph.constant(axes.reshape(1)))])


def _mod(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """With the sign of the divisor, of floats: TVM's is `x - floor(x / y) * y`, which makes NaN of infinities."""
    if np.dtype(graph.dtype(node.input[0])).kind != "f" or attributes(node, fmod=0)["fmod"]:
        return None
    zero = graph.constant(np.array(0, graph.dtype(node.input[0])))
    rest = graph.node("Mod", *node.input, fmod=1)
    signs = [graph.node("Less", name, zero) for name in (rest.output[0], node.input[1])]
    differ = graph.node("Xor", *(sign.output[0] for sign in signs))
    is_zero = graph.node("Equal", rest.output[0], zero)
    same = graph.node("Not", differ.output[0])
    kept = graph.node("Or", is_zero.output[0], same.output[0])
    other = graph.node("Add", rest.output[0], node.input[1])
    last = graph.node("Where", kept.output[0], rest.output[0], other.output[0])
    return graph.ending(node, [rest, *signs, differ, is_zero, same, kept, other, last])


def _bit_shift(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """By no less than there are bits, or by a negative number, all are shifted out: machines do other things then."""
    dtype = graph.dtype(node.input[0])
    if dtype is None or np.dtype(dtype).kind not in "iu":
        return None
    kind, bits = np.dtype(dtype), np.dtype(dtype).itemsize * 8
    nothing, most = graph.constant(np.array(0, kind)), graph.constant(np.array(bits - 1, kind))
    by = node.input[1]
    too_far = graph.node("Greater", by, most)
    nodes, outside = [too_far], too_far.output[0]
    if kind.kind == "i":
        nodes += [is_negative := graph.node("Less", by, nothing)]
        nodes += [either := graph.node("Or", outside, is_negative.output[0])]
        outside = either.output[0]
    within = graph.node("Where", outside, most, by)
    shifted = graph.like(node, node.input[0], within.output[0])
    nodes += [within, shifted]
    if kind.kind == "i" and attributes(node, direction=b"")["direction"] == b"RIGHT":
        return graph.ending(node, nodes)  # the sign's bit fills it
    return graph.ending(node, [*nodes, graph.node("Where", outside, nothing, shifted.output[0])])


def _dropout(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """At inference it keeps all, and says so."""
    if len(node.output) < 2 or graph.shape(node.input[0]) is None:
        return None
    mask = graph.constant(np.ones(graph.shape(node.input[0]), bool))
    kept = graph.node("Identity", node.input[0])
    kept.output[0] = node.output[0]
    return [kept, *graph.ending(node, [graph.node("Identity", mask)], output=1)]


def _split(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Into one part, which is all: of TVM's operator comes a tensor then, where its passes expect a tuple."""
    return graph.ending(node, [graph.node("Identity", node.input[0])]) if len(node.output) == 1 else None


def _compress(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """What a constant chooses."""
    chosen = graph.value(node.input[1])
    if chosen is None:
        return None
    axis = attributes(node, axis=None)["axis"]
    data, nodes = node.input[0], []
    if axis is None:
        flat = graph.node("Reshape", data, graph.constant(np.array([-1])))
        nodes, data = [flat], flat.output[0]
    indices = graph.constant(np.flatnonzero(chosen))
    return graph.ending(node, [*nodes, graph.node("Gather", data, indices, axis=axis or 0)])


def _eye_like(node: onnx.NodeProto, graph: Graph) -> Nodes:
    shape, given = graph.shape(node.input[0]), attributes(node, k=0, dtype=0)
    dtype = given["dtype"] or graph.elem_type(node.input[0])
    if shape is None or not dtype:
        return None
    rows, columns = shape
    eye = np.eye(rows, columns, k=given["k"]).astype(helper.tensor_dtype_to_np_dtype(dtype))
    return graph.ending(node, [graph.node("Identity", graph.constant(eye))])


def _conv_transpose(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """With the extents that come out given: what they leave is padding."""
    shape, kernel = graph.shape(node.input[0]), graph.shape(node.input[1])
    given = attributes(node, output_shape=None, strides=None, dilations=None, output_padding=None, auto_pad=b"NOTSET")
    if given["output_shape"] is None or shape is None or kernel is None:
        return None
    n = len(shape) - 2
    strides, dilations = given["strides"] or [1] * n, given["dilations"] or [1] * n
    more = given["output_padding"] or [0] * n
    wanted = given["output_shape"][-n:]
    full = [s * (i - 1) + o + (k - 1) * d + 1
            for s, i, o, k, d in zip(strides, shape[2:], more, kernel[2:], dilations, strict=True)]  # fmt: skip
    total = [a - b for a, b in zip(full, wanted, strict=True)]
    # Extents that the kernel does not reach are zeros after the last: output padding, as TVM has it, too.
    extra = [max(0, -t) for t in total]
    total = [max(0, t) for t in total]
    lower = given["auto_pad"] == b"SAME_UPPER"
    begin = [t // 2 if lower else t - t // 2 for t in total]
    changed = {"pads": begin + [t - b for t, b in zip(total, begin, strict=True)],
               "output_padding": [a + b for a, b in zip(more, extra, strict=True)]}  # fmt: skip
    return [graph.changed(node, changed, without=("output_shape", "auto_pad"))]


def _lp_normalization(node: onnx.NodeProto, graph: Graph) -> Nodes:
    given = attributes(node, axis=-1, p=2)
    kind = "ReduceL1" if given["p"] == 1 else "ReduceL2"
    norm = graph.reduce(kind, node.input[0], given["axis"])
    zero = graph.constant(np.array(0, graph.dtype(node.input[0])))
    one = graph.constant(np.array(1, graph.dtype(node.input[0])))
    vanishes = graph.node("Equal", norm.output[0], zero)
    divisor = graph.node("Where", vanishes.output[0], one, norm.output[0])
    return graph.ending(node, [norm, vanishes, divisor, graph.node("Div", node.input[0], divisor.output[0])])


def _tile(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Axis by axis: of a remainder on several axes at once LLVM 22 makes wrong code for AVX-512."""
    shape, repeats = graph.shape(node.input[0]), graph.value(node.input[1]) if len(node.input) == 2 else None
    if shape is None or repeats is None or (repeats > 1).sum() < 2:
        return None
    nodes, last = [], node.input[0]
    for axis, (extent, count) in enumerate(zip(shape, repeats.tolist(), strict=True)):
        if count != 1:
            indices = graph.constant(np.tile(np.arange(extent), count))
            nodes.append(graph.node("Gather", last, indices, axis=axis))
            last = nodes[-1].output[0]
    return graph.ending(node, nodes)


def _space_to_depth(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """With channels before the places within a block (`CRD`): TVM knows the other order."""
    shape, given = graph.shape(node.input[0]), attributes(node, mode=b"DCR")
    if given["mode"] != b"CRD" or shape is None:
        return None
    (n, c, h, w), b = shape, given["blocksize"]
    apart = graph.node("Reshape", node.input[0], graph.constant(np.array([n, c, h // b, b, w // b, b])))
    ordered = graph.node("Transpose", apart.output[0], perm=[0, 1, 3, 5, 2, 4])
    together = graph.node("Reshape", ordered.output[0], graph.constant(np.array([n, c * b * b, h // b, w // b])))
    return graph.ending(node, [apart, ordered, together])


def _one_hot(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Where places are those of an axis: TVM's takes a depth that is no list, and counts none from the end."""
    indices, depth, ends = node.input
    shape, count = graph.shape(indices), graph.value(depth)
    if shape is None or count is None:
        return None
    axis, n = attributes(node, axis=-1)["axis"] % (len(shape) + 1), int(count.reshape(-1)[0])
    made = Made(graph)
    places = made.unsqueezed(made.from_start(made.op("Cast", indices, to=onnx.TensorProto.INT64), n), axis)
    around = [-1 if a == axis else 1 for a in range(len(shape) + 1)]
    is_there = made.op("Equal", places, graph.constant(np.arange(n).reshape(around)))
    off, on = (made.part(ends, 0, end, end + 1) for end in range(2))
    return made.ending(node, made.op("Where", is_there, on, off))


def _resize(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Axis by axis, as a sum of what constant indices gather; TVM's own only where it is right. It knows those of
    version 11 and later."""
    today = onnx_resize.of_today(node, graph)
    shape = graph.shape(node.input[0])
    plan = onnx_resize.plan(today or node, graph) if shape is not None else None
    if plan is None:
        return None if today is None else graph.ending(node, [today])
    nodes: list[onnx.NodeProto] = []
    last, dtype = node.input[0], graph.dtype(node.input[0])
    if plan.dtype_between != dtype:
        nodes.append(graph.node("Cast", last, to=helper.np_dtype_to_tensor_dtype(np.dtype(plan.dtype_between))))
        last = nodes[-1].output[0]
    for axis, taps in plan.axes:
        made = list(_along(last, axis, taps, len(shape or ()), plan.dtype_between, graph))
        nodes += made
        last = made[-1].output[0]
    if plan.dtype_between != dtype:
        nodes.append(graph.node("Cast", last, to=helper.np_dtype_to_tensor_dtype(np.dtype(dtype))))
    if not nodes:
        nodes = [graph.node("Identity", last)]
    return graph.ending(node, nodes)


def _slice(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Before version 10 attributes say of what; TVM knows inputs."""
    given = attributes(node, starts=None, ends=None, axes=None)
    if given["starts"] is None:
        return None
    axes = given["axes"] or range(len(given["starts"]))
    bounds = [graph.constant(np.array(each, np.int64)) for each in (given["starts"], given["ends"], list(axes))]
    return graph.ending(node, [graph.node("Slice", node.input[0], *bounds)])


def _reshape(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Before version 5 an attribute says to what."""
    shape = attributes(node, shape=None)["shape"]
    if shape is None:
        return None
    return graph.ending(node, [graph.node("Reshape", node.input[0], graph.constant(np.array(shape, np.int64)))])


def _col2im(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Axis by axis, as a sum of what each tap of the windows adds to a pixel."""
    shape, *sizes = graph.shape(node.input[0]), *map(graph.value, node.input[1:3])
    image, block = ([] if size is None else [int(n) for n in size] for size in sizes)
    if shape is None or not image or not block:
        return None
    given, n = attributes(node, strides=None, dilations=None, pads=None), len(image)
    strides, dilations, pads = given["strides"] or [1] * n, given["dilations"] or [1] * n, given["pads"] or [0] * 2 * n
    counts = [(extent + pads[a] + pads[n + a] - dilations[a] * (block[a] - 1) - 1) // strides[a] + 1
              for a, extent in enumerate(image)]  # fmt: skip
    batch, channels = shape[0], shape[1] // math.prod(block)
    joined = [taps * count for taps, count in zip(block, counts, strict=True)]
    apart = graph.node("Reshape", node.input[0], graph.constant(np.array([batch, channels, *block, *counts])))
    beside = graph.node("Transpose", apart.output[0], perm=[0, 1, *(2 + a + b for a in range(n) for b in (0, n))])
    nodes = [
        apart,
        beside,
        graph.node("Reshape", beside.output[0], graph.constant(np.array([batch, channels, *joined]))),
    ]
    for a, extent in enumerate(image):
        taps = onnx_resize.windows(extent, counts[a], block[a], strides[a], dilations[a], pads[a])
        nodes += _along(nodes[-1].output[0], 2 + a, taps, 2 + n, graph.dtype(node.input[0]), graph)
    return graph.ending(node, nodes)


def _along(
    name: str, axis: int, taps: onnx_resize.Taps, ndim: int, dtype: Any, graph: Graph
) -> Iterator[onnx.NodeProto]:
    around = [-1 if n == axis else 1 for n in range(ndim)]
    total = ""
    for indices, weights in zip(taps.indices, taps.weights, strict=True):
        found = graph.node("Gather", name, graph.constant(indices), axis=axis)
        yield found
        term = found.output[0]
        if not (weights == 1).all():
            scaled = graph.node("Mul", term, graph.constant(weights.astype(dtype).reshape(around)))
            yield scaled
            term = scaled.output[0]
        if total:
            added = graph.node("Add", total, term)
            yield added
            term = added.output[0]
        total = term
    if taps.constant.any():
        yield graph.node("Add", total, graph.constant(taps.constant.astype(dtype).reshape(around)))


def _roi_align(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Of regions in units of the image that is read: TVM takes half a pixel off before it scales, ONNX afterwards."""
    given = attributes(node, coordinate_transformation_mode=b"half_pixel", spatial_scale=1.0)
    if graph.version < 16 or given["coordinate_transformation_mode"] != b"half_pixel" or given["spatial_scale"] == 1:
        return None
    scale = graph.constant(np.array(given["spatial_scale"], graph.dtype(node.input[1])))
    regions = graph.node("Mul", node.input[1], scale)
    aligned = graph.like(node, node.input[0], regions.output[0], node.input[2])
    return graph.ending(node, [regions, graph.changed(aligned, {"spatial_scale": 1.0})])


Rule = Callable[[onnx.NodeProto, Graph], Nodes]

RULES: dict[str, Rule] = {
    "Sum": _sum,
    "Mean": _mean,
    "IsInf": _is_inf,
    "Pow": _pow,
    "ReduceMax": _of_booleans,
    "ReduceMin": _of_booleans,
    "Equal": _equal,
    "Squeeze": _axes,
    "Unsqueeze": _axes,
    "BitShift": _bit_shift,
    "Mod": _mod,
    "Dropout": _dropout,
    "Compress": _compress,
    "Split": _split,
    "EyeLike": _eye_like,
    "ConvTranspose": _conv_transpose,
    "LpNormalization": _lp_normalization,
    "Tile": _tile,
    "SpaceToDepth": _space_to_depth,
    "DFT": onnx_signals.dft,
    "OneHot": _one_hot,
    "STFT": onnx_signals.stft,
    "ReverseSequence": onnx_signals.reverse_sequence,
    "TensorScatter": onnx_signals.tensor_scatter,
    "DeformConv": onnx_deformed.deform_conv,
    "Reshape": _reshape,
    "RoiAlign": _roi_align,
    "Resize": _resize,
    "Slice": _slice,
    "Upsample": _resize,
    "Col2Im": _col2im,
    "LSTM": onnx_recurrence.lstm,
    "GRU": onnx_recurrence.gru,
    "RNN": onnx_recurrence.rnn,
    "QLinearConv": onnx_quantized.qlinear_conv,
    "QLinearMatMul": onnx_quantized.qlinear_matmul,
    "ConvInteger": onnx_quantized.of_integers,
    "MatMulInteger": onnx_quantized.of_integers,
}
_OF_ONNX_RUNTIME: dict[str, Rule] = {
    "QGemm": onnx_quantized.q_gemm,
    "QLinearAdd": onnx_quantized.qlinear_binary,
    "QLinearMul": onnx_quantized.qlinear_binary,
    "QLinearGlobalAveragePool": onnx_quantized.qlinear_global_average_pool,
    "QLinearAveragePool": onnx_quantized.qlinear_unary,
    "QLinearConcat": onnx_quantized.qlinear_concat,
    "QLinearLeakyRelu": onnx_quantized.qlinear_unary,
    "QLinearSigmoid": onnx_quantized.qlinear_unary,
    "QLinearSoftmax": onnx_quantized.qlinear_unary,
    "QLinearWhere": onnx_quantized.qlinear_where,
}
_RULES_OF = {"": RULES, "ai.onnx": RULES, "com.microsoft": _OF_ONNX_RUNTIME}  # by domain
