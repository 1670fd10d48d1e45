"""Run a compiled model once, in a process of its own; needs TVM's runtime, NumPy and this one file.

    python -m lib.run_library LIBRARY PARAMS INPUTS OUT

PARAMS, INPUTS and OUT are .npz files, arrays in order. `lib.measure.emulator` starts it on an emulated CPU.
"""

import sys
from typing import Any

import numpy as np
import tvm
from tvm.runtime import vm


def main(library: str, params: str, inputs: str, out: str) -> None:
    """Write what the model makes of the inputs."""
    machine = vm.VirtualMachine(tvm.runtime.load_module(library), tvm.cpu())
    arguments = [tvm.runtime.tensor(array) for path in (inputs, params) for array in _arrays(path)]
    np.savez(out, *_flat(machine["main"](*arguments)))


def _arrays(path: str) -> list[np.ndarray]:
    import ml_dtypes  # .npz knows no bf16

    with np.load(path) as file:
        return [array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array for array in file.values()]


def _flat(value: Any) -> list[np.ndarray]:
    if isinstance(value, tvm.runtime.Tensor):
        return [value.numpy()]
    return [array for item in value for array in _flat(item)]


if __name__ == "__main__":
    main(*sys.argv[1:])
