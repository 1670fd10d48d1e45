"""Attention as one program: scores, masks, softmax and context.

Shapes: b batches, h heads, n tokens, m tokens attended to, d and s sizes of a head. A tile of rows goes through all of
it before the next one begins (`lib.search.spaces.attention`), so that scores stay in a core's caches: what Dao et al.,
"FlashAttention" (NeurIPS 2022), do for the fast memory of a GPU. A cache has room for all scores of a few rows (32 rows
of 4,096 tokens are 512 KB), so no sum has to be corrected when a larger score is found. The results of a row are
divided by the sum of its weights, not its m weights.

Columns of scores are whole vectors: keys and values have zeros after their own, whose weights vanish.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import te, tirx

from lib.machine.dots import Dot

# The blocks, in order; `WEIGHTS` are rounded to what an instruction takes.
SCORES, LOGITS, LANE_MAXIMA, MAXIMA, WEIGHTS, LANE_SUMS, SUMS, CONTEXT, RESULT = (
    f"attention_{block}"
    for block in ("scores", "logits", "lane_maxima", "maxima", "weights", "lane_sums", "sums", "context", "result")
)
BLOCKS = (SCORES, LOGITS, LANE_MAXIMA, MAXIMA, WEIGHTS, LANE_SUMS, SUMS, CONTEXT, RESULT)

# What softmax gets: from a score, its index (b, h, n, m), and the masks.
Logits = Callable[[tirx.Expr, Sequence[tirx.Expr], Sequence[te.Tensor]], tirx.Expr]

_SMALLEST = -127.0  # the exponent whose bits are zero
_WHOLE = 1.5 * 2**23  # added to a float of either sign, it leaves a whole number in the last bits
# Of 2 to x, -0.5 <= x <= 0.5: minimax, the highest power first; 1 of 0, so that the smallest one's bits are zero. The
# first is within 2e-7; the second within 1.1e-4, for what is rounded to bf16 (2e-3).
_POWERS = (1.3264727e-3, 9.671513e-3, 5.5507336e-2, 2.4022242e-1, 6.93147e-1, 1.0)
_FEWER_POWERS = (5.5008933e-2, 2.4221095e-1, 6.9328290e-1, 1.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the tensors do not say.

    Attributes:
        columns: m; `size`: s. Keys and values may have more, of zeros; keys have a multiple of `lanes`.
        lanes: Of the machine's vectors: a power of two.
        dot: The instruction for factors of its types; None: for float32.
        by_rows: The result is (b, n, h, s), else (b, h, n, s).
    """

    columns: int
    size: int
    lanes: int
    dot: Dot | None
    by_rows: bool


def attention(
    shape: Shape, logits: Logits, query: te.Tensor, keys: te.Tensor, values: te.Tensor, *masks: te.Tensor
) -> te.Tensor:
    """The context in float32.

    Args:
        query: (b, h, n, d).
        keys: (b, h, d, m), or for an instruction (b, h, d / depth, m, depth); `values`: (b, h, m, s) in the same way.
        masks: Read by `logits`.
    """
    batch, heads, rows, depth = query.shape
    dot, wide = shape.dot, int(keys.shape[3])
    turn = te.reduce_axis((0, depth), "k")
    scores = te.compute(
        (batch, heads, rows, wide),
        lambda b, h, n, m: te.sum(_times(query(b, h, n, turn), _factor(dot, keys, (b, h), turn, m)), axis=turn),
        name=SCORES,
    )

    def logit(*at: tirx.Var) -> tirx.Expr:
        found = logits(scores(*at), at, masks)
        return found if shape.columns == wide else tirx.Select(at[-1] < shape.columns, found, _float(-math.inf))

    inner = te.compute(scores.shape, logit, name=LOGITS)
    largest = _over_columns(inner, shape.lanes, te.max, tirx.Max, (LANE_MAXIMA, MAXIMA))
    weights = te.compute(scores.shape, lambda *at: _exp(inner(*at) - largest(*at[:-1]), dot), name=WEIGHTS)
    total = _over_columns(weights, shape.lanes, te.sum, tirx.Add, (LANE_SUMS, SUMS))
    over = te.reduce_axis((0, values.shape[2] * (dot.depth if dot else 1)), "j")

    def place(at: Sequence[tirx.Var]) -> tuple[tirx.Var, ...]:
        """The index (b, h, n) of a result."""
        return (at[0], at[2], at[1]) if shape.by_rows else (at[0], at[1], at[2])

    def sums(*at: tirx.Var) -> tirx.Expr:
        row = place(at)
        return te.sum(_times(weights(*row, over), _factor(dot, values, row[:2], over, at[-1])), axis=over)

    outer = (batch, rows, heads) if shape.by_rows else (batch, heads, rows)
    context = te.compute((*outer, values.shape[3]), sums, name=CONTEXT)
    # In this order, TVM has the block of the sums before that of the context.
    return te.compute((*outer, shape.size), lambda *at: _float(1.0) / total(*place(at)) * context(*at), name=RESULT)


def _times(left: tirx.Expr, right: tirx.Expr) -> tirx.Expr:
    return left.astype("float32") * right.astype("float32")


def _factor(
    dot: Dot | None, tensor: te.Tensor, batch: Sequence[tirx.Var], turn: tirx.Expr, column: tirx.Var
) -> tirx.Expr:
    """An element of the second factor of a product."""
    if dot is None:
        return tensor(*batch, turn, column)
    return tensor(*batch, turn // dot.depth, column, turn % dot.depth)


def _over_columns(
    x: te.Tensor, lanes: int, over: Callable, combine: Callable, names: tuple[str, str]
) -> te.Tensor:  # fmt: skip
    """The reduction of each row, in two steps: of each lane of its vectors, then of these, half by half."""
    *outer, columns = x.shape
    step = te.reduce_axis((0, columns // lanes), "step")
    by_lane = te.compute(
        (*outer, lanes),
        lambda *at: over(x(*at[:-1], step * lanes + at[-1]).astype("float32"), axis=step),
        name=names[0],
    )

    def together(*at: tirx.Var) -> tirx.Expr:
        found = [by_lane(*at, lane) for lane in range(lanes)]
        while len(found) > 1:
            half = len(found) // 2
            found = [combine(a, b) for a, b in zip(found[:half], found[half:], strict=True)]
        return found[0]

    return te.compute(outer, together, name=names[1])


def _exp(x: tirx.Expr, dot: Dot | None) -> tirx.Expr:
    """e to x <= 0, as the product with the values takes it: 2 to a whole number, which are the bits of an exponent,
    times 2 to what is left; zero below 1e-38. The error is that of the powers, and 6e-8 times |x| more: that of `x` in
    powers of two."""
    power = tirx.Max(x * _float(math.log2(math.e)), _float(_SMALLEST))
    shifted = tirx.reinterpret("int32", power + _float(_WHOLE))  # as bits: TVM would take the sum apart again
    rest = power - (tirx.reinterpret("float32", shifted) - _float(_WHOLE))
    first, *others = _FEWER_POWERS if dot else _POWERS
    found = _float(first)
    for factor in others:
        found = found * rest + _float(factor)
    bits = tirx.reinterpret("int32", found) + (shifted << tirx.const(23, "int32"))
    return tirx.reinterpret("float32", bits).astype(dot.data if dot else "float32")


def _float(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")
