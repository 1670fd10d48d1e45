import numpy as np
import pytest
from tvm.relax import op

from lib.graph.rules import pooling
from tests.lib.graph.rules.helpers import becomes, stays

IMAGE = (1, 3, 7, 5)


@pytest.mark.parametrize(
    ("build", "after", "shape"),
    [
        (lambda x: op.nn.avg_pool2d(x, (7, 5)), ["mean"], IMAGE),
        (lambda x: op.nn.avg_pool2d(x, (40, 40), (40, 40), ceil_mode=True), ["mean"], IMAGE),
        (lambda x: op.nn.avg_pool2d(x, (9, 7), (9, 9), (2, 2, 1, 1), count_include_pad=False), ["mean"], IMAGE),
        (lambda x: op.nn.max_pool2d(x, (40, 40), (40, 40), ceil_mode=True), ["max"], IMAGE),
        (lambda x: op.nn.max_pool2d(x, (8, 6), (1, 1), (1, 1, 0, 0)), ["max"], IMAGE),
        (lambda x: op.nn.avg_pool2d(x, (7, 5), layout="NHWC"), ["mean"], (1, 7, 5, 3)),
        (lambda x: op.nn.avg_pool1d(x, (9,), (9,), ceil_mode=True, count_include_pad=False), ["mean"], (1, 3, 7)),
        (lambda x: op.nn.max_pool3d(x, (2, 7, 5)), ["max"], (1, 3, 2, 7, 5)),
    ],
)
def test_a_window_that_covers_its_input_becomes_a_reduction(build, after, shape):
    assert becomes(pooling.RULES, build, shape)[1] == after


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.nn.avg_pool2d(x, (7, 3), (1, 3)),  # one column is left out
        lambda x: op.nn.avg_pool2d(x, (7, 5), (1, 1), (1, 1, 1, 1)),  # nine windows
        lambda x: op.nn.avg_pool2d(x, (9, 7), (9, 9), (1, 1, 1, 1), count_include_pad=True),  # zeros count
        lambda x: op.nn.max_pool2d(x, (2, 2), (9, 9), dilation=(2, 2)),
        lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2)),
    ],
)
def test_other_windows_stay(build):
    assert stays(pooling.RULES, build, IMAGE)


LOWEST = float(np.finfo(np.float32).min)


def padded(x, value=0.0, widths=(0, 0, 0, 0, 0, 1, 1, 2)):
    return op.nn.pad(x, list(widths), "constant", value)


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.nn.max_pool2d(padded(x, -np.inf), (3, 3), (2, 2)),
        lambda x: op.nn.max_pool2d(padded(x, LOWEST), (3, 3), (2, 2), (1, 0, 1, 0)),
        lambda x: op.nn.avg_pool2d(padded(x), (3, 3), (2, 2)),
        lambda x: op.nn.avg_pool2d(padded(x), (3, 3), (1, 1), (1, 1, 1, 1), count_include_pad=True),
    ],
)
def test_a_pooling_adds_by_itself_what_was_added_for_it(build):
    _, after = becomes(pooling.RULES, build, IMAGE)

    assert after in (["nn.max_pool2d"], ["nn.avg_pool2d"])


def test_so_do_those_of_signals():
    build = lambda x: op.nn.max_pool1d(padded(x, -np.inf, (0, 0, 0, 0, 0, 2)), (3,), (2,))  # noqa: E731

    assert becomes(pooling.RULES, build, (1, 3, 8))[1] == ["nn.max_pool1d"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.nn.max_pool2d(padded(x), (3, 3), (2, 2)),  # zeros may be the largest
        lambda x: op.nn.avg_pool2d(padded(x), (3, 3), (1, 1), (1, 1, 1, 1)),  # some zeros count, others do not
        lambda x: op.nn.avg_pool2d(padded(x), (3, 3), (2, 2), ceil_mode=True),
        lambda x: op.nn.max_pool2d(padded(x, -np.inf, (0, 0, 0, 1, 0, 0, 0, 0)), (3, 3), (2, 2)),  # one more channel
        lambda x: op.nn.max_pool2d(op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], "reflect"), (3, 3), (2, 2)),
    ],
)
def test_what_means_something_else_is_added_before(build):
    assert stays(pooling.RULES, build, IMAGE)
