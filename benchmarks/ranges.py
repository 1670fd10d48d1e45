"""A bundle for a range of lengths beside libraries for exactly one, and beside vendors with dynamic shapes.

    luigi --module pipeline TuneModel --model FILE --shape 'sequence=1..512'
    luigi --module pipeline TuneModel --model FILE --shape 'sequence=139'          one for each length, same memory
    python benchmarks/ranges.py --onnx FILE --bundle FOLDER --exact 139=FOLDER [90=FOLDER ...] [--turns 9]
    python benchmarks/ranges.py --table benchmarks/ranges
    python benchmarks/ranges.py --draw 10                                        ten lengths from 1 to 512, by seed

Folders are runs' `compiled/`. FILE leaves its length open (`files.py --open`); ONNX Runtime and OpenVINO get it as it
is, and so compile it for any length; beside a bundle in bf16 OpenVINO is run at its default, which is bf16 on CPUs that
have it, and outputs may differ by what the bundle's manifest allows. Each side is a process that stands still while
another has its turn (`sides.py`). The bundle and the exact libraries are called as users call them: padding and cutting
are part of the time. What the file multiplies and adds at a length would take the time "at the peak", if each operation
ran at the peak of float32, or of bf16 (of a loop of nothing but it, the highest that the tuning of an exact library
measured): with these operations nothing is faster, and most of a vendor's distance to it is all that can be won.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import intervals
import numpy as np
import pandas as pd
import provenance
import pyarrow as pa
import pyarrow.parquet as pq
import sides

from lib.contracts.tables import written_whole
from lib.graph import fusion
from lib.graph.algorithms import IN_BF16
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import host, targets
from lib.models import onnx_import
from lib.probing import values
from lib.tir.numerics import relative_error

TOLERANCE = 1e-3
SIDES = ("range", "exact", "onnxruntime", "openvino")
SCHEMA = pa.schema(
    [
        pa.field("model", pa.string(), False),
        pa.field("length", pa.int64(), False),
        pa.field("bucket", pa.int64(), False),  # of the bundle, that holds it
        pa.field("side", pa.string(), False),  # range, exact, onnxruntime or openvino
        pa.field("turn", pa.int64(), False),  # -1: the side could not begin
        pa.field("latency_s", pa.float64()),  # median of the turn's inferences; null: see failure
        pa.field("n_inferences", pa.int64(), False),
        pa.field("max_error", pa.float64()),  # of the outputs to ONNX Runtime's, over the largest; null: no outputs
        pa.field("at_peak_s", pa.float64()),  # what the file computes at the length; null: the peak is not known
        pa.field("bytes", pa.int64()),  # of the bundle or the library with its weights
        pa.field("failure", pa.string(), False),  # empty: none
        pa.field("threads", pa.int64(), False),
        pa.field("cpu", pa.string(), False),
        pa.field("revision", pa.string(), False),  # of the code that compiled the libraries
        pa.field("date", pa.string(), False),
        pa.field("version", pa.string(), False),  # of the side
    ]
)


def measure(bundle: Path, exact: Path | None, onnx: Path, length: int, turns: int, threads: int) -> pd.DataFrame:
    """Rows of one length, without what is equal in all of them; of some lengths there is no exact library."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    [name] = manifest["ranges"]
    places = {"range": bundle, **({"exact": exact} if exact else {}), "onnxruntime": onnx, "openvino": onnx}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.savez(work / "inputs.npz", *values(manifest["model_inputs"], {name: length}, seed=length))
        ready: dict[str, sides.Side] = {}
        outputs: dict[str, list[np.ndarray]] = {}
        for side, path in places.items():
            kind = "bundle" if side in ("range", "exact") else _kind(side, manifest)
            one = stack.enter_context(sides.Side(kind, path, work / "inputs.npz", work / f"{side}.npz", threads))
            try:
                outputs[side] = one.load()
                ready[side] = one
            except sides.SideFailed as error:
                rows.append(asdict(sides.Turn(side, -1, float("nan"), 0, str(error))) | {"version": ""})
        for turn in sides.in_turn(ready, turns, seed=length):
            rows.append(asdict(turn) | {"version": ready[turn.side].version})
    frame = pd.DataFrame(rows).rename(columns={"number": "turn"})
    errors = {side: _error(found, outputs.get("onnxruntime", [])) for side, found in outputs.items()}
    buckets = sorted(each["extents"][name] for each in manifest["buckets"])
    sizes = {side: _bytes(path) for side, path in places.items()}
    return frame.assign(
        length=length,
        bucket=next(bucket for bucket in buckets if bucket >= length),
        max_error=[errors.get(side, float("nan")) for side in frame["side"]],
        bytes=[sizes[side] for side in frame["side"]],
    )


def _kind(side: str, manifest: dict[str, Any]) -> str:
    """Of a vendor's process: OpenVINO chooses a precision of its own beside a bundle that is not in float32."""
    return "openvino_default" if side == "openvino" and manifest["precision"] == IN_BF16 else side


def flop(onnx: Path, name: str, length: int) -> float:
    """What the file computes at a length, in additions and multiplications of its fused graph."""
    module = fusion.fuse(onnx_import.load(onnx, {name: (length,)}).module, targets.target("host", 0).tvm())
    return sum(subgraph.weight * subgraph.flop for subgraph in extract_subgraphs(module))


def peak(compiled: Sequence[Path]) -> float | None:
    """The highest FLOP/s that runs measured, of the element type that most is computed in; None if none did."""
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in compiled]
    found = [each.get("peak_flops_bf16") or each.get("peak_flops") for each in manifests]
    return max((each for each in found if each), default=None)


