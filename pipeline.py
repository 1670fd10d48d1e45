"""Luigi tasks: who needs whom, where files lie, options and luigi.cfg to frozen configs. No tuning.

    ExtractSubgraphs -> ClusterFamilies
        -> [GenerateCandidates(r) -> MeasureCandidates(r) -> TrainFamilyModels(r)] for r = 0, 1, ...
        -> CompileModel -> Report

`TuneModel` asks for rounds until a limit is reached, then compiles and reports. A task is complete if its
output exists and was made from what its inputs are now: the digests in the files decide, not their dates.
A stage that is started alone does not run the rounds before it; it says what is missing.
"""

import atexit
import json
import logging
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import luigi
from luigi import configuration
from luigi.cmdline_parser import CmdlineParser
from luigi.task import externalize

from lib import cost_model, devices, digests, history, locks, planning, pools, schemas, settings, tables, targets, zoo
from lib.cost_model import TrainConfig
from lib.devices import Devices, Local, Replay
from lib.errors import ConfigError, ContractError, ModelError, TunerError
from lib.families import ALGORITHMS
from lib.layout import ModelFiles, RoundFiles, RunFiles
from lib.planning import Member, PlanConfig
from lib.progress import Goal, Progress
from lib.runner import MeasureConfig, Pool, Runner
from lib.search import SearchConfig
from lib.source import Source
from lib.tables import Origin
from stages import cluster, compile, extract, generate, measure, report, train

ROOT = Path(__file__).parent
_DEFAULT_TRIALS = 128  # a subgraph, when no limit is given
SESSION = uuid.uuid4().hex[:12]
progress = Progress()


def artifacts() -> Path:
    """Where runs are kept; `[tuner] artifacts` in the configuration moves it."""
    return Path(configuration.get_config().get("tuner", "artifacts", str(ROOT / "artifacts")))


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path


@cache
def check(source: Source) -> None:
    """Refuse at once what cannot be a model."""
    source.check()
    if not source.is_file:
        zoo.entry(source.model)


def configured(kind: type[Any], section: str, **options: Any) -> Any:
    """A frozen config from its section of luigi.cfg and from command-line options."""
    config = configuration.get_config()
    values = dict(config.items(section)) if config.has_section(section) else {}
    return settings.configured(kind, section, values, **options)


@cache
def make_runner(where: Devices, target: targets.AnyTarget, config: MeasureConfig) -> Runner:
    """What measures for this process, shared by its rounds; what it started ends with it."""
    runner = pools.open_runner(where, target, config)
    atexit.register(runner.close)
    return runner


