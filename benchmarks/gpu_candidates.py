"""Whether what the search makes for GPUs compiles, and computes what it should; without a GPU.

    python benchmarks/gpu_candidates.py --programs 20 --out benchmarks/gpu_candidates
    python benchmarks/gpu_candidates.py --table benchmarks/gpu_candidates

For each kind of operator of the zoo (`tests/cuda/operators.py`): the untuned program and random ones, run on stand-ins
for a GPU (`tests/cuda`) and compared with LLVM's. Those in halves, most of which use tensor cores, are also compiled by
nvcc, for sm_80 and for sm_90, of which only that they compile is known. What stands in the folder is not done again.
No times: those of stand-ins mean nothing.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["TVM_CUDA_COMPILE_MODE"] = "nvcc"

import pandas as pd
import provenance
import tvm
from tvm.support import nvcc

from lib.machine import host, targets
from lib.tir import lowering, traces
from tests.cuda import candidates, stand_ins
from tests.cuda.operators import HALVES, OPERATORS

ARCHITECTURES = {"sm_80": "nvidia/nvidia-a100", "sm_90": "nvidia/nvidia-h100"}


@contextmanager
def gpus(cache: Path) -> Iterator[None]:
    """Stand-ins for what is started meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        found, before = stand_ins.StandIns(stand_ins.build(cache), Path(folder)), dict(os.environ)
        os.environ.update(found.environment())
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def ran(name: str, workload: tvm.IRModule, n: int) -> pd.DataFrame:
    """A row for each program: what came of it."""
    some = candidates.sampled(workload, n)
    found = candidates.outcomes(workload, some)
    return pd.DataFrame(
        {
            "operator": name, "by": "stand-in", "program": range(len(some)), "status": [each.status for each in found],
            "error": [each.error for each in found], "told": [each.told for each in found],
            "barriers": [each.barriers for each in found], "tensor_cores": [each.tensor_cores for each in found],
        }
    )  # fmt: skip


def compiled(name: str, workload: tvm.IRModule, n: int, architecture: str) -> pd.DataFrame:
    """A row for each program: whether nvcc makes machine code of it."""
    texts = [source(workload, trace, architecture) for trace in candidates.sampled(workload, n)]
    with ThreadPoolExecutor(host.physical_cores()) as executor:
        told = list(executor.map(lambda text: refused(text, architecture), texts))
    return pd.DataFrame(
        {
            "operator": name, "by": f"nvcc {architecture}", "program": range(len(texts)),
            "status": ["build" if each else "compiled" for each in told], "error": float("nan"), "told": told,
            "barriers": [text.count(candidates.BARRIER) for text in texts],
            "tensor_cores": [candidates.MULTIPLICATION in text for text in texts],
        }
    )  # fmt: skip


def source(workload: tvm.IRModule, trace: str, architecture: str) -> str:
    """CUDA C++ of a program; empty if TVM cannot lower it."""
    target = targets.target(ARCHITECTURES[architecture]).tvm()
    try:
        with target:
            return str(lowering.build(traces.program(workload, trace, target), target).imports[0].inspect_source())
    except Exception:
        return ""


def refused(text: str, architecture: str) -> str:
    """Why it does not compile; empty if it does."""
    if not text:
        return "TVM cannot lower it"
    try:
        with targets.target(ARCHITECTURES[architecture]).tvm():
            nvcc.compile_cuda(text, target_format="cubin", compiler="nvcc")
    except RuntimeError as error:
        return str(error)[-300:]
    return ""


def table(rows: pd.DataFrame) -> str:
    """Markdown: programs of each operator, and what came of them."""
    lines = ["| operator | by | programs | with barriers | on tensor cores | right or compiled | largest error |"]
    lines.append("|---" * 7 + "|")
    for (name, by), part in rows.groupby(["operator", "by"], sort=False):
        good = part["status"].isin(["right", "compiled"]).sum()
        error = part["error"].max()
        lines.append(
            f"| {name} | {by} | {len(part)} | {(part['barriers'] > 0).sum()} | {part['tensor_cores'].sum()} | {good} | "
            f"{'-' if pd.isna(error) else f'{error:.0e}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the rows there, and end")
    parser.add_argument("--programs", type=int, default=20, help="random ones of an operator")
    parser.add_argument(
        "--compiled", type=int, default=10, help="random ones in halves, for each architecture; 0: none"
    )
    parser.add_argument("--operators", nargs="+", choices=[*OPERATORS, *HALVES], default=[*OPERATORS, *HALVES])
    parser.add_argument("--cache", type=Path, default=ROOT / ".pytest_cache" / "d" / "cuda", help="for stand-ins")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table:
        print(table(pd.read_parquet(options.table / "outcomes.parquet")))
        return
    if not options.out:
        parser.error("--out is needed, or --table")
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "outcomes.parquet"
    parts = [pd.read_parquet(kept)] if kept.exists() else list[pd.DataFrame]()
    made = provenance.columns(1)
    for name in options.operators:
        done = {by for part in parts for by in part.loc[part["operator"] == name, "by"]}
        workload = (OPERATORS | HALVES)[name]()
        if "stand-in" not in done:
            with gpus(options.cache):
                parts.append(ran(name, workload, options.programs).assign(**made))
        for architecture in ARCHITECTURES if name in HALVES and options.compiled else ():
            if f"nvcc {architecture}" not in done:
                parts.append(compiled(name, workload, options.compiled, architecture).assign(**made))
        pd.concat(parts, ignore_index=True).to_parquet(kept, index=False)
        print(table(parts[-1]).splitlines()[-1], flush=True)
    print(table(pd.concat(parts, ignore_index=True)))


if __name__ == "__main__":
    main()
