import json

import pyarrow.compute as pc
import pytest

from lib.contracts import manifest, tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import (
    CANDIDATES,
    FAMILIES,
    FEATURE_VERSION,
    MEASUREMENTS,
    PLAN,
    RESULTS,
    SUBGRAPHS,
    TRAINING,
)
from lib.tuning import base, history
from lib.tuning.base import CARD, BaseModels, bases_of
from lib.tuning.cost_model import Samples, train
from lib.verification import CompileConfig
from stages import compile, foretell, recall
from stages import train as training
from tests.stages.conftest import PROVENANCE, SEARCH, TRAIN

COMPILE = CompileConfig(finalists=1, repeats=1, turns=1)


@pytest.fixture(scope="module")
def bases(started, tmp_path_factory):
    """A base model for convolutions, of what the first round measured of them."""
    folder = tmp_path_factory.mktemp("bases")
    found = history.samples(started.run.round(0))
    chosen = found.families == "conv2d"
    model = train(Samples(found.features[chosen], found.subgraphs[chosen], found.latencies_s[chosen]), TRAIN, 0)
    model.save(folder / "conv2d.ubj")
    facts = {"file": "conv2d.ubj", "regrets": [0.2, 0.01], "pairwise": 0.8, "samples": int(chosen.sum())}
    (folder / CARD).write_text(json.dumps({"features": FEATURE_VERSION, "operators": {"conv2d": facts}}))
    base._bases.cache_clear()
    return BaseModels(folder)


@pytest.fixture
def begun(started, bases, tmp_path):
    """A run that knows nothing but the base models."""
    run = RunFiles(tmp_path / "run")
    described, clustered = tables.read(started.model.subgraphs, SUBGRAPHS), tables.read(started.families, FAMILIES)
    recall.run(
        started.model.subgraphs, started.families, "core-operator", None, 100, provenance=PROVENANCE, out=run.recalled
    )
    training.run(
        started.families, [run.recalled], TRAIN, seed=0, provenance=PROVENANCE, out=run.recalled,
        base_of=bases_of(described, clustered, bases),
    )  # fmt: skip
    return run


def foretold(started, run, cpu, bases):
    foretell.run(
        started.model.subgraphs, started.families, [run.recalled], cpu, SEARCH, bases, seed=0, provenance=PROVENANCE,
        out=run.foretold,
    )  # fmt: skip
    return history.load([run.recalled, run.foretold])


def test_all_is_foretold_what_has_a_base_model_by_that_and_nothing_was_measured(started, begun, cpu, bases):
    so_far = foretold(started, begun, cpu, bases)

    families = dict(tables.read(started.families, FAMILIES).to_pandas().to_numpy())
    for subgraph_id, family in families.items():
        past = so_far.of(subgraph_id)
        assert {each.origin for each in past.foretold} == ({"evolved"} if family == "conv2d" else {"sampled"})
        assert not past.fastest
        assert not past.was_tried
    assert (so_far.n_rounds, so_far.n_trials) == (0, 0)


def test_the_candidates_of_a_subgraph_stand_in_the_order_of_their_scores(started, begun, cpu, bases):
    foretold(started, begun, cpu, bases)

    rows = tables.read(begun.foretold.candidates, CANDIDATES).to_pylist()
    for subgraph_id in {row["subgraph_id"] for row in rows if row["family_id"] == "conv2d"}:
        scores = [row["score"] for row in rows if row["subgraph_id"] == subgraph_id]
        assert scores == sorted(scores, reverse=True)
        assert len(scores) <= 2
    assert set(tables.read(begun.foretold.plan, PLAN)["kind"].to_pylist()) == {"foretold"}


def test_a_library_of_what_was_foretold_is_verified(started, begun, cpu, bases, pool):
    foretold(started, begun, cpu, bases)

    compile.run(
        started.model, started.families, [begun.recalled, begun.foretold], cpu, COMPILE, pool, provenance=PROVENANCE,
        out=begun.compiled,
    )  # fmt: skip

    facts = manifest.read(begun.compiled.manifest)
    rows = tables.read(begun.compiled.results, RESULTS).to_pylist()
    assert facts["shipped"] == "tuned"
    assert facts["max_error"] < 1e-4
    notes = {row["note"] for row in rows if row["family_id"] == "conv2d"}
    assert notes == {"foretold, not measured"}
    assert (facts["n_trials"], facts["n_rounds"]) == (0, 0)


def test_after_rounds_only_what_none_of_them_tried_is_foretold(started, begun, cpu, bases):
    measured = started.run.round(0)
    tried = set(tables.read(measured.plan, PLAN)["subgraph_id"].to_pylist())
    rest = tables.read(started.model.subgraphs, SUBGRAPHS).filter(pc.field("tunable"))["subgraph_id"].to_pylist()
    for path, schema in (
        (measured.plan, PLAN),
        (measured.candidates, CANDIDATES),
        (measured.measurements, MEASUREMENTS),
    ):
        keep = pc.not_equal(tables.read(path, schema)["subgraph_id"], rest[0])
        out = begun.round(0).folder / path.name
        tables.write(
            tables.read(path, schema).filter(keep), out, schema, PROVENANCE, clock=tables.stamp(path, schema).clock
        )
    tables.write(tables.read(begun.recalled.training, TRAINING), begun.round(0).training, TRAINING, PROVENANCE)
    past = [begun.recalled, begun.round(0)]

    foretell.run(
        started.model.subgraphs, started.families, past, cpu, SEARCH, bases, seed=0, provenance=PROVENANCE,
        out=begun.foretold,
    )  # fmt: skip

    assert set(rest) == tried
    so_far = history.load([*past, begun.foretold])
    assert [key for key in rest if so_far.of(key).foretold] == [rest[0]]
    assert so_far.n_rounds == 1
    assert so_far.of(rest[1]).fastest


def test_a_foretold_program_that_is_wrong_is_left_out(started, begun, cpu, bases, pool):
    """The trace of one subgraph under the name of another."""
    foretold(started, begun, cpu, bases)
    rows = tables.read(begun.foretold.candidates, CANDIDATES).to_pylist()
    ids = sorted({row["subgraph_id"] for row in rows if row["origin"] == "evolved"})
    broken = [{**row, "trace": '[[["GetSBlock", [], ["no such", "main"], ["b0"]]], []]'} if row["subgraph_id"] == ids[0]
              else row for row in rows]  # fmt: skip
    path = begun.foretold.candidates
    tables.write(tables.pa.Table.from_pylist(broken, schema=CANDIDATES), path, CANDIDATES, PROVENANCE)

    compile.run(
        started.model, started.families, [begun.recalled, begun.foretold], cpu, COMPILE, pool, provenance=PROVENANCE,
        out=begun.compiled,
    )  # fmt: skip

    found = {row["subgraph_id"]: row for row in tables.read(begun.compiled.results, RESULTS).to_pylist()}
    assert found[ids[0]]["candidate_id"] is None
    assert "foretold" in found[ids[0]]["note"]
    assert all(found[key]["candidate_id"] for key in ids[1:])