class TunerTask(luigi.Task):
    """The options that decide what a run is; equal options continue the same run."""

    model: str = luigi.Parameter(description="name of the zoo, or path of an .onnx or .pt2 file")
    batch: int = luigi.IntParameter(default=0, description="samples in an inference of a zoo model; 0: 1")
    sequence: int = luigi.IntParameter(default=0, description="tokens in a sample of a zoo model; 0: its default")
    shape: str = luigi.Parameter(
        default="", description="for an ONNX file's open dimensions: 'ids=1,128 mask=1,128', or 'batch=1 sequence=128'"
    )
    weights: str = luigi.Parameter(default="", description="a .safetensors file for a zoo model; empty: random weights")
    families: str = luigi.ChoiceParameter(
        default="core-operator", choices=list(ALGORITHMS), description="what shares a cost model"
    )
    foresee: float = luigi.FloatParameter(
        default=0.25, description="share of a round for the bottleneck's family after it"
    )
    strategy: str = luigi.ChoiceParameter(
        default="foresee", choices=planning.STRATEGIES, description="who gets the next trials"
    )
    seed: int = luigi.IntParameter(default=0, description="of the search")
    target: str = luigi.Parameter(
        default="host", description="`host`; `cuda`, or a GPU as `nvidia/nvidia-h100`; or a target as JSON"
    )
    threads: int = luigi.IntParameter(default=0, description="threads of one inference; 0: all physical cores")
    devices: str = luigi.Parameter(
        default="local", description="where to measure: `local`, `rpc://HOST:PORT/KEY`, or `replay:FOLDER`"
    )

    # A central scheduler gives up a task that another process runs, where locks wait and then see what is done.
    session: str = luigi.Parameter(default=SESSION, description="tells the tasks of one process from those of others")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            check(self.source)
            _ = self.measured_on
        except (ConfigError, ModelError) as error:
            sys.exit(f"error: {error}")

    @cached_property
    def source(self) -> Source:
        """The model that is meant."""
        return Source(_expanded(self.model), self.batch, self.sequence, self.shape, _expanded(self.weights))

    @cached_property
    def measured_on(self) -> Devices:
        """What `--devices` says."""
        return devices.parse(self.devices)

    # Configs.

    @cached_property
    def compile_target(self) -> targets.AnyTarget:
        return targets.target(self.target, self.threads)

    @cached_property
    def plan_config(self) -> PlanConfig:
        return configured(PlanConfig, "plan", strategy=self.strategy, foresee=self.foresee)

    @cached_property
    def search_config(self) -> SearchConfig:
        return configured(SearchConfig, "generate")

    @cached_property
    def measure_config(self) -> MeasureConfig:
        return configured(MeasureConfig, "measure")

    @cached_property
    def train_config(self) -> TrainConfig:
        return configured(TrainConfig, "train")

    # Files.

    @cached_property
    def model_files(self) -> ModelFiles:
        return ModelFiles(artifacts() / self.compile_target.name / self.source.name)

    @cached_property
    def run_files(self) -> RunFiles:
        configs = (self.plan_config, self.search_config, self.measure_config, self.train_config)
        where = [self.measured_on.identity] if self.measured_on.identity else []
        identity = settings.digest(*configs, self.seed, self.compile_target.text, *where)
        return self.model_files.run(f"{self.strategy}-{self.families}-seed{self.seed}-{identity[:8]}")

    @property
    def families_file(self) -> Path:
        return self.model_files.families(self.families)

    def finished_rounds(self, known: int = 0) -> int:
        """How many rounds are complete and current, from the first on; `known` of them are not looked at again."""
        while self.clone(TrainFamilyModels, round=known).is_current():
            known += 1
        return known

    def on_failure(self, exception: BaseException) -> Any:
        if isinstance(exception, TunerError):
            progress.end()
            print(f"error: {exception}", file=sys.stderr)
        return super().on_failure(exception)


class StageTask(TunerTask):
    """A task with one stage, one main output, and a digest of what that must have been made from."""

    def is_current(self) -> bool:
        """Whether the output exists and was made from what the inputs are now.

        Raises:
            ContractError: It is there, but damaged or of another version.
        """
        raise NotImplementedError

    def work(self) -> None:
        """Run the stage."""
        raise NotImplementedError

    def complete(self) -> bool:
        try:
            return self.is_current()
        except TunerError:
            return False  # `run` tells what is wrong, as this task's failure

    @property
    def lock(self) -> Path:
        """Held while it runs, so that two runs of one command share the work and do not mix."""
        return self.run_files.folder / "lock"

    def run(self) -> None:
        with locks.exclusive(self.lock, on_wait=lambda: self.status("waiting for another run of this model")):
            if not self.is_current():  # which also refuses to write over what it cannot read
                with self.turn():
                    self.work()

    def turn(self) -> AbstractContextManager[None]:
        """Any number of stages work on this CPU at a time, but none while another run measures on it."""
        return locks.shared(locks.of_this_machine("llvm"), on_wait=self.wait_for_measuring)

    def wait_for_measuring(self) -> None:
        """Say why nothing happens."""
        self.status("waiting for another run to measure")

    def status(self, doing: str) -> None:
        """Tell the terminal and Luigi's scheduler what is going on."""
        line = progress.say(doing)
        if self.set_status_message:
            self.set_status_message(line)


class MeasuringTask(StageTask):
    """A stage that times programs."""

    def turn(self) -> AbstractContextManager[None]:
        """Alone on what it times here; a tracker gives a device to one at a time itself."""
        if not isinstance(self.measured_on, Local):
            return super().turn()
        return locks.exclusive(locks.of_this_machine(self.compile_target.kind), on_wait=self.wait_for_measuring)

    def runner(self) -> Runner:
        """What measures."""
        return make_runner(self.measured_on, self.compile_target, self.measure_config)


