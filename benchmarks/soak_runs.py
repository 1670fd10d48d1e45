"""Twenty models and two thousand candidates while everything goes wrong: is anything lost, doubled, grown or left?

    python benchmarks/soak_runs.py [--models 20] [--trials 100] [--fault 0.02] [--out ROWS.parquet]

Small random networks are tuned one after the other by one process. Its workers fail at any request, each in one of many
ways (see `soak_worker.py`); it is killed once in each stage (`STAGES`), at a random moment of it; and the disk fills up
twice, where this user may mount a small one. Each time the same command is given again. The end is compared with what
stood in journals and tables when it was killed.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import onnx
import pandas as pd
import psutil
from onnx import TensorProto, helper, numpy_helper

from lib.contracts import tables
from lib.contracts.schemas import MEASUREMENTS
from lib.measure import journal

STAGES = ("extract", "cluster", "generate", "measure", "train", "compile", "report")
_DISK_MB = 192
_CONFIG = """
[tuner]
artifacts = {artifacts}
[plan]
num_trials_per_round = 16
num_trials_warmup = 6
[generate]
population = 32
generations = 1
[measure]
min_repeat_s = 0.001
repeats = 2
run_timeout_s = 2
build_timeout_s = 6
[train]
min_samples = 4
num_boost_round = 20
[compile]
finalists = 2
repeats = 1
turns = 1
timeout_s = 20
[core]
log_level = WARNING
"""


def network(seed: int, path: Path) -> Path:
    """A few random layers: convolutions, products, a softmax."""
    rng = np.random.default_rng(seed)
    channels, size = (int(n) for n in (rng.choice([8, 12, 16]), rng.choice([10, 14, 17])))
    weights: list[onnx.TensorProto] = []
    nodes: list[onnx.NodeProto] = []
    last = "x"

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operator, list(inputs), [f"t{len(nodes)}"], **attributes))
        return f"t{len(nodes) - 1}"

    def weight(*shape: int) -> str:
        values = rng.normal(scale=0.3, size=shape).astype(np.float32)
        weights.append(numpy_helper.from_array(values, f"w{len(weights)}"))
        return f"w{len(weights) - 1}"

    for _ in range(int(rng.integers(1, 4))):
        kernel = int(rng.choice([1, 3]))
        last = add("Conv", last, weight(channels, channels, kernel, kernel), pads=[kernel // 2] * 4)
        last = add(str(rng.choice(["Relu", "Tanh", "Sigmoid"])), last)
    last = add("Flatten", add("GlobalAveragePool", last))
    for _ in range(int(rng.integers(1, 3))):
        last = add("Gemm", last, weight(channels, channels))
    last = add("Softmax", last, axis=1)
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, size, size])],
        [helper.make_tensor_value_info(last, TensorProto.FLOAT, [1, channels])], weights,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


# The process that tunes.


def tune(models: Sequence[str], trials: int, dies_in: str, seed: int) -> None:
    """All models, in this process; kills itself in a stage, if asked to, and hands its workers their faults."""
    import luigi

    import pipeline
    from lib.measure.process import Worker

    defaults = Worker.__init__.__kwdefaults__
    assert defaults
    defaults["module"] = "soak_worker"
    if dies_in:
        module = getattr(pipeline, dies_in)
        run, rng = module.run, random.Random(seed)

        def doomed(*arguments: Any, **named: Any) -> Any:
            def die() -> None:
                time.sleep(rng.uniform(0, {"measure": 4.0, "compile": 12.0}.get(dies_in, 0.1)))
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=die, daemon=True).start()
            return run(*arguments, **named)

        module.run = doomed
    ok = luigi.build(
        [pipeline.TuneModel(model=model, trials=trials) for model in models], local_scheduler=True, no_lock=True,
        workers=1, log_level="WARNING",
    )  # fmt: skip
    sys.exit(0 if ok else 30)


# The process that watches.


class Watch:
    """Runs the command again and again, and notes what stood on disk each time it ended."""

    def __init__(self, models: Sequence[Path], trials: int, artifacts: Path, fault: float) -> None:
        self._command = [sys.executable, __file__, "--tune", *map(str, models), "--trials", str(trials)]
        self._artifacts, self._fault = artifacts, fault
        self.known: dict[str, float] = {}  # when each candidate was measured, as first seen
        self.doubled = self.tracebacks = 0
        self.memory: list[tuple[float, float]] = []  # seconds, MB of the tuning process, of the longest command
        self.ends: Counter[str] = Counter()

    def run(self, name: str, dies_in: str = "", full_at: int = 0) -> int:
        """The command once; with a disk that is full when so many candidates are known. Returns its exit status."""
        memory: list[tuple[float, float]] = []
        filler = self._artifacts / "filler"
        environment = {**os.environ, "SOAK_FAULT": str(self._fault), "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}"}
        process = psutil.Popen(
            [*self._command, "--dies-in", dies_in, "--seed", str(len(self.ends))], env=environment, text=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
        )  # fmt: skip
        told: list[str] = []
        reader = threading.Thread(target=lambda: told.extend(process.stderr))
        reader.start()
        started = time.monotonic()
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):
                memory.append((time.monotonic() - started, process.memory_info().rss / 1e6))
            if full_at and len(self.rows()) >= full_at and not filler.exists():
                _fill(filler)
            time.sleep(1.0)
        reader.join()
        filler.unlink(missing_ok=True)
        self.memory = max(self.memory, memory, key=len)
        self._compare()
        if any("Traceback" in line for line in told):
            self.tracebacks += 1
            print("".join(told[-40:]), flush=True)
        self.ends[name] += 1
        words = [line.strip() for line in told if line.startswith("error")]
        print(f"{name:28} status {process.returncode:4} after {time.monotonic() - started:5.0f} s, "
              f"{len(self.known)} candidates known  {words[-1][:150] if words else ''}", flush=True)  # fmt: skip
        return int(process.returncode)

    def rows(self) -> dict[str, float]:
        """Of all journals and tables: when which candidate was measured."""
        found: dict[str, float] = {}
        for path in self._artifacts.rglob("measurements.jsonl"):
            for row in journal.read(path).rows:
                found[f"{path.parent.parent.parent.parent.parent.name} {row.candidate_id}"] = row.measured_at
        for path in self._artifacts.rglob("rounds/*/measurements.parquet"):
            with contextlib.suppress(FileNotFoundError):
                for row in tables.read(path, MEASUREMENTS).select(["candidate_id", "measured_at"]).to_pylist():
                    found[f"{path.parent.parent.parent.parent.parent.name} {row['candidate_id']}"] = row["measured_at"]
        return found

    def _compare(self) -> None:
        now = self.rows()
        self.doubled += sum(now.get(key, at) != at for key, at in self.known.items())
        self.known = {**now, **self.known}


def _fill(filler: Path) -> None:
    with filler.open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
            file.flush()


@contextlib.contextmanager
def a_disk(folder: Path) -> Iterator[tuple[Path, bool]]:
    """A small one of its own, if this user may mount; else a folder that cannot fill up."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={_DISK_MB}m", "tmpfs", str(folder)]
    is_small = subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    try:
        yield folder, is_small
    finally:
        if is_small:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def main() -> None:
    """Run it all, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--fault", type=float, default=0.02, help="share of requests that go wrong")
    parser.add_argument("--out", type=Path, help="gets the rows of all candidates")
    parser.add_argument("--tune", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--dies-in", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tune:
        tune(options.tune, options.trials, options.dies_in, options.seed)
        return
    with tempfile.TemporaryDirectory() as work, a_disk(Path(work) / "disk") as (artifacts, is_small):
        folder = Path(work)
        scratch = folder / "tmp"
        scratch.mkdir()
        os.environ |= {
            "TMPDIR": str(scratch),
            "TUNER_LOCKS": str(folder),
            "LUIGI_CONFIG_PATH": str(folder / "soak.cfg"),
        }
        (folder / "soak.cfg").write_text(_CONFIG.format(artifacts=artifacts))
        models = [network(seed, folder / f"net{seed}.onnx") for seed in range(options.models)]
        watch = Watch(models, options.trials, artifacts, options.fault)
        for stage in STAGES:
            watch.run(f"killed in {stage}", dies_in=stage)
        for _ in range(2 if is_small else 0):
            watch.run("disk full", full_at=len(watch.known) + options.trials // 2)
        status = next(
            (status for status in (watch.run("faults of workers") for _ in range(200)) if status == 0), "never 0"
        )
        found = watch.rows()
        print(f"ended with status {status}; {len(found)} candidates of {len(list(artifacts.glob('*/*/runs/*')))} runs")
        print(f"lost: {len(watch.known.keys() - found.keys())}, measured twice: {watch.doubled}, "
              f"ends with a traceback: {watch.tracebacks}")  # fmt: skip
        memory = [mb for _, mb in watch.memory]
        if len(memory) > 10:
            early, late = np.median(memory[len(memory) // 5 : len(memory) // 4 + 2]), np.median(memory[-5:])
            print(f"memory of the longest command: {early:.0f} MB after a fifth of its {watch.memory[-1][0]:.0f} s, "
                  f"{late:.0f} MB at its end")  # fmt: skip
        left = [path for path in scratch.rglob("*") if path.is_file()]
        unfinished = [p for p in artifacts.rglob("*") if p.name.startswith(("building-", ".")) and p.name != ".lock"]
        print(f"left: {len(left)} temporary files, {len(unfinished)} unfinished ones {unfinished[:3]}, "
              f"{len(psutil.Process().children(recursive=True))} processes")  # fmt: skip
        if options.out:
            rows = [
                row
                for path in artifacts.rglob("rounds/*/measurements.parquet")
                for row in tables.read(path, MEASUREMENTS).to_pylist()
            ]
            pd.DataFrame(rows).drop(columns="conditions").to_parquet(options.out)
            print(json.dumps(Counter(str(row["status"]) for row in rows)))


if __name__ == "__main__":
    main()
