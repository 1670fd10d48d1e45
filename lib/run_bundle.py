"""Run a bundle on inputs in files, in a process of its own; needs TVM's runtime and NumPy, and of this project
`lib.runtime`.

    python -m lib.run_bundle FOLDER INPUTS

INPUTS is a folder of `NAME.in.npz`, arrays in order; beside each comes `NAME.out.npz`.
"""

import sys
from pathlib import Path

import numpy as np

from lib.runtime.family_tuner_runtime import Model


def main(folder: str, inputs: str) -> None:
    """Write what the bundle makes of all of them."""
    model = Model(folder, rest=False)  # the library alone
    for path in sorted(Path(inputs).glob("*.in.npz")):
        with np.load(path) as file:
            found = model(*file.values())
        outputs = list(found.values()) if isinstance(found, dict) else [found]
        np.savez(path.with_name(path.name.replace(".in.npz", ".out.npz")), *outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
