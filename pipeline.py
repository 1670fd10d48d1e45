"""Luigi tasks: who needs whom, where files lie, options and luigi.cfg to frozen configs. No tuning.

    ExtractSubgraphs -> ClusterFamilies -> RecallMeasurements -> TrainFamilyModels(-1)
        -> [GenerateCandidates(r) -> MeasureCandidates(r) -> TrainFamilyModels(r)] for r = 0, 1, ...
        -> [ForetellCandidates] -> CompileModel -> Report      (foretold: what no round tried; with --trials 0 all)

`TuneModel` asks for rounds until a limit is reached, then compiles and reports; `TuneModels` and `TuneRange` do so for
several models, or shapes of one, whose subgraphs are joined first (`JoinSubgraphs`). A task is complete if its output
was made from what its inputs are now: digests in the files decide. A stage started alone says what is missing before
it.
"""

import argparse
import io
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import luigi
import pyarrow as pa
from luigi.task import externalize

from lib.contracts import digests, manifest, schemas, tables
from lib.contracts.errors import ConfigError, TunerError
from lib.contracts.files import FORETOLD, RECALLED, ModelFiles, RoundFiles
from lib.contracts.tables import Provenance, made_from
from lib.graph.algorithms import AS_IT_IS, PRECISIONS
from lib.machine import host
from lib.measure import factory, launcher
from lib.options import Options, Table, options
from lib.report import console
from lib.report.nights import Outcome
from lib.scheduling import (
    Choice,
    Float,
    Int,
    MeasuringTask,
    StageTask,
    Text,
    configure,
    is_asked_for,
    section,
    tell_unread,
)
from lib.shapes import Shape
from lib.tuning import budget, cost_model, history, planning, runs
from lib.tuning.base import bases_of
from lib.tuning.budget import TRIALS_PER_SUBGRAPH, Budget, Standing
from lib.tuning.families import ALGORITHMS
from lib.tuning.history import History
from lib.tuning.members import is_tried, joint_members, members
from lib.tuning.memory import Memory
from lib.tuning.planning import Member
from lib.verification import CompileConfig
from stages import (
    adapt,
    cluster,
    compare,
    compile,
    compile_range,
    export_database,
    extract,
    foretell,
    generate,
    import_database,
    join,
    measure,
    probe,
    recall,
    report,
    report_range,
    share,
    summarize,
    train,
)

_TIMES = 1.5  # trials of a range of shapes, to those of one
_MANY = 6  # models whose import is worth processes of their own, which take seconds to begin
SESSION = uuid.uuid4().hex[:12]
ROOT = Path(__file__).parent
ARTIFACTS = ROOT / "artifacts"  # unless `[tuner] artifacts` in the configuration moves them

configure(ROOT / "luigi.cfg")


class TunerTask(luigi.Task):
    """The options that decide what a run is; equal options continue the same run."""

    model: str = Text(description="name of the zoo, or path of an .onnx or .pt2 file")
    batch_size: int = Int(default=0, description="samples in an inference of a zoo model; 0: 1")
    sequence: int = Int(default=0, description="tokens in a sample of a zoo model; 0: its default")
    shape: str = Text(
        default="", description="of a file's inputs: 'ids=1,128'; or 'batch=1'; or a range: 'sequence=1..512'"
    )
    lengths: str = Text(default="", description="of a range: a file with lengths and how often each is asked for")
    weights: str = Text(default="", description="a .safetensors file for a zoo model; empty: random weights")
    fix: str = Text(default="", description="inputs of an ONNX file that are constants: 'use_cache_branch=true'")
    models: str = Text(default="", description=argparse.SUPPRESS)  # tuned together, see `TuneModels`
    families: str = Choice(default="core-operator", choices=list(ALGORITHMS), description="what shares a cost model")
    foresee: float = Float(default=0.25, description="share of a round for the bottleneck's family")
    strategy: str = Choice(default="foresee", choices=planning.STRATEGIES, description="whose turn is next")
    seed: int = Int(default=0, description="of the search")
    target: str = Text(default="host", description="`host`, `raspberry-pi/5`, `cuda`, a tag of TVM, or JSON")
    threads: int = Int(default=0, description="threads of one inference; 0: all physical cores")
    precision: str = Choice(
        default=AS_IT_IS,
        choices=PRECISIONS,
        description="of products: as the model has it, bf16, bf16x3, bf16x6 or int8",
    )
    calibration: str = Text(default="", description="samples to quantise a file with: .npz, or a folder of them")
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

    @property
    def recalled(self) -> "TrainFamilyModels":
        """What there is before the first round."""
        return self.clone(TrainFamilyModels, round=RECALLED)

    def finished_rounds(self, known: int = 0) -> int:
        """How many rounds are complete and current, from the first on; `known` of them are not looked at again."""
        while self.clone(TrainFamilyModels, round=known).is_current():
            known += 1
        return known


