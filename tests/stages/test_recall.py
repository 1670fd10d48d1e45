"""What a run begins with, from what the memory has of its subgraphs and of others."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.contracts import tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import CANDIDATES, FAMILIES, MEASUREMENTS, PLAN, SUBGRAPHS, TRAINING
from lib.searching import Known
from lib.tuning import history, planning
from lib.tuning.base import NONE
from lib.tuning.cost_model import LOOKS
from lib.tuning.memory import Memory
from stages import generate, measure, recall, train
from tests.helpers import CONDITIONS
from tests.lib.tuning.test_memory import remembered
from tests.stages.conftest import PLAN as CONFIG
from tests.stages.conftest import PROVENANCE, SEARCH, TRAIN
from tests.stages.test_measure import Recorder


@pytest.fixture
def memory(tmp_path):
    return Memory(tmp_path / "memory", CONDITIONS)


@pytest.fixture
def files(tmp_path):
    return RunFiles(tmp_path / "run")


def run(started, files, memory, max_samples=6000, algorithm="core-operator"):
    recall.run(
        started.model.subgraphs, started.families, algorithm, memory, max_samples, provenance=PROVENANCE,
        out=files.recalled,
    )  # fmt: skip
    return history.load(files.past(0))


def some_subgraph(started, operator="conv2d"):
    rows = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()
    return next(row["subgraph_id"] for row in rows if row["tunable"] and row["core_operator"] == operator)


def test_without_a_memory_a_run_begins_with_nothing(started, files, memory):
    for each in (None, memory):
        found = run(started, files, each)

        assert (found.subgraphs, found.n_trials) == ({}, 0)
        assert len(tables.read(files.recalled.plan, PLAN)) == 0


def test_what_is_known_of_a_subgraph_is_recalled_and_costs_nothing(started, files, memory):
    subgraph_id = some_subgraph(started)
    memory.remember(remembered(subgraph_id, 3.0, 2.0, 4.0))

    found = run(started, files, memory)

    past = found.of(subgraph_id)
    assert (past.n_recalled, past.best_s, past.known >= {"0", "1", "2"}, past.was_tried) == (3, 2.0, True, True)
    assert (found.n_trials, found.n_rounds) == (0, 0)


def test_a_subgraph_of_which_there_is_no_more_is_not_searched_again(started, files, tmp_path):
    memory = Memory(tmp_path / "memory", CONDITIONS, search="this one")
    for name in ("conv2d", "matmul"):
        memory.remember(remembered(some_subgraph(started, name), 3.0, 2.0, operator=name))
    memory.exhaust("conv2d", some_subgraph(started, "conv2d"))

    found = run(started, files, memory)
    other = Memory(tmp_path / "memory", CONDITIONS, search="another one")
    again = run(started, RunFiles(tmp_path / "other"), other)

    assert planning.dead(found.of(some_subgraph(started, "conv2d")), CONFIG) == "its space is exhausted"
    assert planning.dead(found.of(some_subgraph(started, "matmul")), CONFIG) == ""
    assert found.of(some_subgraph(started, "conv2d")).best_s == 2.0
    assert planning.dead(again.of(some_subgraph(started, "conv2d")), CONFIG) == ""


def test_what_a_round_hardly_found_anything_of_is_kept_as_exhausted(started, files, memory, pool):
    first, second = started.run.round(0), files.round(0)
    for path in (first.candidates, first.measurements):
        second.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, second.folder)
    plan = tables.read(first.plan, PLAN).to_pylist()
    conv2d = some_subgraph(started)
    for row in plan:
        row["num_trials"] = 100 if row["subgraph_id"] == conv2d else row["num_trials"]
    tables.write(pa.Table.from_pylist(plan, schema=PLAN), second.plan, PLAN, PROVENANCE)

    recorder = Recorder(pool)
    measure.run(started.model.subgraphs, recorder, provenance=PROVENANCE, out=second, memory=memory)

    assert recorder.asked == []  # all of it was measured before
    rows = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()
    operators = {row["subgraph_id"]: row["core_operator"] for row in rows}
    found = tables.read(first.candidates, CANDIDATES)["subgraph_id"].to_pylist()
    few = {row["subgraph_id"] for row in plan if found.count(row["subgraph_id"]) < row["num_trials"] / 4}
    assert conv2d in few
    assert few == {key for key, operator in operators.items() if memory.is_exhausted(operator, key)}


def test_families_learn_from_subgraphs_of_other_models_but_these_are_not_planned(started, files, memory):
    memory.remember(remembered("elsewhere", *[1.0 + n for n in range(20)]))
    memory.remember(remembered("of another operator", *[1.0] * 20, operator="tan"))

    run(started, files, memory)
    train.run(started.families, files.past(0), TRAIN, seed=0, provenance=PROVENANCE, out=files.recalled)

    samples = history.samples(files.recalled)
    assert set(samples.subgraphs) == {"elsewhere"}
    assert set(samples.families) <= set(tables.read(started.families, FAMILIES)["family_id"].to_pylist())
    assert len(tables.read(files.recalled.plan, PLAN)) == 0
    assert any((files.recalled.folder / "models").iterdir())


def test_how_well_others_are_foretold_decides_how_long_a_first_look_is(started, files, memory):
    """Four subgraphs of other models, five programs each; the last line is what a search is told."""
    for name in "wxyz":
        memory.remember(remembered(name, 3.0, 2.0, 4.0, 1.0, 5.0))
    run(started, files, memory)
    train.run(started.families, files.past(0), TRAIN, seed=0, provenance=PROVENANCE, out=files.recalled)

    rows = {row["family_id"]: row for row in tables.read(files.recalled.training, TRAINING).to_pylist()}

    assert len(rows["conv2d"]["regrets"]) == LOOKS
    assert rows["conv2d"]["regrets"][4:] == [0.0] * (LOOKS - 4)  # of the first five of five programs
    assert rows["matmul"]["regrets"] == []
    known = Known(
        tables.read(started.model.subgraphs, SUBGRAPHS), tables.read(started.families, FAMILIES), files.past(0),
        history.load(files.past(0)), NONE,
    )  # fmt: skip
    assert {each.family_id for each in known.subgraphs if each.regrets} == {"conv2d"}


def test_a_family_gets_no_more_samples_than_it_may_have_and_its_own_before_others(started, files, memory):
    subgraph_id = some_subgraph(started)
    memory.remember(remembered(subgraph_id, *[1.0] * 8))
    memory.remember(remembered("elsewhere", *[1.0] * 8))

    found = run(started, files, memory, max_samples=4)

    samples = history.samples(files.recalled)
    assert set(samples.subgraphs) == {subgraph_id}
    assert len(samples.features) == 4
    assert found.of(subgraph_id).n_recalled == 8  # the others are known not to be worth another trial


def test_each_its_own_family_learns_from_no_other(started, files, memory):
    memory.remember(remembered("elsewhere", 1.0))

    run(started, files, memory, algorithm="each")

    assert len(tables.read(files.recalled.candidates, CANDIDATES)) == 0


def test_what_one_run_measures_the_next_begins_with(started, files, tmp_path, cpu, pool):
    """The first round of a run is in the memory; another run plans no warm-up and asks for none of it again."""
    memory = Memory(tmp_path / "memory", pool.conditions)
    first = RunFiles(tmp_path / "first")
    run(started, first, memory)
    train.run(started.families, first.past(0), TRAIN, seed=0, provenance=PROVENANCE, out=first.recalled)
    one_round(started, first, cpu, pool, memory, seed=0)
    measured = tables.read(first.round(0).measurements, MEASUREMENTS)
    assert measured.num_rows > 0

    known = run(started, files, memory)
    train.run(started.families, files.past(0), TRAIN, seed=1, provenance=PROVENANCE, out=files.recalled)
    one_round(started, files, cpu, pool, memory, seed=1)

    assert sum(past.n_recalled for past in known.subgraphs.values()) == measured.num_rows
    kinds = tables.read(files.round(0).plan, PLAN)["kind"].to_pylist()
    assert kinds == ["bottleneck"]
    again = set(tables.read(files.round(0).candidates, CANDIDATES)["candidate_id"].to_pylist())
    assert again
    assert not again & set(measured["candidate_id"].to_pylist())


def test_what_another_run_measured_meanwhile_is_not_measured_again(started, tmp_path, cpu, pool):
    """Both began with nothing, and one seed gives one warm-up."""
    memory = Memory(tmp_path / "memory", pool.conditions)
    runs = [RunFiles(tmp_path / name) for name in ("one", "other")]
    asked = []
    for each in runs:
        run(started, each, None)
        train.run(started.families, each.past(0), TRAIN, seed=0, provenance=PROVENANCE, out=each.recalled)
    for each in runs:
        recorder = Recorder(pool)
        one_round(started, each, cpu, recorder, memory, seed=0)
        asked.append(len(recorder.asked))

    one, other = (tables.read(each.round(0).measurements, MEASUREMENTS) for each in runs)
    assert asked == [one.num_rows, 0]
    assert other.equals(one)
    kept = [pq.read_metadata(path).num_rows for path in memory.folder.rglob("*.parquet")]
    assert sum(kept) == one.num_rows


def one_round(started, files, cpu, runner, memory, seed):
    out = files.round(0)
    generate.run(
        started.model.subgraphs, started.families, files.past(0), cpu, CONFIG, SEARCH, seed=seed, provenance=PROVENANCE,
        out=out,
    )  # fmt: skip
    measure.run(started.model.subgraphs, runner, provenance=PROVENANCE, out=out, memory=memory)
