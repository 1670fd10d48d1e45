"""What a user asked for, as values: options and sections of luigi.cfg become frozen configs, files and identities."""

import atexit
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from lib.contracts import digests, settings
from lib.contracts.errors import ConfigError, require_file
from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.schemas import FAMILIES, SUBGRAPHS
from lib.graph.algorithms import IN_INT8, AlgorithmConfig
from lib.machine import linking, targets
from lib.machine.registers import registers
from lib.measure import devices, factory
from lib.measure.devices import Devices
from lib.measure.file_peer import Original
from lib.measure.replay import ReplayRunner
from lib.measure.runner import MeasureConfig, Runner
from lib.models import listing, ranges
from lib.models.listing import Listed
from lib.models.ranges import Range, RangeConfig
from lib.models.source import Source, parse_shapes
from lib.models.zoo import catalogue
from lib.search.evolution import METASCHEDULE, RECORDED, SearchConfig
from lib.search.spaces import table
from lib.tuning import runs
from lib.tuning.base import BaseModels, base_models, stock_base_models
from lib.tuning.cost_model import TrainConfig
from lib.tuning.memory import Memory, MemoryConfig
from lib.tuning.planning import PlanConfig

Section = Callable[[str], Mapping[str, str]]  # from a name to text by key
Say = Callable[[str], object]
Table = tuple[Path, Any]  # with its schema


