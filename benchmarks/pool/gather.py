"""Make a pool of what finished runs have measured, for operators that no recording has: to train base models on.

    python benchmarks/pool/gather.py --runs RUN ... --operators SUFFIX ... --out FOLDER

A run is a folder `<artifacts>/<target>/<model>/runs/<run>`; of its subgraphs those are taken whose core operator ends
with one of the suffixes. Beside a recording (`record.py`) its programs are fewer and better: the first of each subgraph
are drawn at random, the others were evolved under the models that the run trained meanwhile. There is no anchor, so
nothing else must have run on the machine. The folder gets what `record.py` writes, but for `again` and `anchors`.
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from record import without_host, without_paths

from lib.contracts import tables
from lib.contracts.files import ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, SUBGRAPHS
from lib.contracts.tables import Provenance
from stages import join

_NO_PROVENANCE = Provenance(session="pool")


def gather(runs: Sequence[Path], operators: Sequence[str], out: Path) -> None:
    """Write the pool; models are named after their files."""
    with tempfile.TemporaryDirectory() as work:
        parts = []
        for n, run in enumerate(runs):
            rows = tables.read(ModelFiles(run.parent.parent).subgraphs, SUBGRAPHS)
            path = Path(work) / f"{n}.parquet"
            tables.write(rows.filter(_ends_with(rows["core_operator"], operators)), path, SUBGRAPHS, _NO_PROVENANCE)
            parts.append(join.Part(run.parent.parent.name, 1.0, path))
        joined = ModelFiles(Path(work) / "joined")
        join.run(parts, provenance=_NO_PROVENANCE, out=joined)
        out.mkdir(parents=True, exist_ok=True)
        (out / "models.parquet").write_bytes(joined.models.read_bytes())
        subgraphs = without_paths(tables.read(joined.subgraphs, SUBGRAPHS))
    tables.write(subgraphs, out / "subgraphs.parquet", SUBGRAPHS, _NO_PROVENANCE)
    rounds = [each for run in runs for each in RunFiles(run).trained() if each.is_round]
    candidates = _of(rounds, lambda each: each.candidates, CANDIDATES, subgraphs)
    tables.write(_once(candidates), out / "candidates.parquet", CANDIDATES, _NO_PROVENANCE)
    measurements = without_host(_of(rounds, lambda each: each.measurements, MEASUREMENTS, subgraphs))
    tables.write(measurements, out / "measurements.parquet", MEASUREMENTS, _NO_PROVENANCE)
    print(f"{len(subgraphs)} subgraphs, {len(candidates)} candidates, {len(measurements)} measurements")


def _ends_with(names: pa.ChunkedArray, suffixes: Sequence[str]) -> pa.ChunkedArray:
    found = pc.ends_with(names, suffixes[0])
    for suffix in suffixes[1:]:
        found = pc.or_(found, pc.ends_with(names, suffix))
    return found


def _of(
    rounds: Sequence[RoundFiles], path: Callable[[RoundFiles], Path], schema: pa.Schema, subgraphs: pa.Table
) -> pa.Table:
    """The rows of these subgraphs in a table of each round."""
    found = pa.concat_tables([schema.empty_table(), *(tables.read(path(each), schema) for each in rounds)])
    return found.filter(pc.is_in(found["subgraph_id"], subgraphs["subgraph_id"].combine_chunks()))


def _once(candidates: pa.Table) -> pa.Table:
    """Each candidate once: models share subgraphs."""
    firsts = list({key: n for n, key in reversed(list(enumerate(candidates["candidate_id"].to_pylist())))}.values())
    return candidates.take(sorted(firsts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", type=Path, required=True)
    parser.add_argument("--operators", nargs="+", required=True, metavar="SUFFIX")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    gather(given.runs, given.operators, given.out)
