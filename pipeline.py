"""Luigi tasks: who needs whom, where files lie, options and luigi.cfg to frozen configs. No tuning.

    ExtractSubgraphs -> ClusterFamilies
        -> [GenerateCandidates(r) -> MeasureCandidates(r) -> TrainFamilyModels(r)] for r = 0, 1, ...
        -> CompileModel -> Report

`TuneModel` asks for rounds until a limit is reached, then compiles and reports. A task is complete if its output was
made from what its inputs are now: digests in the files decide. A stage started alone says what is missing before it.
"""

import argparse
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import luigi
from luigi.task import externalize

from lib.contracts import digests, manifest, schemas, tables
from lib.contracts.errors import TunerError
from lib.contracts.files import RoundFiles
from lib.contracts.tables import Provenance, made_from
from lib.measure import factory
from lib.options import Options, Table, options
from lib.report import console
from lib.scheduling import Choice, Float, Int, MeasuringTask, StageTask, Text, is_asked_for, section, tell_unread
from lib.tuning import budget, cost_model, planning, runs
from lib.tuning.budget import TRIALS_PER_SUBGRAPH, Budget, Standing
from lib.tuning.families import ALGORITHMS
from lib.tuning.members import members
from lib.verification import CompileConfig
from stages import cluster, compile, extract, generate, measure, report, train

SESSION = uuid.uuid4().hex[:12]
ARTIFACTS = Path(__file__).parent / "artifacts"  # unless `[tuner] artifacts` in the configuration moves them


class TunerTask(luigi.Task):
    """The options that decide what a run is; equal options continue the same run."""

    model: str = Text(description="name of the zoo, or path of an .onnx or .pt2 file")
    batch_size: int = Int(default=0, description="samples in an inference of a zoo model; 0: 1")
    sequence: int = Int(default=0, description="tokens in a sample of a zoo model; 0: its default")
    shape: str = Text(default="", description="of an ONNX file's inputs: 'ids=1,128', or 'batch=1'")
    weights: str = Text(default="", description="a .safetensors file for a zoo model; empty: random weights")
    families: str = Choice(default="core-operator", choices=list(ALGORITHMS), description="what shares a cost model")
    foresee: float = Float(default=0.25, description="share of a round for the bottleneck's family")
    strategy: str = Choice(default="foresee", choices=planning.STRATEGIES, description="whose turn is next")
    seed: int = Int(default=0, description="of the search")
    target: str = Text(default="host", description="`host`, `cuda`, a GPU's tag, or a target as JSON")
    threads: int = Int(default=0, description="threads of one inference; 0: all physical cores")
    devices: str = Text(default="local", description="measure there: `local`, `rpc://HOST:PORT/KEY`, `replay:FOLDER`")
    # A central scheduler gives up a task that another process runs, where locks wait and then see what is done.
    session: str = Text(default=SESSION, description=argparse.SUPPRESS)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tell_unread()
        self.given.check()

    @property
    def given(self) -> Options:
        own = {name: getattr(self, name) for name, _ in TunerTask.get_params() if name != "session"}
        return options(section, console.tell, Path(section("tuner").get("artifacts", ARTIFACTS)), **own)

    def finished_rounds(self, known: int = 0) -> int:
        """How many rounds are complete and current, from the first on; `known` of them are not looked at again."""
        while self.clone(TrainFamilyModels, round=known).is_current():
            known += 1
        return known


class ExtractSubgraphs(TunerTask, StageTask):
    """Import the model and cut it into subgraphs."""

    path = property(lambda self: self.given.model_files.subgraphs)
    lock = property(lambda self: self.given.model_files.lock)  # all runs of a model share it

    @property
    def provenance(self) -> Provenance:
        given = self.given
        return Provenance(extract.inputs(given.model_files, given.compile_target, given.algorithms), SESSION)

    def is_current(self) -> bool:
        return tables.is_current(*self.given.subgraphs, self.provenance.inputs)

    def work(self) -> None:
        self.status("importing the model")
        given, made = self.given, self.provenance
        extract.run(given.source, given.compile_target, given.algorithms, provenance=made, out=given.model_files)


class ClusterFamilies(TunerTask, StageTask):
    """Group the subgraphs into families."""

    path = property(lambda self: self.given.clustered[0])
    lock = property(lambda self: self.given.model_files.lock)

    def requires(self) -> luigi.Task:
        return self.clone(ExtractSubgraphs)

    @property
    def provenance(self) -> Provenance:
        return Provenance(made_from(self.given.subgraphs), SESSION)

    def is_current(self) -> bool:
        return self.requires().is_current() and tables.is_current(*self.given.clustered, self.provenance.inputs)

    def work(self) -> None:
        cluster.run(self.given.model_files.subgraphs, self.families, provenance=self.provenance, out=self.path)