class ModelTask(StageTask):
    """A stage whose output all runs of a model share."""

    @property
    def lock(self) -> Path:
        return self.model_files.folder / "lock"


class ExtractSubgraphs(ModelTask):
    """Import the model and cut it into subgraphs."""

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.model_files.subgraphs)

    @property
    def origin(self) -> Origin:
        return Origin(
            digests.of_text(
                self.model_files.folder.name, self.compile_target.text, version("apache-tvm"),
                settings.digest(self.extract_config, extract.REVISION),
            ),
            SESSION,
        )  # fmt: skip

    @property
    def extract_config(self) -> extract.ExtractConfig:
        return configured(extract.ExtractConfig, "extract")

    def is_current(self) -> bool:
        return tables.is_current(self.model_files.subgraphs, schemas.SUBGRAPHS, self.origin.inputs)

    def work(self) -> None:
        self.status("importing the model")
        extract.run(self.source, self.compile_target, self.extract_config, origin=self.origin, out=self.model_files)


class ClusterFamilies(ModelTask):
    """Group the subgraphs into families."""

    def requires(self) -> luigi.Task:
        return self.clone(ExtractSubgraphs)

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.families_file)

    @property
    def origin(self) -> Origin:
        return Origin(made_from((self.model_files.subgraphs, schemas.SUBGRAPHS)), SESSION)

    def is_current(self) -> bool:
        return self.requires().is_current() and tables.is_current(
            self.families_file, schemas.FAMILIES, self.origin.inputs
        )

    def work(self) -> None:
        cluster.run(self.model_files.subgraphs, self.families, origin=self.origin, out=self.families_file)

    def show(self) -> None:
        """Print the families."""
        progress.end()
        subgraphs = tables.read(self.model_files.subgraphs, schemas.SUBGRAPHS)
        print(cluster.describe(subgraphs, tables.read(self.families_file, schemas.FAMILIES)))


@ClusterFamilies.event_handler(luigi.Event.SUCCESS)
@ClusterFamilies.event_handler(luigi.Event.DEPENDENCY_PRESENT)  # nothing was left to do
def show_families(task: ClusterFamilies) -> None:
    """Whoever asks for the families sees them, whether they had to be made or not."""
    if is_asked_for(task):
        task.show()


class RoundTask(StageTask):
    """A stage of one round."""

    round: int = luigi.IntParameter(default=0, description="number of the round, from 0")

    @property
    def files(self) -> RoundFiles:
        return self.run_files.round(self.round)

    @property
    def schema(self) -> Any:
        raise NotImplementedError

    @property
    def sources(self) -> list[tuple[Path, Any]]:
        """The files it is made from, with their schemas."""
        raise NotImplementedError

    def output(self) -> luigi.LocalTarget:
        raise NotImplementedError

    @property
    def origin(self) -> Origin:
        return Origin(made_from(*self.sources), SESSION)

    def is_current(self) -> bool:
        path = Path(self.output().path)
        return all(source.exists() for source, _ in self.sources) and tables.is_current(
            path, self.schema, self.origin.inputs
        )


class GenerateCandidates(RoundTask):
    """Plan a round and search its candidates."""

    schema = schemas.CANDIDATES

    def requires(self) -> list[luigi.Task]:
        before = [externalize(self.clone(TrainFamilyModels, round=self.round - 1))] if self.round else []
        return [self.clone(ClusterFamilies), *before]

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.files.candidates)

    @property
    def sources(self) -> list[tuple[Path, Any]]:
        before = [(self.run_files.round(self.round - 1).training, schemas.TRAINING)] if self.round else []
        return [
            (self.model_files.subgraphs, schemas.SUBGRAPHS),
            (self.families_file, schemas.FAMILIES),
            *before,
        ]

    def work(self) -> None:
        self.status("searching candidates")
        generate.run(
            self.model_files.subgraphs, self.families_file, self.run_files.rounds(self.round), self.compile_target,
            self.plan_config, self.search_config, seed=self.seed, origin=self.origin, out=self.files,
        )  # fmt: skip


