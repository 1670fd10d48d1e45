"""The heaviest kernels of libraries beside what the machine can do, all timed in one process at one moment.

    python benchmarks/roofline.py COMPILED ... [--seconds 6] [--out ROWS.parquet]
    python benchmarks/roofline.py --table ROWS.parquet

Of bundles in the folders of their runs. In each turn all kernels of an inference are called in their order, each by
itself and timed (`in_place.py`), and so is a loop of nothing but the instruction that multiplies in them, and copies of
what lies in caches and of what does not. Turns count in which the cores shared a cache (`cores.py`). Operations are
multiplications and additions; bytes are parameters and results, each once.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cores
import in_place
import numpy as np
import pandas as pd
import provenance
import tvm
from apart import twin

from lib.contracts import manifest, tables
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.machine import host
from lib.machine.registers import registers
from lib.measure import peak
from lib.report.rows import moved_bytes
from lib.report.text import narrow_kind
from lib.runtime.family_tuner_runtime import Model
from lib.tir import lowering

_HEAVIEST = 4  # kernels of a model that are listed
_COPIES = {"cache": 4 << 20, "memory": 256 << 20}  # bytes
_KINDS = {"bfloat16": "_bf16", "int8": "_int8", "int16": "_int16"}  # of operators, by the elements of weights
_PACKED = "_prepacked"  # what TVM calls a kernel whose weights are packed


class Machine:
    """What it does at most, in operations and bytes a second."""

    def __init__(self, target: tvm.target.Target, threads: int, kinds: Sequence[str]) -> None:
        """Of kinds as `narrow_kind` has them; empty: float32."""
        self._loops = {kind: _loop(target, threads, kind) for kind in kinds}
        self._threads = threads
        self._copies = {name: np.zeros((2, threads, n_bytes // 8 // threads)) for name, n_bytes in _COPIES.items()}

    def look(self, run: Callable[[Callable[[], Any]], Any]) -> dict[str, float]:
        """One look at all of it; `run` has a session's thread call something."""
        found = {kind: flop / run(lambda: _seconds(loop)) for kind, (loop, flop) in self._loops.items()}  # noqa: B023
        with ThreadPoolExecutor(self._threads) as pool:
            for name, (source, destination) in self._copies.items():
                seconds = min(
                    _seconds(lambda: list(pool.map(np.copyto, destination, source)))  # noqa: B023
                    for _ in range(3)
                )
                found[name] = 2 * source.nbytes / seconds
        return found


def _loop(target: tvm.target.Target, threads: int, kind: str) -> tuple[Callable[[], Any], float]:
    weights = next((weights for weights, name in _KINDS.items() if name == kind), "")
    program, flop = peak.loop(target, threads, registers(target).fastest(weights))
    function = lowering.build(program, target)["main"]
    tensors = [
        tvm.runtime.tensor(np.zeros(shape, dtype)) if dtype != "bfloat16" else tvm.runtime.empty(shape, dtype)
        for shape, dtype in (([int(n) for n in p.shape], str(p.dtype)) for p in program["main"].params)
    ]
    return lambda: function(*tensors), flop


def _seconds(call: Callable[[], Any]) -> float:
    before = time.perf_counter()
    call()
    return time.perf_counter() - before


def measure(folder: Path, seconds: float) -> pd.DataFrame:
    """A row for each subgraph of a library, in place, without what is equal in all of them."""
    with twin(folder) as model:
        return _measured(model, folder, seconds)