@ClusterFamilies.event_handler(luigi.Event.SUCCESS)
@ClusterFamilies.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # nothing was left to do
def show_families(task: ClusterFamilies) -> None:
    """Whoever asks for the families sees them, whether they had to be made or not."""
    if is_asked_for(task):
        console.show(cluster.describe(tables.read(*task.given.subgraphs), tables.read(*task.given.clustered)))


class RoundTask(TunerTask, StageTask):
    """A stage of one round: made from `sources`, all of which must be there."""

    round: int = Int(default=0, description="number of the round, from 0")
    schema: Any
    sources: list[Table]

    @property
    def files(self) -> RoundFiles:
        return self.given.run_files.round(self.round)

    @property
    def trained_before(self) -> list[Table]:
        return [(self.given.run_files.round(self.round - 1).training, schemas.TRAINING)] if self.round else []

    @property
    def provenance(self) -> Provenance:
        return Provenance(made_from(*self.sources), SESSION)

    def is_current(self) -> bool:
        there = all(source.exists() for source, _ in self.sources)
        return there and tables.is_current(self.path, self.schema, self.provenance.inputs)


class GenerateCandidates(RoundTask):
    """Plan a round and search its candidates."""

    schema = schemas.CANDIDATES
    path = property(lambda self: self.files.candidates)
    sources = property(lambda self: [self.given.subgraphs, self.given.clustered, *self.trained_before])

    def requires(self) -> list[luigi.Task]:
        before = [externalize(self.clone(TrainFamilyModels, round=self.round - 1))] if self.round else []
        return [self.clone(ClusterFamilies), *before]

    def work(self) -> None:
        self.status("searching candidates")
        runs.record(self.given.run_files, self.given.identity)
        given, past = self.given, self.given.run_files.rounds(self.round)
        generate.run(
            given.model_files.subgraphs, given.clustered[0], past, given.compile_target, given.plan, given.search,
            seed=self.seed, provenance=self.provenance, out=self.files,
        )  # fmt: skip


class MeasureCandidates(RoundTask, MeasuringTask):
    """Build and time a round's candidates."""

    schema = schemas.MEASUREMENTS
    path = property(lambda self: self.files.measurements)
    sources = property(lambda self: [(self.files.candidates, schemas.CANDIDATES)])

    def requires(self) -> luigi.Task:
        return externalize(self.clone(GenerateCandidates))

    def work(self) -> None:
        (subgraphs, _), made = self.given.subgraphs, self.provenance
        doing = measure.describe(subgraphs, self.files)

        def watch(measurement: Any) -> None:
            console.progress().measured(measurement)
            self.status(doing)

        self.status(doing)
        runs.record(self.given.run_files, self.given.identity)
        measure.run(subgraphs, self.given.runner, provenance=made, out=self.files, watch=watch, say=console.tell)


class TrainFamilyModels(RoundTask):
    """Train the models of the families that a round measured."""

    schema = schemas.TRAINING
    path = property(lambda self: self.files.training)

    def requires(self) -> luigi.Task:
        return externalize(self.clone(MeasureCandidates))

    @property
    def sources(self) -> list[Table]:  # type: ignore[override]
        own = [(self.files.candidates, schemas.CANDIDATES), (self.files.measurements, schemas.MEASUREMENTS)]
        return [self.given.clustered, *own, *self.trained_before]

    def is_current(self) -> bool:
        """The whole round is: a round whose candidates went missing is made again from there."""
        before = (self.clone(GenerateCandidates), self.clone(MeasureCandidates))
        return all(stage.is_current() for stage in before) and super().is_current()

    def work(self) -> None:
        self.status("training")
        config = self.given.train
        if config.device == "cuda" and (reason := cost_model.without_cuda()):
            console.tell(f"warning: [train] device = cuda: {reason}, so cost models train on the CPU")
            config = replace(config, device="cpu")
        past = self.given.run_files.rounds(self.round + 1)
        train.run(self.given.clustered[0], past, config, seed=self.seed, provenance=self.provenance, out=self.files)


class FinalTask(TunerTask, StageTask):
    """A stage that looks back on finished rounds."""

    rounds: int = Int(default=-1, description="use the first so many rounds; -1: all finished ones")

    @cached_property
    def past(self) -> list[RoundFiles]:
        return self.given.run_files.rounds(self.finished_rounds() if self.rounds < 0 else self.rounds)


