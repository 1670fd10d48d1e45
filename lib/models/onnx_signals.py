"""Operators on sequences that TVM's importer lacks: spectra of signals and of their windows, sequences turned round,
and caches that the next steps are written to."""

import numpy as np
import onnx

from lib.models import onnx_recurrence
from lib.models.onnx_graph import Graph, Made, Nodes, attributes

_MOST = 4096  # elements of a window: a matrix of 128 MiB, see `lib.models.torch_fft`


def dft(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Products with constant cosines and sines; half a spectrum becomes the real signal that it is of."""
    shape = graph.shape(node.input[0])
    given = attributes(node, axis=None, inverse=0, onesided=0)
    lengths, axes = [graph.value(name) if name else None for name in [*node.input, "", ""][1:3]]
    if shape is None or any(name and graph.value(name) is None for name in node.input[1:]):
        return None
    axis = (
        given["axis"] if given["axis"] is not None else int(axes) if axes is not None else (1, -2)[graph.version >= 20]
    )
    axis, parts, inverse = axis % len(shape), shape[-1], bool(given["inverse"])
    n, is_half = shape[axis], bool(given["onesided"])
    length = int(lengths) if lengths is not None else 2 * (n - 1) if is_half and inverse else n
    bins = length // 2 + 1 if is_half else length
    rows, columns = (min(n, bins), length) if inverse else (min(n, length), bins)
    angles = 2 * np.pi * np.outer(np.arange(rows), np.arange(columns)) / length * (1 if inverse else -1)
    scale = np.full((rows, 1), 1 / length if inverse else 1.0)
    if is_half and inverse:  # each but the first, and the last of an even number, stands for its conjugate as well
        scale[1 : (length + 1) // 2] *= 2
    dtype = graph.dtype(node.input[0])
    cos, sin = (graph.constant((scale * of(angles)).astype(dtype)) for of in (np.cos, np.sin))
    order = [a for a in range(len(shape) - 1) if a != axis] + [axis]
    at = onnx_recurrence.Steps(graph)
    read = [at("Transpose", at.gather(node.input[0], part, len(shape) - 1), perm=order) for part in range(parts)]
    read = [at.rows(name, 0, rows, axis=len(order) - 1) if rows < n else name for name in read]
    made = [at("MatMul", read[0], cos)] if is_half and inverse else [at("MatMul", read[0], of) for of in (cos, sin)]
    if parts == 2:
        made[0] = at("Sub", made[0], at("MatMul", read[1], sin))
        made[1:] = [at("Add", imaginary, at("MatMul", read[1], cos)) for imaginary in made[1:]]
    back = [order.index(a) for a in range(len(order))]
    at.stacked([at("Transpose", name, perm=back) for name in made], len(shape) - 1)
    return graph.ending(node, at.nodes)


def stft(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """Windows of a real signal, each times the waves of its frequencies: a product of matrices."""
    signal, step_name, window, length_name = (*node.input, "", "")[:4]
    shape, of_window, step, length = (
        graph.shape(signal),
        graph.shape(window),
        *map(graph.value, (step_name, length_name)),
    )
    if shape is None or step is None or (length is None and of_window is None) or shape[2:] not in ((), (1,)):
        return None
    count = int(length) if length is not None else of_window[0]  # type: ignore[index]
    if (window and of_window != (count,)) or not 0 < count <= min(_MOST, shape[1]):
        return None
    first = np.arange(0, shape[1] - count + 1, int(step))
    bins = count // 2 + 1 if attributes(node, onesided=1)["onesided"] else count
    angles = 2 * np.pi * (np.outer(np.arange(count), np.arange(bins)) % count) / count
    waves = np.stack([np.cos(angles), -np.sin(angles)], -1).reshape(count, 2 * bins)
    made = Made(graph)
    flat = made.op("Reshape", signal, made.axes(*shape[:2]))
    parts = made.op("Gather", flat, graph.constant(first[:, None] + np.arange(count)), axis=1)
    if (constant := graph.value(window)) is not None:
        waves *= constant[:, None]
    elif window:
        parts = made.op("Mul", parts, window)
    spectra = made.op("MatMul", parts, graph.constant(waves.astype(graph.dtype(signal))))
    made.op("Reshape", spectra, made.axes(shape[0], len(first), bins, 2))
    return graph.ending(node, made.nodes)


def reverse_sequence(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The first elements of each sequence from the last to the first, and the others as they are."""
    data, lengths = node.input
    given = attributes(node, batch_axis=1, time_axis=0)
    shape = graph.shape(data)
    if shape is None:
        return None
    made, steps = Made(graph), graph.constant(np.arange(shape[given["time_axis"]], dtype=np.int64)[None])
    to_front = [given["batch_axis"], given["time_axis"], *range(2, len(shape))]
    ends = made.unsqueezed(made.op("Cast", lengths, to=onnx.TensorProto.INT64), 1)
    mirrored = made.op("Sub", made.op("Sub", ends, made.integer(1)), steps)
    places = made.op("Where", made.op("Less", steps, ends), mirrored, steps)
    sequences = made.op("Transpose", data, perm=to_front)
    turned = made.op("GatherND", sequences, made.unsqueezed(places, 2), batch_dims=1)
    made.op("Transpose", turned, perm=to_front)  # of two axes: its own inverse
    return graph.ending(node, made.nodes)


def tensor_scatter(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """A cache, and from a place of each sequence on what the next steps have: each step of the cache chooses."""
    cache, update, first = (*node.input, "")[:3]
    shape, of_update = graph.shape(cache), graph.shape(update)
    given = attributes(node, axis=-2, mode=b"linear")
    if shape is None or of_update is None:
        return None
    axis, made = given["axis"] % len(shape), Made(graph)
    first = made.unsqueezed(first, 1) if first else graph.constant(np.zeros((shape[0], 1), np.int64))
    steps = made.op("Sub", graph.constant(np.arange(shape[axis], dtype=np.int64)[None]), first)
    if given["mode"] == b"circular":
        steps = made.op("Mod", steps, made.integer(shape[axis]))
    within = made.op("And", made.op("GreaterOrEqual", steps, made.integer(0)),
                     made.op("Less", steps, made.integer(of_update[axis])))  # fmt: skip
    places = made.within(steps, of_update[axis])
    to_front = [0, axis, *(a for a in range(1, len(shape)) if a != axis)]
    taken = made.op("GatherND", made.op("Transpose", update, perm=to_front), made.unsqueezed(places, 2), batch_dims=1)
    back = [to_front.index(a) for a in range(len(shape))]
    around = [shape[0], *(shape[axis] if a == axis else 1 for a in range(1, len(shape)))]
    made.op("Where", made.op("Reshape", within, made.axes(*around)), made.op("Transpose", taken, perm=back), cache)
    return graph.ending(node, made.nodes)
