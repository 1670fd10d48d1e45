"""A tiny model taken through the first stages once, for the tests of each stage."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from lib.cost_model import TrainConfig
from lib.layout import ModelFiles, RunFiles
from lib.planning import PlanConfig
from lib.search import SearchConfig
from lib.source import Source
from lib.tables import Origin
from stages import cluster, extract, generate, measure, train
from stages.extract import ExtractConfig

PLAN = PlanConfig(num_trials_per_round=8, num_trials_warmup=3)
SEARCH = SearchConfig(population=32, generations=1)
TRAIN = TrainConfig(min_samples=4)
ORIGIN = Origin("inputs", "session")


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
    extract.run(Source("tiny_cnn"), cpu, ExtractConfig(), origin=ORIGIN, out=model)
    cluster.run(model.subgraphs, "core-operator", origin=ORIGIN, out=families)
    first = run.round(0)
    generate.run(model.subgraphs, families, [], cpu, PLAN, SEARCH, seed=0, origin=ORIGIN, out=first)
    measure.run(model.subgraphs, pool, origin=ORIGIN, out=first)
    train.run(families, [first], TRAIN, seed=0, origin=ORIGIN, out=first)
    return Started(model, families, run)


@pytest.fixture
def second_round(started, tmp_path, cpu):
    """A copy of the run with the candidates of round 1, for a test to spoil."""
    folder = tmp_path / "run"
    shutil.copytree(started.run.folder, folder)
    run = RunFiles(folder)
    generate.run(
        started.model.subgraphs, started.families, run.rounds(1), cpu, PLAN, SEARCH, seed=0, origin=ORIGIN,
        out=run.round(1),
    )  # fmt: skip
    return run
