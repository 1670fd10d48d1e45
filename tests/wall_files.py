"""ONNX files of the wall without their weights: each has the mean and spread of what it had, and gets such again.

python -m tests.wall_files FILE.onnx ...     # writes tests/data/wall/NAME.onnx.gz
"""

import gzip
import sys
import zlib
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

FOLDER = Path(__file__).parent / "data" / "wall"
_KEPT = 64  # elements: smaller ones stay as they are, and so do masks and the like, of few different values


def strip(path: Path) -> None:
    """Keep a file's graph."""
    model = onnx.load(path)
    model.metadata_props.clear()
    del model.graph.value_info[:]
    for node in model.graph.node:
        node.doc_string = ""
        node.metadata_props.clear()
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.size > _KEPT and len(np.unique(values)) > values.size // 4:
            tensor.ClearField("raw_data")
            tensor.ClearField("float_data")
            tensor.doc_string = f"{values.mean():.6g} {values.std():.6g}"
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{path.name}.gz").write_bytes(gzip.compress(model.SerializeToString(), mtime=0))


def fill(name: str, out: Path) -> Path:
    """Write a file that has weights again, seeded by their names."""
    model = onnx.ModelProto()
    model.ParseFromString(gzip.decompress((FOLDER / f"{name}.onnx.gz").read_bytes()))
    for tensor in model.graph.initializer:
        if tensor.doc_string:
            mean, spread = map(float, tensor.doc_string.split())
            rng = np.random.default_rng(zlib.crc32(tensor.name.encode()))
            values = rng.normal(mean, spread, tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    onnx.save(model, out)
    return out


if __name__ == "__main__":
    for name in sys.argv[1:]:
        strip(Path(name))
