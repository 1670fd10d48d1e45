"""Model files of JAX, as jax2onnx writes them: what it tests itself with, networks of Flax and Equinox and operators.

    pip install jax2onnx flax equinox                     # into an environment of its own
    python benchmarks/wall_jax.py --out FILES
    python benchmarks/wall.py --files FILES --quick --out ROWS.parquet

Beside each file lie inputs and what JAX makes of them in float32. Open dimensions get three elements. Left out is what
has no inputs, or others than numbers of NumPy (complex ones, keys of random numbers), or does not export.
"""

import argparse
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax2onnx
import jax2onnx.plugins.plugin_system as plugins
import numpy as np
import onnx

_NARROW = {np.dtype(np.float64): np.dtype(np.float32), np.dtype(np.int64): np.dtype(np.int32)}
_OPEN = 3  # elements of a dimension that has a name
_OPSET = 21
_MOST_BYTES = 300e6


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and description of each."""
    plugins.import_all_plugins()
    for key, plugin in {**plugins.PLUGIN_REGISTRY, **plugins.EXAMPLE_REGISTRY}.items():
        found = plugin if isinstance(plugin, dict) else getattr(plugin, "metadata", {})
        for case in found.get("testcases", []):
            if not case.get("run_only_f64_variant") and not case.get("enable_double_precision"):
                yield re.sub(r"\W", "_", f"{found.get('component', key)}__{case['testcase']}"), case


def inputs(case: dict[str, Any], rng: np.random.Generator) -> list[np.ndarray]:
    """Given ones, or random ones of its shapes."""
    if "input_values" in case:
        given = [np.asarray(value) for value in case["input_values"]]
        return [array.astype(_NARROW.get(array.dtype, array.dtype)) for array in given]
    shapes = [tuple(_OPEN if isinstance(n, str) else int(n) for n in each) for each in case.get("input_shapes", [])]
    kinds = [np.dtype(kind) for kind in case.get("input_dtypes") or [np.float32] * len(shapes)]
    return [
        rng.normal(size=shape).astype(_NARROW.get(kind, kind)) if kind.kind == "f"
        else rng.integers(0, 2, shape).astype(_NARROW.get(kind, kind))
        for shape, kind in zip(shapes, kinds, strict=True)
    ]  # fmt: skip


def write(name: str, case: dict[str, Any], folder: Path) -> None:
    """Export a case, with inputs and outputs beside it.

    Raises:
        Exception: It has none that `wall.py` could compare, or JAX or its exporter say something.
    """
    given = inputs(case, np.random.default_rng(0))
    made = case["callable"]
    if hasattr(made, "with_dtype"):
        made = made.with_dtype(jax.numpy.float32).instantiate()
    more = case.get("input_params") or {}
    outputs = [np.asarray(each) for each in jax.tree_util.tree_leaves(made(*map(jax.numpy.asarray, given), **more))]
    if not given or not outputs or any(each.dtype.kind not in "fiub" for each in (*given, *outputs)):
        raise ValueError("no numbers of NumPy")
    described = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in given]
    proto = jax2onnx.to_onnx(made, described, input_params=more, opset=case.get("opset_version", _OPSET))
    if len(proto.graph.input) != len(given) or len(proto.graph.output) != len(outputs):
        raise ValueError("other inputs or outputs than JAX has")
    if proto.ByteSize() > _MOST_BYTES:
        raise ValueError("large")
    proto.ir_version = min(proto.ir_version, 11)  # that of the pinned ONNX Runtime
    arrays: dict[str, Any] = {f"input_{n:03}": each for n, each in enumerate(given)}
    arrays |= {f"output_{n:03}": each for n, each in enumerate(outputs)}
    np.savez(folder / f"{name}.npz", **arrays)
    onnx.save(proto, folder / f"{name}.onnx")


def main() -> None:
    """Write them all; says which were not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, case in dict(cases()).items():
        try:
            write(name, case, options.out)
        except BaseException as error:  # whatever of JAX, of its exporter and of 600 plugins
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"{name}: not written: {type(error).__name__} {str(error)[:120]!r}", flush=True)


if __name__ == "__main__":
    main()
