"""What it is worth to call kernels together, in parallel regions: bundles in turn with their twins (`apart.py`).

    python benchmarks/together.py COMPILED ... [--turns 6] --out ROWS.parquet
    python benchmarks/together.py --table ROWS.parquet

Of bundles in the folders of their runs, a process a side with the other stopped. Nothing else may run on the machine.
"""

import argparse
import tempfile
from pathlib import Path

import apart
import intervals
import pandas as pd
import provenance
import versus

from lib.machine import host

_TOGETHER, _APART = "together", "apart"


def measure(compiled: Path, turns: int, seconds: float) -> pd.DataFrame:
    """The turns of both."""
    with tempfile.TemporaryDirectory() as folder:
        twin = Path(folder)
        apart.write(compiled, twin)
        kinds = {_TOGETHER: ("library", compiled), _APART: ("library", twin)}
        rows = versus.measure(kinds, host.physical_cores(), turns, seconds, seed=0, patience=2)
    return rows.assign(model=compiled.resolve().parents[2].name)


def table(rows: pd.DataFrame) -> list[str]:
    """A line a model, for turns with a common cache and for those without one."""
    lines = ["| model | common cache | turns | together, ms | apart, ms | gain |", "|---" * 6 + "|"]
    for model, part in rows.groupby("model", sort=False):
        far = versus.Race(part, near=False).latencies
        near = versus.Race(part).latencies.drop(far.index, errors="ignore")  # which are all turns if none had one
        for told, found in (("yes", near), ("no", far)):
            if found.empty:
                continue
            times = [intervals.estimate(intervals.median_of(found[side]), len(found)) for side in (_TOGETHER, _APART)]
            gain = intervals.estimate(intervals.best_ratio_of([found[_APART]], found[_TOGETHER]), len(found))
            cells = [told, str(len(found)), *(each.text(1e3) for each in times), gain.text()]
            lines.append(f"| {model} | {' | '.join(cells)} |")
    first = rows.iloc[0]
    return [*lines, "", f"{first['cpu']}, {first['threads']} threads; revision {first['revision']}, {first['date']}."]


def main() -> None:
    """Measure, keep and print, or print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="*", type=Path, metavar="COMPILED")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.5, help="timed in a turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(pd.read_parquet(options.table))))
        return
    found = pd.concat([measure(each, options.turns, options.seconds) for each in options.bundles], ignore_index=True)
    found = found.assign(**provenance.columns(host.physical_cores()))
    if options.out:
        found.to_parquet(options.out)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
