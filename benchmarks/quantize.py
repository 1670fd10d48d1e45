"""An ONNX file quantised like `--precision int8` does it, calibrated on random inputs: speed does not depend on these.

python benchmarks/quantize.py --onnx FILE --out FOLDER
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from lib.models import onnx_quantization

_SAMPLES, _TOKENS = 2, 100


def random_samples(file: Path, out: Path, seed: int = 0) -> Path:
    """Write some for each input of a file."""
    inputs = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"]).get_inputs()
    np.savez(out, **{value.name: _random(value, seed) for value in inputs})
    return out


def _random(value: Any, seed: int) -> Any:
    rng, shape = np.random.default_rng(seed), (_SAMPLES, *value.shape)
    if "float" in value.type:
        return rng.standard_normal(shape).astype(np.float32)
    return rng.integers(0, _TOKENS, shape)


def main() -> None:
    """Quantise one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--onnx", type=Path, required=True)
    parser.add_argument("--bits", type=int, choices=(7, 8), default=8, help="of weights")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        samples = random_samples(given.onnx, Path(work) / "samples.npz")
        print(onnx_quantization.quantized(given.onnx, samples, given.out, given.bits))


if __name__ == "__main__":
    main()