class ExtractSubgraphs(TunerTask, StageTask):
    """Import the model and cut it into subgraphs."""

    # The folder of the model in another shape, whose weights are not written again.
    like: str = Text(default="", significant=False, description=argparse.SUPPRESS)
    in_range: int = Int(default=0, description=argparse.SUPPRESS)  # 1: it is one of the shapes of a range

    @property
    def given(self) -> Options:
        given = super().given
        return given.of_a_shape if self.in_range else given

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
        extract.run(
            given.source, given.compile_target, given.algorithms, provenance=made, out=given.model_files,
            like=ModelFiles(Path(self.like)) if self.like else None,
        )  # fmt: skip


class JoinSubgraphs(TunerTask, StageTask):
    """Import the models of a list, and join their subgraphs; one that cannot be imported leaves a reason."""

    path = property(lambda self: self.given.tuned_files.subgraphs)
    lock = property(lambda self: self.given.tuned_files.lock)

    @cached_property
    def extracted(self) -> list[ExtractSubgraphs | str]:
        """What extracts each model; or why nothing can, its file say is missing."""
        like = str(self.given.files_of_shapes[0].folder) if self.given.range else ""
        return [self._extracted(own, like if n else "") for n, own in enumerate(self.given.options_of_models())]

    def _extracted(self, own: dict[str, Any], like: str = "") -> ExtractSubgraphs | str:
        try:
            in_range = int(self.given.range is not None)
            return self.clone(ExtractSubgraphs, **own, models="", lengths="", like=like, in_range=in_range)
        except (TunerError, OSError) as error:
            return console.in_words(error)

    @property
    def provenance(self) -> Provenance:
        """Of what makes the models what they are."""
        made = [task if isinstance(task, str) else task.provenance.inputs for task in self.extracted]
        return Provenance(digests.of_text(*made), SESSION)

    def is_current(self) -> bool:
        """Also with models that could not be imported: they are tried again when they have changed."""
        if not tables.is_current(*self.given.subgraphs, self.provenance.inputs):
            return False
        errors = tables.read(self.given.tuned_files.models, schemas.MODELS)["error"].to_pylist()
        imported = [task for error, task in zip(errors, self.extracted, strict=True) if not error]
        return all(isinstance(task, ExtractSubgraphs) and task.is_current() for task in imported)

    def work(self) -> None:
        parts = []
        if self.given.range:
            self.import_shapes()
        for listed, task in zip(self.given.listed, self.extracted, strict=True):
            self.status(f"importing {listed.name}")
            error = task if isinstance(task, str) else attempt(task, status=self.set_status_message)
            table = None if error or isinstance(task, str) else task.path
            parts.append(join.Part(listed.name, listed.importance, table, error))
        if self.given.range:
            self.status("looking which shapes read the same weights")
            share.run(self.given.files_of_shapes, provenance=self.provenance, out=self.given.tuned_files)
        join.run(parts, provenance=self.provenance, out=self.given.tuned_files)

    def import_shapes(self) -> None:
        """One, whose padding is looked at before the others cost anything, and then these side by side.

        Raises:
            TunerError: One of them cannot be imported, or padding would falsify the range.
        """
        tasks = [task for task in self.extracted if not isinstance(task, str)]
        errors = [task for task in self.extracted if isinstance(task, str)]
        errors += [attempt(task, status=self.set_status_message) for task in tasks[:1]]
        if not any(errors):
            self.probe()
            left = [task for task in tasks[1:] if not task.complete()]
            self.status(f"importing the model in {len(left)} other shapes")
            errors += attempt_all(left)
        if found := next(filter(None, errors), None):
            raise TunerError(found)

    def probe(self) -> None:
        """Refuse a range that padding would falsify, before it costs anything."""
        given, original = self.given, self.given.original
        assert given.range is not None
        assert original is not None
        self.status("checking that padding changes nothing")
        probe.run(
            original, given.files_of_shapes[0], given.range.buckets, given.range.limits, provenance=self.provenance,
            out=given.tuned_files,
        )  # fmt: skip