class MeasureCandidates(RoundTask, MeasuringTask):
    """Build and time a round's candidates."""

    schema = schemas.MEASUREMENTS

    def requires(self) -> luigi.Task:
        return externalize(self.clone(GenerateCandidates))

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.files.measurements)

    @property
    def sources(self) -> list[tuple[Path, Any]]:
        return [(self.files.candidates, schemas.CANDIDATES)]

    def work(self) -> None:
        plan = tables.read(self.files.plan, schemas.PLAN).to_pylist()
        subgraphs = tables.read(self.model_files.subgraphs, schemas.SUBGRAPHS).select(["subgraph_id", "name"])
        names = dict(zip(*subgraphs.to_pydict().values(), strict=True))
        what = names[plan[0]["subgraph_id"]] if len(plan) == 1 else f"{len(plan)} subgraphs"
        doing = f"measuring {what} ({plan[0]['kind']})"

        def watch(measurement: Any) -> None:
            progress.measured(measurement)
            self.status(doing)

        self.status(doing)
        measure.run(self.model_files.subgraphs, self.runner(), origin=self.origin, out=self.files, watch=watch)


class TrainFamilyModels(RoundTask):
    """Train the models of the families that a round measured."""

    schema = schemas.TRAINING

    def requires(self) -> luigi.Task:
        return externalize(self.clone(MeasureCandidates))

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.files.training)

    @property
    def sources(self) -> list[tuple[Path, Any]]:
        before = [(self.run_files.round(self.round - 1).training, schemas.TRAINING)] if self.round else []
        own = [(self.files.candidates, schemas.CANDIDATES), (self.files.measurements, schemas.MEASUREMENTS)]
        return [(self.families_file, schemas.FAMILIES), *own, *before]

    def is_current(self) -> bool:
        """The whole round is: a round whose candidates went missing is made again from there."""
        return (
            self.clone(GenerateCandidates).is_current()
            and self.clone(MeasureCandidates).is_current()
            and super().is_current()
        )

    def work(self) -> None:
        self.status("training")
        config = self.train_config
        if config.device == "cuda" and (reason := cost_model.without_cuda()):
            warn(f"[train] device = cuda: {reason}, so cost models train on the CPU")
            config = replace(config, device="cpu")
        past = self.run_files.rounds(self.round + 1)
        train.run(self.families_file, past, config, seed=self.seed, origin=self.origin, out=self.files)


class FinalTask(StageTask):
    """A stage that looks back on finished rounds."""

    rounds: int = luigi.IntParameter(default=-1, description="use the first so many rounds; -1: all finished ones")

    @cached_property
    def n_rounds(self) -> int:
        return self.finished_rounds() if self.rounds < 0 else self.rounds


class CompileModel(FinalTask, MeasuringTask):
    """Compile the model with the best of its finished rounds."""

    @property
    def compile_config(self) -> compile.CompileConfig:
        return configured(compile.CompileConfig, "compile")

    def requires(self) -> luigi.Task:
        return externalize(self.clone(TrainFamilyModels, round=max(self.n_rounds - 1, 0)))

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.run_files.compiled.manifest)

    @property
    def origin(self) -> Origin:
        last = self.run_files.round(self.n_rounds - 1).training
        own = settings.digest(self.compile_config)
        return Origin(digests.of_text(own, made_from((last, schemas.TRAINING))), SESSION)

    def is_current(self) -> bool:
        files = self.run_files.compiled
        wanted = (files.manifest, files.library, files.params, files.results)
        if not self.n_rounds or not all(path.exists() for path in wanted):
            return False
        try:
            found = json.loads(files.manifest.read_text())
        except json.JSONDecodeError as error:
            raise ContractError(
                f"{files.manifest} is damaged: expected JSON, found: {error}\nDelete it to have it made again."
            ) from error
        return bool(found.get("inputs") == self.origin.inputs)

    def work(self) -> None:
        if isinstance(self.measured_on, Replay):
            raise ConfigError("--devices replay: nothing can be compiled, since winners are timed and checked again.")
        compile.run(
            self.model_files, self.families_file, self.run_files.rounds(self.n_rounds), self.compile_target,
            self.compile_config, cast(Pool, self.runner()), origin=self.origin, out=self.run_files.compiled,
            say=self.status,
        )  # fmt: skip


