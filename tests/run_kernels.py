"""Runs on an emulated CPU: kernels on their inputs, one process for all, since each takes seconds to load TVM.

    python -m tests.run_kernels FOLDER

For each FOLDER/<name>.so there are its inputs and a place for the result, in order, in <name>.npz; the result goes to
<name>.out.npz, or what went wrong to <name>.error.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import tvm

for library in sorted(Path(sys.argv[1]).glob("*.so")):
    with np.load(library.with_suffix(".npz")) as file:
        arrays = [array.view(ml_dtypes.bfloat16) if array.dtype == "V2" else array for array in file.values()]
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    try:
        tvm.runtime.load_module(str(library))["main"](*tensors)
    except Exception as error:
        library.with_suffix(".error").write_text(str(error))
    else:
        np.savez(library.with_suffix(".out.npz"), tensors[-1].numpy())
