"""What tuned models give to others: Transfer-Tuning's setting (Gibson and Cano, CC 2023), through the tuner's commands.

    python benchmarks/transfer.py --work FOLDER --pairs resnet50,mobilenetv2 ... --out FILE.parquet
        [--spaces metaschedule] [--minutes 5] [--minutes-after 2]

Each model of the pairs is tuned alone with an empty memory: its full gain. For each ordered pair DONOR,MODEL, the model
is tuned once more with the donor's memory. Base models are left out, so that all that is known comes from the donor;
in MetaSchedule's space convolutions are computed as the model has them. Latencies are sums over subgraphs of the lowest
medians so far, and time is that of search, measurement and training. For each pair:

- `adapted_share`: of the full gain, the untuned latency less the tuned one, what the donor's schedules reach alone:
  those adapted, and those of subgraphs that both models have
- `adapted_speedup_share`: the same as a ratio of speedups, the paper's figure (49 % of Ansor's on the mean)
- `seconds_alone`, `seconds_after`: until 95 % of the full gain was reached, without donor and with it
- `close_alone`, `close_after`: until the latency was within 5 % of the best that either run reached
- `foretold_ms`, `foretold_share`, `seconds_foretold`: the library of `--trials 0`, which the donor gives before
  anything is measured: its latency, its share of the gain between libraries, and the seconds until it was chosen

A command that was interrupted goes on where it stood. Nothing else may run on the machine.
"""

import argparse
import itertools
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import curves
import numpy as np
import pandas as pd
from nights import Place, past_of, tunable

from lib.contracts import manifest, tables
from lib.contracts.files import RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, TRAINING
from lib.tuning.history import latencies_s

_GAIN = 0.95  # of the full one
_NEAR = 1.05  # times the best of both


def settings(spaces: str) -> str:
    """Of the runs' configuration."""
    direct = "[extract]\nwinograd = never\nstrassen = never\nwiden = never\n" if spaces == "metaschedule" else ""
    return f"{direct}[generate]\nspaces = {spaces}\n[train]\nbase = no\n"


class Run:
    """What came of a run.

    Attributes:
        rows: Every measurement, that of the memory first, at 0 seconds: seconds, subgraph_id, candidate_id, latency_s,
            origin.
    """

    def __init__(self, folder: Path, calls: dict[str, int]) -> None:
        self.calls = calls
        recalled, *own = past_of(folder)
        known = _measured(recalled.measurements).assign(seconds=0.0)
        rows = pd.concat([known[known["subgraph_id"].isin(calls)], curves.of_run(folder)], ignore_index=True)
        candidates = [tables.read(files.candidates, CANDIDATES).select(["candidate_id", "origin"]).to_pandas()
                      for files in (recalled, *own)]  # fmt: skip
        origins = pd.concat(candidates).drop_duplicates("candidate_id").set_index("candidate_id")
        self.rows = rows.join(origins, on="candidate_id")
        self.is_known = set(known["candidate_id"])

    def latency_s(self, rows: pd.DataFrame) -> float:
        """Of the model, with the best of some measurements."""
        best = rows.groupby("subgraph_id")["latency_s"].min()
        return float(sum(n * best.get(key, np.inf) for key, n in self.calls.items()))

    @property
    def untuned(self) -> pd.DataFrame:
        return self.rows[self.rows["origin"] == "untuned"]

    @property
    def of_donor(self) -> pd.DataFrame:
        """What the donor gave, beside the untuned programs."""
        return self.rows[(self.rows["origin"] == "adapted") | self.rows["candidate_id"].isin(self.is_known)]

    def seconds_to(self, latency_s: float) -> float:
        """Until the model was that fast; infinity if it never was."""
        curve = curves.curve(self.rows, self.calls)
        return float(curve.loc[curve["latency_s"] <= latency_s, "seconds"].min())


