"""A memory of a million measurements beside an empty one: what a run waits for, when it begins and in each round.

    python benchmarks/memory.py [--rows 1000000] [--turns 7]

The rows are made up (equal features compress well; a real file of 64 rows has some 100 kB): 64 a file, as a round
leaves them, 128 a subgraph. Timed in alternation, with the files of both in the system's cache: `open` finds the files
of a run's 25 subgraphs, `recall` is the whole stage for them, with samples of other subgraphs of its five families, and
`round` is what a round of 64 trials does with the memory: claim its subgraph, look its candidates up, write them.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import pyarrow as pa

from lib.contracts import tables
from lib.contracts.conditions import Conditions
from lib.contracts.files import RunFiles
from lib.contracts.schemas import FAMILIES, REMEMBERED, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.search import nest
from lib.tuning.memory import Memory
from stages import recall

A_FILE, A_SUBGRAPH = 64, 128  # rows
OPERATORS = ("conv2d", "matmul", "reduce_sum", "add", "softmax")
OWN = 25  # subgraphs of the run
CONDITIONS = Conditions('{"kind": "llvm"}', 2, "cold", "plain r0", 1, "a CPU", "apache-tvm 0")


def rows(subgraph: int, start: int, rng: np.random.Generator) -> pa.Table:
    """A file's worth of REMEMBERED."""
    operator = OPERATORS[subgraph % len(OPERATORS)]
    features = rng.random(len(nest.NAMES)).astype(np.float32)
    found = [
        {
            "core_operator": operator, "operators": [operator], "candidate_id": f"{subgraph:08x}{n:08x}",
            "subgraph_id": f"{subgraph:016x}", "origin": "evolved", "space": "contraction", "program_hash": f"{n}",
            "trace": "[" + "0, " * 800 + f"{n}]", "donor": "", "features": features, "status": "ok",
            "latencies": list(rng.random(3)), "error": None, "build_s": 0.1, "run_s": 0.1, "measured_at": 1.0,
            "host": "host", "device": "cpu", "conditions": asdict(CONDITIONS),
        }
        for n in range(start, start + A_FILE)
    ]  # fmt: skip
    return pa.Table.from_pylist(found, schema=REMEMBERED)


def filled(folder: Path, n_rows: int) -> Memory:
    """A memory with so many rows."""
    memory, rng = Memory(folder, CONDITIONS), np.random.default_rng(0)
    for n in range(n_rows // A_FILE):
        subgraph, part = divmod(n, A_SUBGRAPH // A_FILE)
        memory.remember(rows(subgraph, part * A_FILE, rng))
    return memory


def run_of(folder: Path) -> tuple[Path, Path]:
    """SUBGRAPHS and FAMILIES of a run whose subgraphs are the memory's first ones."""
    ids = [(f"{n:016x}", OPERATORS[n % len(OPERATORS)]) for n in range(OWN)]
    described = [
        {
            "subgraph_id": subgraph_id, "name": "f", "functions": ["f"], "weight": 1, "flop": 1.0,
            "core_operator": operator, "operators": [operator], "tunable": True, "note": "", "workload": "{}",
        }
        for subgraph_id, operator in ids
    ]  # fmt: skip
    families = [{"subgraph_id": subgraph_id, "family_id": operator} for subgraph_id, operator in ids]
    paths = folder / "subgraphs.parquet", folder / "families.parquet"
    for path, found, schema in zip(paths, (described, families), (SUBGRAPHS, FAMILIES), strict=True):
        tables.write(pa.Table.from_pylist(found, schema=schema), path, schema, Provenance())
    return paths


def timed(memory: Memory, folder: Path, turn: int) -> Mapping[str, float]:
    """Seconds of each step."""
    subgraphs, families = run_of(folder)
    found = {}

    def step(name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        found[name] = time.perf_counter() - started

    own = [(OPERATORS[n % len(OPERATORS)], f"{n:016x}") for n in range(OWN)]
    step("open", lambda: [memory.files(*each) for each in own])
    out = RunFiles(folder / f"run{turn}").recalled
    step("recall", lambda: recall.run(
        subgraphs, families, "core-operator", memory, 6000, provenance=Provenance(), out=out
    ))  # fmt: skip
    new = rows(0, 1_000_000 + turn * A_FILE, np.random.default_rng(turn))
    operator, subgraph_id = own[0]

    def a_round() -> None:
        with memory.claimed({subgraph_id: operator}, lambda: None):
            memory.known(operator, subgraph_id, new["candidate_id"].to_pylist())
            memory.remember(new)

    step("round", a_round)
    shutil.rmtree(out.run)
    return found


def main() -> None:
    """Make both, time them, print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        started = time.perf_counter()
        full = filled(folder / "full", options.rows)
        size = sum(path.stat().st_size for path in full.folder.rglob("*.parquet"))
        print(f"{options.rows:,} measurements in {options.rows // A_FILE:,} files, {size / 1e6:,.0f} MB, "
              f"written in {time.perf_counter() - started:.0f} s", flush=True)  # fmt: skip
        memories = {"full": full, "empty": Memory(folder / "empty", CONDITIONS)}
        seconds = pa.Table.from_pylist([
            {"memory": name, **timed(memory, folder / name, turn)}
            for turn in range(options.turns) for name, memory in memories.items()
        ]).to_pandas()  # fmt: skip
        print(seconds.groupby("memory").agg(median).map(lambda value: f"{value * 1e3:,.1f} ms").to_string())


if __name__ == "__main__":
    main()