class CompileModel(FinalTask, MeasuringTask):
    """Compile the model with the best of its finished rounds."""

    path = property(lambda self: self.given.run_files.compiled.manifest)

    @property
    def config(self) -> CompileConfig:
        return self.given.configured(CompileConfig, "compile")

    def requires(self) -> luigi.Task:
        return externalize(self.clone(TrainFamilyModels, round=max(len(self.past) - 1, 0)))

    @property
    def provenance(self) -> Provenance:
        return Provenance(compile.inputs(self.past, self.config), SESSION)

    def is_current(self) -> bool:
        return bool(self.past) and manifest.is_current(self.path, self.provenance.inputs)

    def work(self) -> None:
        given, pool = self.given, factory.require_pool(self.given.runner)
        compile.run(
            given.model_files, given.clustered[0], self.past, given.compile_target, self.config, pool,
            provenance=self.provenance, out=self.given.run_files.compiled, onnx=given.onnx_file, say=self.status,
        )  # fmt: skip


class Report(FinalTask):
    """Write and print the report of a compiled run."""

    path = property(lambda self: self.given.run_files.reported)

    def requires(self) -> luigi.Task:
        return externalize(self.clone(CompileModel, rounds=len(self.past)))

    @property
    def provenance(self) -> Provenance:
        return Provenance(digests.of_file(self.given.run_files.compiled.manifest), SESSION)

    def is_current(self) -> bool:
        return self.requires().is_current() and manifest.is_current(self.path, self.provenance.inputs)

    def work(self) -> None:
        given, files = self.given, self.given.run_files
        title = f"{given.model_files.folder.name} on {given.compile_target.name}, {files.folder.name}"
        report.run(
            given.model_files, given.clustered[0], self.past, files.compiled, title,
            provenance=self.provenance, out=files,
        )  # fmt: skip

    def run(self) -> None:
        """Print it, also if another run of the same command wrote it."""
        super().run()
        console.show(report.shown(self.given.run_files))


class TuneModel(TunerTask):
    """Tune a model until the first of its limits is reached, then compile, verify and report it."""

    trials: int = Int(
        default=0, description=f"end after so many; 0: {TRIALS_PER_SUBGRAPH} a subgraph if no limit is set"
    )
    minutes: float = Float(default=0.0, description="end after so many minutes of tuning; 0: no limit")
    target_latency_ms: float = Float(default=0.0, description="end at this estimate; 0: no limit")

    _finished = 0  # rounds that this process has seen complete
    _counted_on = ""  # the families that they were made for: a new extraction begins a new count
    _started = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = Budget(self.trials, 60 * self.minutes, self.target_latency_ms / 1e3)

    def complete(self) -> bool:
        compiles = self.given.measured_on.can_compile
        try:
            if not self.clone(ClusterFamilies).is_current():  # say, after an upgrade of TVM
                return False
            self._finished = self.finished_rounds()
            reported = not compiles or self.clone(Report, rounds=self._finished).is_current()
            done = reported and self.standing().ended != ""
        except TunerError:
            return False  # `run` tells what is wrong
        if done and not self._started:
            files = self.given.run_files
            kept = f"report is {files.report}" if compiles else f"tables are in {files.folder}"
            print(f"Nothing is left to do; the {kept}")
        return done

    def run(self) -> Iterator[luigi.Task]:
        """Luigi starts this afresh after each task it asked for, so what stands before a yield is cheap."""
        self._started = True
        _ = (self.given.run_files, self.clone(CompileModel).config)  # settings that cannot work end it here
        yield self.clone(ClusterFamilies)
        now = made_from(self.given.clustered)
        self._finished = self.finished_rounds(self._finished if self._counted_on == now else 0)
        self._counted_on = now
        standing = self.standing()
        console.progress().begin_round(self.budget, standing)
        self.set_progress_percentage(standing.percentage(self.budget))
        if not standing.ended:
            for stage in (GenerateCandidates, MeasureCandidates, TrainFamilyModels):
                yield self.clone(stage, round=self._finished)
        console.note(f"tuning ended: {standing.ended}")
        if not self.given.measured_on.can_compile:
            console.show(
                f"Nothing is compiled from replayed measurements; the tables are in {self.given.run_files.folder}"
            )
            return
        yield self.clone(CompileModel, rounds=self._finished)
        yield self.clone(Report, rounds=self._finished)

    def standing(self) -> Standing:
        """After the rounds that are finished."""
        found = members(tables.read(*self.given.subgraphs), tables.read(*self.given.clustered))
        self.budget = self.budget.or_default(len(found))
        return budget.standing(self.given.run_files.rounds(self._finished), found, self.budget, self.given.plan)
