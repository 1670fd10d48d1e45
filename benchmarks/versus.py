"""Compiled models beside ONNX Runtime, OpenVINO and torch.compile on the file that they came from.

    python benchmarks/versus.py --libraries ours=FOLDER [NAME=FOLDER ...] --onnx FILE [--pt2 FILE] [--turns 15]
    python benchmarks/versus.py --gpu --libraries ours=FOLDER --pt2 FILE --out benchmarks/gpu_vendors
    python benchmarks/versus.py --table benchmarks/vendors

A folder is a run's `compiled/`, or what `stock.py` left (named `stock...`). Each side is a process; all others are
stopped while one has its turn, and each turn has an order of its own. All get equal inputs and threads, and compute in
float32 (`side.py` has the settings). Nothing else may run on the machine. The rows go to `benchmarks/vendors/`; a side
that cannot run its model is a row that says why. `--table` makes the table from the rows alone. The exit status is 1 if
a side's outputs are off by more than 1e-3 of the largest from ONNX Runtime's, or from the first side's without it.

With `--gpu` libraries for a GPU run beside torch there: as it is, compiled, and compiled with graphs of CUDA.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cores
import intervals
import numpy as np
import pandas as pd
import provenance
import pyarrow as pa
import pyarrow.parquet as pq
import sides
from intervals import Estimate, Statistic

from lib.contracts.tables import written_whole
from lib.machine import host
from lib.tir.numerics import relative_error

TOLERANCE = 1e-3
PATIENCE = 3  # times the turns that were asked for, until there are so many in which the cores shared a cache
_ENOUGH = 5  # turns, for a ratio of its own
ON_GPU = {
    "torch_cuda": "torch",
    "torch_cuda_compiled": "torch.compile",
    "torch_cuda_graph": "torch.compile, reduce-overhead",
}
VENDORS = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "torch": "torch.compile", **ON_GPU}
_ORDER = ("library", *VENDORS, "stock")  # of columns

_WORK = pa.struct(
    [
        pa.field("instruction", pa.string(), False),
        pa.field("flop", pa.float64(), False),
        pa.field("peak_flops", pa.float64(), False),  # FLOP/s
    ]
)
SCHEMA = pa.schema(
    [
        pa.field("model", pa.string(), False),
        pa.field("side", pa.string(), False),
        pa.field("kind", pa.string(), False),  # of side.py, or `stock`
        pa.field("turn", pa.int64(), False),  # -1: the side could not begin
        pa.field("latency_s", pa.float64()),  # median of the turn's inferences; null: see failure
        pa.field("n_inferences", pa.int64(), False),
        pa.field("max_error", pa.float64()),  # of the outputs, to `reference`, over its largest; null: no outputs
        pa.field("reference", pa.string(), False),  # a side
        pa.field("failure", pa.string(), False),  # empty: none
        pa.field("between_cores", pa.float64()),  # bytes/s, see `cores.py`; null: not written down
        pa.field("bytes", pa.int64()),  # of the library and its parameters, or of the file; null: not written down
        pa.field("work", pa.list_(_WORK)),  # of a library (`precision.py`); null: not written down
        pa.field("threads", pa.int64(), False),
        pa.field("cpu", pa.string(), False),  # or the GPU
        pa.field("revision", pa.string(), False),  # of the code that compiled the libraries
        pa.field("date", pa.string(), False),
        pa.field("version", pa.string(), False),  # of the side
    ]
)


def measure(
    kinds: Mapping[str, tuple[str, Path]],
    threads: int,
    turns: int,
    seconds: float,
    seed: int,
    patience: int = PATIENCE,
) -> pd.DataFrame:
    """Rows of one model, without what is equal in all of them.

    Args:
        kinds: For each side, by name, what it is and its file or folder. The first that is a `library` or `stock` has
            the manifest that names the inputs.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = next(path for kind, path in kinds.values() if kind in ("library", "stock"))
        np.savez(work / "inputs.npz", *sides.inputs(first))
        ready: dict[str, sides.Side] = {}
        outputs: dict[str, list[np.ndarray]] = {}
        for n, (name, (kind, path)) in enumerate(kinds.items()):
            kind = "library" if kind == "stock" else kind
            side = stack.enter_context(sides.Side(kind, path, work / "inputs.npz", work / f"{n}.npz", threads))
            try:
                outputs[name] = side.load()
                ready[name] = side
            except sides.SideFailed as error:
                side.close()
                rows.append(asdict(sides.Turn(name, -1, float("nan"), 0, str(error))) | {"version": ""})
            print(f"{name}: {rows[-1]['failure'] if name not in ready else side.version}", flush=True)
        reference = _reference(outputs, kinds)
        errors = {name: _difference(found, outputs[reference]) for name, found in outputs.items()}
        del outputs
        for turn in sides.in_turn(ready, turns, seconds=seconds, seed=seed, at_most=patience * turns):
            rows.append(asdict(turn) | {"version": ready[turn.side].version})
    frame = pd.DataFrame(rows).rename(columns={"number": "turn"})
    frame["kind"] = [kinds[name][0] for name in frame["side"]]
    frame["max_error"] = [errors.get(name, float("nan")) for name in frame["side"]]
    frame["reference"] = reference
    frame["bytes"] = [n_bytes(kinds[name][1]) for name in frame["side"]]
    return frame


