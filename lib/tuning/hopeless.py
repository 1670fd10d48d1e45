"""Untuned programs that need no measurement: of much arithmetic, on one thread, one sum after the other.

In recorded runs of eleven models (convolutions, products and attention, in f32, bf16 and bytes; AVX-512 and 128-bit
vectors) there were 57 subgraphs of at least so many FLOP a call. Their untuned programs were 3.7 to 613 times as slow
as the best that a few trials found, 95 % of them at least 12 times. They ran for 0.1 s or more each, by the median, and
their compilation takes as long as that of others.
"""

_FLOP = 1e8  # of a call
LEAST = 3.0  # times as slow as the best program that was measured, at the least
_PER_S = 1.6e9  # FLOP that they computed in a second, by the median


def is_hopeless(flop: float) -> bool:
    """Whether an untuned program of so many FLOP a call is slower than any that base models choose, and by far."""
    return flop >= _FLOP


def guess_s(flop: float) -> float:
    """About how long one takes."""
    return flop / _PER_S
