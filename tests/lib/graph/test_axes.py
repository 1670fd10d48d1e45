import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.graph.axes import Movement, compose


def apply(x, steps):
    for kind, numbers in steps:
        x = x.reshape(numbers) if kind == "reshape" else x.transpose(numbers)
    return x


def moved(x, movement):
    return x.reshape(movement.before).transpose(movement.order).reshape(movement.after)


@st.composite
def split_axes(draw, extent):
    """Extents whose product is this one, units among them."""
    found = []
    while extent > 1:
        found.append(draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0])))
        extent //= found[-1]
    return found or [1]


@st.composite
def chains(draw):
    """A shape, and reshapes that split or merge axes, with permutes between them."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=4))
    steps, now = [], tuple(shape)
    for kind in draw(st.lists(st.sampled_from(["permute", "split", "merge", "cut"]), min_size=1, max_size=5)):
        if kind == "permute":
            order = tuple(draw(st.permutations(range(len(now)))))
            now = tuple(now[axis] for axis in order)
            steps.append(("permute", order))
            continue
        if kind == "split":
            now = tuple(part for extent in now for part in draw(split_axes(extent)))
        elif kind == "merge" and len(now) > 1:
            at = draw(st.integers(0, len(now) - 2))
            now = (*now[:at], now[at] * now[at + 1], *now[at + 2 :])
        elif kind == "cut":  # may cut across axes
            now = tuple(draw(split_axes(math.prod(now))))
        steps.append(("reshape", now))
    return tuple(shape), steps


@settings(max_examples=300, deadline=None)
@given(chains())
def test_a_chain_is_what_numpy_makes_of_it_step_by_step(chain):
    shape, steps = chain
    x = np.arange(math.prod(shape)).reshape(shape)

    movement = compose(shape, steps)

    if movement is not None:
        np.testing.assert_array_equal(moved(x, movement), apply(x, steps))
        assert 1 not in movement.before


@settings(max_examples=300, deadline=None)
@given(chains())
def test_a_chain_that_keeps_the_elements_in_order_is_a_reshape(chain):
    shape, steps = chain
    if any(kind == "permute" for kind, _ in steps):
        # Back again: every permute undone, in the end.
        x = np.arange(math.prod(shape)).reshape(shape)
        in_order = np.array_equal(apply(x, steps).ravel(), x.ravel())
        movement = compose(shape, steps)
        assert movement is None or movement.is_reshape == in_order
    else:
        movement = compose(shape, steps)
        assert movement is not None
        assert movement.is_reshape


@settings(max_examples=200, deadline=None)
@given(chains())
def test_only_a_reshape_of_reordered_axes_can_lack_common_atoms(chain):
    shape, steps = chain
    if compose(shape, steps) is None:
        reordered = [n for n in range(len(steps)) if not getattr(compose(shape, steps[:n]), "is_reshape", False)]
        assert reordered
        assert any(kind == "reshape" for kind, _ in steps[reordered[0] :])


@pytest.mark.parametrize(
    ("shape", "steps", "expected"),
    [
        ((), [("reshape", (1, 1))], Movement((), (), (1, 1))),
        ((2, 3), [("permute", (1, 0)), ("permute", (-1, 0))], Movement((6,), (0,), (2, 3))),
        ((2, 1, 3), [("permute", (1, 0, 2))], Movement((6,), (0,), (1, 2, 3))),  # units move for nothing
        ((2, 3, 4), [("permute", (2, 0, 1))], Movement((6, 4), (1, 0), (4, 2, 3))),  # neighbours move as one
        ((6, 4), [("reshape", (4, 6)), ("reshape", (24,))], Movement((24,), (0,), (24,))),
        ((2, 3), [("permute", (1, 0)), ("permute", (1, 0)), ("reshape", (3, 2))], Movement((6,), (0,), (3, 2))),
    ],
)
def test_a_movement_has_the_fewest_axes(shape, steps, expected):
    assert compose(shape, steps) == expected


def test_axes_that_are_cut_across_after_they_were_reordered_have_no_common_atoms():
    assert compose((3, 2), [("permute", (1, 0)), ("reshape", (3, 2)), ("permute", (1, 0))]) is None
