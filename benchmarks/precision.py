"""Libraries in float32, in three or six products of bf16, in bf16 and of bytes beside ONNX Runtime and OpenVINO.

    python benchmarks/quantize.py --onnx FILE --out FOLDER
    python benchmarks/precision.py --onnx FILE --f32 COMPILED --bf16 COMPILED [--bf16x3 COMPILED]
        [--bf16x6 COMPILED] [--qdq QDQ --int8 COMPILED] [--out FOLDER]
    python benchmarks/precision.py --table benchmarks/precision

These run the same files. Measured like `versus.py`: a process a side, the others stopped, in a shuffled order for each
turn. OpenVINO is run in float32 and at its default, which is bf16 on CPUs that have it, also beside bytes. Errors are
those of the outputs to ONNX Runtime's in float32, over the largest output; sizes are of library and parameters. What
our libraries multiply and add would take the time in the table of bounds, if each operation ran at the peak of its
instruction (of a loop of nothing but it, the highest that any run of the table measured): no library with the same
operations is faster.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import intervals
import numpy as np
import pandas as pd
import provenance
import versus

from lib.contracts import tables
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.machine import host
from lib.report.text import narrow_kind

F32, SIX, THREE, BF16, INT8 = "ours f32", "ours bf16x6", "ours bf16x3", "ours bf16", "ours int8"
ORT, OPENVINO, DEFAULT = "ONNX Runtime", "OpenVINO f32", "OpenVINO"
ORT_QDQ, OPENVINO_QDQ = "ONNX Runtime QDQ", "OpenVINO QDQ"
_ORDER = (F32, SIX, THREE, BF16, INT8, ORT, OPENVINO, DEFAULT, ORT_QDQ, OPENVINO_QDQ)
_RATIOS = {
    "f32": (F32, [ORT, OPENVINO]),
    "bf16x6, to the better one in f32": (SIX, [ORT, OPENVINO]),
    "bf16x3, to the better one in f32": (THREE, [ORT, OPENVINO]),
    "bf16, to OpenVINO's default": (BF16, [DEFAULT]),
    "int8, to the better one": (INT8, [ORT_QDQ, OPENVINO_QDQ]),
}


def table(rows: pd.DataFrame) -> list[str]:
    """The rows of any number of models as markdown: latencies, ratios, and errors."""
    races = {str(model): versus.Race(part) for model, part in rows.groupby("model")}
    order, compared = _told(_ORDER, rows), {name: sides for name, sides in _RATIOS.items() if _told(sides[:1], rows)}
    heads = [*(f"{name}, ms" for name in order), *compared]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    ratios = {name: {model: _ratio(race, *sides) for model, race in races.items()} for name, sides in compared.items()}
    for model, race in races.items():
        cells = [found.text(1e3) if (found := race.latency(name)) else "-" for name in order]
        of_model = [ratios[name][model] for name in compared]
        cells += [intervals.estimate(*ratio).text() if ratio else "-" for ratio in of_model]
        lines.append(f"| {' | '.join([model, *cells])} |")
    means = []
    for name in compared:
        known = [ratio for ratio in ratios[name].values() if ratio]
        means.append(f"{intervals.geometric_mean(known).text()} (of {len(known)})" if known else "-")
    lines.append(f"| geometric mean |{' |' * len(order)} {' | '.join(means)} |")
    parts = [
        lines,
        _bounds(races, rows, compared),
        versus.apart(rows, compared),
        _errors(rows),
        _sizes(rows),
        versus._notes(rows),
    ]
    return [line for part in parts for line in (*part, "")][:-1]


def _told(sides: Sequence[str], rows: pd.DataFrame) -> list[str]:
    """Those of some sides that a table has: not those that few CPUs have an instruction for, where no row has them."""
    return [side for side in sides if side not in (SIX, THREE) or (rows["side"] == side).any()]


def _ratio(race: versus.Race, ours: str, vendors: Sequence[str]) -> tuple[intervals.Statistic, int] | None:
    there = [race.latencies[name] for name in vendors if name in race.latencies]
    if ours not in race.latencies or not there:
        return None
    return intervals.best_ratio_of(there, race.latencies[ours]), len(race.latencies)


def _bounds(
    races: Mapping[str, versus.Race], rows: pd.DataFrame, compared: Mapping[str, tuple[str, Sequence[str]]]
) -> list[str]:
    """Times at the peak, and how many times as fast as the better vendor a library could be by them at most."""
    lines = [f"| at the peak, ms (ratio at most) | {' | '.join(compared)} |", "|---" * (len(compared) + 1) + "|"]
    known = rows.dropna(subset="work").drop_duplicates(["model", "side"])
    works = {(row["model"], row["side"]): row["work"] for row in known.to_dict("records")}
    peaks: dict[str, float] = {}  # of all runs: one that was disturbed has a lower one
    for each in (each for work in works.values() for each in work):
        peaks[each["instruction"]] = max(each["peak_flops"], peaks.get(each["instruction"], 0.0))
    ratios: dict[str, list[float]] = {name: [] for name in compared}
    for model, race in races.items():
        cells = []
        for name, (ours, vendors) in compared.items():
            timed = [float(np.median(race.latencies[each])) for each in vendors if each in race.latencies]
            if (model, ours) not in works or not timed:
                cells.append("-")
                continue
            bound = sum(each["flop"] / peaks[each["instruction"]] for each in works[model, ours])
            ratios[name].append(min(timed) / bound)
            cells.append(f"{bound * 1e3:.3g} ({min(timed) / bound:.2f})")
        lines.append(f"| {' | '.join([model, *cells])} |")
    means = [f"({np.exp(np.mean(np.log(found))):.2f})" if found else "-" for found in ratios.values()]
    told = ", ".join(f"{name} {peak / 1e9:,.0f}" for name, peak in sorted(peaks.items()))
    return [*lines, f"| geometric mean | {' | '.join(means)} |", "", f"Peaks: {told} G a second."]


def work(compiled: Path) -> list[dict[str, object]] | None:
    """What a library computes, by the instruction that multiplies in it, and the peak of each in FLOP/s; None if a
    subgraph has one that was not measured.

    Args:
        compiled: `compiled/` of a run, in the folders of its model.
    """
    facts = json.loads((compiled / "manifest.json").read_text())
    rows = tables.read(ModelFiles(compiled.parents[2]).subgraphs, SUBGRAPHS)
    flop: dict[str, float] = {}
    for row in rows.select(["weight", "flop", "core_operator"]).to_pylist():
        kind = narrow_kind(row["core_operator"])
        flop[kind] = flop.get(kind, 0.0) + row["weight"] * row["flop"]
    if any(f"peak_flops{kind}" not in facts for kind in flop):
        return None
    return [
        {"instruction": kind.lstrip("_") or "f32", "flop": found, "peak_flops": facts[f"peak_flops{kind}"]}
        for kind, found in flop.items()
    ]


def _errors(rows: pd.DataFrame) -> list[str]:
    """Of the outputs, as a table of their own."""
    sides = _told((F32, SIX, THREE, BF16, DEFAULT, INT8, ORT_QDQ, OPENVINO_QDQ), rows)
    lines = [f"| error | {' | '.join(sides)} | revision | date |", "|---" * (len(sides) + 3) + "|"]
    for model, part in rows.groupby("model"):
        errors = part.groupby("side")["max_error"].max()
        cells = [f"{errors[side]:.1e}" if side in errors else "-" for side in sides]
        lines.append(f"| {' | '.join([str(model), *cells, *(str(part[c].iloc[0]) for c in ('revision', 'date'))])} |")
    return lines


def _sizes(rows: pd.DataFrame) -> list[str]:
    """Of the libraries with their parameters, and of the files, as a table of their own."""
    names = {ORT: "file", ORT_QDQ: "file, quantised"}
    sides = {side: names.get(side, side) for side in _told((F32, SIX, THREE, BF16, INT8, *names), rows)}
    lines = [f"| size, MB | {' | '.join(sides.values())} |", "|---" * (len(sides) + 1) + "|"]
    for model, part in rows.groupby("model"):
        sizes = part.groupby("side")["bytes"].max()
        cells = [f"{sizes[side] / 1e6:.1f}" if pd.notna(sizes.get(side)) else "-" for side in sides]
        lines.append(f"| {' | '.join([str(model), *cells])} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and keep, or print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the rows there, and end")
    parser.add_argument("--onnx", type=Path, help="in float32")
    parser.add_argument("--qdq", type=Path, help="the same, quantised")
    parser.add_argument("--f32", type=Path, metavar="FOLDER", help="`compiled/` of a run")
    for name in ("bf16x3", "bf16x6"):
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"the same of one with --precision {name}")
    parser.add_argument("--bf16", type=Path, metavar="FOLDER", help="the same of one with --precision bf16")
    parser.add_argument("--int8", type=Path, metavar="FOLDER", help="the same of the quantised file")
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=0.5, help="timed in a turn; at least one inference")
    parser.add_argument("--seed", type=int, default=0, help="of the order in each turn")
    parser.add_argument("--revision", default="", help="of the code that compiled the libraries; default: this clone's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "precision", help="folder of the rows")
    given = parser.parse_args(arguments)
    if given.table:
        print("\n".join(table(versus.read(given.table))))
        return
    kinds = {
        F32: ("library", given.f32), SIX: ("library", given.bf16x6), THREE: ("library", given.bf16x3),
        BF16: ("library", given.bf16), INT8: ("library", given.int8),
        ORT: ("onnxruntime", given.onnx), OPENVINO: ("openvino", given.onnx), DEFAULT: ("openvino_default", given.onnx),
        ORT_QDQ: ("onnxruntime", given.qdq), OPENVINO_QDQ: ("openvino_default", given.qdq),
    }  # fmt: skip
    kinds = {name: (kind, path) for name, (kind, path) in kinds.items() if path}
    threads = host.physical_cores()
    rows = versus.measure(kinds, threads, given.turns, given.seconds, given.seed).assign(
        model=given.onnx.stem, **provenance.columns(threads, given.revision)
    )
    works = {name: work(path) for name, (kind, path) in kinds.items() if kind == "library"}
    rows = rows.assign(work=pd.Series([works.get(name) for name in rows["side"]], index=rows.index, dtype=object))
    versus.write(rows, given.out / f"{given.onnx.stem}.parquet")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