def attempt(*tasks: StageTask, status: Callable[[str], None] | None) -> str:
    """Run tasks that are not complete, of one model among several; why that failed, or empty.

    Args:
        status: Shows in the scheduler's page what is being done.
    """
    try:
        for task in tasks:
            task.set_status_message = status
            if not task.complete():
                task.run()
    except Exception as error:  # the others go on
        return console.in_words(error) or f"{type(error).__name__}: {error}"
    return ""


def attempt_all(tasks: Sequence[ExtractSubgraphs]) -> list[str]:
    """`attempt` of each; of many, in processes side by side, as many as there are cores."""
    if len(tasks) < _MANY:
        return [attempt(task, status=None) for task in tasks]
    with host.processes(host.physical_cores()) as executor:
        return list(executor.map(_attempted, [task.param_kwargs for task in tasks]))


def _attempted(options: dict[str, Any]) -> str:
    console.progress().stream = io.StringIO()  # who asked tells what is being done
    return attempt(ExtractSubgraphs(**options), status=None)


class ClusterFamilies(TunerTask, StageTask):
    """Group the subgraphs into families."""

    path = property(lambda self: self.given.clustered[0])
    lock = property(lambda self: self.given.tuned_files.lock)

    def requires(self) -> luigi.Task:
        return self.clone(JoinSubgraphs if self.given.is_joint else ExtractSubgraphs)

    @property
    def provenance(self) -> Provenance:
        return Provenance(made_from(self.given.subgraphs), SESSION)

    def is_current(self) -> bool:
        return self.requires().is_current() and tables.is_current(*self.given.clustered, self.provenance.inputs)

    def work(self) -> None:
        cluster.run(self.given.subgraphs[0], self.families, provenance=self.provenance, out=self.path)


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
        before = self.given.run_files.round(self.round - 1)
        return [] if self.files.is_recalled else [(before.training, schemas.TRAINING)]

    @property
    def provenance(self) -> Provenance:
        return Provenance(made_from(*self.sources), SESSION)

    def is_current(self) -> bool:
        there = all(source.exists() for source, _ in self.sources)
        return there and tables.is_current(self.path, self.schema, self.provenance.inputs)


class RecallMeasurements(RoundTask):
    """Pin what the memory knows, as the round before the first."""

    round: int = Int(default=RECALLED, description=argparse.SUPPRESS)
    schema = schemas.CANDIDATES
    path = property(lambda self: self.files.candidates)
    sources = property(lambda self: [self.given.subgraphs, self.given.clustered])

    def requires(self) -> luigi.Task:
        return self.clone(ClusterFamilies)

    def is_current(self) -> bool:
        """Also the subgraphs are those that would be extracted now: not by an older version of this project, say."""
        return self.requires().is_current() and super().is_current()

    def work(self) -> None:
        self.status("recalling what is known")
        given = self.given
        runs.record(given.run_files, given.identity)
        recall.run(
            given.subgraphs[0], given.clustered[0], self.families, given.memory, given.train.max_samples,
            provenance=self.provenance, out=self.files,
        )  # fmt: skip


class ForetellCandidates(RoundTask):
    """Choose by model what was not measured: for a library without trials, or one whose time was short."""

    round: int = Int(default=FORETOLD, description=argparse.SUPPRESS)
    rounds: int = Int(default=0, description="that were finished before")
    schema = schemas.CANDIDATES
    path = property(lambda self: self.files.candidates)
    past = property(lambda self: self.given.run_files.past(self.rounds))

    @property
    def sources(self) -> list[Table]:  # type: ignore[override]
        return [self.given.subgraphs, self.given.clustered, (self.past[-1].training, schemas.TRAINING)]

    def requires(self) -> luigi.Task:
        return externalize(self.clone(TrainFamilyModels, round=self.rounds - 1)) if self.rounds else self.recalled

    def work(self) -> None:
        self.status("foretelling candidates")
        given = self.given
        if given.range:
            adapt.run(
                given.tuned_files, given.clustered[0], self.past, given.compile_target, given.search,
                given.base_models, seed=self.seed, provenance=self.provenance, out=self.files,
            )  # fmt: skip
            return
        foretell.run(
            given.subgraphs[0], given.clustered[0], self.past, given.compile_target, given.search,
            given.base_models, seed=self.seed, provenance=self.provenance, out=self.files,
        )  # fmt: skip


