"""Model in, distinct subgraphs out, with the fused module and the weights that compile needs."""

from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import tvm

from lib.contracts import arrays, digests, settings, tables
from lib.contracts.clock import Clock
from lib.contracts.errors import ModelError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.graph import fusion
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.fusion import Model
from lib.graph.subgraphs import Subgraph, extract_subgraphs
from lib.machine.registers import registers
from lib.machine.targets import AnyTarget
from lib.models import onnx_import, torch_import
from lib.models.source import Source, parse_shapes
from lib.models.zoo import catalogue
from lib.tir import few_bits_rows

REVISION = 55  # raised when the same model comes out as other subgraphs than before


def inputs(out: ModelFiles, target: AnyTarget, config: AlgorithmConfig) -> str:
    """Digest of what subgraphs are made from; the name of a model's folder has that of its file and shapes."""
    made_by = (version("apache-tvm"), settings.digest(config, REVISION))
    return digests.of_text(out.folder.name, target.text, *made_by)


def run(
    source: Source,
    target: AnyTarget,
    config: AlgorithmConfig,
    *,
    provenance: Provenance,
    out: ModelFiles,
    like: ModelFiles | None = None,
) -> Path:
    """Import a model and cut it into subgraphs.

    Args:
        source: A model of the zoo, an ONNX file, or an exported program of torch.
        like: The same model in another shape: what is equal in its weights is not written again.
        out: Gets `module.json`, `weights.npz` and, last, the SUBGRAPHS table; where convolutions were replaced also
            `reference.json` and `kernels.npz`, the module and the weights as they were, to verify against.

    Raises:
        ModelError: The model is unknown, damaged or not supported. Nothing was written then.
    """
    clock = Clock()
    try:
        loaded = load(source, target)
        chosen = choose_algorithms(loaded, target, config)
        module, subgraphs = partition(chosen, target)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        # What TVM's passes raise for models that nobody had tried.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise ModelError(
            f"{source.model} is read, but its graph cannot be prepared for tuning: {reason}\n"
            "Where from: the same with --log-level DEBUG"
        ) from error
    files = [
        _write_module(module, out.module),
        _write_weights(chosen.weights, out.weights, like.weights if like else None),
    ]
    if chosen is not loaded:
        changed = {name: value for name, value in loaded.weights.items() if value is not chosen.weights[name]}
        files.append(_write_module(fusion.fuse(loaded.module, target.tvm()), out.reference))
        of_other = like.kernels if like and like.kernels.exists() else None
        files.append(_write_weights(changed, out.kernels, of_other))
    else:
        out.reference.unlink(missing_ok=True)
        out.kernels.unlink(missing_ok=True)
    table = pa.Table.from_pylist([asdict(subgraph) for subgraph in subgraphs], schema=SUBGRAPHS)
    return tables.write(table, out.subgraphs, SUBGRAPHS, provenance, clock=clock.read(), files=files)


def _write_module(module: tvm.IRModule, path: Path) -> Path:
    with tables.written_whole(path) as partial:
        partial.write_text(tvm.ir.save_json(module))
    return path


def _write_weights(weights: Mapping[str, np.ndarray], path: Path, like: Path | None = None) -> Path:
    with tables.written_whole(path) as partial:
        arrays.write(path, partial, weights, like)
    return path


def load(source: Source, target: AnyTarget | None = None) -> Model:
    """A model by name or by file.

    Args:
        target: What it is loaded for; None: any CPU.

    Raises:
        ModelError: There is none, or it cannot be imported; the message says why.
    """
    source.check()
    path = Path(source.model)
    is_cpu = target is None or target.kind == "llvm"
    lanes = registers(target.tvm()).lanes if target and is_cpu else 8
    shapes = parse_shapes(source.shape)
    if path.suffix == ".onnx":
        instruction = few_bits_rows.instruction(target.tvm()) if target and is_cpu else ""
        return onnx_import.load(path, shapes, has_loops=is_cpu, instruction=instruction, lanes=lanes)
    if path.suffix == ".pt2":
        return torch_import.load(path, shapes, has_loops=is_cpu, lanes=lanes)
    weights = Path(source.weights) if source.weights else None
    return catalogue.load(source.model, batch=source.batch_size or 1, sequence=source.sequence or None, weights=weights)


def partition(model: Model, target: AnyTarget) -> tuple[tvm.IRModule, list[Subgraph]]:
    """The fused module, and its distinct subgraphs, those with most FLOP per inference first.

    Raises:
        ModelError: Not one subgraph can be tuned.
    """
    module = fusion.fuse(model.module, target.tvm())
    subgraphs = extract_subgraphs(module)
    if not any(subgraph.tunable for subgraph in subgraphs):
        raise ModelError(f"None of the model's {len(subgraphs)} subgraphs can be tuned.")
    return module, subgraphs
