"""Bootstrap intervals, against the exact ones where they are known."""

import intervals
import numpy as np
import pytest
from scipy.stats import binom


@pytest.mark.parametrize("n", [11, 13, 17])  # the exact probabilities are not near a quantile
def test_the_interval_of_a_median_is_that_of_order_statistics(n):
    values = np.random.default_rng(1).permutation(n) + 1.0  # the k-th smallest is k

    found = intervals.estimate(intervals.median_of(values), n)

    # A drawn median is at most k where more than half of n draws are among the k smallest.
    below = [binom.sf(n // 2, n, k / n) for k in range(1, n + 1)]
    exact = [1 + next(k for k, p in enumerate(below) if p >= quantile) for quantile in (0.025, 0.975)]
    assert (found.value, found.low, found.high) == (np.median(values), *exact)


def test_two_turns_draw_their_means():
    found = intervals.estimate(intervals.median_of([1.0, 3.0]), 2)

    assert (found.value, found.low, found.high) == (2, 1, 3)


def test_ratios_are_paired_by_turn():
    ours = np.array([1.0, 5.0, 2.0, 9.0, 4.0])  # a machine that is not equally fast all day

    found = intervals.estimate(intervals.best_ratio_of([3 * ours, 2 * ours], ours), 5)

    assert (found.value, found.low, found.high) == (2, 2, 2)


def test_which_other_side_is_better_is_uncertain_too():
    first, second = [1.0, 1.0, 4.0], [2.0, 2.0, 2.0]

    found = intervals.estimate(intervals.best_ratio_of([first, second], [1.0, 1.0, 1.0]), 3)

    assert (found.value, found.low, found.high) == (1, 1, 2)  # with the second, it is never 4


def test_a_geometric_mean_of_known_ratios_is_exact():
    statistics = [(intervals.best_ratio_of([[ratio] * n], [1.0] * n), n) for ratio, n in ((2.0, 3), (8.0, 5))]

    found = intervals.geometric_mean(statistics)

    assert (found.value, found.low, found.high) == pytest.approx((4, 4, 4))


def test_the_interval_of_a_geometric_mean_is_narrower_than_its_parts():
    noisy = 2 * np.exp(np.random.default_rng(0).normal(scale=0.2, size=(8, 15)))
    statistics = [(intervals.best_ratio_of([values], np.ones(15)), 15) for values in noisy]

    parts = [intervals.estimate(*statistic) for statistic in statistics]
    whole = intervals.geometric_mean(statistics)

    assert whole.low < 2 < whole.high
    assert np.log(whole.high / whole.low) < 0.5 * np.median([np.log(part.high / part.low) for part in parts])


def test_the_same_rows_give_the_same_interval():
    values = np.random.default_rng(0).normal(size=15)

    assert intervals.estimate(intervals.median_of(values), 15) == intervals.estimate(intervals.median_of(values), 15)


@pytest.mark.parametrize(
    ("value", "text"), [(0.012345, "0.0123"), (1.0, "1.00"), (123.4, "123"), (999.9, "1,000"), (12345.6, "12,346")]
)
def test_numbers_are_shown_with_three_digits_or_all_before_the_point(value, text):
    assert intervals.Estimate(value, value, value).text() == f"{text} [{text}, {text}]"
