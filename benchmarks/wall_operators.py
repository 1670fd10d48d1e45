"""Every single-operator model of ONNX's own backend tests, tuned and compared with what ONNX says comes out.

    python benchmarks/wall_operators.py --out ROWS.parquet [--only NAME ...] [--jobs 2] [--quick]

Each is imported, gets a warm-up round of three programs a subgraph, is compiled and verified by the stages that
`TuneModel` runs (with `--quick`: is imported and compiled untuned), and is then run on the test's own inputs. Shapes,
axes, pads and the like, which those tests feed as inputs, are made constants first, as they are in the files that
people have. A row says what came of it: see `wall.VERDICTS`.
"""

import argparse
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import onnx
import wall
import wall_serve
from onnx import numpy_helper
from onnx.backend.test.loader import load_node_model_tests

# Inputs, by their place, that say how to compute rather than on what.
_SETTINGS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Expand": (1,), "Tile": (1,), "Pad": (1, 2, 3), "Slice": (1, 2, 3, 4), "Unsqueeze": (1,),
    "Squeeze": (1,), "TopK": (1,), "OneHot": (1,), "Split": (1,), "SplitToSequence": (1,), "ConstantOfShape": (0,),
    "Range": (0, 1, 2), "Resize": (1, 2, 3), "Upsample": (1,), "CumSum": (1,), "CumProd": (1,), "Trilu": (1,),
    "CenterCropPad": (1,), "NonMaxSuppression": (2, 3, 4), "Dropout": (1, 2), "AffineGrid": (1,), "Col2Im": (1, 2),
    "DFT": (1, 2), "STFT": (1, 3), "MaxUnpool": (2,), "HannWindow": (0,), "HammingWindow": (0,),
    "BlackmanWindow": (0,), "MelWeightMatrix": (0, 1, 2, 3, 4),
    **{f"Reduce{kind}": (1,) for kind in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp",
                                          "SumSquare")},
}  # fmt: skip


def tests() -> dict[str, Any]:
    """All of them, by name."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        found = {test.name.removeprefix("test_"): test for test in load_node_model_tests()}
    return {name: test for name, test in found.items() if "_expanded" not in name}


def write(test: Any, path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """A test's model with its settings as constants; returns inputs and outputs that belong together.

    Raises:
        TypeError: Something of it is no tensor of numbers that NumPy has.
    """
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    inputs, outputs = (list(map(_array, values)) for values in test.data_sets[0])
    are_tensors = all(each.type.HasField("tensor_type") for each in model.graph.input)
    if not are_tensors or len(inputs) != len(model.graph.input):
        raise TypeError("an optional input")
    node = model.graph.node[0]
    settings = {node.input[n] for n in _SETTINGS.get(node.op_type, ()) if n < len(node.input)}
    kept, left = [], []
    for described, value in zip(model.graph.input, inputs, strict=True):
        if described.name in settings:
            model.graph.initializer.append(numpy_helper.from_array(value, described.name))
        else:
            kept.append(described)
            left.append(value)
            for dim, extent in zip(described.type.tensor_type.shape.dim, value.shape, strict=True):
                dim.CopyFrom(onnx.TensorShapeProto.Dimension(dim_value=extent))
    del model.graph.input[:]
    model.graph.input.extend(kept)
    onnx.save(model, path)
    return left, outputs


def _array(value: Any) -> np.ndarray:
    value = np.asarray(value) if isinstance(value, np.generic) else value
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise TypeError("strings, sequences, optionals or numbers of fewer bits than NumPy has")
    return value


def serve(*, quick: bool) -> None:
    """The process that tries tests."""
    from wall_stages import Stages

    known, stages = tests(), Stages()
    tuned = stages.untuned if quick else stages.outputs

    def attempt(name: str) -> wall_serve.Row:
        test = known[name]
        return wall.of_operator(test.model.graph.node[0].op_type, "model.onnx", partial(write, test), tuned)

    wall_serve.serve(attempt)


def main() -> None:
    """Try them, keep a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("wall_operators.parquet"))
    parser.add_argument("--only", nargs="+", help="some of the tests; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=90.0, help="seconds for a test")
    parser.add_argument("--quick", action="store_true", help="import, compile untuned and compare only")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(quick=options.quick)
        return
    command = [__file__, "--serve", *(["--quick"] if options.quick else [])]
    table = wall_serve.rows(command, options.only or list(tests()), options.jobs, options.deadline, options.out)
    print(wall.summary(table))


if __name__ == "__main__":
    main()
