"""An ONNX file and a range in, what its open dimensions are out; a range that padding would falsify is refused."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lib import deploy, probing
from lib.contracts import manifest
from lib.contracts.files import ModelFiles
from lib.contracts.tables import Provenance
from lib.measure.onnx_peer import Original
from lib.models import onnx_facts
from lib.tir.workload import load_module


def run(
    onnx: Original,
    shape: ModelFiles,
    buckets: Sequence[Mapping[str, int]],
    limits: Mapping[str, tuple[int, int]],
    *,
    provenance: Provenance,
    out: ModelFiles,
) -> Path:
    """Look at a file that is to be compiled for a range.

    Args:
        onnx: The file.
        shape: Of the model in one of its shapes, with `module.json`.
        buckets: Extents by dimension; `limits`: the lowest and highest of each.
        out: Gets `range.json`, with the facts of `probing.Probed`.

    Raises:
        ModelError: Padding changes what it computes; the message says how.
    """
    interface = deploy.interface(load_module(shape.module.read_text()))
    out.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.folder) as work:
        found = probing.probe(
            onnx, interface, onnx_facts.open_axes(onnx.path), onnx_facts.output_names(onnx.path), buckets, limits,
            Path(work),
        )  # fmt: skip
    return manifest.write(out.probed, provenance.inputs, asdict(found), [])
