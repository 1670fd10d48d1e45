"""Files that are made of a user's file: written whole, into a folder of their own, with all weights."""

import tempfile
from pathlib import Path

import onnx

from lib.contracts import tables

_MOST_WITHIN = 1 << 30  # bytes of weights within a file; protobuf takes no more than two


def save(proto: onnx.ModelProto, path: Path) -> None:
    """Write a model; weights of more than a gigabyte into a file beside it."""
    n_bytes = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    beside = f"{path.name}.data"
    onnx.save(proto, path, save_as_external_data=n_bytes > _MOST_WITHIN, location=beside, size_threshold=1024)


def save_all(protos: dict[str, onnx.ModelProto], folder: Path) -> None:
    """Write models by their file names into a folder, which is there with all of them, or is not; one that is there, of
    another process, is left."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=tables.BUILDING) as work:
        made = Path(work) / folder.name
        made.mkdir()
        for name, proto in protos.items():
            save(proto, made / name)
        if not folder.exists():
            made.rename(folder)
