"""Bundles: what a compiled model consists of, and a command that looks at them.

    python -m lib.bundle pack FOLDER OUT     what is deployed of a run's compiled/, as a folder or as OUT.tar
    python -m lib.bundle check FOLDER        whether it is whole, fits this machine, and computes what it should
    python -m lib.bundle info FOLDER         what it is

A bundle is a folder with a library, weights, a reference and a manifest that names them; no file knows where it lies.
`lib/runtime` runs it, and has `check` and `info` as well, for machines without the tuner.
"""

import argparse
import io
import json
import shutil
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.contracts import manifest, tables, weights
from lib.contracts.errors import ContractError, TunerError
from lib.contracts.files import CompiledFiles
from lib.machine import host, targets
from lib.runtime.family_tuner_runtime import __main__ as runtime
from lib.runtime.family_tuner_runtime import bundle as format_of
from lib.runtime.family_tuner_runtime.errors import BundleError
from lib.tir import cpu_check, matrix

FORMAT = format_of.FORMAT  # raised when a bundle is another than before
OF_RANGES = format_of.OF_RANGES
_MOST_REFERENCE = 16 << 20  # bytes of inputs and outputs that come along
_INPUT, _OUTPUT = "input", "output"


def facts(
    out: CompiledFiles,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    target: targets.AnyTarget,
    entry: str,
    licence: str,
) -> dict[str, Any]:
    """What the manifest says to whoever runs the library.

    Args:
        inputs, outputs: Of the model, as `deploy` describes them.
        entry: The name of the function.
        licence: Of the model's weights, as its file has it; empty if that says nothing.
    """
    return {
        "format": FORMAT,
        "library": out.library.name,
        "params": out.params.name,
        "reference": out.reference.name if out.reference.exists() else None,
        "entry": entry,
        "model_inputs": inputs,
        "model_outputs": outputs,
        "target": json.loads(target.text),
        "threads": target.threads,
        "instructions": cpu_check.needed(target.tvm()) + matrix.needed(out.folder.glob(f"*{out.library.suffix}")),
        "versions": host.versions(),
        "host": host.hostname(),
        "device": host.cpu_name(),
        "licences": [
            {"of": "weights", "licence": licence or "not stated in the model's file; that of the model applies"},
            {"of": "Apache TVM and TVM FFI, which compiled the library and run it", "licence": "Apache-2.0"},
        ],
    }


def with_rest(rest: Path, outputs: Sequence[Mapping[str, Any]], told: str, out: CompiledFiles) -> dict[str, Any]:
    """Copy what ONNX Runtime is to compute after the library; returns what the manifest says of it.

    Args:
        outputs: Of the whole model, in order: `name`, `shape` with names for what is open, and `dtype`.
        told: What it is, in words.
    """
    with tables.written_whole(out.rest) as partial:
        shutil.copyfile(rest, partial)
    return {"rest": {"file": out.rest.name, "outputs": list(outputs), "told": told}}


def of_range(
    facts: Mapping[str, Any], limits: Mapping[str, tuple[int, int]], buckets: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The same of a bundle for a range of shapes.

    Args:
        facts: As `facts` has them; in the shapes of inputs and outputs, names stand for dimensions that are open.
        limits: The lowest and the highest extent of each of these.
        buckets: The shapes that were compiled: `extents`, the file name of the `library`, and the `weights` as it takes
            them, names in the file with shapes; and what else there is to say.
    """
    return {
        **{name: value for name, value in facts.items() if name != "library"},
        "format": OF_RANGES,
        "ranges": {name: {"from": lowest, "to": highest} for name, (lowest, highest) in limits.items()},
        "buckets": list(buckets),
    }


def write_reference(inputs: Sequence[np.ndarray], expected: Sequence[np.ndarray], out: CompiledFiles) -> None:
    """Write what the model should make of some inputs, unless that is large."""
    named = [(_INPUT, inputs), (_OUTPUT, expected)]
    arrays = {f"{kind}{n}": array for kind, values in named for n, array in enumerate(values)}
    if sum(array.nbytes for array in arrays.values()) > _MOST_REFERENCE:
        out.reference.unlink(missing_ok=True)
        return
    with tables.written_whole(out.reference) as partial:
        weights.write(partial, arrays)


def sweep(out: CompiledFiles) -> None:
    """Remove the weights of a library that was compiled before there were bundles."""
    (out.folder / "params.npz").unlink(missing_ok=True)


def delivered(out: CompiledFiles) -> list[Path]:
    """The files that the manifest vouches for."""
    found = [out.library, out.params, out.results]
    return [*found, *(each for each in (out.reference, out.rest) if each.exists())]


def pack(folder: Path, out: Path) -> Path:
    """Copy what is deployed, and check the copy's digests.

    Args:
        folder: A run's `compiled/`.
        out: A folder that does not exist yet, or a name that ends in `.tar`: equal bundles give equal archives.

    Raises:
        BundleError: It is damaged, or no bundle.
        ContractError: `out` exists.
    """
    source = format_of.Bundle.read(folder)
    if damaged := list(source.damages()):
        raise BundleError("; ".join(damaged))
    if out.exists():
        raise ContractError(f"{out} exists. Delete it, or name another one.")
    kept = [path for path in (*source.libraries, source.weights, source.reference, source.rest) if path]
    facts = {name: value for name, value in source.facts.items() if name not in ("inputs", "files")}
    if out.suffix != ".tar":
        out.mkdir(parents=True)
        copies = [Path(shutil.copyfile(path, out / path.name)) for path in kept]
        manifest.write(out / format_of.MANIFEST, source.facts["inputs"], facts, copies)
        return out
    with tables.written_whole(out) as partial:
        _archive(partial, kept, manifest.text(source.facts["inputs"], facts, kept))
    return out


def _archive(path: Path, files: Sequence[Path], described: str) -> None:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for file in files:
            with file.open("rb") as content:
                archive.addfile(_entry(file.name, file.stat().st_size), content)
        data = described.encode()
        archive.addfile(_entry(format_of.MANIFEST, len(data)), io.BytesIO(data))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    """Without owner and date: they would make equal bundles differ."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    return entry


def main(arguments: Sequence[str]) -> int:
    """The command; the exit status is 1 if something is wrong with a bundle."""
    if arguments[:1] != ["pack"]:
        return runtime.main(arguments, "python -m lib.bundle", {"pack": "copy what is deployed to OUT"})
    parser = argparse.ArgumentParser(prog="python -m lib.bundle pack", description=pack.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments[1:])
    try:
        print(pack(options.folder, options.out))
    except (BundleError, TunerError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
