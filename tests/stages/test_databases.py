"""Out to stock TVM, and in from it."""

import json

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op
from tvm.s_tir import meta_schedule as ms

from lib.contracts import tables
from lib.contracts.errors import ModelError
from lib.contracts.files import RunFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution, interchange
from lib.tir.numerics import random_values, relative_error
from lib.tir.workload import load_module
from lib.tuning.memory import Memory
from stages import export_database, import_database, measure
from tests.helpers import matmul
from tests.lib.graph.rules import helpers as graphs
from tests.stages.conftest import PROVENANCE
from tests.stages.test_measure import Recorder


@pytest.fixture
def memory(started, tmp_path, pool):
    """With the first round of the tiny model."""
    memory = Memory(tmp_path / "memory", pool.conditions)
    copied = RunFiles(tmp_path / "run")
    for name in ("plan", "candidates"):
        target = getattr(copied.round(0), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(getattr(started.run.round(0), name).read_bytes())
    measure.run(started.model.subgraphs, pool, provenance=PROVENANCE, out=copied.round(0), memory=memory)
    return memory


def subgraphs(started):
    return [row for row in tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist() if row["tunable"]]


def outputs(module, started, x):
    """What plain `relax.build` makes of a fused module."""
    machine = relax.VirtualMachine(relax.build(module, "llvm"), tvm.cpu())
    params = [tvm.runtime.tensor(array) for array in np.load(started.model.weights).values()]
    return machine[fusion.ENTRY](tvm.runtime.tensor(x), *params).numpy()


def test_stock_tvm_compiles_with_the_memorys_best_and_computes_the_same(started, memory, cpu, tmp_path):
    module = tvm.ir.load_json(started.model.module.read_text())
    count = export_database.run(started.model, memory, cpu, out=tmp_path / "database")

    with cpu.tvm():
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path / "database"))(module)

    scheduled = [f for f in applied.functions.values() if f.attrs and f.attrs.get("tirx.is_scheduled")]
    assert count == len(scheduled) == len(subgraphs(started)) > 1
    shape = tuple(int(n) for n in module[fusion.ENTRY].params[0].ty.shape.values)
    x = random_values(shape, "float32", 0, seed=0)
    assert relative_error(outputs(applied, started, x), outputs(module, started, x)) < 1e-5


def test_of_a_model_that_was_never_tuned_nothing_goes_out(started, cpu, pool, tmp_path):
    with pytest.raises(ModelError, match="Nothing is known of this model's subgraphs"):
        export_database.run(
            started.model, Memory(tmp_path, pool.conditions), cpu, out=tmp_path / "database"
        )  # fmt: skip

    assert not (tmp_path / "database").exists()


def test_what_goes_out_is_the_fastest_of_each_subgraph(started, memory, cpu, tmp_path):
    export_database.run(started.model, memory, cpu, out=tmp_path / "database")

    found = import_database.of_subgraphs(
        interchange.read(tmp_path / "database"), {row["subgraph_id"]: row for row in subgraphs(started)}
    )

    for row in subgraphs(started):
        known = memory.of(row["core_operator"], row["subgraph_id"]).to_pylist()
        best = min(np.median(each["latencies"]) for each in known if each["origin"] != "untuned")
        assert [record.seconds for record in found[row["subgraph_id"]]] == [pytest.approx(best)]


def halves(x):
    """Two convolutions that differ in the channels that they read and write."""
    weight = graphs.const(graphs.random((1, 1, 16, 32)))
    parts = [op.strided_slice(x, [3], [16 * n], [16 * n + 16], [1]) for n in range(2)]
    return op.concat([op.nn.conv2d(each, weight, data_layout="NHWC", kernel_layout="HWIO") for each in parts], 3)


def test_convolutions_of_other_channels_go_out_each_and_come_in_as_one_subgraph(cpu, tmp_path):
    given = fusion.fuse(fusion.lift_constants(graphs.module(halves, (1, 4, 4, 32))).module, cpu.tvm())
    [subgraph] = extract_subgraphs(given)
    [program] = evolution.sample(load_module(subgraph.workload), cpu.tvm(), 1, known=(), seed=0)
    workloads = export_database.workloads(given, subgraph.functions)

    interchange.write(tmp_path, [(each, program.trace, 1e-3) for each in workloads], cpu.tvm())
    found = import_database.of_subgraphs(
        interchange.read(tmp_path), {subgraph.subgraph_id: {"workload": subgraph.workload}}
    )

    assert len(workloads) == 2
    assert len(found[subgraph.subgraph_id]) == 2
    with cpu.tvm():
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path))(given)
    assert sum("tirx.is_scheduled" in (f.attrs or {}) for f in applied.functions.values()) == 2


@pytest.fixture
def stocks(started, cpu, tmp_path):
    """A database as MetaSchedule writes it: schedules of its own space for one subgraph, and for another workload."""
    [row] = [row for row in subgraphs(started) if row["core_operator"] == "matmul"][:1]
    workload, foreign = load_module(row["workload"]), matmul()
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    for module in (workload, foreign):
        token = database.commit_workload(module)
        arguments = ms.arg_info.ArgInfo.from_prim_func(module["main"])
        for n, each in enumerate(evolution.sample(module, cpu.tvm(), 3, known=(), seed=0, spaces=())):
            trace = tvm.s_tir.Schedule(module)
            tvm.s_tir.schedule.Trace.apply_json_to_schedule(json.loads(each.trace), trace)
            database.commit_tuning_record(ms.database.TuningRecord(trace.trace, token, [1.0 + n], cpu.tvm(), arguments))
    return row, tmp_path


def test_what_comes_in_is_measured_here_and_remembered(started, stocks, tmp_path, cpu, pool):
    row, folder = stocks
    memory = Memory(tmp_path / "memory", pool.conditions)

    def bring_in(most, runner):
        return import_database.run(started.model.subgraphs, folder, most, runner, memory, cpu, session="s")

    told = bring_in(2, pool)
    again = bring_in(64, recorder := Recorder(pool))

    found = memory.of(row["core_operator"], row["subgraph_id"]).to_pylist()
    assert (told.measured, told.failed, told.foreign, told.unfit, told.left_out) == (2, 0, 3, 0, 1)
    assert (again.measured, again.known, len(recorder.asked)) == (1, 2, 1)
    assert [each["origin"] for each in found] == ["imported"] * 3
    assert all(each["status"] == "ok" and np.median(each["latencies"]) < 0.5 for each in found)  # the database says 1 s
    assert all(each["features"] for each in found)


def test_a_database_of_another_model_or_none_is_refused_by_name(started, tmp_path, cpu, pool):
    memory = Memory(tmp_path / "memory", pool.conditions)

    def bring_in():
        return import_database.run(started.model.subgraphs, tmp_path, 1, pool, memory, cpu, session="s")

    with pytest.raises(ModelError, match=r"there is no database_workload\.json"):
        bring_in()
    interchange.write(tmp_path, [], cpu.tvm())
    with pytest.raises(ModelError, match="none of its 0 records"):
        bring_in()
    for name in interchange.FILES:
        (tmp_path / name).write_text("no JSON\n")
    with pytest.raises(ModelError, match="no database of this TVM's MetaSchedule"):
        bring_in()
