"""Medians, ratios and their geometric means with bootstrap intervals of 95 %.

Turns are what is drawn again, with replacement: of several sides the same turns, since what disturbs a turn of one
side often disturbs the turn of another one right after it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 10_000

# From turns (... x n indices) to a value for each row of them (...).
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float

    def text(self, scale: float = 1.0, digits: int = 3) -> str:
        """Markdown: the value, and the interval in brackets."""
        shown = [_rounded(number * scale, digits) for number in (self.value, self.low, self.high)]
        return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def median_of(values: ArrayLike) -> Statistic:
    """The median over turns of one side."""
    array = np.asarray(values, float)
    return lambda turns: np.asarray(np.median(array[turns], axis=-1))


def geometric_mean_of(values: ArrayLike) -> Statistic:
    """The geometric mean of several ratios, which are drawn themselves: of models and seeds, say, in place of turns."""
    logarithms = np.log(np.asarray(values, float))
    return lambda drawn: np.asarray(np.exp(np.mean(logarithms[drawn], axis=-1)))


def best_ratio_of(others: Sequence[ArrayLike], ours: ArrayLike) -> Statistic:
    """The lowest, over other sides, of the median over turns of theirs to ours.

    Which of them is the best is decided anew for each row, so the interval has that uncertainty, too.
    """
    ratios = [np.asarray(values, float) / np.asarray(ours, float) for values in others]
    return lambda turns: np.min([np.median(ratio[turns], axis=-1) for ratio in ratios], axis=0)


def draws(statistic: Statistic, n_turns: int, seed: int = 0) -> np.ndarray:
    """What the statistic is of `RESAMPLES` drawn sets of turns."""
    return statistic(np.random.default_rng(seed).integers(0, n_turns, (RESAMPLES, n_turns)))


def estimate(statistic: Statistic, n_turns: int) -> Estimate:
    """A statistic of all turns, with its interval."""
    return _with_interval(float(statistic(np.arange(n_turns))), draws(statistic, n_turns))


def geometric_mean(statistics: Sequence[tuple[Statistic, int]]) -> Estimate:
    """Of statistics with their numbers of turns, e.g. a ratio for each model; models are not drawn, turns are."""
    values = [float(statistic(np.arange(n_turns))) for statistic, n_turns in statistics]
    drawn = [draws(statistic, n_turns, seed) for seed, (statistic, n_turns) in enumerate(statistics)]
    return _with_interval(float(np.exp(np.mean(np.log(values)))), np.exp(np.mean(np.log(drawn), axis=0)))


def _rounded(number: float, digits: int) -> str:
    """So many digits, or all before the point."""
    text = f"{number:#.{digits}g}"
    return f"{number:,.0f}" if "e+" in text else text.rstrip(".")


def _with_interval(value: float, drawn: np.ndarray) -> Estimate:
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(value, float(low), float(high))
