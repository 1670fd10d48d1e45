"""What a model's file says of its inputs and outputs beside what it computes, of whichever kind it is."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import onnx

from lib.contracts.errors import ModelError

_ROOT = Path(__file__).parents[2]
_LICENCE_KEYS = ("license", "licence", "license_name", "org.opencontainers.image.licenses")


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one file."""

    axes: Mapping[str, tuple[str, ...]]  # by input: the name of each dimension that is open, empty text for others
    outputs: tuple[str, ...]
    licence: str = ""  # what its metadata call so
    computed: Mapping[str, str] = field(default_factory=dict)  # by dimension: what else of inputs follows it (`2*s77`)

    @property
    def open_dimensions(self) -> list[str]:
        """Names of the dimensions of inputs that the file leaves open."""
        return sorted({name for names in self.axes.values() for name in names if name})


def of(path: Path) -> Facts:
    """Those of an ONNX file or of an exported program of torch.

    Raises:
        ModelError: It is a program that torch does not read.
    """
    return _of(path.resolve(), path.stat().st_mtime_ns)


@lru_cache
def _of(path: Path, _changed: int) -> Facts:
    return _of_program(path) if path.suffix == ".pt2" else _of_onnx(onnx.load(path, load_external_data=False))


def _of_onnx(proto: onnx.ModelProto) -> Facts:
    weights = {tensor.name for tensor in proto.graph.initializer}
    axes = {
        value.name: tuple(dim.dim_param for dim in value.type.tensor_type.shape.dim)
        for value in proto.graph.input if value.name not in weights
    }  # fmt: skip
    said = {entry.key.lower(): entry.value for entry in proto.metadata_props}
    licence = next((said[key] for key in _LICENCE_KEYS if said.get(key)), "")
    return Facts(axes, tuple(value.name for value in proto.graph.output), licence)


def _of_program(path: Path) -> Facts:
    """In a process of its own: what asks may have TVM loaded, with which torch's libraries do not mix."""
    command = [sys.executable, "-m", "lib.models.torch_facts", str(path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError((done.stderr.strip().splitlines() or [f"{path}: exit status {done.returncode}"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    axes = {name: tuple(names) for name, names in found["axes"].items()}
    return Facts(axes, tuple(found["outputs"]), computed=found["computed"])