def _measured(model: Model, folder: Path, seconds: float) -> pd.DataFrame:
    facts = manifest.read(folder / "manifest.json")
    subgraphs = tables.read(ModelFiles(folder.parents[2]).subgraphs, SUBGRAPHS).to_pylist()
    of_kernel = {name: subgraph for subgraph in subgraphs for name in subgraph["functions"]}
    kinds = {subgraph["subgraph_id"]: narrow_kind(subgraph["core_operator"]) for subgraph in subgraphs}
    arrays = in_place.inputs_of(model)
    session = model.session()
    kernels = in_place.kernels_of(model, session, arrays)
    one = in_place.Session("", session, arrays, kernels)
    run = session._driver.run
    machine = Machine(tvm.target.Target(facts["target"]), model.threads, sorted(set(kinds.values())))
    turns: list[tuple[float, np.ndarray, dict[str, float]]] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        before = cores.between()
        time.sleep(0.35)  # helpers of other threads spin for some 0.3 s
        inferences = [run(one._in_order) for _ in range(12)][5:]
        peaks = machine.look(run)
        turns.append((min(before, cores.between()), np.median(inferences, 0) / 1e9, peaks))
    fastest = max(speed for speed, *_ in turns)
    near = [turn for turn in turns if cores.are_near(turn[0], fastest)]
    peaks = {name: max(looked[name] for *_, looked in near) for name in near[0][2]}
    latencies = np.median([found for _, found, _ in near], 0)
    rows = pd.DataFrame({"kernel": [name.removesuffix(_PACKED) for name, *_ in kernels], "latency_s": latencies})
    rows = rows[[name in of_kernel for name in rows["kernel"]]]
    rows["subgraph_id"] = [of_kernel[name]["subgraph_id"] for name in rows["kernel"]]
    found = rows.groupby("subgraph_id").agg(
        kernel=("kernel", "first"), calls=("kernel", "size"), time_s=("latency_s", "sum")
    )
    known = {subgraph["subgraph_id"]: subgraph for subgraph in subgraphs}
    return found.reset_index().assign(
        model=folder.resolve().parents[2].name,
        operator=[known[name]["core_operator"] for name in found.index],
        flop=[known[name]["flop"] for name in found.index],
        bytes=[moved_bytes(tvm.ir.load_json(known[name]["workload"])["main"]) for name in found.index],
        peak_flops=[peaks[kinds[name]] for name in found.index],
        cache_bytes_per_s=peaks["cache"],
        memory_bytes_per_s=peaks["memory"],
        turns=len(near),
    )


def table(rows: pd.DataFrame) -> list[str]:
    """The heaviest kernels of each model; and how much of each model's time the machine needs at least."""
    lines = ["| model | kernel | calls | share | us a call | G operations/s | of the peak | GB/s |", "|---" * 8 + "|"]
    whole = ["| model | kernels, ms | at the roof, ms | share |", "|---" * 4 + "|"]
    rows = rows.assign(
        roof_s=rows["calls"] * np.maximum(rows["flop"] / rows["peak_flops"], rows["bytes"] / rows["cache_bytes_per_s"])
    )
    for model, part in rows.groupby("model", sort=False):
        total = part["time_s"].sum()
        for row in part.nlargest(_HEAVIEST, "time_s").to_dict("records"):
            latency = row["time_s"] / row["calls"]
            flops = row["flop"] / latency
            cells = [row["operator"], str(row["calls"]), f"{row['time_s'] / total:.0%}", f"{latency * 1e6:.4g}"]
            cells += [f"{flops / 1e9:.3g}", f"{flops / row['peak_flops']:.0%}", f"{row['bytes'] / latency / 1e9:.3g}"]
            lines.append(f"| {model} | {' | '.join(cells)} |")
        roof = part["roof_s"].sum()
        whole.append(f"| {model} | {total * 1e3:.4g} | {roof * 1e3:.4g} | {roof / total:.0%} |")
    peaks = {_told(kind): found["peak_flops"].max() for kind, found in rows.groupby(rows["operator"].map(narrow_kind))}
    told = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in peaks.items())
    speeds = [rows[f"{name}_bytes_per_s"].median() / 1e9 for name in _COPIES]
    first = rows.iloc[0]
    notes = (
        f"{first['cpu']}, {first['threads']} threads. Peaks, G operations a second: {told}; copies, reading and "
        f"writing: {speeds[0]:.0f} GB/s in caches, {speeds[1]:.0f} in memory; {rows['turns'].min()} to "
        f"{rows['turns'].max()} turns; revision {first['revision']}, {first['date']}."
    )
    return [*lines, "", *whole, "", notes]


def _told(kind: str) -> str:
    return kind.lstrip("_") or "f32"


def main() -> None:
    """Measure and print, or print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, metavar="COMPILED")
    parser.add_argument("--seconds", type=float, default=6.0, help="a bundle")
    parser.add_argument("--revision", default="", help="of the code that compiled them; default: this clone's")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(pd.read_parquet(options.table))))
        return
    threads = host.physical_cores()
    found = pd.concat([measure(folder, options.seconds) for folder in options.bundles], ignore_index=True)
    found = found.assign(**provenance.columns(threads, options.revision))
    if options.out:
        found.to_parquet(options.out)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
