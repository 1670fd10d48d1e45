"""Attention as ONNX Runtime's operators have it: `Attention`, `MultiHeadAttention`, `GroupQueryAttention` and the
rotation of positions (RoPE), as products, softmax and element-wise operators of ONNX, which `lib.graph` reads as
attention again.

Tensors here: queries (b, h, s, k), keys and values (b, h, t, k), with s new tokens of t in all. Not here, and left to
be refused by name: caches that share their buffer or are quantised, sinks, soft caps and smooth softmax.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from lib.models.onnx_graph import Graph, Made, Nodes, attributes

Shape = tuple[int, int]

_LOWEST = float(np.finfo(np.float32).min)  # of a score that is masked: its exponential is zero


@dataclass(frozen=True, slots=True)
class _Tensors:
    """Of heads: queries (b, h, s, k), keys and values (b, h, t, k)."""

    q: str
    k: str
    v: str


def packed(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`Attention`: queries, keys and values are products with one matrix, side by side."""
    given = attributes(node, num_heads=0, unidirectional=0, scale=0.0, mask_filter_value=-10000.0, do_rotary=0,
                       past_present_share_buffer=0, qkv_hidden_sizes=None)  # fmt: skip
    x, weights, bias, mask, past, more = [*node.input, *[""] * 6][:6]
    if given["do_rotary"] or given["past_present_share_buffer"]:
        return None
    matrix, added, shape = graph.value(weights), graph.value(bias) if bias else None, graph.shape(x)
    if matrix is None or shape is None or (bias and added is None):
        return None
    made, batch = Made(graph), shape[0]
    widths = given["qkv_hidden_sizes"] or [matrix.shape[1] // 3] * 3
    ends = np.cumsum(widths)[:2]
    parts = []
    for n, part in enumerate(np.split(matrix, ends, axis=1)):
        product = made.op("MatMul", x, graph.constant(part))
        if added is not None:
            product = made.op("Add", product, graph.constant(np.split(added, ends)[n]))
        parts.append(_heads(made, product, given["num_heads"]))
    return _attention(made, node, _Tensors(*parts), given, (mask, past, more), (batch, widths[0] // given["num_heads"]))


def quantized(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`QAttention`: the same products, of bytes."""
    given = attributes(node, num_heads=0, unidirectional=0, scale=0.0, mask_filter_value=-10000.0, do_rotary=0,
                       past_present_share_buffer=0)  # fmt: skip
    x, weights, bias, x_scale, scale, mask, x_zero, zero, past = [*node.input, *[""] * 9][:9]
    matrix, shape = graph.shape(weights), graph.shape(x)
    if given["do_rotary"] or given["past_present_share_buffer"] or matrix is None or shape is None:
        return None
    made, batch = Made(graph), shape[0]
    sums = made.op("MatMulInteger", x, weights, *[name for name in (x_zero, zero) if name])
    scaled = made.op("Mul", made.op("Cast", sums, to=TensorProto.FLOAT), made.op("Mul", x_scale, scale))
    if bias:
        scaled = made.op("Add", scaled, bias)
    width = matrix[1] // 3
    parts = [_heads(made, made.part(scaled, 2, n * width, (n + 1) * width), given["num_heads"]) for n in range(3)]
    return _attention(made, node, _Tensors(*parts), given, (mask, past, ""), (batch, width // given["num_heads"]))


def _attention(
    made: Made, node: onnx.NodeProto, new: _Tensors, given: dict[str, Any], masking: tuple[str, str, str], shape: Shape
) -> Nodes:
    """Args:
    given: Attributes.
    masking: Names of a mask, of keys and values of before, (2, b, h, p, k), and of what is added to the scores.
    shape: How many sequences there are, and the extent of a query.
    """
    (mask, past, more), (batch, k) = masking, shape
    keys, values = new.k, new.v
    if past:
        before = [made.op("Gather", past, made.integer(n), axis=0) for n in range(2)]
        keys, values = (made.op("Concat", old, own, axis=2) for old, own in zip(before, (keys, values), strict=True))
    masks = _masks(made, mask, keys, given["mask_filter_value"], batch)
    if masks is None:
        return None
    if given["unidirectional"]:
        masks.append(_causal(made, new.q, keys))
    scale = given["scale"] or 1 / math.sqrt(k)
    found = _attended(made, _Tensors(new.q, keys, values), made.number(scale), [*masks, *([more] if more else [])])
    if len(node.output) > 1 and node.output[1]:
        both = made.op("Concat", *(made.unsqueezed(each, 0) for each in (keys, values)), axis=0)
        made.rename(both, node.output[1])
    return made.ending(node, found)


def multi_head(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`MultiHeadAttention`: queries, keys and values are given, the latter also as (b, h, t, k)."""
    given = attributes(node, num_heads=0, unidirectional=0, scale=0.0, mask_filter_value=-10000.0)
    q, k, v, bias, mask, more, past_k, past_v, length, indirection = [*node.input, *[""] * 10][:10]
    shapes = [graph.shape(name) if name else () for name in (q, k)]
    added = graph.value(bias) if bias else None
    if length or indirection or any(shape is None for shape in shapes) or (bias and added is None):
        return None
    if any(map(graph.is_read, node.output[3:])):
        return None
    if any(len(shape or ()) == 5 for shape in shapes):
        return None  # queries, keys and values packed into one
    made, heads, shape, parts = Made(graph), int(given["num_heads"]), shapes[0] or (), list[str]()
    bounds = [0, shape[2], 2 * shape[2], None]
    for n, name in enumerate((q, k, v)):
        is_in_heads = n > 0 and len(shapes[1] or ()) == 4
        if added is not None and not is_in_heads:
            name = made.op("Add", name, graph.constant(added[bounds[n] : bounds[n + 1]]))
        parts.append(name if is_in_heads else _heads(made, name, heads))
    queries, keys, values = parts
    if past_k and past_v:
        keys = made.op("Concat", past_k, keys, axis=2)
        values = made.op("Concat", past_v, values, axis=2)
    masks = _masks(made, mask, keys, given["mask_filter_value"], shape[0])
    if masks is None:
        return None
    if given["unidirectional"]:
        masks.append(_causal(made, queries, keys))
    for name, output in zip((keys, values), node.output[1:3], strict=False):
        made.rename(name, output)
    scale = made.number(given["scale"]) if given["scale"] else _usual_scale(made, queries)
    found = _attended(made, _Tensors(queries, keys, values), scale, [*masks, *([more] if more else [])])
    return made.ending(node, found)


def grouped(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`GroupQueryAttention`: several heads share keys and values, which are put behind those of before.

    How many there are of before, each sequence has a number of its own, which is known when it runs: new ones are put
    there, and what comes after is zero in the cache that is given back, and masked. Of a prompt that is shorter than
    others, what the tokens give that fill it up is not defined: ONNX Runtime reads memory there that nobody wrote.
    """
    given = attributes(node, num_heads=0, kv_num_heads=0, scale=0.0, softcap=0.0, local_window_size=-1, do_rotary=0,
                       rotary_interleaved=0, smooth_softmax=0, causal=1, kv_cache_bit_width=0,
                       sliding_window_cache=0)  # fmt: skip
    names = [*node.input, *[""] * 16]
    q, k, v, past_k, past_v, lengths, total, cos, sin, positions, more = names[:11]
    is_unknown = any(names[11:]) or any(given[key] for key in ("softcap", "kv_cache_bit_width", "sliding_window_cache"))
    if is_unknown or given["smooth_softmax"] > 0 or not given["causal"] or any(map(graph.is_read, node.output[3:])):
        return None
    heads, groups = int(given["num_heads"]), int(given["kv_num_heads"])
    shape, n_total = graph.shape(q), graph.value(total)
    before = graph.shape(past_k) if past_k else None
    if shape is None or n_total is None or (past_k and before is None):
        return None
    made = Made(graph)
    batch, seq, n_all = shape[0], shape[1], int(n_total.reshape(()))
    n_before = before[2] if before else 0
    is_first = seq == n_all  # of a prompt: nothing of before counts
    if not is_first and batch > 1 and seq > 1:
        return None
    width = shape[2] // heads if k else shape[2] // (heads + 2 * groups)
    if not k:
        bounds = [0, heads * width, (heads + groups) * width, (heads + 2 * groups) * width]
        q, k, v = (made.part(q, 2, begin, end) for begin, end in itertools.pairwise(bounds))
    places = _numbers(made, seq) if is_first else _places(made, lengths, seq)
    queries, keys, values = (_heads(made, name, n) for name, n in ((q, heads), (k, groups), (v, groups)))
    if given["do_rotary"]:
        cache = graph.shape(cos)
        if cache is None:
            return None
        at = positions or (made.op("Expand", places, made.axes(batch, seq)) if is_first else places)
        turn = _Turn(made, cos, sin, at, 2 * cache[1], width, bool(given["rotary_interleaved"]))
        queries, keys = turn.of(queries), turn.of(keys)
    extent = max(n_before, n_all)
    if not is_first or n_before:
        keys, values = (
            _cached(made, new, past if not is_first else "", places, seq, extent, n_before)
            for new, past in ((keys, past_k), (values, past_v))
        )
    for name, output in zip((keys, values), node.output[1:3], strict=False):
        made.rename(name, output)
    if more and n_all < extent:
        return None
    mask = _seen(made, places, extent, int(given["local_window_size"]))
    scale = made.number(given["scale"] or 1 / math.sqrt(width))
    if groups < heads:
        keys, values = (_shared(made, each, heads // groups, heads, width) for each in (keys, values))
    found = _attended(made, _Tensors(queries, keys, values), scale, [mask, *([more] if more else [])])
    return made.ending(node, found)


def _places(made: Made, lengths: str, seq: int) -> str:
    """Of the last tokens (b, s), where the place of the last one is known, (b,) or (b, 1)."""
    last = made.op("Reshape", made.op("Cast", lengths, to=TensorProto.INT64), made.axes(-1, 1))
    return made.op("Add", made.graph.constant(np.arange(1 - seq, 1, dtype=np.int64)[None]), last)


def _seen(made: Made, places: str, extent: int, window: int) -> str:
    """What is added to scores (b, h, s, extent) of tokens at places (b, s), so that none sees a later one, or, if a
    window is above zero, one that is so far behind."""
    keys, at_most = _numbers(made, extent, 3), made.unsqueezed(places, 2)
    allowed = made.op("LessOrEqual", keys, at_most)
    if window > 0:
        least = made.op("Sub", at_most, made.integer(window))
        allowed = made.op("And", allowed, made.op("Greater", keys, least))
    return made.unsqueezed(made.op("Where", allowed, made.number(0), made.number(_LOWEST)), 1)


def _numbers(made: Made, n: int, rank: int = 2) -> str:
    """From zero on, along the last axis of so many."""
    return made.graph.constant(np.arange(n, dtype=np.int64).reshape((1,) * (rank - 1) + (n,)))


def _shared(made: Made, name: str, times: int, heads: int, width: int) -> str:
    """(b, g, t, k) as (b, g * times, t, k), each so many times in a row."""
    apart = made.unsqueezed(name, 2)
    spread = made.op("Expand", apart, made.axes(1, 1, times, 1, 1))
    length = made.extent(name, 2)
    shape = made.op("Concat", made.axes(0, heads), length, made.axes(width), axis=0)
    return made.op("Reshape", spread, shape)


def _cached(made: Made, new: str, past: str, places: str, seq: int, extent: int, n_before: int) -> str:
    """Keys or values (b, g, extent, k): those of before, then new ones at their places (b, s), then zeros."""
    first = made.unsqueezed(made.unsqueezed(made.part(places, 1, 0, 1), 2), 3)  # (b, 1, 1, 1)
    numbers = made.graph.constant(np.arange(extent, dtype=np.int64)[None, None, :, None])
    above = made.op("Sub", numbers, first)
    if seq == 1:
        moved = new  # spread over all places
    else:
        row = made.op("Reshape", made.op("Clip", above, made.integer(0), made.integer(seq - 1)), made.axes(-1))
        moved = made.op("Gather", new, made.part(row, 0, 0, extent), axis=2)
    is_new = made.op(
        "And", made.op("GreaterOrEqual", above, made.integer(0)), made.op("Less", above, made.integer(seq))
    )
    if not past:
        return made.op("Where", is_new, moved, made.number(0))
    if extent > n_before:
        filling = made.op("Expand", made.part(new, 2, 0, 1), made.axes(1, 1, extent - n_before, 1))
        past = made.op("Concat", past, filling, axis=2)
    is_old = made.op("Less", above, made.integer(0))
    rest = made.op("Where", is_new, moved, made.number(0))
    return made.op("Where", is_old, past, rest)


def rotary(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """`RotaryEmbedding`, of (b, s, h * k) or of (b, h, s, k)."""
    given = attributes(node, interleaved=0, num_heads=0, rotary_embedding_dim=0, scale=1.0, is_packed_batching=0)
    x, positions, cos, sin = node.input
    shape, rank, cache = graph.shape(x), graph.shape(positions), graph.shape(cos)
    if shape is None or rank is None or cache is None or given["is_packed_batching"] or given["scale"] != 1:
        return None
    made = Made(graph)
    width = 2 * cache[1]
    if len(shape) == 4:
        n_heads, seq, heads = shape[1], shape[2], x
        extent = shape[3]
    else:
        n_heads = given["num_heads"] or shape[2] // width
        seq, extent, heads = shape[1], shape[2] // n_heads, _heads(made, x, n_heads)
    if len(rank) == 1:  # the place of the first
        positions = made.op("Add", made.op("Reshape", positions, made.axes(1, 1)),
                            _numbers(made, seq))  # fmt: skip
        positions = made.op("Expand", positions, made.axes(shape[0], seq))
    turned = _Turn(made, cos, sin, positions, width, extent, bool(given["interleaved"])).of(heads)
    if len(shape) == 4:
        return made.ending(node, turned)
    together = made.op("Transpose", turned, perm=[0, 2, 1, 3])
    return made.ending(node, made.op("Reshape", together, made.axes(0, 0, n_heads * extent)))


class _Turn:
    """A rotation of pairs of numbers by the places of tokens: of the first `width` of k, each with the one that is half
    of these later, or next to it."""

    def __init__(
        self, made: Made, cos: str, sin: str, positions: str, width: int, extent: int, is_interleaved: bool
    ) -> None:
        """Args:
        cos, sin: Tables (places, width / 2); sin of the same.
        positions: (b, s).
        extent: k.
        """
        self._made, self._width, self._extent, self._is_interleaved = made, width, extent, is_interleaved
        rows = [made.unsqueezed(made.op("Gather", table, positions, axis=0), 1) for table in (cos, sin)]
        self._cos, self._sin = (self._doubled(each) for each in rows)  # (b, 1, s, width)

    def _doubled(self, rows: str) -> str:
        """One for both of each pair."""
        made = self._made
        if not self._is_interleaved:
            return made.op("Concat", rows, rows, axis=3)
        apart = made.unsqueezed(rows, 4)
        both = made.op("Concat", apart, apart, axis=4)
        return made.op("Reshape", both, made.axes(0, 0, 0, self._width))

    def of(self, heads: str) -> str:
        """Of (b, h, s, k)."""
        made, width = self._made, self._width
        part = heads if width == self._extent else made.part(heads, 3, 0, width)
        straight = made.op("Mul", part, self._cos)
        turned = made.op("Add", straight, made.op("Mul", self._across(part), self._sin))
        if width == self._extent:
            return turned
        return made.op("Concat", turned, made.part(heads, 3, width), axis=3)

    def _across(self, part: str) -> str:
        """The other one of each pair, negative for the first."""
        made, half = self._made, self._width // 2
        if not self._is_interleaved:
            first, second = made.part(part, 3, 0, half), made.part(part, 3, half)
            return made.op("Concat", made.op("Neg", second), first, axis=3)
        pairs = made.op("Reshape", part, made.axes(0, 0, 0, half, 2))
        first, second = made.part(pairs, 4, 0, 1), made.part(pairs, 4, 1)
        both = made.op("Concat", made.op("Neg", second), first, axis=4)
        return made.op("Reshape", both, made.axes(0, 0, 0, self._width))


def _heads(made: Made, name: str, heads: int) -> str:
    """(b, s, h * k) as (b, h, s, k)."""
    apart = made.op("Reshape", name, made.axes(0, 0, heads, -1))
    return made.op("Transpose", apart, perm=[0, 2, 1, 3])


def _masks(made: Made, mask: str, keys: str, masked: float, batch: int) -> list[str] | None:
    """What a mask adds to the scores (b, h, s, t), zero or a number far below; None where its form is not known.

    A mask has a one for each key that is seen: (b, t), or (b, s, t) for each query. Or it has lengths, (b,), or ends
    and then beginnings, (2 b,).
    """
    if not mask:
        return []
    shape = made.graph.shape(mask)
    if shape is None:
        return None
    if len(shape) == 1:
        if shape[0] not in (batch, 2 * batch):
            return None
        return [_by_lengths(made, mask, keys, masked, batch if shape[0] == 2 * batch else 0)]
    if len(shape) not in (2, 3):
        return None
    seen = made.op("Cast", mask, to=TensorProto.BOOL)
    added = made.op("Where", seen, made.number(0), made.number(masked))
    added = made.unsqueezed(added, 1)
    return [added if len(shape) == 3 else made.unsqueezed(added, 1)]


def _by_lengths(made: Made, mask: str, keys: str, masked: float, beginnings: int) -> str:
    """Args:
    beginnings: How many ends come before as many beginnings; zero if there are only ends.
    """
    length = made.op("Squeeze", made.extent(keys, 2))
    numbers = made.op("Range", made.integer(0), length, made.integer(1))  # (t,)
    wide = made.unsqueezed(made.op("Cast", mask, to=TensorProto.INT64), 1)
    seen = made.op("Less", numbers, made.part(wide, 0, 0, beginnings) if beginnings else wide)  # (b, t)
    if beginnings:
        begun = made.op("Not", made.op("Less", numbers, made.part(wide, 0, beginnings)))
        seen = made.op("And", seen, begun)
    added = made.op("Where", seen, made.number(0), made.number(masked))
    return made.unsqueezed(made.unsqueezed(added, 1), 1)


def _causal(made: Made, queries: str, keys: str) -> str:
    """What is added to scores (b, h, s, t) of the last s of t tokens, so that none sees a later one; (s, t)."""
    seq, length = (made.op("Squeeze", made.extent(name, 2)) for name in (queries, keys))
    zero, one = made.integer(0), made.integer(1)
    numbers = made.op("Range", zero, length, one)
    places = made.op("Range", made.op("Sub", length, seq), length, one)
    later = made.op("Greater", made.unsqueezed(numbers, 0), made.unsqueezed(places, 1))
    return made.op("Where", later, made.number(_LOWEST), made.number(0))


def _usual_scale(made: Made, queries: str) -> str:
    """One over the root of the extent of a query."""
    extent = made.op("Cast", made.extent(queries, 3), to=TensorProto.FLOAT)
    return made.op("Div", made.number(1), made.op("Sqrt", extent))


def _attended(made: Made, heads: _Tensors, scale: str, masks: Sequence[str]) -> str:
    """(b, s, h * k)."""
    scores = made.op("MatMul", heads.q, made.op("Transpose", heads.k, perm=[0, 1, 3, 2]))
    scores = made.op("Mul", scores, scale)
    for mask in masks:
        scores = made.op("Add", scores, mask)
    found = made.op("MatMul", made.op("Softmax", scores, axis=-1), heads.v)
    return made.op("Reshape", made.op("Transpose", found, perm=[0, 2, 1, 3]), made.axes(0, 0, -1))
