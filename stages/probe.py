"""A file and a range in, what its open dimensions are out; a range that padding would falsify is refused."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from lib import deploy, probing
from lib.contracts import manifest
from lib.contracts.files import ModelFiles
from lib.contracts.tables import Provenance
from lib.measure.file_peer import Original
from lib.models import file_facts
from lib.tir.workload import load_module


def run(
    original: Original,
    shape: ModelFiles,
    buckets: Sequence[Mapping[str, int]],
    limits: Mapping[str, tuple[int, int]],
    *,
    provenance: Provenance,
    out: ModelFiles,
) -> Path:
    """Look at a file that is to be compiled for a range.

    Args:
        original: The file.
        shape: Of the model in one of its shapes, with `module.json`.
        buckets: Extents by dimension; `limits`: the lowest and highest of each.
        out: Gets `range.json`, with the facts of `probing.Probed`.

    Raises:
        ModelError: Padding changes what it computes; the message says how.
    """
    interface = deploy.interface(load_module(shape.module.read_text()))
    out.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.folder) as work:
        said = file_facts.of(original.path)
        found = probing.probe(original, interface, said.axes, said.outputs, buckets, limits, Path(work))
    return manifest.write(out.probed, provenance.inputs, asdict(found), [])
