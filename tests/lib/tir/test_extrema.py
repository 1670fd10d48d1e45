import numpy as np
import pytest
from tvm import te
from tvm.s_tir import Schedule

from lib.tir import extrema
from tests.helpers import run_on

LEAST = np.finfo(np.float32).min
ROWS = np.array([[-np.inf] * 24, [LEAST, *[-np.inf] * 23], [np.inf, *[0] * 23], [*[-1] * 23, 3]], np.float32)


def extremum(of, marks):
    x, turn = te.placeholder(ROWS.shape, name="x"), te.reduce_axis((0, ROWS.shape[1]), name="turn")
    found = te.compute(ROWS.shape[:1], lambda row: of(x[row, turn], axis=turn), name="found", attrs=marks)
    return Schedule(te.create_prim_func([x, found]))


def as_it_is(schedule):
    pass


def decomposed(schedule):
    block = schedule.get_sblock("found")
    schedule.decompose_reduction(block, schedule.get_loops(block)[-1])


def in_vectors(schedule):
    _, lane = schedule.split(schedule.get_loops(schedule.get_sblock("found"))[-1], [None, 16])  # of 24, with a rest
    part = schedule.rfactor(lane, 1)
    step, lane = schedule.get_loops(part)[-2:]
    schedule.reorder(step, lane)
    schedule.vectorize(lane)
    schedule.decompose_reduction(part, step)


@pytest.mark.parametrize("change", [as_it_is, decomposed, in_vectors])
@pytest.mark.parametrize(("of", "sign"), [(te.max, 1), (te.min, -1)])
def test_extrema_of_infinities_alone_are_infinite_and_others_what_they_are(cpu, of, sign, change):
    schedule = extremum(of, {extrema.MARK: 1})
    change(schedule)

    found = run_on(schedule.mod, cpu.tvm(), [sign * ROWS], np.zeros(len(ROWS), np.float32))

    np.testing.assert_array_equal(found, [-sign * np.inf, sign * LEAST, sign * np.inf, sign * 3])


def test_others_stay():
    function = extremum(te.max, {}).mod["main"]

    assert extrema.insert(function).same_as(function)
