"""A compiled model in a server: how soon it answers, how much it serves, what further sessions and models cost.

    cmake -S lib/runtime/example -B BUILD && cmake --build BUILD
    python benchmarks/serve.py --bundle COMPILED --onnx FILE.onnx --program BUILD/run --out FILE.parquet
    python benchmarks/serve.py --table FILE.parquet

Beside ONNX Runtime and OpenVINO on the same file. Each measurement is a process of its own, one at a time, all kinds in
turn; the files are in the page cache. Throughput: 1, 2 and 4 sessions with a caller each, on all cores together;
threads of a session are the cores divided by the sessions, at least one. Start: from the beginning of the process to
the first result, Python's own start and imports included. `program` is the C++ example; the many bundles are copies of
one, with libraries of their own. A side that is not installed is left out.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import provenance

from lib.machine import host
from lib.runtime.family_tuner_runtime import Bundle
from lib.runtime.family_tuner_runtime.weights import Mapped

Row = dict[str, Any]
SIDES = {"runtime": "ours", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
STARTS = {"program": "ours, C++", "runtime": "ours, Python", "onnxruntime": "ONNX Runtime, Python",
          "openvino": "OpenVINO, Python", "openvino_cached": "OpenVINO, Python, from its cache"}  # fmt: skip
PARTS = {"load_s": ("of that, until it is loaded", "s"), "session_kib": ("memory of a further session", "KiB"),
         "used_session_kib": ("memory of one that has computed", "KiB")}  # fmt: skip
SESSIONS = (1, 2, 4)


class Work:
    """What the processes are given."""

    def __init__(self, folder: Path, bundle: Path, onnx: Path, program: Path, copies: int) -> None:
        self.folder, self.program, self.bundle = folder, program, bundle
        self.onnx = Path(shutil.copyfile(onnx, folder / "model.onnx"))  # OpenVINO's cache goes beside it
        self.inputs = folder / "inputs.npz"
        reference = Bundle.read(bundle).reference
        if reference is None:
            raise SystemExit("the bundle has no reference to take inputs from")
        arrays = Mapped(reference).arrays()
        np.savez(self.inputs, *(array for name, array in arrays.items() if name.startswith("input")))
        self.copies = [self._copy(n) for n in range(copies)]

    def _copy(self, number: int) -> Path:
        """A library of its own; weights are the same file by another name."""
        folder = self.folder / "copies" / f"{number:03d}"
        folder.mkdir(parents=True)
        for path in self.bundle.iterdir():
            if path.name == "weights.safetensors":
                os.link(shutil.copyfile(path, self.folder / "weights") if number == 0 else self.folder / "weights",
                        folder / path.name)  # fmt: skip
            else:
                shutil.copyfile(path, folder / path.name)
        return folder

    def run(self, kind: str, threads: int, *options: object) -> tuple[float, Row] | None:
        """Start a process; seconds until its first line, and what its lines say; none if it fails, which says why."""
        if kind == "program":
            command: list[str] = [str(self.program), "--times", str(self.bundle), *map(str, options)]
        else:
            model = self.bundle if kind == "runtime" else self.onnx
            side = Path(__file__).with_name("serve_side.py")
            command = [sys.executable, str(side), kind, str(model), "--inputs", str(self.inputs),
                       "--threads", str(threads), *map(str, options)]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(provenance.ROOT / "lib" / "runtime")}
        started = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            seconds = time.perf_counter() - started
            rest = process.stdout.read()
        if process.returncode:
            return None
        return seconds, {**json.loads(first), **json.loads(rest)}


def _row(turn: int, what: str, side: str, sessions: int, value: float, unit: str) -> Row:
    return {"turn": turn, "what": what, "side": side, "sessions": sessions, "value": value, "unit": unit}


def measure(work: Work, cores: int, turns: int, warm_s: float, seconds: float) -> Iterator[Row]:
    """Rows: turn, what, side, sessions, value, unit."""

    for turn in range(turns):
        row = partial(_row, turn)
        for kind, side in STARTS.items():
            if run := work.run(kind, cores):
                yield row("first result", side, 1, run[0], "s")
                yield from (
                    row(what, side, 1, run[1][name], unit) for name, (what, unit) in PARTS.items() if name in run[1]
                )
        for sessions in SESSIONS:
            options = ("--sessions", sessions, "--warm-s", warm_s, "--seconds", seconds)
            for kind, side in SIDES.items():
                if run := work.run(kind, max(1, cores // sessions), *options):
                    yield row("inferences", side, sessions, run[1]["inferences_per_s"], "1/s")
        for kind in ("program", "runtime"):
            others = work.copies if kind == "program" else ["--others", *work.copies]
            if run := work.run(kind, cores, *others):
                yield row(f"{len(work.copies)} bundles loaded", STARTS[kind], 1, run[1]["others_s"], "s")


def table(rows: pd.DataFrame) -> str:
    """Medians with the least and the most of all turns, in Markdown."""
    lines = ["| model | what | sessions | side | median | least | most | unit |", "|---|---|---|---|---|---|---|---|"]
    for (model, what, sessions, side), values in rows.groupby(["model", "what", "sessions", "side"], sort=False):
        scale, unit = (1e3, "ms") if values["unit"].iloc[0] == "s" else (1.0, values["unit"].iloc[0])
        found = scale * values["value"].agg(["median", "min", "max"])
        numbers = " | ".join(f"{number:.3g}" if number < 1000 else f"{number:,.0f}" for number in found)
        lines.append(f"| {model} | {what} | {sessions} | {side} | {numbers} | {unit} |")
    first = rows.iloc[0]
    lines.append(f"\n{first['cpu']}, {first['threads']} cores, {rows['turn'].nunique()} turns; {first['version']}; "
                 f"revision {first['revision']}, {first['date']}")  # fmt: skip
    return "\n".join(lines)


def _versions() -> str:
    there = {str(found.metadata["Name"]) for found in distributions()}
    return ", ".join(f"{name} {version(name)}" for name in ("apache-tvm", "onnxruntime", "openvino") if name in there)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--program", type=Path, help="the C++ example, built")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--copies", type=int, default=100)
    parser.add_argument("--table", type=Path, help="such a file, or a folder of them")
    options = parser.parse_args(arguments)
    if options.table:
        print(table(pd.read_parquet(options.table)))
        return
    cores = host.physical_cores()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(Path(folder), options.bundle, options.onnx, options.program, options.copies)
        found = pd.DataFrame(measure(work, cores, options.turns, options.warm_s, options.seconds))
    found = found.assign(model=options.onnx.stem, version=_versions(), **provenance.columns(cores))
    found.to_parquet(options.out)
    print(table(found))


if __name__ == "__main__":
    main()
