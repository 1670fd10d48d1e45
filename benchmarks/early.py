"""How near a library is to the fully tuned one after 0, 1 and 10 measurements a subgraph, and how soon it is there.

    python benchmarks/early.py --work FOLDER --models FILE ... --out FILE.parquet [--levels 1 10] [--minutes 4]
    python benchmarks/early.py --table FILE.parquet

Each level of a model is a command of its own that begins with an empty memory: `--trials 0`, and n measurements a
subgraph on average, as the tuner spends them, for the others. The last one, `full`, tunes for so many minutes. Then
all libraries of a model have turns in a shuffled order, a process each, the others stopped (`versus.py`). A command
that was interrupted goes on where it stood. Nothing else may run on the machine, and no base model may have seen the
models.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import intervals
import pandas as pd
import provenance
import versus
from nights import Place, tunable

from lib.contracts import manifest
from lib.contracts.files import RunFiles
from lib.machine import host

_FULL = "full"


def of_model(work: Path, model: str, levels: Sequence[int], minutes: float, turns: int, code: Path) -> pd.DataFrame:
    """The rows of a model: those of `versus.py`, with what each level cost."""
    libraries, costs, n_subgraphs = {}, {}, 0
    for level in ["0", *map(str, levels), _FULL]:
        place = Place((work / Path(model).stem / level).resolve(), code)
        is_full = level == _FULL
        limit = ["--minutes", f"{minutes:g}"] if is_full else ["--trials", str(int(level) * n_subgraphs)]
        run, seconds = place.tuned(model, *limit)
        libraries[level] = RunFiles(run).compiled
        costs[level] = {"command_s": seconds, "trials": manifest.read(libraries[level].manifest)["n_trials"]}
        n_subgraphs = len(tunable(place.artifacts, run.parents[1].name))
        print(f"{model}, {level}: {costs[level]}", flush=True)
    kinds = {level: ("library", files.folder) for level, files in libraries.items()}
    rows = versus.measure(kinds, host.physical_cores(), turns, 0.5, 0)
    known = pd.DataFrame.from_dict(costs, orient="index")
    return rows.join(known, on="side").assign(
        model=Path(model).stem, subgraphs=n_subgraphs, minutes=minutes, **provenance.columns(host.physical_cores())
    )


def table(rows: pd.DataFrame) -> Iterator[str]:
    """Lines of Markdown: for each model and level the seconds of the command and the latency over the tuned one's."""
    levels = sorted(set(rows["side"]) - {_FULL}, key=int)
    yield f"| model | {' | '.join(f'{level}: s | latency / tuned' for level in levels)} | tuned: trials | s | ms |"
    yield "|---|" + "---|---|" * len(levels) + "---|---|---|"
    ratios: dict[str, list[tuple[intervals.Statistic, int]]] = {level: [] for level in levels}
    for model, part in rows.groupby("model", sort=False):
        latencies = versus.Race(part).latencies
        costs = part.drop_duplicates("side").set_index("side")
        cells = []
        for level in levels:
            ratio = intervals.median_of(latencies[level] / latencies[_FULL]), len(latencies)
            ratios[level].append(ratio)
            cells.append(f"{costs.loc[level, 'command_s']:.0f} | {intervals.estimate(*ratio).text()}")
        full = costs.loc[_FULL]
        cells.append(f"{full['trials']:,.0f} | {full['command_s']:.0f} | {latencies[_FULL].median() * 1e3:.2f}")
        yield f"| {model} | {' | '.join(cells)} |"
    means = [f" | {intervals.geometric_mean(ratios[level]).text()}" for level in levels]
    yield f"| geometric mean | {' | '.join(means)} | | | |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--levels", nargs="+", type=int, default=[1, 10], help="measurements a subgraph, beside none")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--code", type=Path, default=Path(__file__).resolve().parents[1])
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(pd.read_parquet(given.table))))
        return
    if not (given.work and given.models and given.out):
        parser.error("--work, --models and --out are needed, or --table")
    rows = pd.DataFrame()
    for model in given.models:
        own = of_model(given.work, model, given.levels, given.minutes, given.turns, given.code)
        rows = pd.concat([rows, own], ignore_index=True)
        rows.to_parquet(given.out)  # a later model may fail
    print("\n".join(table(rows)))
    sys.exit(bool(versus.wrong(rows)))


if __name__ == "__main__":
    main()