def _measured(path: Path) -> pd.DataFrame:
    measured = tables.read(path, MEASUREMENTS)
    rows: pd.DataFrame = measured.select(["candidate_id", "subgraph_id"]).to_pandas()
    return rows.assign(latency_s=latencies_s(measured))


def compared(alone: Run, after: Run) -> dict[str, Any]:
    """The figures of a pair; see the head of this file."""
    untuned = alone.latency_s(alone.untuned)
    full = alone.latency_s(alone.rows)
    given = after.latency_s(pd.concat([after.of_donor, after.untuned, alone.untuned]))
    best = min(full, after.latency_s(after.rows))
    goal, near = untuned - _GAIN * (untuned - full), _NEAR * best
    return {
        "untuned_ms": untuned * 1e3, "full_ms": full * 1e3, "adapted_ms": given * 1e3,
        "after_ms": after.latency_s(after.rows) * 1e3,
        "adapted_share": (untuned - given) / (untuned - full), "adapted_speedup_share": full / given,
        "seconds_alone": alone.seconds_to(goal), "seconds_after": after.seconds_to(goal),
        "close_alone": alone.seconds_to(near), "close_after": after.seconds_to(near),
        "subgraphs": len(alone.calls), "known": len(set(after.rows.query("seconds == 0")["subgraph_id"])),
        "adapted": int(after.rows.loc[after.rows["origin"] == "adapted", "subgraph_id"].nunique()),
    }  # fmt: skip


def foretold(alone: Path, run: Path) -> dict[str, float]:
    """The library that was made of a donor's schedules without a measurement, beside the tuned one and the untuned."""
    full, own = (manifest.read(RunFiles(folder).compiled.manifest)["latencies_s"] for folder in (alone, run))
    files = RunFiles(run)
    chosen = [(files.recalled.training, TRAINING), (files.foretold.candidates, CANDIDATES)]
    latency_s, full_s, untuned_s = median(own["tuned"]), median(full["tuned"]), median(full["untuned"])
    return {
        "foretold_ms": latency_s * 1e3, "foretold_share": (untuned_s - latency_s) / (untuned_s - full_s),
        "seconds_foretold": sum(tables.stamp(path, schema).clock["total"] for path, schema in chosen),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pairs", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--spaces", default="metaschedule", choices=("own", "metaschedule"))
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--minutes-after", type=float, default=2)
    parser.add_argument("--code", type=Path, default=Path(__file__).resolve().parents[1])
    given = parser.parse_args()
    pairs = [tuple(pair.split(",")) for pair in given.pairs]
    places = {model: Place((given.work / Path(model).stem).resolve(), given.code, settings(given.spaces))
              for model in dict.fromkeys(itertools.chain(*pairs))}  # fmt: skip
    alone = {model: place.tuned(model, "--minutes", f"{given.minutes:g}")[0] for model, place in places.items()}
    rows = []
    for donor, model in pairs:
        calls = tunable(places[model].artifacts, alone[model].parents[1].name)
        [memory] = places[donor].artifacts.glob("*/memory")
        names = {"donor": Path(donor).stem, "model": Path(model).stem}
        runs = []
        for name, limit in (("foretold", ("--trials", "0")), ("after", ("--minutes", f"{given.minutes_after:g}"))):
            place = Place((given.work / "-".join(names.values()) / name).resolve(), given.code, settings(given.spaces))
            shutil.copytree(memory, place.artifacts / memory.parent.name / "memory", dirs_exist_ok=True)
            runs.append(place.tuned(model, *limit)[0])
        rows.append({**names, "spaces": given.spaces,
                     **compared(Run(alone[model], calls), Run(runs[1], calls)),
                     **foretold(alone[model], runs[0])})  # fmt: skip
        print(rows[-1], flush=True)
    pd.DataFrame(rows).to_parquet(given.out)
    print(pd.DataFrame(rows).round(3).T.to_string())


if __name__ == "__main__":
    main()