class GenerateCandidates(RoundTask):
    """Plan a round and search its candidates."""

    schema = schemas.CANDIDATES
    path = property(lambda self: self.files.candidates)
    sources = property(lambda self: [self.given.subgraphs, self.given.clustered, *self.trained_before])

    def requires(self) -> list[luigi.Task]:
        before = self.clone(TrainFamilyModels, round=self.round - 1)
        return [self.clone(ClusterFamilies), externalize(before) if self.round else before]

    def work(self) -> None:
        self.status("searching candidates")
        runs.record(self.given.run_files, self.given.identity)
        given, past = self.given, self.given.run_files.past(self.round)
        generate.run(
            given.subgraphs[0], given.clustered[0], past, given.compile_target, given.plan, given.search,
            seed=self.seed, bases=given.base_models, recorded=given.recorded, provenance=self.provenance,
            out=self.files, models=given.tuned_files.models if given.is_joint else None,
            shared=given.tuned_files.shared if given.range else None,
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
        given = self.given
        runs.record(given.run_files, given.identity)
        measure.run(
            subgraphs, given.runner, provenance=made, out=self.files, memory=given.memory, watch=watch, say=console.tell
        )


class TrainFamilyModels(RoundTask):
    """Train the models of the families that a round measured, or of which something was recalled."""

    schema = schemas.TRAINING
    path = property(lambda self: self.files.training)

    def requires(self) -> luigi.Task:
        recalls = self.files.is_recalled
        return self.clone(RecallMeasurements) if recalls else externalize(self.clone(MeasureCandidates))

    @property
    def sources(self) -> list[Table]:  # type: ignore[override]
        own = [(self.files.candidates, schemas.CANDIDATES), (self.files.measurements, schemas.MEASUREMENTS)]
        return [self.given.clustered, *own, *self.trained_before]

    def is_current(self) -> bool:
        """The whole round is: a round whose candidates went missing is made again from there."""
        before = [RecallMeasurements] if self.files.is_recalled else [GenerateCandidates, MeasureCandidates]
        return all(self.clone(stage).is_current() for stage in before) and super().is_current()

    def work(self) -> None:
        self.status("training")
        config = self.given.train
        if config.device == "cuda" and (reason := cost_model.without_cuda()):
            console.tell(f"warning: [train] device = cuda: {reason}, so cost models train on the CPU")
            config = replace(config, device="cpu")
        past = self.given.run_files.past(self.round + 1)
        bases = bases_of(tables.read(*self.given.subgraphs), tables.read(*self.given.clustered), self.given.base_models)
        train.run(
            self.given.clustered[0], past, config, seed=self.seed, provenance=self.provenance, out=self.files,
            base_of=bases,
        )  # fmt: skip


class FinalTask(TunerTask, StageTask):
    """A stage that looks back on finished rounds."""

    rounds: int = Int(default=-1, description="use the first so many rounds; -1: all finished ones")

    @cached_property
    def past(self) -> list[RoundFiles]:
        """What was recalled, the rounds, and what was foretold after them, if anything was."""
        count = self.finished_rounds() if self.rounds < 0 else self.rounds
        foretold = self.clone(ForetellCandidates, rounds=count)
        found = self.given.run_files.past(count)
        return [*found, foretold.files] if foretold.is_current() else found

    @property
    def n_rounds(self) -> int:
        return sum(files.is_round for files in self.past)

    @property
    def folders(self) -> list[Path]:
        """The library of one of several models lies in a folder of the model."""
        return [*super().folders, self.given.shipped.folder]


class CompileModel(FinalTask, MeasuringTask):
    """Compile the model with the best of its finished rounds."""

    stage: Any = compile
    path = property(lambda self: self.given.shipped.compiled.manifest)

    @property
    def config(self) -> CompileConfig:
        return self.given.configured(CompileConfig, "compile")

    def requires(self) -> luigi.Task:
        """Round 0, where neither that nor anything recalled is there: else nothing would be tuned."""
        last = self.past[-1]
        if last.is_foretold:
            return externalize(self.clone(ForetellCandidates, rounds=self.n_rounds))
        is_empty = last.is_recalled and not (last.plan.exists() and len(tables.read(last.plan, schemas.PLAN)))
        return externalize(self.clone(TrainFamilyModels, round=0 if is_empty else last.number))

    @property
    def provenance(self) -> Provenance:
        return Provenance(self.stage.inputs(self.past, self.config), SESSION)

    def is_current(self) -> bool:
        there = all(files.training.exists() for files in self.past)
        return there and manifest.is_current(self.path, self.provenance.inputs)

    def work(self) -> None:
        given, pool = self.given, factory.require_pool(self.given.runner)
        runs.record(given.shipped, given.identity)
        compile.run(
            given.model_files, given.clustered[0], self.past, given.compile_target, self.config, pool,
            provenance=self.provenance, out=given.shipped.compiled, original=given.original,
            precision=given.algorithms.precision, say=self.status,
        )  # fmt: skip


class Report(FinalTask):
    """Write and print the report of a compiled run."""

    stage: Any = report
    compiles: Any = CompileModel
    path = property(lambda self: self.given.shipped.reported)

    def requires(self) -> luigi.Task:
        return externalize(self.clone(self.compiles, rounds=self.n_rounds))

    @property
    def provenance(self) -> Provenance:
        return Provenance(self.stage.inputs(self.given.shipped.compiled), SESSION)

    def is_current(self) -> bool:
        return self.requires().is_current() and manifest.is_current(self.path, self.provenance.inputs)

    def work(self) -> None:
        given, files = self.given, self.given.shipped
        title = f"{given.model_files.folder.name} on {given.compile_target.name}, {files.folder.name}"
        report.run(
            given.model_files, given.clustered[0], self.past, files.compiled, title,
            provenance=self.provenance, out=files,
        )  # fmt: skip

    def run(self) -> None:
        """Print it, also if another run of the same command wrote it."""
        super().run()
        if not self.models:  # of which there is a summary
            console.show(self.stage.shown(self.given.shipped))


class CompareRuns(luigi.Task):
    """Write a page with two runs side by side; done whenever it is asked for."""

    first: str = Text(description="folder of a run: artifacts/<target>/<model>/runs/<run>")
    second: str = Text(description="folder of another one")
    page: str = Text(default="comparison.html", description="file to write")

    _is_done = False

    def complete(self) -> bool:
        return self._is_done

    def run(self) -> None:
        written = compare.run(*(Path(folder).resolve() for folder in (self.first, self.second)), out=Path(self.page))
        self._is_done = True
        console.show(f"page: {written}")


class DatabaseTask(TunerTask, MeasuringTask):
    """What goes between the memory and a MetaSchedule database: done whenever it is asked for."""

    database: str = Text(description="folder of database_workload.json and database_tuning_record.json")

    path = property(lambda self: Path(self.database))
    _is_done = False

    def requires(self) -> luigi.Task:
        return self.clone(ExtractSubgraphs)

    def is_current(self) -> bool:
        return self._is_done

    @property
    def memory(self) -> Memory:
        if self.given.memory is None:
            raise ConfigError("There is no memory: [memory] use = no, or measurements are replayed.")
        return self.given.memory

    def tell(self, text: str) -> None:
        self._is_done = True
        console.show(text)


class ExportDatabase(DatabaseTask):
    """Write the memory's best of a model's subgraphs as a database that stock TVM compiles with."""

    def work(self) -> None:
        given = self.given
        count = export_database.run(given.model_files, self.memory, given.compile_target, out=self.path)
        self.tell(f"{count} schedules are in {self.path}; the functions they are of: {given.model_files.module}")


class ImportDatabase(DatabaseTask):
    """Measure the schedules of a database that fit a model's subgraphs, and keep them in the memory."""

    most: int = Int(default=64, description="schedules of a subgraph, the fastest by what the database says")

    def work(self) -> None:
        (subgraphs, _), given = self.given.subgraphs, self.given
        told = import_database.run(
            subgraphs, self.path, self.most, given.runner, self.memory, given.compile_target, session=SESSION,
            say=self.status,
        )  # fmt: skip
        self.tell(str(told))


class TuningTask(TunerTask):
    """Asks for rounds until the first of its limits is reached."""

    trials: int = Int(default=-1, description="end after so many; 0: measure nothing, go by models; -1: no limit")
    minutes: float = Float(default=0.0, description="end after so many minutes of tuning; 0: no limit")
    trials_per_subgraph: int = Int(
        default=TRIALS_PER_SUBGRAPH, description="if there is no limit: end after so many a subgraph, by its time"
    )

    _finished = 0  # rounds that this process has seen complete
    _counted_on = ""  # what they stand on: a new extraction begins a new count
    _started = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = Budget(None if self.trials == -1 else self.trials, 60 * self.minutes or None)
        if self.trials_per_subgraph < 1:
            raise ConfigError(f"--trials-per-subgraph must be at least 1, but got {self.trials_per_subgraph}.")
        if self.trials:
            self.given.require_device()

    def complete(self) -> bool:
        try:
            if not self.recalled.is_current():  # say, after an upgrade of TVM
                return False
            self._finished = self.finished_rounds()
            done = self.is_delivered() and self.standing().ended != ""
        except TunerError:
            return False  # `run` tells what is wrong
        if done and not self._started:
            print(f"Nothing is left to do; the {self.kept}")
        return done

    def is_delivered(self) -> bool:
        """Whether what comes after the finished rounds is there and current."""
        raise NotImplementedError

    @property
    def kept(self) -> str:
        """Where to look, for who has nothing left to do."""
        raise NotImplementedError

    @property
    def past(self) -> list[RoundFiles]:
        """What was recalled, and the finished rounds."""
        return self.given.run_files.past(self._finished)

    def look(self) -> Standing:
        """Where the run stands; progress is told."""
        now = made_from((self.recalled.path, schemas.TRAINING))
        self._finished = self.finished_rounds(self._finished if self._counted_on == now else 0)
        self._counted_on = now
        standing = self.standing()
        console.progress().begin_round(standing, is_relative=self.given.is_joint)
        self.set_progress_percentage(standing.percentage)
        return standing

    def prepare(self) -> None:
        """What measures is made ready while the model is read; where nothing is there, that is told at once."""
        if self.given.measured_on.can_compile:
            launcher.prepare()
        if self.trials and self.given.absence:
            console.tell(f"warning: {self.given.absence} It may yet come: the model is read first.")

    def next_round(self) -> Iterator[luigi.Task]:
        for stage in (GenerateCandidates, MeasureCandidates, TrainFamilyModels):
            yield self.clone(stage, round=self._finished)

    def foretelling(self) -> Iterator[luigi.Task]:
        """What no round tried, since measuring is over, or nothing is measured at all."""
        so_far = history.load(self.past)
        is_tried = all(so_far.of(member.subgraph_id).was_tried for member in self.members(so_far))
        if not is_tried or (self.trials == 0 and not self._finished):
            yield self.clone(ForetellCandidates, rounds=self._finished)

    def standing(self) -> Standing:
        """After the rounds that are finished."""
        so_far = history.load(self.past)
        found = self.members(so_far)
        limits = self.limits.or_default(so_far, found, self.trials_per_subgraph)
        return budget.standing(self.past, found, limits, self.given.plan)

    def members(self, so_far: History) -> list[Member]:
        """What is tuned."""
        raise NotImplementedError


class TuneModel(TuningTask):
    """Tune a model until the first of its limits is reached, then compile, verify and report it."""

    target_latency_ms: float = Float(default=0.0, description="end at this estimate; 0: no limit")

    _delivers = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = replace(self.limits, latency_s=self.target_latency_ms / 1e3 or None)
        _ = self.of_range  # what a range cannot be is told at once

    @property
    def of_range(self) -> "TuneRange | None":
        """What tunes it, if it is to be compiled for a range of shapes."""
        if not self.given.range:
            return None
        if self.target_latency_ms:
            raise ConfigError("--target-latency-ms is for one shape.")
        return self.clone(TuneRange)

    def complete(self) -> bool:
        """See `TuningTask.complete`."""
        return self.of_range.complete() if self.of_range else super().complete()

    def is_delivered(self) -> bool:
        compiles = self.given.measured_on.can_compile
        return not compiles or self.clone(Report, rounds=self._finished).is_current()

    @property
    def kept(self) -> str:
        files = self.given.run_files
        compiles = self.given.measured_on.can_compile
        return f"report is {files.report}" if compiles else f"tables are in {files.folder}"

    def run(self) -> Iterator[luigi.Task]:
        """Luigi starts this afresh after each task it asked for, so what stands before a yield is cheap."""
        if self.of_range:
            yield self.of_range
            return
        self._started = True
        _ = (self.given.run_files, self.clone(CompileModel).config)  # settings that cannot work end it here
        self.prepare()
        yield self.recalled
        while not (standing := self.look()).ended:  # goes round where another process did what it asks for
            yield from self.next_round()
        console.note(f"tuning ended: {standing.ended}")
        yield from self.foretelling()
        if not self.given.measured_on.can_compile:
            console.show(
                f"Nothing is compiled from replayed measurements; the tables are in {self.given.run_files.folder}"
            )
            return
        if not self._delivers and self.is_delivered():  # say, subgraphs were extracted again, and are the same
            console.show(f"Nothing new came of it; the {self.kept}")
            return
        self._delivers = True
        yield self.clone(CompileModel, rounds=self._finished)
        yield self.clone(Report, rounds=self._finished)

    def members(self, so_far: History) -> list[Member]:
        return members(tables.read(*self.given.subgraphs), tables.read(*self.given.clustered))


class CompileRange(CompileModel):
    """Compile a model for a range of shapes with the best of its finished rounds."""

    stage = compile_range

    def work(self) -> None:
        given, pool = self.given, factory.require_pool(self.given.runner)
        assert given.range is not None
        assert given.original is not None
        runs.record(given.shipped, given.identity)
        shapes = [
            Shape(files, extents, importance > 0)
            for files, extents, importance in zip(
                given.files_of_shapes, given.range.buckets, given.range.importances, strict=True
            )
        ]
        compile_range.run(
            shapes, given.tuned_files, given.clustered[0], self.past, given.compile_target, self.config, pool,
            limits=given.range.limits, original=given.original, provenance=self.provenance, out=given.shipped.compiled,
            precision=given.algorithms.precision, say=self.status,
        )  # fmt: skip


class ReportRange(Report):
    """Write and print the report of a model that was compiled for a range of shapes."""

    stage = report_range
    compiles = CompileRange

    def work(self) -> None:
        given, files = self.given, self.given.shipped
        title = f"{given.tuned_files.folder.name} on {given.compile_target.name}, {files.folder.name}"
        report_range.run(given.tuned_files, given.clustered[0], self.past, title, provenance=self.provenance, out=files)


class TuneRange(TuningTask):
    """Tune a model in all shapes of a range together, then compile, verify and report one bundle for them.

    `TuneModel` asks for it where `--shape` says a range.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.given.range:
            raise ConfigError("TuneRange is for a range of shapes: --shape 'sequence=1..512'. For one, TuneModel is.")
        if self.trials == 0:
            raise ConfigError("A range of shapes needs some trials: how weights are packed is decided by measurements.")

    def is_delivered(self) -> bool:
        return self.clone(ReportRange, rounds=self._finished).is_current()

    @property
    def kept(self) -> str:
        return f"report is {self.given.run_files.report}"

    def run(self) -> Iterator[luigi.Task]:
        """See `TuneModel.run`."""
        self._started = True
        _ = (self.given.run_files, self.clone(CompileRange).config)
        factory.require_pool(self.given.runner)
        self.prepare()
        yield self.recalled
        while not (standing := self.look()).ended:
            yield from self.next_round()
        console.note(f"tuning ended: {standing.ended}")
        yield from self.foretelling()
        yield self.clone(CompileRange, rounds=self._finished)
        yield self.clone(ReportRange, rounds=self._finished)

    def foretelling(self) -> Iterator[luigi.Task]:
        """Programs for all that no round tried: other shapes, and what hardly takes time."""
        so_far = history.load(self.past)
        tunable = tables.read(*self.given.clustered)["subgraph_id"].to_pylist()
        if not all(so_far.of(subgraph_id).was_tried for subgraph_id in tunable):
            yield self.clone(ForetellCandidates, rounds=self._finished)

    def standing(self) -> Standing:
        """Without a limit: so many times the trials of the shape that has the most subgraphs, that with the compilation
        of all shapes it takes no more than twice its time."""
        so_far = history.load(self.past)
        found = self.members(so_far)
        most = max(
            len(row["subgraphs"]) for row in tables.read(self.given.tuned_files.models, schemas.MODELS).to_pylist()
        )
        each = max(1, round(_TIMES * self.trials_per_subgraph * most / max(1, len(found))))
        limits = self.limits.or_default(so_far, found, each)
        return budget.standing(
            self.past, found, limits, self.given.plan, foretells=False
        )  # of packings nothing is known

    def members(self, so_far: History) -> list[Member]:
        given = self.given
        return joint_members(
            tables.read(*given.subgraphs), tables.read(*given.clustered),
            tables.read(given.tuned_files.models, schemas.MODELS), so_far,
            tables.read(given.tuned_files.shared, schemas.SHARED),
        )  # fmt: skip


class DeliverModel(FinalTask):
    """Compile, verify and report one of several models that are tuned together; that it fails is an outcome, too.

    An early library has no report yet.
    """

    is_early: bool = luigi.BoolParameter(default=False, description=argparse.SUPPRESS)

    path = property(lambda self: self.given.run_files.outcome(self.given.model_files.folder.name))

    @property
    def provenance(self) -> Provenance:
        return Provenance(made_from((self.past[-1].training, schemas.TRAINING)), SESSION)

    def is_current(self) -> bool:
        """Whether it was tried: what failed is tried again by the next command."""
        if not self.path.exists():
            return False
        found = manifest.read(self.path)
        is_same = found["inputs"] == self.provenance.inputs
        return is_same and (found["session"] == SESSION if found["error"] else self.stages[-1].is_current())

    @property
    def stages(self) -> list[StageTask]:
        kinds = [CompileModel] if self.is_early else [CompileModel, Report]
        return [self.clone(stage, rounds=self.n_rounds) for stage in kinds]

    def run(self) -> None:
        """No lock of its own is held: its stages take that of the run."""
        if not self.is_current():
            self.status(f"compiling {self.given.model_files.folder.name}")
            facts = {"session": SESSION, "error": attempt(*self.stages, status=self.set_status_message)}
            manifest.write(self.path, self.provenance.inputs, facts, [])


class TuneModels(TuningTask):
    """Tune several models together; each gets a library early, and a faster one, if there is one, at the end."""

    model: str = Text(default="", description=argparse.SUPPRESS)
    shape: str = Text(default="", description=argparse.SUPPRESS)
    lengths: str = Text(default="", description=argparse.SUPPRESS)
    weights: str = Text(default="", description=argparse.SUPPRESS)
    fix: str = Text(default="", description=argparse.SUPPRESS)
    models: str = Text(
        description="names of the zoo and paths, with commas, `*.onnx` too; or a .toml file that lists them"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.model or self.shape or self.weights or self.lengths or self.fix:
            raise ConfigError(
                "--model, --shape, --fix and --weights are for one model; a list says them of each of its own."
            )

    def is_delivered(self) -> bool:
        summarized = self.given.run_files.summarized
        told = summarized.exists() and not manifest.damaged_files(summarized)
        return told and all(task.is_current() for task in self.deliveries()) and not summarize.failed(self.outcomes())

    @property
    def kept(self) -> str:
        return f"summary is {self.given.run_files.summary}, its page {self.given.run_files.night_page}"

    def run(self) -> Iterator[luigi.Task]:
        """See `TuneModel.run`."""
        self._started = True
        _ = (self.given.run_files, self.clone(CompileModel).config)
        factory.require_pool(self.given.runner)
        self.prepare()
        yield self.recalled
        while not (standing := self.look()).ended:
            so_far = history.load(self.past)
            for row, task in self.listed():
                if is_tried(row, so_far) and not task.path.exists():
                    yield task.clone(is_early=True)
            yield from self.next_round()
        console.note(f"tuning ended: {standing.ended}")
        yield from self.foretelling()
        for task in self.deliveries():
            yield task
        self.summarize()

    def members(self, so_far: History) -> list[Member]:
        given = self.given
        return joint_members(
            tables.read(*given.subgraphs), tables.read(*given.clustered), self.rows, so_far,
        )  # fmt: skip

    @property
    def rows(self) -> pa.Table:
        return tables.read(self.given.tuned_files.models, schemas.MODELS)

    def listed(self) -> list[tuple[dict[str, Any], DeliverModel]]:
        """The models that could be imported, with what makes their libraries."""
        options = self.given.options_of_models()
        return [(row, self.clone(DeliverModel, **own, models=self.models, rounds=self._finished))
                for row, own in zip(self.rows.to_pylist(), options, strict=True) if not row["error"]]  # fmt: skip

    def deliveries(self) -> list[DeliverModel]:
        return [task for _, task in self.listed()]

    def outcomes(self) -> dict[str, Outcome]:
        """What came of each model, by name."""
        found = {row["name"]: Outcome(row["error"]) for row in self.rows.to_pylist()}
        for row, task in self.listed():
            error = manifest.read(task.path)["error"]
            found[row["name"]] = Outcome(error, task.given.model_files, task.given.shipped)
        return found

    def summarize(self) -> None:
        """Write and print it.

        Raises:
            TunerError: Some models failed: the command's status is to tell.
        """
        given, outcomes, so_far = self.given, self.outcomes(), history.load(self.past)
        files = given.run_files
        summarize.run(
            given.tuned_files, given.clustered[0], self.members(so_far), self.past, outcomes, given.plan,
            f"{len(outcomes)} models on {given.compile_target.name}", earlier=given.summaries, out=files,
        )  # fmt: skip
        console.show(f"{files.summary.read_text(encoding='utf-8')}\npage: {files.night_page}")
        if told := summarize.failed(outcomes):
            raise TunerError(f"{told}. The others have their libraries; see {files.summary}.")