class Report(FinalTask):
    """Write and print the report of a compiled run."""

    def requires(self) -> luigi.Task:
        return externalize(self.clone(CompileModel, rounds=self.n_rounds))

    def output(self) -> luigi.LocalTarget:
        return luigi.LocalTarget(self.run_files.report)

    @property
    def origin(self) -> Origin:
        return Origin(digests.of_file(self.run_files.compiled.manifest), SESSION)

    def is_current(self) -> bool:
        files = self.run_files
        wanted = (files.report, files.curve, files.treemap)
        if not (all(path.exists() for path in wanted) and self.requires().is_current()):
            return False
        return files.report.read_text().rstrip().endswith(self.origin.inputs)

    def work(self) -> None:
        title = f"{self.model_files.folder.name} on {self.compile_target.name}, {self.run_files.folder.name}"
        files = self.run_files
        report.run(
            self.model_files, self.families_file, files.rounds(self.n_rounds), files.compiled, title,
            origin=self.origin, out=files.report, curve=files.curve, treemap=files.treemap,
        )  # fmt: skip

    def run(self) -> None:
        super().run()
        self.show()

    def show(self) -> None:
        """Print it, also if another run of the same command wrote it."""
        files = self.run_files
        progress.end()
        print(files.report.read_text())
        print(f"library, parameters and manifest: {files.compiled.folder}")
        print(f"curve: {files.curve}\nfamilies: {files.treemap}")


