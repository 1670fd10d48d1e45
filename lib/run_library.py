"""Run a compiled model once, in a process of its own; needs TVM's runtime, NumPy, and of this project `lib.runtime`.

    python -m lib.run_library LIBRARY WEIGHTS INPUTS OUT

WEIGHTS is a bundle's file, INPUTS and OUT are .npz files, arrays in order. `lib.measure.emulator` starts it on an
emulated CPU.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.runtime import vm

from lib.runtime.family_tuner_runtime.weights import Mapped


def main(library: str, weights: str, inputs: str, out: str) -> None:
    """Write what the model makes of the inputs."""
    machine = vm.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
    with np.load(inputs) as file:
        given = [tvm.runtime.tensor(array) for array in file.values()]
    np.savez(out, *_flat(machine["main"](*given, *Mapped(Path(weights)).tensors)))


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for item in value for array in _flat(item)]


if __name__ == "__main__":
    main(*sys.argv[1:])
