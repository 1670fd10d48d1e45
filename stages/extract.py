"""Model in, distinct subgraphs out, with the fused module and the weights that compile needs."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import tvm

from lib import graph, onnx_import, tables, workloads, zoo
from lib.clock import Clock
from lib.errors import ModelError
from lib.graph import Model
from lib.host import CpuTarget
from lib.layout import ModelFiles
from lib.schemas import SUBGRAPHS
from lib.tables import Origin


def run(model: str, target: CpuTarget, *, origin: Origin, out: ModelFiles) -> Path:
    """Import a model and cut it into subgraphs.

    Args:
        model: A name of the zoo, or a path to an ONNX file.
        out: Gets `module.json`, `weights.npz` and, last, the SUBGRAPHS table.

    Raises:
        ModelError: The model is unknown, damaged or not supported. Nothing was written then.
    """
    clock = Clock()
    loaded = load(model)
    module, subgraphs = partition(loaded, target)
    with tables.written_whole(out.module) as partial:
        partial.write_text(tvm.ir.save_json(module))
    with tables.written_whole(out.weights) as partial:
        np.savez(partial, **dict(loaded.weights))  # type: ignore[arg-type]  # the stub takes any name for allow_pickle
    table = pa.Table.from_pylist([asdict(subgraph) for subgraph in subgraphs], schema=SUBGRAPHS)
    return tables.write(table, out.subgraphs, SUBGRAPHS, origin, clock=clock.read(), files=[out.module, out.weights])


def load(model: str) -> Model:
    """A model by name or by file."""
    return onnx_import.load(Path(model)) if is_file(model) else zoo.load(model)


def check(model: str) -> None:
    """Whether a model is there, without loading it.

    Raises:
        ModelError: It is neither a file nor one of the zoo.
    """
    if is_file(model):
        onnx_import.require(Path(model))
    else:
        zoo.entry(model)


def is_file(model: str) -> bool:
    """Whether a model is named by a path, rather than as one of the zoo."""
    return model.endswith(".onnx") or "/" in model


def partition(model: Model, target: CpuTarget) -> tuple[tvm.IRModule, list[workloads.Subgraph]]:
    """The fused module, and its distinct subgraphs, those with most FLOP per inference first.

    Raises:
        ModelError: Not one subgraph can be tuned.
    """
    module = graph.fuse(model.module, target.tvm())
    subgraphs = workloads.extract(module)
    if not any(subgraph.tunable for subgraph in subgraphs):
        raise ModelError(f"None of the model's {len(subgraphs)} subgraphs can be tuned.")
    return module, subgraphs