def _error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    return max((relative_error(one, other) for one, other in zip(found, expected, strict=False)), default=float("nan"))


def _bytes(path: Path) -> int:
    """Of what is deployed, without the reference."""
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.suffix in (".so", ".safetensors")]
    return sum(file.stat().st_size for file in files if not file.name.startswith("reference"))


def table(rows: pd.DataFrame) -> str:
    """As markdown, with the geometric means."""
    heads = ["model", "tokens", "computed as", "range, ms", "exact, ms", "ONNX Runtime", "OpenVINO", "at the peak",
             "range / exact", "better vendor / range", "at most", "bundle / one shape", "error"]  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    beside, ahead, most = [], [], []
    for _, part in rows.groupby(["model", "length"]):
        model, length, bucket = (str(part[name].iloc[0]) for name in ("model", "length", "bucket"))
        timed = part[part["failure"] == ""].pivot_table(index="turn", columns="side", values="latency_s")
        found = {side: timed[side] for side in SIDES if side in timed}
        vendors = [found[side] for side in ("onnxruntime", "openvino") if side in found]
        ratios = ["-", "-"]
        if "range" in found and "exact" in found:
            beside.append((intervals.best_ratio_of([found["range"]], found["exact"]), len(timed)))
            ratios[0] = intervals.estimate(*beside[-1]).text()
        if "range" in found and vendors:
            ahead.append((intervals.best_ratio_of(vendors, found["range"]), len(timed)))
            ratios[1] = intervals.estimate(*ahead[-1]).text()
        cells = [f"{1e3 * found[side].median():.2f}" if side in found else "-" for side in SIDES]
        bound_s = part["at_peak_s"].iloc[0]
        cells.append(f"{1e3 * bound_s:.2f}" if bound_s > 0 else "-")
        if bound_s > 0 and vendors:
            most.append(min(side.median() for side in vendors) / bound_s)
        ratios.append(f"{most[-1]:.2f}" if bound_s > 0 and vendors else "-")
        size = part.drop_duplicates("side").set_index("side")["bytes"]
        share = f"{size['range'] / size['exact']:.3f}" if "exact" in size else "-"
        lines.append(
            f"| {model} | {length} | {bucket} | {' | '.join(cells)} | {' | '.join(ratios)} | {share} "
            f"| {part['max_error'].max():.0e} |"
        )
    means = [intervals.geometric_mean(known).text() if known else "-" for known in (beside, ahead)]
    means.append(f"{np.exp(np.mean(np.log(most))):.2f}" if most else "-")
    lines.append(f"| geometric mean | | | | | | | | {' | '.join(means)} | | |")
    setup = rows.iloc[0]
    versions = ", ".join(sorted(set(map(str, rows.loc[rows["version"] != "", "version"]))))
    return "\n".join([*lines, "", f"{setup['cpu']}, {setup['threads']} threads; {versions}; {setup['revision']}."])


def lengths(n: int, seed: int, highest: int = 512) -> list[int]:
    """So many lengths, each as likely as any other."""
    return sorted(map(int, np.random.default_rng(seed).integers(1, highest + 1, n)))


def wrong(rows: pd.DataFrame, tolerance: float = TOLERANCE) -> list[str]:
    """Sides whose outputs are off, or that failed."""
    found = rows[(rows["failure"] != "") | ~(rows["max_error"] <= tolerance)].drop_duplicates(["length", "side"])
    records = found.to_dict("records")
    return [f"{row['side']} at {row['length']}: {row['failure'] or row['max_error']}" for row in records]


def main() -> None:
    """Measure and keep, or print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of the rows there, and end")
    parser.add_argument("--draw", type=int, metavar="N", help="print so many lengths, and end")
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--exact", nargs="+", default=[], metavar="LENGTH=FOLDER")
    parser.add_argument("--lengths", nargs="+", type=int, default=[], help="further ones, without exact libraries")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0, help="of the lengths that are drawn")
    parser.add_argument("--revision", default="", help="of the code that compiled them; default: this clone's")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "ranges", help="folder of the rows")
    options = parser.parse_args()
    if options.draw:
        print(*lengths(options.draw, options.seed))
        return
    if options.table:
        print(table(pd.concat([pd.read_parquet(path) for path in sorted(options.table.glob("*.parquet"))])))
        return
    if not (options.onnx and options.bundle and (options.exact or options.lengths)):
        parser.error("--onnx, --bundle and --exact or --lengths, or --table or --draw, are needed")
    exact: dict[int, Path | None] = dict.fromkeys(options.lengths)
    exact |= {int(word.partition("=")[0]): Path(word.partition("=")[2]) for word in options.exact}
    manifest = json.loads((options.bundle / "manifest.json").read_text())
    threads, is_narrow = host.physical_cores(), manifest["precision"] == IN_BF16
    name = f"{options.onnx.stem}-{IN_BF16}" if is_narrow else options.onnx.stem
    highest = peak([folder for folder in exact.values() if folder])
    [dimension] = manifest["ranges"]
    parts = [
        measure(options.bundle, folder, options.onnx, length, options.turns, threads).assign(
            at_peak_s=flop(options.onnx, dimension, length) / highest if highest else float("nan")
        )
        for length, folder in exact.items()
    ]
    rows = pd.concat(parts).assign(model=name, **provenance.columns(threads, options.revision))
    options.out.mkdir(exist_ok=True)
    with written_whole(options.out / f"{name}.parquet") as partial:
        pq.write_table(pa.Table.from_pandas(rows[SCHEMA.names], schema=SCHEMA, preserve_index=False), partial)
    print(table(rows))
    if complaints := wrong(rows, manifest["tolerance"] if is_narrow else TOLERANCE):
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