class TuneModel(TunerTask):
    """Tune a model until the first of its limits is reached, then compile, verify and report it."""

    trials: int = luigi.IntParameter(
        default=0, description=f"end after so many trials; 0: no limit, or {_DEFAULT_TRIALS} a subgraph if none is set"
    )
    minutes: float = luigi.FloatParameter(default=0.0, description="end after so many minutes of tuning; 0: no limit")
    target_latency_ms: float = luigi.FloatParameter(
        default=0.0, description="end at this estimated latency; 0: no limit"
    )

    _finished = 0  # rounds that this process has seen complete
    _counted_on = ""  # the families that they were made for: a new extraction begins a new count
    _started = False

    def complete(self) -> bool:
        try:
            if not self.clone(ClusterFamilies).is_current():  # say, after an upgrade of TVM
                return False
            self._finished = self.finished_rounds()
            done = self.ended() != "" and (self.replays or self.clone(Report, rounds=self._finished).is_current())
        except TunerError:
            return False  # `run` tells what is wrong
        if done and not self._started:
            kept = f"tables are in {self.run_files.folder}" if self.replays else f"report is {self.run_files.report}"
            print(f"Nothing is left to do; the {kept}")
        return done

    def run(self) -> Iterator[luigi.Task]:
        """Luigi starts this afresh after each task it asked for, so what stands before a yield is cheap."""
        self._started = True
        _ = (self.run_files, self.clone(CompileModel).compile_config)  # settings that cannot work end it here
        yield self.clone(ClusterFamilies)
        self._finished = self.finished_rounds(self._finished if self._counted_on == self.families_stamp else 0)
        self._counted_on = self.families_stamp
        self.show_progress()
        reason = self.ended()
        if not reason:
            for stage in (GenerateCandidates, MeasureCandidates, TrainFamilyModels):
                yield self.clone(stage, round=self._finished)
        tell(f"tuning ended: {reason}")
        if self.replays:
            progress.end()
            print(f"Nothing is compiled from replayed measurements; the tables are in {self.run_files.folder}")
            return
        yield self.clone(CompileModel, rounds=self._finished)
        yield self.clone(Report, rounds=self._finished)

    @property
    def families_stamp(self) -> str:
        """Changes when the families, or what they were made from, do."""
        return made_from((self.families_file, schemas.FAMILIES))

    @property
    def replays(self) -> bool:
        """Whether nothing is measured, so that nothing can be compiled."""
        return isinstance(self.measured_on, Replay)

    def ended(self) -> str:
        """Which limit is reached, or that nothing is left to improve; empty if the run goes on."""
        if not self._finished:
            return ""
        past = history.load(self.run_files.rounds(self._finished))
        if self.max_trials and past.n_trials >= self.max_trials:
            return f"{past.n_trials} trials"
        if self.minutes and self.seconds_spent() >= 60 * self.minutes:
            return f"{self.seconds_spent() / 60:.1f} minutes"
        if self.target_latency_ms and self.latency_s(past) * 1e3 <= self.target_latency_ms:
            return f"estimated latency {self.latency_s(past) * 1e3:.3f} ms"
        if not planning.plan_round(past, self.members, self.plan_config):
            return "no subgraph is left that can improve"
        return ""

    @property
    def max_trials(self) -> int:
        """The limit on trials; without any limit from the user, one that grows with the model."""
        if self.trials or self.minutes or self.target_latency_ms:
            return self.trials
        return _DEFAULT_TRIALS * len(self.members)

    @cached_property
    def members(self) -> list[Member]:
        subgraphs = tables.read(self.model_files.subgraphs, schemas.SUBGRAPHS)
        weights = dict(zip(subgraphs["subgraph_id"].to_pylist(), subgraphs["weight"].to_pylist(), strict=True))
        families = tables.read(self.families_file, schemas.FAMILIES).to_pylist()
        return [Member(row["subgraph_id"], row["family_id"], weights[row["subgraph_id"]]) for row in families]

    def latency_s(self, past: history.History) -> float:
        return history.model_latency_s(past, {member.subgraph_id: member.weight for member in self.members})

    def seconds_spent(self) -> float:
        """Of all finished rounds; what an interrupted round took is not known."""
        total = 0.0
        for files in self.run_files.rounds(self._finished):
            for path, schema in ((files.candidates, schemas.CANDIDATES), (files.measurements, schemas.MEASUREMENTS),
                                 (files.training, schemas.TRAINING)):  # fmt: skip
                total += tables.stamp(path, schema).clock["total"]
        return total

    def show_progress(self) -> None:
        progress.goal = Goal(self.max_trials, 60 * self.minutes, self.target_latency_ms / 1e3)
        past = history.load(self.run_files.rounds(self._finished))
        failures = sum((p.statuses for p in past.subgraphs.values()), Counter())
        del failures["ok"]
        progress.begin_round(self._finished, past.n_trials, self.seconds_spent(), self.latency_s(past), failures)
        for member in self.members:
            if reason := planning.dead(past.of(member.subgraph_id), self.plan_config):
                tell(f"no more trials for subgraph {member.subgraph_id}: {reason}")
        if self.max_trials:
            self.set_progress_percentage(min(100, 100 * past.n_trials // self.max_trials))


@cache
def tell(text: str) -> None:
    """Print something for whoever watches, once."""
    progress.note(text)


@cache
def warn(text: str) -> None:
    """Print what the user asked for and does not get, once."""
    progress.end()
    print(f"warning: {text}", file=sys.stderr)


def is_asked_for(task: luigi.Task) -> bool:
    """Whether the command line names this task, rather than one that needs it."""
    command = CmdlineParser.get_instance()
    return command is not None and command.get_task_obj() == task


def made_from(*sources: tuple[Path, Any]) -> str:
    """Digest of files by content and origin: a change anywhere upstream changes it."""
    return digests.of_text(*(tables.stamp(path, schema).fingerprint for path, schema in sources))


@luigi.Task.event_handler(luigi.Event.DEPENDENCY_MISSING)
def name_what_is_missing(task: luigi.Task) -> None:
    """A stage was started alone, and what it reads is not there."""
    options = " ".join(
        f"--{name.replace('_', '-')} {value}"
        for name, value in task.to_str_params(only_significant=True).items()
        if name == "model" or value != str(dict(task.get_params())[name]._default)
    )
    name = task.task_family
    print(
        f"error: {Path(task.output().path)} is missing, or no longer fits what it was made from.\n"
        f"Run `luigi --module pipeline {name} {options}` first, or `TuneModel` for all there is.",
        file=sys.stderr,
    )


class _NoTracebacks(logging.Filter):
    """Errors written for the user were printed; Luigi's traceback of them says less."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, TunerError) and "external data dependency" not in record.getMessage()


def _on_interrupt(kind: Any, error: Any, trace: Any) -> None:
    if issubclass(kind, KeyboardInterrupt):
        progress.end()
        print("interrupted: what was measured is kept, and the same command continues", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


logging.getLogger("luigi-interface").addFilter(_NoTracebacks())
logging.getLogger("tvm").setLevel(logging.ERROR)
if threading.current_thread() is threading.main_thread():
    sys.excepthook = _on_interrupt
