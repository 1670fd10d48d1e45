"""A file taken through the stages that `TuneModel` runs, in this process, with one pool for all of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import tvm

from lib import deploy
from lib.contracts.files import ModelFiles
from lib.contracts.tables import Provenance
from lib.graph.algorithms import AlgorithmConfig
from lib.machine import targets
from lib.measure.device_source import LocalDevice
from lib.measure.file_peer import Original
from lib.measure.libraries import Libraries
from lib.measure.local_pool import LocalPool
from lib.measure.protocol import Infer, OpenLibrary
from lib.measure.runner import MeasureConfig
from lib.models.source import Source
from lib.search.evolution import SearchConfig
from lib.tuning.cost_model import TrainConfig
from lib.tuning.planning import PlanConfig
from lib.verification import CompileConfig
from stages import cluster, compile, extract, generate, measure, train

_PLAN = PlanConfig(num_trials_per_round=8, num_trials_warmup=2)
_SEARCH = SearchConfig(population=32, generations=1)
_TRAIN = TrainConfig(min_samples=4, num_boost_round=5)
_MEASURE = MeasureConfig(repeats=1, min_repeat_s=0.001, build_timeout_s=20, run_timeout_s=5)
_COMPILE = CompileConfig(finalists=1, repeats=1, turns=1, timeout_s=60, once_above_s=0)  # the untuned one is not timed
_MADE = Provenance("inputs", "session")


class Stages:
    """What all files share."""

    def __init__(self) -> None:
        self._target = targets.cpu_target(threads=1)
        self._pool = LocalPool(self._target, _MEASURE)

    def untuned(self, file: Path, folder: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the model makes of inputs as it is imported, without a search, in this process.

        Raises:
            TunerError: It cannot be imported; in words.
        """
        model = ModelFiles(folder / "model")
        extract.run(_source(file, inputs), self._target, AlgorithmConfig(), provenance=_MADE, out=model)
        module = tvm.ir.load_json(model.module.read_text())
        deploy.build(module, {}, self._target.tvm(), folder / "untuned.so")
        libraries = Libraries(LocalDevice("llvm"))
        np.savez(folder / "inputs.npz", *inputs)
        libraries.open(OpenLibrary("untuned", folder / "untuned.so", model.weights, folder / "inputs.npz"))
        libraries.infer(Infer("untuned", folder / "outputs.npz"))
        return _in_order(folder / "outputs.npz")

    def outputs(self, file: Path, folder: Path, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What the tuned library makes of inputs.

        Raises:
            TunerError: There is no library; in words.
        """
        model, target, pool = ModelFiles(folder / "model"), self._target, self._pool
        families, run = model.families("single"), model.run("run")
        first = run.round(0)
        extract.run(_source(file, inputs), target, AlgorithmConfig(), provenance=_MADE, out=model)
        cluster.run(model.subgraphs, "single", provenance=_MADE, out=families)
        generate.run(model.subgraphs, families, [], target, _PLAN, _SEARCH, seed=0, provenance=_MADE, out=first)
        measure.run(model.subgraphs, pool, provenance=_MADE, out=first)
        train.run(families, [first], _TRAIN, seed=0, provenance=_MADE, out=first)
        original = Original(file, target, is_timed=False)
        compile.run(
            model, families, [first], target, _COMPILE, pool, provenance=_MADE, out=run.compiled, original=original
        )  # fmt: skip
        np.savez(folder / "inputs.npz", *inputs)
        with pool.models(60.0) as session:
            session.open_library("shipped", run.compiled.library, run.compiled.params, folder / "inputs.npz")
            session.infer("shipped", folder / "outputs.npz")
        return _in_order(folder / "outputs.npz")


def _source(file: Path, inputs: Sequence[np.ndarray]) -> Source:
    """A file; one that leaves dimensions open is tuned for those of its inputs."""
    if file.suffix != ".onnx":
        return Source(str(file))
    given = onnx.load(file, load_external_data=False).graph.input
    is_open = any(not axis.HasField("dim_value") for value in given for axis in value.type.tensor_type.shape.dim)
    shapes = {value.name: array.shape for value, array in zip(given, inputs, strict=False)}
    return Source(str(file), shape=" ".join(f"{n}={','.join(map(str, of))}" for n, of in shapes.items()) * is_open)


def _in_order(path: Path) -> list[np.ndarray]:
    found = np.load(path)
    return [found[f"arr_{n}"] for n in range(len(found))]
