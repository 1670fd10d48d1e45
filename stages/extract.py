"""Model in, distinct subgraphs out, with the fused module and the weights that compile needs."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import tvm

from lib import graph, onnx_import, reweight, tables, torch_import, widen, winograd, workloads, zoo
from lib.clock import Clock
from lib.errors import ConfigError, ModelError
from lib.graph import Model
from lib.layout import ModelFiles
from lib.schemas import SUBGRAPHS
from lib.source import Source, parse_shapes
from lib.spaces import tiling
from lib.tables import Origin
from lib.targets import AnyTarget

REVISION = 3  # raised when the same model comes out as other subgraphs than before


@dataclass(frozen=True, slots=True)
class ExtractConfig:
    """How a model is turned into subgraphs."""

    winograd: str = "auto"  # convolutions on CPUs, where it saves time; or `never`
    widen: str = "auto"  # channels on CPUs, where they do not fill vectors; or `never`

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value not in ("auto", "never"):
                raise ConfigError(f"[extract] {name} must be `auto` or `never`, but got {value!r}.")


def run(source: Source, target: AnyTarget, config: ExtractConfig, *, origin: Origin, out: ModelFiles) -> Path:
    """Import a model and cut it into subgraphs.

    Args:
        source: A model of the zoo, an ONNX file, or an exported program of torch.
        out: Gets `module.json`, `weights.npz` and, last, the SUBGRAPHS table; where convolutions were replaced also
            `reference.json` and `kernels.npz`, the module and the weights as they were, to verify against.

    Raises:
        ModelError: The model is unknown, damaged or not supported. Nothing was written then.
    """
    clock = Clock()
    loaded = load(source)
    chosen = choose_algorithms(loaded, target, config)
    module, subgraphs = partition(chosen, target)
    files = [_write_module(module, out.module), _write_weights(chosen.weights, out.weights)]
    if chosen is not loaded:
        changed = {name: value for name, value in loaded.weights.items() if value is not chosen.weights[name]}
        files.append(_write_module(graph.fuse(loaded.module, target.tvm()), out.reference))
        files.append(_write_weights(changed, out.kernels))
    else:
        out.reference.unlink(missing_ok=True)
        out.kernels.unlink(missing_ok=True)
    table = pa.Table.from_pylist([asdict(subgraph) for subgraph in subgraphs], schema=SUBGRAPHS)
    return tables.write(table, out.subgraphs, SUBGRAPHS, origin, clock=clock.read(), files=files)


def choose_algorithms(model: Model, target: AnyTarget, config: ExtractConfig) -> Model:
    """Replace what can be computed with less work on this kind of target; the same model if there is nothing."""
    if target.kind != "llvm":
        return model
    widened = widen.replacement(tiling.registers(target.tvm()).lanes)
    ways = [(config.winograd, winograd.replacement), (config.widen, widened)]
    choices = [way for wanted, way in ways if wanted == "auto"]
    module, changed = reweight.rewrite(model.module, model.weights, choices)
    return Model(module, {**model.weights, **changed}) if changed else model


def _write_module(module: tvm.IRModule, path: Path) -> Path:
    with tables.written_whole(path) as partial:
        partial.write_text(tvm.ir.save_json(module))
    return path


def _write_weights(weights: Mapping[str, np.ndarray], path: Path) -> Path:
    with tables.written_whole(path) as partial:
        np.savez(partial, **dict(weights))  # type: ignore[arg-type]  # the stub takes any name for allow_pickle
    return path


def load(source: Source) -> Model:
    """A model by name or by file.

    Raises:
        ModelError: There is none, or it cannot be imported; the message says why.
    """
    source.check()
    path = Path(source.model)
    if path.suffix == ".onnx":
        return onnx_import.load(path, parse_shapes(source.shape))
    if path.suffix == ".pt2":
        return torch_import.load(path)
    weights = Path(source.weights) if source.weights else None
    return zoo.load(source.model, batch=source.batch or 1, sequence=source.sequence or None, weights=weights)


def partition(model: Model, target: AnyTarget) -> tuple[tvm.IRModule, list[workloads.Subgraph]]:
    """The fused module, and its distinct subgraphs, those with most FLOP per inference first.

    Raises:
        ModelError: Not one subgraph can be tuned.
    """
    module = graph.fuse(model.module, target.tvm())
    subgraphs = workloads.extract(module)
    if not any(subgraph.tunable for subgraph in subgraphs):
        raise ModelError(f"None of the model's {len(subgraphs)} subgraphs can be tuned.")
    return module, subgraphs
