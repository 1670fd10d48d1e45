"""Which subgraphs and families models have, and what it takes to find that out. Nothing is compiled.

    python benchmarks/subgraphs.py [--models NAME_OR_FILE ...]

Prints markdown: the families of each model, a line for each model, and of the models that were asked for each
subgraph. By default it is every model of the zoo. Each is imported in a process of its own, for its time and its peak
memory; those of the zoo come without their weights, which say nothing about subgraphs.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.models.source import Source
from lib.models.zoo import catalogue
from lib.tuning import families
from stages import extract

# Distinct subgraphs in FamilySeer (ICPP 2023), by TVM's graph-level optimisation of that time.
PAPER = {"resnet50": "28", "bert_large": "11", "gpt2": "10", "vit_huge": "13", "mobilenetv2": "over 30"}
_MOVING = ("data_movement", "gather")  # core operators that compute nothing


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one model."""

    model: str
    subgraphs: list[dict[str, Any]]  # rows of SUBGRAPHS but for the workloads, those with most FLOP first
    import_s: float  # with the clean-up of what was imported
    fuse_s: float
    peak_gb: float  # of the whole process


def look_at(model: str) -> Found:
    """Import and fuse a model in this process, which should be a fresh one."""
    started = time.perf_counter()
    source = Source(model)
    module = extract.load(source).module if source.is_file else catalogue.define(model)[0]
    imported = time.perf_counter()
    subgraphs = [asdict(subgraph) for subgraph in extract_subgraphs(fusion.fuse(module, targets.cpu_target().tvm()))]
    fused = time.perf_counter()
    for row in subgraphs:
        del row["workload"]
    # Of this program alone: ru_maxrss counts what the parent had before it became this one.
    [peak_kb] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return Found(Path(model).stem, subgraphs, imported - started, fused - imported, int(peak_kb) / 1e6)


def look_at_from_afar(model: str) -> Found:
    """Import and fuse a model in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one", model], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model}: {done.stderr.strip()}")
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def families_table(found: Sequence[Found]) -> str:
    """Subgraphs, and in brackets calls, of each family in each model."""
    cells: dict[str, dict[str, str]] = {}
    for column in found:
        tuned = [SimpleNamespace(**row) for row in column.subgraphs if row["tunable"]]
        n, calls = Counter[str](), Counter[str]()
        for row, family in zip(tuned, families.cluster(tuned, "core-operator"), strict=True):
            n[family] += 1
            calls[family] += row.weight
        for family in n:
            cells.setdefault(family, {})[column.model] = f"{n[family]} ({calls[family]})"
    rows = [[family, *(of.get(column.model, "") for column in found)] for family, of in sorted(cells.items())]
    return markdown(["family", *(column.model for column in found)], rows)


def summary_table(found: Sequence[Found]) -> str:
    """A line for each model."""
    rows = []
    for model in found:
        computing = [row for row in model.subgraphs if row["tunable"] and row["core_operator"] not in _MOVING]
        rows.append(
            [
                model.model,
                str(len(model.subgraphs)),
                str(len(computing)),
                PAPER.get(model.model, ""),
                str(sum(row["weight"] for row in model.subgraphs)),
                movements(model.subgraphs),
                f"{sum(row['flop'] * row['weight'] for row in model.subgraphs) / 1e9:.3g}",
                f"{model.import_s:.2f}",
                f"{model.fuse_s:.2f}",
                f"{model.peak_gb:.2f}",
            ]
        )
    header = ["model", "subgraphs", "that compute", "in the paper", "calls", "movements (calls)", "GFLOP",
              "import and clean-up, s", "fusion, s", "peak, GB"]  # fmt: skip
    return markdown(header, rows)


def movements(subgraphs: Sequence[dict[str, Any]]) -> str:
    """The subgraphs that compute nothing by their operators, each kind with its calls."""
    calls = Counter[str]()
    for row in subgraphs:
        if row["core_operator"] in _MOVING:
            what = " + ".join(row["operators"]) or "copy"
            calls[what if row["tunable"] else f"{what}, not tuned"] += row["weight"]
    return "; ".join(f"{what} ({n})" for what, n in calls.most_common())


def subgraph_table(subgraphs: Sequence[dict[str, Any]]) -> str:
    """A line for each subgraph of a model."""
    rows = [
        [row["name"], str(row["weight"]), f"{row['flop'] / 1e6:,.3f}", row["core_operator"],
         ", ".join(row["operators"]) or "copy", row["note"]]
        for row in subgraphs
    ]  # fmt: skip
    return markdown(["subgraph", "calls", "MFLOP a call", "core operator", "operators", "note"], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main() -> None:
    """Look at each model, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", help="names of the zoo or files; default: all of the zoo")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(look_at(options.one))))
        return
    distinct = [name for name in catalogue.ZOO if name != "resnet50_v1"]  # another name of resnet50
    found = [look_at_from_afar(model) for model in options.models or distinct]
    print(families_table(found), summary_table(found), sep="\n\n")
    for model in found if options.models else []:
        print(f"\n### {model.model}\n\n{subgraph_table(model.subgraphs)}")


if __name__ == "__main__":
    main()
