"""Model files of every kind, each tuned as `TuneModel` does: what works, and what is refused how.

    python benchmarks/wall_models.py --out FILES                       # makes them, with what torch computes
    python benchmarks/wall.py --files FILES --out ROWS.parquet [--only NAME ...] [--jobs 2] [--command | --quick]
    python benchmarks/wall.py --table ROWS.parquet ...                 # also of `wall_operators.py`

Each file gets a short warm-up round, a library and its verification by the stages of `TuneModel` (with `--command`: by
the command that a user types; with `--quick`: is imported and compiled untuned); then the library is run on the inputs
that lie beside the file, and compared with what torch made of them. Nothing is timed, so files go side by side.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import pandas as pd
import wall_serve

from lib.contracts.errors import TunerError
from lib.contracts.files import CompiledFiles
from lib.tir.numerics import relative_error
from tests.helpers import environment, luigi_command

Arrays = Sequence[np.ndarray]

VERDICTS = {
    "works": "a library came out, and computes what it should within 1e-3 of the largest value, or so far as is said",
    "refused": "no library, but a line that names the operator or the reason",
    "seen wrong": "no library: verification saw that it would compute something else",
    "nothing": "nothing in it can be tuned, and a line says so",
    "no tensors": "strings, sequences or optional values, which no tensor library takes: not tried",
    "unclear": "no library, and a line that does not name the operator",
    "wrong": "a library came out that computes something else",
    "traceback": "a traceback instead of a line",
    "crash": "the process ended without a word",
    "hang": "killed after the deadline",
}
TOLERANCE = {"float16": 5e-3, "bfloat16": 4e-2}  # of the largest value
WITHIN = 1e-3  # the same of all others, unless a file says otherwise


def compared(found: Sequence[np.ndarray], expected: Sequence[np.ndarray], within: float = WITHIN) -> dict[str, Any]:
    """Whether outputs are what they should be.

    Args:
        within: Of the largest value; of narrow floats `TOLERANCE`.
    """
    shapes = [[value.shape for value in values] for values in (found, expected)]
    if shapes[0] != shapes[1]:
        return {"verdict": "wrong", "told": f"shapes {shapes[0]}, expected {shapes[1]}"}
    errors = [relative_error(a, b) if np.any(b) or np.any(a) else 0.0 for a, b in zip(found, expected, strict=True)]
    limits = [TOLERANCE.get(str(b.dtype), within) for b in expected]
    right = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    return {"verdict": "works" if right else "wrong", "error": max(errors, default=0.0), "told": ""}


def refused(told: str, operator: str = "") -> str:
    """What kind of refusal a message is."""
    if "Traceback" in told:
        return "traceback"
    if "can be tuned" in told or "no inputs" in told or "no elements" in told:
        return "nothing"
    if "differ" in told or "finite element" in told:
        return "seen wrong"
    named = any(words in told for words in ("cannot be imported: ", "uses ", "has an If")) or (
        operator in told if operator else "operator" in told
    )
    return "refused" if named else "unclear"


def of_operator(
    operator: str,
    file: str,
    write: Callable[[Path], tuple[Arrays, Arrays]],
    tuned: Callable[[Path, Path, Arrays], Arrays],
) -> dict[str, Any]:
    """What comes of a file with one operator.

    Args:
        file: Its name.
        write: Writes it; returns inputs and outputs that belong together. A `TypeError` says that there are none.
        tuned: What a library makes of inputs, of a file and a folder to work in.
    """
    row = {"operator": operator}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / file
        try:
            inputs, outputs = write(path)
            return row | compared(tuned(path, Path(folder), inputs), outputs)
        except TypeError as error:
            return row | {"verdict": "no tensors", "told": str(error)}
        except TunerError as error:
            return row | {"verdict": refused(str(error), operator), "told": str(error)}


def by_command(file: Path, deadline_s: float) -> dict[str, Any]:
    """What comes of a file when the command is typed."""
    with tempfile.TemporaryDirectory() as folder:
        surroundings = {**environment(Path(folder), "repeats = 1"), "TUNER_LOCKS": folder}
        command = luigi_command("TuneModel", "--model", str(file), "--trials", "1")
        process = subprocess.Popen(
            command, cwd=ROOT, env=surroundings, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            _, told = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return {"verdict": "hang", "told": process.communicate()[1][-300:]}
        if process.returncode < 0 or process.returncode > 128:
            return {"verdict": "crash", "told": told[-300:]}
        if process.returncode:
            return {"verdict": refused(told), "told": told.strip()[-500:]}
        [compiled] = Path(folder).glob("artifacts/*/*/runs/*/compiled")
        return compared(*_outputs(CompiledFiles(compiled), file, Path(folder)))


def _outputs(compiled: CompiledFiles, file: Path, folder: Path) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """What a library makes of the inputs beside a file, what lies there, and how far they may be from each other."""
    from lib.machine import targets
    from lib.measure.local_pool import LocalPool
    from lib.measure.runner import MeasureConfig

    inputs, outputs, within = _beside(file)
    np.savez(folder / "inputs.npz", *inputs)
    with LocalPool(targets.cpu_target(), MeasureConfig()).models(120.0) as session:
        session.open_library("shipped", compiled.library, compiled.params, folder / "inputs.npz")
        session.infer("shipped", folder / "outputs.npz")
    found = np.load(folder / "outputs.npz")
    return [found[f"arr_{n}"] for n in range(len(found))], outputs, within


def _beside(file: Path) -> tuple[list[np.ndarray], list[np.ndarray], float]:
    """Inputs and outputs that lie beside a file, and how far from these a library may be."""
    found = np.load(file.parent / f"{file.name.split('.')[0]}.npz")
    inputs, outputs = ([found[key] for key in found if key.startswith(kind)] for kind in ("input", "output"))
    return inputs, outputs, float(found["within"]) if "within" in found else WITHIN


def serve(folder: Path, *, quick: bool) -> None:
    """The process that tries files by the stages."""
    from wall_stages import Stages

    stages = Stages()
    tuned = stages.untuned if quick else stages.outputs

    def by_stages(name: str) -> wall_serve.Row:
        inputs, outputs, within = _beside(folder / name)
        with tempfile.TemporaryDirectory() as work:
            try:
                return compared(tuned(folder / name, Path(work), inputs), outputs, within)
            except TunerError as error:
                return {"verdict": refused(str(error)), "told": str(error)}

    wall_serve.serve(by_stages)


def summary(table: pd.DataFrame) -> str:
    """How many of each verdict, and the share that works of those that have tensors and something to tune."""
    counts = table["verdict"].value_counts()
    tried = len(table) - counts.get("no tensors", 0) - counts.get("nothing", 0)
    lines = [f"| {verdict} | {counts[verdict]} | {VERDICTS[verdict]} |" for verdict in VERDICTS if verdict in counts]
    share = counts.get("works", 0) / max(tried, 1)
    return "\n".join(["| verdict | files | |", "|---|---|---|", *lines, "", f"works: {share:.1%} of {tried}"])


def main() -> None:
    """Try them, keep a row of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, help="folder of .onnx and .pt2 files with their .npz")
    parser.add_argument("--out", type=Path, default=Path("wall.parquet"))
    parser.add_argument("--only", nargs="+", help="names of files, with suffix")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for a file")
    parser.add_argument("--command", action="store_true", help="each by the command that a user types")
    parser.add_argument("--quick", action="store_true", help="import, compile untuned and compare only")
    parser.add_argument("--table", type=Path, nargs="+", help="print what stands in these rows")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(summary(pd.concat([pd.read_parquet(path) for path in options.table])))
        return
    if options.serve:
        serve(options.files, quick=options.quick)
        return
    names = sorted(path.name for path in options.files.iterdir() if path.suffix in (".onnx", ".pt2"))
    if options.only:
        names = [name for name in names if name in options.only]
    if options.command:
        table = _each_by_command([options.files / name for name in names], options.jobs, options.deadline)
        table.to_parquet(options.out)
    else:
        quick = ["--quick"] if options.quick else []
        command = [__file__, "--serve", "--files", str(options.files.resolve()), *quick]
        table = wall_serve.rows(command, names, options.jobs, options.deadline, options.out)
    print(summary(table))


def _each_by_command(files: Sequence[Path], jobs: int, deadline_s: float) -> pd.DataFrame:
    def row(file: Path) -> dict[str, Any]:
        started = time.perf_counter()
        try:
            found = by_command(file, deadline_s)
        except Exception as error:  # of this script, or of a library that does not load
            found = {"verdict": "traceback", "told": f"{type(error).__name__}: {error}"[-500:]}
        made = {"name": file.name, "seconds": time.perf_counter() - started, **found}
        print(f"{file.name:48} {made['verdict']:11} {made['seconds']:5.0f} s  {made['told']}", flush=True)
        return made

    with ThreadPoolExecutor(jobs) as executor:
        return pd.DataFrame(list(executor.map(row, files)))


if __name__ == "__main__":
    main()
