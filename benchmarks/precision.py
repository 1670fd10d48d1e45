"""Libraries in float32, in bf16 and of bytes beside what ONNX Runtime and OpenVINO make of the same files.

    python benchmarks/quantize.py --onnx FILE --out FOLDER
    python benchmarks/precision.py --onnx FILE --f32 COMPILED --bf16 COMPILED [--qdq QDQ --int8 COMPILED] [--out FOLDER]
    python benchmarks/precision.py --table benchmarks/precision

Measured like `versus.py`: a process a side, the others stopped, in a shuffled order for each turn. OpenVINO is run in
float32 and at its default, which is bf16 on CPUs that have it, also beside bytes. Errors are those of the outputs to
ONNX Runtime's in float32, over the largest output; sizes are of library and parameters together.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import intervals
import pandas as pd
import provenance
import versus

from lib.machine import host

F32, BF16, INT8 = "ours f32", "ours bf16", "ours int8"
ORT, OPENVINO, DEFAULT = "ONNX Runtime", "OpenVINO f32", "OpenVINO"
ORT_QDQ, OPENVINO_QDQ = "ONNX Runtime QDQ", "OpenVINO QDQ"
_ORDER = (F32, BF16, INT8, ORT, OPENVINO, DEFAULT, ORT_QDQ, OPENVINO_QDQ)
_RATIOS = {
    "f32": (F32, [ORT, OPENVINO]),
    "bf16, to OpenVINO's default": (BF16, [DEFAULT]),
    "int8, to the better one": (INT8, [ORT_QDQ, OPENVINO_QDQ]),
}


def table(rows: pd.DataFrame) -> list[str]:
    """The rows of any number of models as markdown: latencies, ratios, and errors."""
    races = {str(model): versus.Race(part) for model, part in rows.groupby("model")}
    heads = [*(f"{name}, ms" for name in _ORDER), *_RATIOS]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    ratios = {name: {model: _ratio(race, *sides) for model, race in races.items()} for name, sides in _RATIOS.items()}
    for model, race in races.items():
        cells = [found.text(1e3) if (found := race.latency(name)) else "-" for name in _ORDER]
        of_model = [ratios[name][model] for name in _RATIOS]
        cells += [intervals.estimate(*ratio).text() if ratio else "-" for ratio in of_model]
        lines.append(f"| {' | '.join([model, *cells])} |")
    means = []
    for name in _RATIOS:
        known = [ratio for ratio in ratios[name].values() if ratio]
        means.append(f"{intervals.geometric_mean(known).text()} (of {len(known)})" if known else "-")
    lines.append(f"| geometric mean |{' |' * len(_ORDER)} {' | '.join(means)} |")
    return [*lines, "", *_errors(rows), "", *_sizes(rows), "", *versus._notes(rows)]


def _ratio(race: versus.Race, ours: str, vendors: Sequence[str]) -> tuple[intervals.Statistic, int] | None:
    there = [race.latencies[name] for name in vendors if name in race.latencies]
    if ours not in race.latencies or not there:
        return None
    return intervals.best_ratio_of(there, race.latencies[ours]), len(race.latencies)


def _errors(rows: pd.DataFrame) -> list[str]:
    """Of the outputs, as a table of their own."""
    sides = (F32, BF16, DEFAULT, INT8, ORT_QDQ, OPENVINO_QDQ)
    lines = [f"| error | {' | '.join(sides)} | revision | date |", "|---" * (len(sides) + 3) + "|"]
    for model, part in rows.groupby("model"):
        errors = part.groupby("side")["max_error"].max()
        cells = [f"{errors[side]:.1e}" if side in errors else "-" for side in sides]
        lines.append(f"| {' | '.join([str(model), *cells, *(str(part[c].iloc[0]) for c in ('revision', 'date'))])} |")
    return lines


def _sizes(rows: pd.DataFrame) -> list[str]:
    """Of the libraries with their parameters, and of the files, as a table of their own."""
    sides = {F32: F32, BF16: BF16, INT8: INT8, ORT: "file", ORT_QDQ: "file, quantised"}
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
        F32: ("library", given.f32), BF16: ("library", given.bf16), INT8: ("library", given.int8),
        ORT: ("onnxruntime", given.onnx), OPENVINO: ("openvino", given.onnx), DEFAULT: ("openvino_default", given.onnx),
        ORT_QDQ: ("onnxruntime", given.qdq), OPENVINO_QDQ: ("openvino_default", given.qdq),
    }  # fmt: skip
    kinds = {name: (kind, path) for name, (kind, path) in kinds.items() if path}
    threads = host.physical_cores()
    rows = versus.measure(kinds, threads, given.turns, given.seconds, given.seed).assign(
        model=given.onnx.stem, **provenance.columns(threads, given.revision)
    )
    versus.write(rows, given.out / f"{given.onnx.stem}.parquet")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
