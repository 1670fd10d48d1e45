"""Model in, distinct subgraphs out, with the fused module and the weights that compile needs."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import tvm

from lib import graph, onnx_import, tables, torch_import, workloads, zoo
from lib.clock import Clock
from lib.errors import ModelError
from lib.graph import Model
from lib.layout import ModelFiles
from lib.schemas import SUBGRAPHS
from lib.source import Source, parse_shapes
from lib.tables import Origin
from lib.targets import AnyTarget


def run(source: Source, target: AnyTarget, *, origin: Origin, out: ModelFiles) -> Path:
    """Import a model and cut it into subgraphs.

    Args:
        source: A model of the zoo, an ONNX file, or an exported program of torch.
        out: Gets `module.json`, `weights.npz` and, last, the SUBGRAPHS table.

    Raises:
        ModelError: The model is unknown, damaged or not supported. Nothing was written then.
    """
    clock = Clock()
    loaded = load(source)
    module, subgraphs = partition(loaded, target)
    with tables.written_whole(out.module) as partial:
        partial.write_text(tvm.ir.save_json(module))
    with tables.written_whole(out.weights) as partial:
        np.savez(partial, **dict(loaded.weights))  # type: ignore[arg-type]  # the stub takes any name for allow_pickle
    table = pa.Table.from_pylist([asdict(subgraph) for subgraph in subgraphs], schema=SUBGRAPHS)
    return tables.write(table, out.subgraphs, SUBGRAPHS, origin, clock=clock.read(), files=[out.module, out.weights])


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
