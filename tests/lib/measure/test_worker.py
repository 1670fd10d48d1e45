"""What a worker process makes of requests, in this process; how it is talked to is in `test_process`."""

import itertools

import pytest
import tvm
from tvm import te, tirx

from lib.measure import timing, worker
from lib.measure.process import Worker
from lib.measure.protocol import Build, Check, Compile, Define, Drop, Param, Time
from lib.measure.worker import Kernels
from lib.tir import lowering, traces
from lib.tir.workload import as_workload
from tests.helpers import matmul

ROWS, COLUMNS, DEPTH = 4, 512, 256  # half a megabyte of weights


def marked(module):
    """A workload whose second parameter is a weight."""
    return as_workload(module["main"].with_attr("layout_free_buffers", [1]))


@pytest.mark.parametrize(
    ("workload", "n_lists"), [(marked(matmul(16, 32, 64)), 0), (marked(matmul(ROWS, COLUMNS, DEPTH)), 192)]
)
def test_weights_of_some_size_are_read_from_memory(cpu, monkeypatch, workload, n_lists):
    seen = []
    rotating = timing.on_rotating_arguments
    monkeypatch.setattr(
        timing, "on_rotating_arguments", lambda kernel, lists: seen.append(lists) or rotating(kernel, lists)
    )
    kernels = Kernels(cpu.tvm())
    kernels.define(Define(tvm.ir.save_json(workload)))
    kernels.build(Build("c", traces.EMPTY_TRACE))

    warm = kernels.time(Time("c", 2, 0.001))
    cold = kernels.time(Time("c", 2, 0.001, cold_weights=True))

    assert [len(lists) for lists in seen] == ([n_lists] if n_lists else [])
    assert len(warm.latencies) == len(cold.latencies) == 2
    for data, _, out in itertools.chain(*seen):  # what is computed is not moved
        assert (data.same_as(seen[0][0][0]), out.same_as(seen[0][0][2])) == (True, True)


def test_the_memory_for_cold_weights_is_made_once(cpu, monkeypatch):
    made, memory = [], timing.ColdMemory
    monkeypatch.setattr(worker, "ColdMemory", lambda dtype: made.append(dtype) or memory(dtype))
    kernels = Kernels(cpu.tvm())
    kernels.define(Define(tvm.ir.save_json(marked(matmul(ROWS, COLUMNS, DEPTH)))))
    kernels.build(Build("c", traces.EMPTY_TRACE))

    for _ in range(3):
        kernels.time(Time("c", 1, 0.001, cold_weights=True))

    assert made == ["float32"]


@pytest.mark.parametrize(("as_shipped", "level"), [(False, 2), (True, None)])
def test_an_untuned_program_that_may_be_shipped_is_compiled_as_what_is(cpu, monkeypatch, as_shipped, level):
    """LLVM's levels made 2.5 times the speed of a GRU: the faster one won, and the slower one stood in the library."""
    targets, build = [], lowering.build

    def seen(program, target, *how):
        targets.append(target)
        return build(program, target, *how)

    monkeypatch.setattr(lowering, "build", seen)
    kernels = Kernels(cpu.tvm())
    kernels.define(Define(tvm.ir.save_json(as_workload(matmul()["main"]))))

    kernels.build(Build("c", traces.EMPTY_TRACE, as_shipped=as_shipped))

    assert [target.attrs.get("opt-level") for target in targets] == [level]


def test_what_competes_for_being_shipped_is_compiled_so(pool, monkeypatch):
    asked, ask = [], Worker.ask

    def seen(self, request, limit_s):
        asked.append(request)
        return ask(self, request, limit_s)

    monkeypatch.setattr(Worker, "ask", seen)

    latencies, base = pool.compare(
        tvm.ir.save_json(as_workload(matmul()["main"])), [traces.EMPTY_TRACE], 1, baseline=traces.EMPTY_TRACE
    )

    assert [len(found) for found in (*latencies, base)] == [1, 2]
    assert {request.as_shipped for request in asked if isinstance(request, Build)} == {True}


def test_another_workload_replaces_the_one_before(cpu, tmp_path):
    kernels = Kernels(cpu.tvm())
    params = []
    for n in (16, 32):
        kernels.define(Define(tvm.ir.save_json(matmul(n, n, n))))
        params.append(kernels.compile(Compile(traces.EMPTY_TRACE, tmp_path / f"{n}.so")).params)

    assert params == [(Param((n, n), "float32", 0),) * 3 for n in (16, 32)]


def test_without_a_workload_that_loads_nothing_is_built(cpu):
    kernels = Kernels(cpu.tvm())
    kernels.define(Define(tvm.ir.save_json(matmul())))
    kernels.build(Build("right", traces.EMPTY_TRACE))

    kernels.define(Define("no workload"))

    with pytest.raises(ValueError, match="Expecting value"):
        kernels.build(Build("wrong", traces.EMPTY_TRACE))


def test_what_was_dropped_cannot_be_timed(cpu):
    kernels = Kernels(cpu.tvm())
    kernels.define(Define(tvm.ir.save_json(matmul())))
    kernels.build(Build("c", traces.EMPTY_TRACE))

    kernels.drop(Drop())

    with pytest.raises(KeyError):
        kernels.time(Time("c", 1, 0.001))


@pytest.mark.parametrize(
    ("has_bytes", "rounding"),
    [
        (True, lambda x: x.astype("uint8").astype("float32")),
        (True, tirx.nearbyint),
        (False, lambda x: x.astype("int32").astype("float32")),
    ],
)
def test_a_check_knows_whether_a_workload_rounds_to_bytes_within(cpu, monkeypatch, has_bytes, rounding):
    x = te.placeholder((4000,), name="x")
    rounded = te.compute(x.shape, lambda i: rounding(x[i] * 100 + 100), name="rounded")
    workload = as_workload(te.create_prim_func([x, te.compute(x.shape, lambda i: rounded[i] * 0.5, name="y")]))
    kernels = Kernels(cpu.tvm())
    kernels.define(Define(tvm.ir.save_json(workload)))
    asked = []
    monkeypatch.setattr(worker, "largest_error", lambda _run, _inputs, **given: asked.append(given) or 0.0)

    kernels.check(Check(traces.EMPTY_TRACE))

    assert asked == [{"has_bytes_within": has_bytes}]
