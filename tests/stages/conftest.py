"""A tiny model taken through the first stages once, for the tests of each stage."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.tables import Provenance
from lib.graph.algorithms import AlgorithmConfig
from lib.models.source import Source
from lib.search.evolution import SearchConfig
from lib.tuning.cost_model import TrainConfig
from lib.tuning.planning import PlanConfig
from stages import cluster, extract, generate, measure, train

PLAN = PlanConfig(num_trials_per_round=8, num_trials_warmup=3)
SEARCH = SearchConfig(population=32, generations=1)
TRAIN = TrainConfig(min_samples=4, num_boost_round=20)
PROVENANCE = Provenance("inputs", "session")


@dataclass(frozen=True)
class Started:
    """A model with its families and one finished round."""

    model: ModelFiles
    families: Path
    run: RunFiles


@pytest.fixture(scope="session")
def started(tmp_path_factory, cpu, pool):
    model = ModelFiles(tmp_path_factory.mktemp("tiny_cnn"))
    families, run = model.families("core-operator"), model.run("run")
    extract.run(Source("tiny_cnn"), cpu, AlgorithmConfig(), provenance=PROVENANCE, out=model)
    cluster.run(model.subgraphs, "core-operator", provenance=PROVENANCE, out=families)
    first = run.round(0)
    generate.run(model.subgraphs, families, [], cpu, PLAN, SEARCH, seed=0, provenance=PROVENANCE, out=first)
    measure.run(model.subgraphs, pool, provenance=PROVENANCE, out=first)
    train.run(families, [first], TRAIN, seed=0, provenance=PROVENANCE, out=first)
    return Started(model, families, run)


@pytest.fixture
def second_round(started, tmp_path, cpu):
    """A copy of the run with the candidates of round 1, for a test to spoil."""
    folder = tmp_path / "run"
    shutil.copytree(started.run.folder, folder)
    run = RunFiles(folder)
    generate.run(
        started.model.subgraphs, started.families, run.rounds(1), cpu, PLAN, SEARCH, seed=0, provenance=PROVENANCE,
        out=run.round(1),
    )  # fmt: skip
    return run
