"""Extents that a file fixes, opened where a user asks for others.

Exporters write the shapes of the example that they were given, also where the operators take any: a detector of faces
that its package runs on images of every size says (10, 3, 32, 32) of its input. ONNX Runtime refuses others, and so
would this importer.
"""

from collections.abc import Mapping
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from lib.contracts import digests
from lib.models import onnx_import, onnx_saving


def opened(path: Path, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> Path:
    """The file with those extents of its inputs open that it fixes otherwise, in a folder; itself if there are none.

    Whether its operators take the others shows when it is imported.

    Args:
        shapes: By input, as `--shape` has them; one with another number of dimensions is left for the importer to
            refuse.

    Raises:
        ModelError: The file cannot be read.
    """
    try:
        header = onnx.load(path, load_external_data=False)
    except (OSError, DecodeError):  # the importer says so better
        return path
    if not _fixed_otherwise(header.graph, shapes):
        return path
    told = " ".join(f"{name}={','.join(map(str, shape))}" for name, shape in sorted(shapes.items()))
    out = folder / f"{path.stem}-{digests.of_text(digests.of_state(path), told)[:8]}" / path.name
    if not out.exists():
        proto = onnx_import.read(path)
        for dim in _fixed_otherwise(proto.graph, shapes):
            dim.Clear()
        for result in proto.graph.output:  # these follow
            result.type.tensor_type.ClearField("shape")
        del proto.graph.value_info[:]
        onnx_saving.save_all({path.name: proto}, out.parent)
    return out


def _fixed_otherwise(
    graph: onnx.GraphProto, shapes: Mapping[str, tuple[int, ...]]
) -> list[onnx.TensorShapeProto.Dimension]:
    found = []
    for value in graph.input:
        dims, given = value.type.tensor_type.shape.dim, shapes.get(value.name, ())
        if len(dims) == len(given):
            found += [
                dim for dim, n in zip(dims, given, strict=True) if dim.HasField("dim_value") and dim.dim_value != n
            ]
    return found