def n_bytes(path: Path) -> int | None:
    """Of a library and its parameters, or of a file; None if there is nothing."""
    files = [path] if path.is_file() else [*path.glob("*.so"), *path.glob("weights.*")]
    return sum(file.stat().st_size for file in files) or None


def _reference(outputs: Mapping[str, Any], kinds: Mapping[str, tuple[str, Path]]) -> str:
    return next((name for name in outputs if kinds[name][0] == "onnxruntime"), next(iter(outputs), ""))


def _difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest difference of any output, over that output's largest value; infinite if they are not of equal shapes."""
    if [value.shape for value in found] != [value.shape for value in expected]:
        return float("inf")
    return max(relative_error(a, b) for a, b in zip(found, expected, strict=True))


def wrong(rows: pd.DataFrame) -> list[str]:
    """What to say of each side whose outputs are too far off."""
    found = rows.loc[rows["max_error"] > TOLERANCE, ["model", "side", "max_error", "reference"]].drop_duplicates()
    return [
        f"{row['model']}: {row['side']} differs from {row['reference']} by {row['max_error']:.1e} of the largest "
        f"output, more than {TOLERANCE:.0e}"
        for row in found.to_dict("records")
    ]


def write(rows: pd.DataFrame, path: Path) -> None:
    """Keep the rows of one model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        known = rows.reindex(columns=SCHEMA.names).astype({"bytes": "Int64"})
        works = [None if isinstance(work, float) else work for work in known["work"]]  # NaN: there is none
        known = known.assign(work=pd.Series(works, index=known.index, dtype=object))
        pq.write_table(pa.Table.from_pandas(known, SCHEMA, preserve_index=False), partial)


def read(folder: Path) -> pd.DataFrame:
    """The rows of all models in a folder."""
    files = sorted(folder.glob("*.parquet"))
    if not files:
        raise SystemExit(f"{folder} has no *.parquet; run this script with --libraries first.")
    rows: pd.DataFrame = pa.concat_tables([pq.read_table(file, schema=SCHEMA) for file in files]).to_pandas()
    return rows


class Race:
    """The turns of one model: those in which the cores shared a cache all the time, or all if there are none; or, with
    `near` false, the others."""

    def __init__(self, rows: pd.DataFrame, *, near: bool = True) -> None:
        self.rows = rows
        self.kinds: dict[str, str] = dict(zip(rows["side"], rows["kind"], strict=True))
        timed = rows.assign(between_cores=rows.get("between_cores", np.nan))[rows["failure"] == ""]
        latencies = timed.pivot_table(index="turn", columns="side", values="latency_s", dropna=False)
        speeds = timed.groupby("turn")["between_cores"].min().reindex(latencies.index)
        are_near = cores.are_near(speeds, timed["between_cores"].max())
        if near and not are_near.any():
            are_near[:] = True
        chosen = latencies[are_near == near]
        self.latencies = chosen.dropna(axis="columns")  # who did not finish all turns is not compared

    def latency(self, side: str) -> Estimate | None:
        """Seconds."""
        if side not in self.latencies:
            return None
        return intervals.estimate(intervals.median_of(self.latencies[side]), len(self.latencies))

    def ratio(self, side: str) -> tuple[Statistic, int] | None:
        """The better of the vendors to a side of ours."""
        vendors = [self.latencies[name] for name in self.latencies if self.kinds[str(name)] in VENDORS]
        if side not in self.latencies or not vendors:
            return None
        return intervals.best_ratio_of(vendors, self.latencies[side]), len(self.latencies)


def table(rows: pd.DataFrame) -> str:
    """The rows of any number of models as markdown, the largest ratio first."""
    races = {str(model): Race(part) for model, part in rows.groupby("model")}
    kinds = dict(zip(rows["side"], rows["kind"], strict=True))
    names = sorted(kinds, key=lambda name: (_ORDER.index(kinds[name]), name != "ours", name))
    ours = [name for name in names if kinds[name] == "library"]
    ratios = {(model, name): race.ratio(name) for model, race in races.items() for name in ours}
    ranks = {model: _value(ratios[model, ours[0]]) if ours else 0.0 for model in races}
    heads = [*(f"{name}, ms" for name in names), *(f"the better vendor / {name}" for name in ours)]
    lines = [f"| model | {' | '.join(heads)} | error | revision | date |", "|---" * (len(heads) + 4) + "|"]
    for model in sorted(races, key=lambda model: -ranks[model]):
        race = races[model]
        latencies = [race.latency(name) for name in names]
        cells = [found.text(1e3) if found else "-" for found in latencies]
        for name in ours:
            ratio = ratios[model, name]
            cells.append(intervals.estimate(*ratio).text() if ratio else "-")
        told = (race.rows[column].iloc[0] for column in ("revision", "date"))
        lines.append(f"| {model} | {' | '.join(cells)} | {race.rows['max_error'].max():.0e} | {' | '.join(told)} |")
    means = []
    for name in ours:
        known = [ratio for (_, side), ratio in ratios.items() if side == name and ratio]
        means.append(f"{intervals.geometric_mean(known).text()} (of {len(known)})" if known else "-")
    lines.append(f"| geometric mean | {' | '.join(['', *[' '] * (len(names) - 1), *means])} | | | |")
    return "\n".join([*lines, "", *_notes(rows), *apart(rows, {name: (name, list(VENDORS.values())) for name in ours})])


def apart(rows: pd.DataFrame, ratios: Mapping[str, tuple[str, Sequence[str]]]) -> list[str]:
    """Ratios of the turns in which the cores shared no cache, where there are enough of them; nothing if none has.

    Args:
        ratios: By their heads, a side of ours and those whose best is compared with it.
    """
    races = {str(model): Race(part, near=False) for model, part in rows.groupby("model")}
    races = {model: race for model, race in races.items() if len(race.latencies) >= _ENOUGH}
    if not races:
        return []
    known: dict[str, list[tuple[Statistic, int]]] = {name: [] for name in ratios}
    lines = [f"| cores without a common cache | turns | {' | '.join(ratios)} |", "|---" * (len(ratios) + 2) + "|"]
    for model, race in races.items():
        cells = []
        for name, (ours, vendors) in ratios.items():
            there = [race.latencies[side] for side in vendors if side in race.latencies]
            if ours not in race.latencies or not there:
                cells.append("-")
                continue
            known[name].append((intervals.best_ratio_of(there, race.latencies[ours]), len(race.latencies)))
            cells.append(intervals.estimate(*known[name][-1]).text())
        lines.append(f"| {model} | {len(race.latencies)} | {' | '.join(cells)} |")
    means = [
        f"{intervals.geometric_mean(found).text()} (of {len(found)})" if found else "-" for found in known.values()
    ]
    return ["", *lines, f"| geometric mean | | {' | '.join(means)} |"]


def _value(ratio: tuple[Statistic, int] | None) -> float:
    return intervals.estimate(*ratio).value if ratio else 0.0


def _notes(rows: pd.DataFrame) -> list[str]:
    """What holds for all rows, or what went wrong."""
    setups = rows[["cpu", "threads"]].drop_duplicates().to_dict("records")
    versions = rows.loc[rows["version"] != "", "version"].drop_duplicates()
    turns = [len(Race(part).latencies) for _, part in rows.groupby("model")]
    counts = f"{min(turns)} to {max(turns)}" if any(turns) else "no"
    notes = [f"{row['cpu']}, {row['threads']} threads; " for row in setups]
    notes[-1] += f"{counts} turns; {', '.join(sorted(versions))}."
    failures = rows.loc[rows["failure"] != "", ["model", "side", "failure"]].drop_duplicates().to_dict("records")
    return notes + [f"- {row['model']}, {row['side']}: {row['failure']}" for row in failures]


def main() -> None:
    """Measure and keep, or print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the rows there, and end")
    parser.add_argument("--libraries", nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--onnx", type=Path, help="for ONNX Runtime and OpenVINO")
    parser.add_argument("--pt2", type=Path, help="for torch.compile")
    parser.add_argument("--gpu", action="store_true", help="libraries and torch run on the first GPU")
    parser.add_argument("--name", help="of the model; default: the file's, or else the first folder's")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument(
        "--patience",
        type=int,
        default=PATIENCE,
        help="times so many turns at most, until the cores shared a cache in as many as were asked for",
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="timed in a turn; at least one inference")
    parser.add_argument("--seed", type=int, default=0, help="of the order in each turn")
    parser.add_argument("--revision", default="", help="of the code that compiled the libraries; default: this clone's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "vendors", help="folder of the rows")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return
    kinds: dict[str, tuple[str, Path]] = {}
    for word in options.libraries:
        name, _, folder = word.partition("=")
        kinds[name] = ("stock" if name.startswith("stock") else "library", Path(folder))
    if not kinds:
        parser.error("--libraries or --table is needed")
    if options.onnx:
        kinds |= {VENDORS[kind]: (kind, options.onnx) for kind in ("onnxruntime", "openvino")}
    if options.pt2:
        kinds |= {VENDORS[kind]: (kind, options.pt2) for kind in (ON_GPU if options.gpu else ("torch",))}
    name = options.name or (options.onnx or options.pt2 or next(iter(kinds.values()))[1]).stem
    threads = host.physical_cores()
    rows = measure(kinds, threads, options.turns, options.seconds, options.seed, options.patience).assign(
        model=name, **provenance.columns(threads, options.revision)
    )
    if options.gpu:
        rows["cpu"] = host.gpu_facts("name")[0][0]
    write(rows, options.out / f"{name}.parquet")
    print(table(rows))
    if complaints := wrong(rows):
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
