import json

import numpy as np
import pytest
from tvm.relax import op

from lib.contracts import digests
from lib.search import evolution
from lib.search.points import Points
from lib.search.spaces.table import fitting
from lib.tir import traces
from lib.tir.traces import to_json
from lib.tir.workload import program_hash
from tests.helpers import matmul, run_on, subgraph
from tests.lib.search.spaces.test_contraction import convolution
from tests.lib.search.spaces.test_rows import softmax
from tests.lib.search.spaces.test_window import depthwise

MAKERS = [
    lambda cpu: matmul(64, 256, 128),
    lambda cpu: convolution(),
    lambda cpu: depthwise(1),
    lambda cpu: softmax(cpu, 24, 64),
    lambda cpu: subgraph(cpu, lambda _, x: op.permute_dims(x, [1, 0]), (64, 48)),
]


def points_of(workload, cpu):
    return Points(workload, cpu.tvm(), fitting(workload, cpu.tvm()), seed=0)


def some(points, n=12, seed=0):
    random = np.random.default_rng(seed)
    return [points.draw(random) for _ in range(n)]


def factors(rows, columns, channels):
    random = np.random.default_rng(0)
    return random.random((rows, channels), np.float32), random.random((channels, columns), np.float32)


@pytest.mark.parametrize("make", MAKERS)
def test_a_points_program_is_the_one_that_its_trace_makes(cpu, make):
    workload = make(cpu)
    points = points_of(workload, cpu)

    for point in some(points, 6):
        schedule = points.program(point)
        replayed = traces.apply(workload, to_json(schedule))

        assert program_hash(replayed.mod) == program_hash(schedule.mod)
        assert points.of_trace(to_json(schedule)).decisions == point.decisions
        assert points.digest(point) == digests.of_trace(to_json(schedule))


@pytest.mark.parametrize("make", MAKERS)
def test_equal_seeds_draw_equal_points_and_a_change_is_a_point_of_the_space(cpu, make):
    points = points_of(make(cpu), cpu)
    random = np.random.default_rng(1)

    assert [p.key for p in some(points)] == [p.key for p in some(points)]
    for point in some(points, 6):
        changed = points.changed(point, random)
        assert points.program(changed) is not None


def test_most_changes_change_one_decision(cpu):
    points = points_of(convolution(), cpu)
    [point] = some(points, 1)
    random = np.random.default_rng(2)

    changed = [points.changed(point, random) for _ in range(64)]

    of_sketch = [p for p in changed if p.sketch == point.sketch]
    differences = [sum(a != b for a, b in zip(p.decisions, point.decisions, strict=True)) for p in of_sketch]
    assert np.mean([n <= 2 for n in differences]) > 0.8  # a tile's size decides what is left to be split, too


def test_a_trace_of_another_workload_is_adapted_and_computes_the_same(cpu):
    donor, workload = matmul(64, 256, 128), matmul(96, 320, 60)
    [proposal] = evolution.sample(donor, cpu.tvm(), 1, known=set(), seed=3)
    points = points_of(workload, cpu)

    adapted = points.adapted(proposal.trace)

    a, b = factors(96, 320, 60)
    assert adapted
    for point in adapted:
        found = run_on(points.program(point).mod, cpu.tvm(), [a, b], np.zeros((96, 320), np.float32))
        np.testing.assert_allclose(found, a @ b, rtol=1e-4)


def test_a_trace_adapted_to_its_own_workload_is_itself(cpu):
    workload = matmul(64, 256, 128)
    points = points_of(workload, cpu)

    for point in some(points, 6):
        trace = to_json(points.program(point))
        assert point.decisions in [adapted.decisions for adapted in points.adapted(trace)]


def test_what_is_no_trace_of_the_space_is_no_point(cpu):
    points = points_of(matmul(64, 256, 128), cpu)

    assert points.of_trace(json.dumps([[["GetSBlock", [], ["other", "main"], ["b0"]]], []])) is None


def test_metaschedules_own_space_has_points_that_are_adapted_too(cpu):
    donor, workload = matmul(64, 256, 128), matmul(48, 96, 32)
    [proposal] = evolution.sample(donor, cpu.tvm(), 1, known=set(), seed=3, spaces=())
    points = Points(workload, cpu.tvm(), None, seed=0)

    adapted = [points.program(point) for point in points.adapted(proposal.trace)]

    a, b = factors(48, 96, 32)
    program = next(schedule for schedule in adapted if schedule is not None)
    found = run_on(program.mod, cpu.tvm(), [a, b], np.zeros((48, 96), np.float32))
    np.testing.assert_allclose(found, a @ b, rtol=1e-4)