@dataclass(frozen=True)
class Options:
    """The options of `TunerTask`, by the same names, and where the rest stands."""

    model: str
    models: str
    batch_size: int
    sequence: int
    shape: str
    lengths: str
    weights: str
    fix: str
    families: str
    foresee: float
    strategy: str
    seed: int
    target: str
    threads: int
    precision: str
    calibration: str
    devices: str
    section: Section  # of the configuration
    say: Say  # is told of what the user should know
    artifacts: Path
    in_range: bool = False  # it is one of the shapes of a range

    def check(self) -> None:
        """Refuse at once what cannot be a model or a place to measure.

        Raises:
            ModelError, ConfigError: It cannot; the message says why.
        """
        if self.models:
            _ = self.listed
        if self.range:
            self.require_range()
        elif self.model or not self.models:
            self.source.check()
            if self.calibration and self.precision != IN_INT8:
                raise ConfigError("--calibration is for --precision int8.")
            if not self.source.is_file:
                catalogue.entry(self.source.model)
        _ = self.measured_on

    def require_range(self) -> None:
        """Raises: ConfigError, ModelError: The range cannot be compiled."""
        if self.models:
            raise ConfigError("A range of shapes is for TuneModel with one file.")
        for each in self.listed:
            each.source.check()
        target = targets.target(self.target, self.threads)  # before it is asked who would link for another machine
        if not (isinstance(target, targets.CpuTarget) and target.runs_here and self.measured_on.is_here):
            raise ConfigError("Ranges of shapes are compiled for this machine's CPU alone, measured here.")

    def require_device(self) -> None:
        """Raises: ConfigError: Something is to be measured, and no device is there."""
        factory.require_device(self.measured_on, self.compile_target)

    @cached_property
    def absence(self) -> str:
        """Why there is no device when the command begins; empty where there is one. It is waited for."""
        return factory.absence(self.measured_on, self.compile_target)

    def configured(self, kind: type[Any], section: str, **options: Any) -> Any:
        """A frozen config from its section and from options.

        Raises:
            ConfigError: See `settings.configured`.
        """
        return settings.configured(kind, section, self.section(section), **options)

    @cached_property
    def source(self) -> Source:
        """The model that is meant, as the file that is tuned: with inputs that are fixed, quantised, and without what
        depends on values."""
        given = Source(
            _expanded(self.model), self.batch_size, self.sequence, self.shape, _expanded(self.weights), self.fix
        )
        if given.fix:
            replace(given, shape="").check()
            given = replace(given, model=str(self._fixed(given)), fix="")
        if given.shape and given.model.endswith(".onnx") and not self.in_range and not self.range:
            given = replace(given, model=str(self._opened(given)))
        if self.precision == IN_INT8:
            given = replace(given, model=str(self._in_int8(given)))
        return self._without_rest(given)

    def _fixed(self, given: Source) -> Path:
        """Its file with constants for some inputs, made once for all runs."""
        from lib.models import onnx_fixed  # onnx takes a while to load

        return onnx_fixed.fixed(Path(given.model), given.fix, self.artifacts / "fixed")

    def _opened(self, given: Source) -> Path:
        """Its file, with extents open that `--shape` gives otherwise than it has them, made once for all runs."""
        from lib.models import onnx_opened  # onnx takes a while to load

        return onnx_opened.opened(Path(given.model), parse_shapes(given.shape), self.artifacts / "opened")

    def _without_rest(self, given: Source) -> Source:
        """What of its file can be compiled, cut off once for all runs; a range of shapes has no such part."""
        if not given.model.endswith(".onnx") or self.in_range or self.range:
            return given
        from lib.models import onnx_rest

        found = onnx_rest.split(Path(given.model), given.shape, self.artifacts / "split")
        if rest := onnx_rest.of(found):
            self.say(f"{given.model}: {rest.told}")
            return replace(given, model=str(found), shape="")
        return given

    def _in_int8(self, given: Source) -> Path:
        """Its file, quantised once for all runs.

        Raises:
            ConfigError: There are no samples to quantise it with.
        """
        from lib.models import onnx_quantization  # onnx takes a while to load

        file, samples = Path(given.model), Path(_expanded(self.calibration))
        if self.models or file.suffix != ".onnx":
            raise ConfigError("--precision int8 is for one ONNX file.")
        require_file(given.model, "--model")
        if onnx_quantization.is_quantized(file):
            return file
        if not self.calibration:
            raise ConfigError(
                f"--precision int8: {file} is in floats, and is quantised with samples of its inputs. Give some with "
                "--calibration: a .npz file or a folder of them."
            )
        if not samples.exists():
            raise ConfigError(f"--calibration {samples}: there is no such file or folder.")
        return onnx_quantization.quantized(file, samples, self.artifacts / "quantized", self._weight_bits)

    @property
    def _weight_bits(self) -> int:
        """Of weights that are quantised here: as many as the target multiplies fast."""
        target = self.compile_target
        return registers(target.tvm()).weight_bits if isinstance(target, targets.CpuTarget) else 8

    @cached_property
    def range(self) -> Range | None:
        """The shapes that one bundle is for, if `--shape` says several."""
        config = self.configured(RangeConfig, "ranges")
        return ranges.parse(_expanded(self.model), self.shape, _expanded(self.lengths), config)

    @property
    def is_joint(self) -> bool:
        """Whether several models, or several shapes of one, are tuned together."""
        return bool(self.models) or self.range is not None

    @cached_property
    def listed(self) -> list[Listed]:
        """The models that are tuned together, if there are several; of a range, the model in each of its shapes, those
        that are not tuned by measurements with no importance."""
        if (found := self.range) is not None:
            return [Listed(replace(self.source, shape=found.shape(bucket)), importance)
                    for bucket, importance in zip(found.buckets, found.importances, strict=True)]  # fmt: skip
        return listing.parse(self.models, self.batch_size, self.sequence)

    def options_of_models(self) -> list[dict[str, Any]]:
        """Those that differ between the listed models."""
        return [asdict(each.source) for each in self.listed]

    @property
    def original(self) -> Original | None:
        """The file to compare with, if the model came from one."""
        if not self.source.model.endswith((".onnx", ".pt2")):
            return None
        target = self.compile_target
        is_here = self.measured_on.is_here and isinstance(target, targets.CpuTarget) and target.runs_here
        return Original(Path(self.source.model), target, is_timed=is_here)

    @cached_property
    def measured_on(self) -> Devices:
        """What `--devices` says."""
        return devices.parse(self.devices)

    @cached_property
    def compile_target(self) -> targets.AnyTarget:
        """What `--target` and `--threads` say."""
        if linker := self.section("tuner").get("linker", ""):
            os.environ[linking.VARIABLE] = linker  # for all processes that compile
        found = targets.target(self.target, self.threads)
        if isinstance(found, targets.CpuTarget) and not found.runs_here and not self.threads:
            self.say(f"--target {self.target}: kernels for {found.threads} threads; --threads says otherwise")
        linking.linker(found.tvm())  # now, and not after the tuning
        return found

    @cached_property
    def of_a_shape(self) -> "Options":
        """Those of the same model in the same shape, as one of a range."""
        return replace(self, in_range=True)

    @cached_property
    def algorithms(self) -> AlgorithmConfig:
        """`[extract]` and `--precision`."""
        found = self.configured(AlgorithmConfig, "extract", precision=self.precision)
        return found.for_all_shapes if self.in_range else found

    @cached_property
    def plan(self) -> PlanConfig:
        """`[plan]`, `--strategy` and `--foresee`."""
        return self.configured(PlanConfig, "plan", strategy=self.strategy, foresee=self.foresee)

    @cached_property
    def search(self) -> SearchConfig:
        """`[generate]`."""
        return self.configured(SearchConfig, "generate")

    @cached_property
    def measure(self) -> MeasureConfig:
        """`[measure]`."""
        return self.configured(MeasureConfig, "measure")

    @cached_property
    def train(self) -> TrainConfig:
        """`[train]`."""
        return self.configured(TrainConfig, "train")

    @property
    def recorded(self) -> Path | None:
        """Where the only candidates are, if `[generate] spaces` says so.

        Raises:
            ConfigError: It does, but nothing is replayed.
        """
        if self.search.spaces != RECORDED:
            return None
        if not isinstance(self.measured_on, devices.Replay):
            raise ConfigError("[generate] spaces = recorded needs measurements of them: --devices replay:FOLDER.")
        return self.measured_on.folder

    @property
    def base_models(self) -> BaseModels:
        """What cost models begin with on this target: those of this project's spaces cost trials in MetaSchedule's,
        which has its own."""
        known = stock_base_models if self.search.spaces == METASCHEDULE else base_models
        return known(self.compile_target.instructions, use=self.train.base == "yes")

    @cached_property
    def memory(self) -> Memory | None:
        """`[memory]`: what was measured on this target before; of replayed measurements there is none."""
        if self.memory_config.use == "no" or isinstance(self.runner, ReplayRunner):
            return None
        search = digests.of_text(settings.digest(settings.deciding(self.search)), str(table.REVISION))
        folder = self.artifacts / self.compile_target.name / "memory"
        return Memory(folder, self.runner.conditions, self.say, search)

    @cached_property
    def memory_config(self) -> MemoryConfig:
        """`[memory]`, as it stands."""
        return self.configured(MemoryConfig, "memory")

    @cached_property
    def model_files(self) -> ModelFiles:
        """Files that all runs of a model on a target share; another graph of it has others."""
        given = self.source
        name = ranges.name(replace(given, shape="").name, self.range) if self.range else given.name
        return ModelFiles(self.artifacts / self.compile_target.name / (name + self.algorithms.suffix))

    @cached_property
    def tuned_files(self) -> ModelFiles:
        """Of what is tuned: the model, or several models as one."""
        if not self.is_joint or self.range:
            return self.model_files
        digest = digests.of_json([[each.name, each.importance] for each in self.listed])[:8]
        name = f"{len(self.listed)}-models-{digest}{self.algorithms.suffix}"
        return ModelFiles(self.artifacts / self.compile_target.name / "nights" / name)

    @property
    def files_of_shapes(self) -> list[ModelFiles]:
        """Of the model in each of the shapes of a range, in the order of its buckets."""
        folder, suffix = self.artifacts / self.compile_target.name, self.algorithms.for_all_shapes.suffix
        return [ModelFiles(folder / (each.source.name + suffix)) for each in self.listed]

    @property
    def summaries(self) -> list[Path]:
        """Records of all nights on this target."""
        return sorted((self.artifacts / self.compile_target.name / "nights").glob("*/runs/*/summary.json"))

    @property
    def subgraphs(self) -> Table:
        """The SUBGRAPHS table of what is tuned, with its schema."""
        return self.tuned_files.subgraphs, SUBGRAPHS

    @property
    def clustered(self) -> Table:
        """The FAMILIES table of these options, with its schema."""
        return self.tuned_files.families(self.families), FAMILIES

    @cached_property
    def runner(self) -> Runner:
        """What measures, shared by all rounds; what it started ends with this process."""
        emulator = self.section("tuner").get("emulator", "")
        return _opened(self.measured_on, self.compile_target, self.measure, emulator, self.say)

    @cached_property
    def identity(self) -> runs.Identity:
        """Which run is meant."""
        configs = {
            "plan": self.plan,
            "generate": self.search,
            "measure": self.measure,
            "train": self.train,
            "memory": self.memory_config,
        }
        options = {"seed": self.seed, "families": self.families, "devices": self.measured_on.identity}
        if self.is_joint:
            options["models"] = self.tuned_files.folder.name
        title = f"{self.strategy}-{self.families}-seed{self.seed}"
        return runs.identity(title, configs, options, self.runner.conditions)

    @cached_property
    def run_files(self) -> RunFiles:
        """Of the run that is meant. Looked for once: what is new when this process begins is its own from then on."""
        found = runs.find(self.tuned_files, self.identity)
        if found.message:
            self.say(found.message)
        return found.files

    @property
    def shipped(self) -> RunFiles:
        """Where the library of `model` lies: in its run, also if it was tuned together with others."""
        return self.model_files.run(self.run_files.folder.name)


@cache
def options(section: Section, say: Say, artifacts: Path, **given: Any) -> Options:
    """The one value of these options in this process: see `Options`."""
    return Options(**given, section=section, say=say, artifacts=artifacts)


@cache
def _opened(measured_on: Devices, target: targets.AnyTarget, config: MeasureConfig, emulator: str, say: Say) -> Runner:
    """One for all models of this process; what it started ends with that."""
    runner = factory.open_runner(measured_on, target, config, emulator)
    if isinstance(runner, ReplayRunner) and runner.left_out:
        say(runner.left_out)
    atexit.register(runner.close)
    return runner


def _expanded(path: str) -> str:
    return str(Path(path).expanduser()) if path.startswith("~") else path
