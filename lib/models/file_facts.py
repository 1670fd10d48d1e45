"""What a model's file says of its inputs and outputs beside what it computes, of whichever kind it is."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from lib.contracts.errors import ModelError
from lib.models import onnx_facts

_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one file."""

    axes: Mapping[str, tuple[str, ...]]  # by input: the name of each dimension that is open, empty text for others
    outputs: tuple[str, ...]
    licence: str = ""
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
    if path.suffix == ".pt2":
        return _of_program(path)
    return Facts(onnx_facts.open_axes(path), tuple(onnx_facts.output_names(path)), onnx_facts.licence(path))


def _of_program(path: Path) -> Facts:
    """In a process of its own: what asks may have TVM loaded, with which torch's libraries do not mix."""
    command = [sys.executable, "-m", "lib.models.torch_facts", str(path)]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError((done.stderr.strip().splitlines() or [f"{path}: exit status {done.returncode}"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    axes = {name: tuple(names) for name, names in found["axes"].items()}
    return Facts(axes, tuple(found["outputs"]), computed=found["computed"])
