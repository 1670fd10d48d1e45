"""Record a pool: candidates of many subgraphs, all measured, twice if wanted, to train and compare without noise.

    python benchmarks/pool/record.py --models NAME_OR_FILE ... --out FOLDER [--rounds 10,5,5] [--passes 1]
        [--target JSON] [--precision model] [--winograd auto] [--strassen auto] [--spaces own] [--subgraphs N]
        [--operators OPERATOR ...] [--having PRIMITIVE] [--but-of FOLDER ...] [--clusterings core-operator]

The first round of each subgraph is drawn at random; the later ones are evolved, in equal parts for each clustering,
under models that were trained on all before them. A pass measures all candidates once
more, in an order of its own. An anchor is timed again and again beside them, so that it is seen when the machine was
not quiet: nothing else may run on it. Interrupted, it goes on where it stood. The folder gets

    models.parquet, subgraphs.parquet      MODELS and SUBGRAPHS
    candidates.parquet                     CANDIDATES; `family_id` is that of core-operator
    measurements.parquet                   MEASUREMENTS of the first pass, as `--devices replay:` reads it
    again.parquet                          of the second one
    anchors.parquet                        of the anchor, in the order of time
"""

import argparse
import itertools
import multiprocessing
import operator
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lib.contracts import digests, tables
from lib.contracts.errors import TunerError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.graph.algorithms import AS_IT_IS, AlgorithmConfig
from lib.machine import targets
from lib.measure.local_pool import LocalPool
from lib.measure.runner import MeasureConfig
from lib.models.source import Source
from lib.search import candidates as proposed
from lib.search import evolution
from lib.search.evolution import DesignSpace, Measured, Proposal, SearchConfig
from lib.search.features import padded
from lib.tir.workload import load_module
from lib.tuning.cost_model import FamilyModel, Samples, TrainConfig, train
from lib.tuning.families import cluster
from lib.tuning.history import latencies_s
from stages import extract, join
from stages.measure import jobs_of

ROOT = Path(__file__).resolve().parents[2]
_ANCHOR_EVERY = 10  # subgraphs
_LEAST_SAMPLES = 16  # of a family that gets a model
_LOOKED_AT = 12  # programs
_NO_PROVENANCE = Provenance(session="pool")


@dataclass(frozen=True)
class Search:
    """What a process needs to propose candidates of a subgraph."""

    subgraph_id: str
    workload: str
    target: str
    n: int
    models: Sequence[FamilyModel]  # one for each clustering; none: drawn at random
    parents: Sequence[Measured]
    known: frozenset[str]
    seed: int
    spaces: str


def propose(search: Search) -> list[Proposal]:
    """New candidates; fewer where the space has no more, none where TVM cannot search it."""
    target, config = targets.cpu_target(search.target).tvm(), SearchConfig(spaces=search.spaces)
    try:
        workload = load_module(search.workload)
        space = DesignSpace(workload, target, config.offered, search.seed)
        if not search.models:
            return evolution.sampled(space, search.n, known=search.known, seed=search.seed)
        found: list[Proposal] = []
        for n, model in enumerate(search.models, start=1):
            known = search.known | {proposal.program_hash for proposal in found}
            found += evolution.evolve(
                space, search.n * n // len(search.models) - len(found), model=model, parents=search.parents,
                known=known, seed=digests.seed(search.seed, n), config=config, n_random=0,
            )  # fmt: skip
    except (RuntimeError, ValueError, LookupError) as error:
        print(f"{search.subgraph_id}: {str(error).strip().splitlines()[-1]}", flush=True)
        return []
    return found


class Recording:
    """The folder, with what is in it so far."""

    def __init__(
        self,
        folder: Path,
        target: targets.CpuTarget,
        models: Sequence[str],
        n_subgraphs: int,
        operators: Sequence[str],
        algorithms: AlgorithmConfig,
        known: Collection[str],
        primitive: str = "",
    ) -> None:
        self.folder, self.target, self.algorithms = folder, target, algorithms
        found = [row for row in self._import(models) if not operators or row["core_operator"] in operators]
        found = [row for row in found if row["subgraph_id"] not in known]
        found = [row for row in found if not primitive or self._has(row, primitive)]
        self.subgraphs = self._chosen(found, n_subgraphs)
        self.texts = {row["subgraph_id"]: row["workload"] for row in self.subgraphs}
        families = cluster([SimpleNamespace(**row) for row in self.subgraphs], "core-operator")
        self.family_of = {row["subgraph_id"]: family for row, family in zip(self.subgraphs, families, strict=True)}

    def _import(self, models: Sequence[str]) -> list[dict[str, Any]]:
        files = ModelFiles(self.folder / "imported")
        if not (self.folder / "subgraphs.parquet").exists():
            parts = []
            for model in models:
                own = ModelFiles(self.folder / "imported" / Path(model).stem)
                try:
                    if not own.subgraphs.exists():
                        extract.run(
                            Source(model, 0, 0, "", ""),
                            self.target,
                            self.algorithms,
                            provenance=_NO_PROVENANCE,
                            out=own,
                        )
                    parts.append(join.Part(Path(model).stem, 1.0, own.subgraphs))
                except TunerError as error:
                    parts.append(join.Part(Path(model).stem, 1.0, None, str(error)))
                print(f"imported {model} {parts[-1].error}", flush=True)
            join.run(parts, provenance=_NO_PROVENANCE, out=files)
            files.models.rename(self.folder / "models.parquet")
            subgraphs = without_paths(tables.read(files.subgraphs, SUBGRAPHS))
            tables.write(subgraphs, self.folder / "subgraphs.parquet", SUBGRAPHS, _NO_PROVENANCE)
        return [row for row in tables.read(self.folder / "subgraphs.parquet", SUBGRAPHS).to_pylist() if row["tunable"]]

    def _has(self, row: dict[str, Any], primitive: str) -> bool:
        """Whether one of some programs of a subgraph, in the space that fits it, has a primitive of TVM."""
        search = Search(row["subgraph_id"], row["workload"], self.target.text, _LOOKED_AT, (), (), frozenset(), 0,
                        SearchConfig().spaces)  # fmt: skip
        return any(f'"{primitive}"' in proposal.trace for proposal in propose(search))

    @staticmethod
    def _chosen(rows: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
        """All, or n of them: those with most FLOP of each family in turn."""
        if not n:
            return rows
        of_family: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(rows, key=lambda row: -row["flop"] * row["weight"]):
            of_family.setdefault(row["core_operator"], []).append(row)
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*of_family.values()))
        return [row for row in in_turn if row is not None][:n]

    def table(self, kind: str, subgraph_id: str, schema: pa.Schema, n_round: int) -> pa.Table | None:
        path = self.path(kind, n_round, subgraph_id)
        return tables.read(path, schema) if path.exists() else None

    def path(self, kind: str, n_round: int, subgraph_id: str) -> Path:
        return self.folder / "parts" / kind / f"{n_round}-{subgraph_id}.parquet"

    def samples(self, subgraph_id: str, n_round: int) -> Samples:
        """What the rounds before one measured of a subgraph."""
        rows, latency = self._rows(subgraph_id, n_round), self._latencies(subgraph_id, n_round)
        features = padded([np.asarray(row["features"], np.float32) for row in rows])
        latencies = np.array([latency.get(row["candidate_id"], np.nan) for row in rows], float)
        return Samples(features, np.array([subgraph_id] * len(rows)), latencies)

    def parents(self, subgraph_id: str, n_round: int) -> tuple[list[Measured], frozenset[str]]:
        """The programs of the rounds before one, the fastest first; and the hashes of all."""
        rows, latency = self._rows(subgraph_id, n_round), self._latencies(subgraph_id, n_round)
        timed = [Measured(row["trace"], latency[row["candidate_id"]]) for row in rows
                 if np.isfinite(latency.get(row["candidate_id"], np.nan))]  # fmt: skip
        known = frozenset(row["program_hash"] for row in rows) | {digests.of_trace(row["trace"]) for row in rows}
        return sorted(timed, key=lambda each: each.latency_s), known

    def _rows(self, subgraph_id: str, n_round: int) -> list[dict[str, Any]]:
        parts = [self.table("candidates", subgraph_id, CANDIDATES, n) for n in range(n_round)]
        return [row for part in parts if part is not None for row in part.to_pylist()]

    def _latencies(self, subgraph_id: str, n_round: int) -> dict[str, float]:
        parts = [self.table("measurements", subgraph_id, MEASUREMENTS, n) for n in range(n_round)]
        return {
            key: latency_s
            for part in parts if part is not None
            for key, latency_s in zip(part["candidate_id"].to_pylist(), latencies_s(part), strict=True)
        }  # fmt: skip

    def before(self, kind: str, schema: pa.Schema, n_round: int) -> dict[str, pa.Table]:
        """What the rounds before one have of each subgraph."""
        found = {}
        for subgraph_id in self.texts:
            parts = [part for n in range(n_round) if (part := self.table(kind, subgraph_id, schema, n)) is not None]
            found[subgraph_id] = pa.concat_tables([schema.empty_table(), *parts])
        return found

    def merge(self, n_rounds: int) -> None:
        """One table of each kind."""
        for kind, schema in (("candidates", CANDIDATES), ("measurements", MEASUREMENTS), ("again", MEASUREMENTS)):
            rows = without_host(pa.concat_tables(self.before(kind, schema, n_rounds).values()))
            if len(rows):
                tables.write(rows, self.folder / f"{kind}.parquet", schema, _NO_PROVENANCE)
        anchors = [
            tables.read(path, MEASUREMENTS) for path in sorted((self.folder / "parts" / "anchors").glob("*.parquet"))
        ]
        rows = without_host(pa.concat_tables(anchors))
        tables.write(rows, self.folder / "anchors.parquet", MEASUREMENTS, _NO_PROVENANCE)


def without_paths(subgraphs: pa.Table) -> pa.Table:
    """What is published names no folder: TVM keeps where the code lies that made a function."""
    place = subgraphs.column_names.index("workload")
    here = str(ROOT).replace("/", r"\/") + r"\/"  # as its JSON has it
    found = pc.replace_substring(subgraphs["workload"], here, "")
    return subgraphs.set_column(place, SUBGRAPHS.field("workload"), found)


def without_host(rows: pa.Table) -> pa.Table:
    """What is published names no machine."""
    if "host" not in rows.column_names:
        return rows
    return rows.set_column(rows.column_names.index("host"), "host", pa.array(["recorder"] * len(rows)))


def models_for(recording: Recording, clustering: str, n_round: int) -> dict[str, FamilyModel]:
    """By subgraph: what was trained on all rounds before one, with the others of its family."""
    of_family: dict[str, list[Samples]] = {}
    described = [SimpleNamespace(**row) for row in recording.subgraphs]
    members: dict[str, list[str]] = {}
    for row, family in zip(described, cluster(described, clustering), strict=True):
        of_family.setdefault(family, []).append(recording.samples(row.subgraph_id, n_round))
        members.setdefault(family, []).append(row.subgraph_id)
    found: dict[str, FamilyModel] = {}
    for family, parts in of_family.items():
        data = reduce(operator.add, parts)
        if len(data) >= _LEAST_SAMPLES and np.isfinite(data.latencies_s).any():
            model = train(data, TrainConfig(), seed=n_round)
            found |= dict.fromkeys(members[family], model)
    return found


def search_round(recording: Recording, n_round: int, n: int, clusterings: Sequence[str], spaces: str) -> None:
    """Propose a round's candidates of all subgraphs that have none yet."""
    left = [key for key in recording.texts if not recording.path("candidates", n_round, key).exists()]
    if not left:
        return
    models = [models_for(recording, clustering, n_round) for clustering in clusterings] if n_round else []
    searches = [
        Search(key, recording.texts[key], recording.target.text, n, [m[key] for m in models if key in m],
               *recording.parents(key, n_round), digests.seed("pool", key, n_round), spaces)
        for key in left
    ]  # fmt: skip
    with ProcessPoolExecutor(recording.target.threads, multiprocessing.get_context("spawn")) as processes:
        for key, found in zip(left, processes.map(propose, searches), strict=True):
            rows = proposed.table([(key, recording.family_of[key], proposal) for proposal in found])
            tables.write(rows, recording.path("candidates", n_round, key), CANDIDATES, _NO_PROVENANCE)


def measure_rounds(recording: Recording, pool: LocalPool, kind: str, rounds: Sequence[int], seed: int) -> None:
    """Measure the candidates of some rounds of all subgraphs, in an order that the seed decides; those of a subgraph
    one after the other, since a machine may be slower an hour later."""
    order = list(recording.texts)
    np.random.default_rng(seed).shuffle(order)
    left = [key for key in order if not recording.path(kind, rounds[-1], key).exists()]
    started = time.perf_counter()
    done = 0
    for n, key in enumerate(left):
        if n % _ANCHOR_EVERY == 0:
            measure_anchor(recording, pool)
        parts = [recording.table("candidates", key, CANDIDATES, n_round) for n_round in rounds]
        rows = pa.concat_tables([part for part in parts if part is not None])
        found = [asdict(measurement) for measurement in pool.run(jobs_of(rows, recording.texts))]
        table = pa.Table.from_pylist(found, schema=MEASUREMENTS)
        tables.write(table, recording.path(kind, rounds[-1], key), MEASUREMENTS, _NO_PROVENANCE)
        done += len(found)
        if n % 20 == 0:
            rate = done / (time.perf_counter() - started)
            print(f"{kind} {rounds}: {n} of {len(left)} subgraphs, {rate:.1f} candidates/s", flush=True)


def measure_anchor(recording: Recording, pool: LocalPool) -> None:
    """Time the first candidate of the first subgraph once more."""
    rows = next(iter(_tables(recording)), None)
    if rows is None:
        return
    found = [asdict(measurement) for measurement in pool.run(jobs_of(rows.slice(0, 1), recording.texts))]
    path = recording.folder / "parts" / "anchors" / f"{time.time():.0f}.parquet"
    tables.write(pa.Table.from_pylist(found, schema=MEASUREMENTS), path, MEASUREMENTS, _NO_PROVENANCE)


def _tables(recording: Recording) -> Iterator[pa.Table]:
    for key in recording.texts:
        rows = recording.table("candidates", key, CANDIDATES, 0)
        if rows is not None and len(rows):
            yield rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default="host")
    parser.add_argument("--spaces", default="own")
    parser.add_argument("--rounds", default="10,5,5", help="candidates of a subgraph in each round")
    parser.add_argument("--passes", type=int, default=1, choices=(1, 2))
    parser.add_argument("--subgraphs", type=int, default=0, help="only so many, those with most FLOP of each family")
    parser.add_argument("--operators", nargs="*", default=[], help="only subgraphs with these core operators")
    parser.add_argument("--having", default="", help="only subgraphs with programs of this primitive, e.g. RFactor")
    parser.add_argument("--precision", default=AS_IT_IS, help="as of the command; files of bytes are run in bytes")
    parser.add_argument("--winograd", default="auto", help="`[extract] winograd`")
    parser.add_argument("--strassen", default="auto", help="`[extract] strassen`")
    parser.add_argument("--but-of", type=Path, nargs="*", default=[], help="pools whose subgraphs are left out")
    parser.add_argument("--clusterings", nargs="+", default=["core-operator"])
    given = parser.parse_args()
    target = targets.cpu_target(given.target)
    algorithms = AlgorithmConfig(winograd=given.winograd, strassen=given.strassen, precision=given.precision)
    parts = [tables.read(folder / "subgraphs.parquet", SUBGRAPHS)["subgraph_id"] for folder in given.but_of]
    known = {key for part in parts for key in part.to_pylist()}
    recording = Recording(
        given.out, target, given.models, given.subgraphs, given.operators, algorithms, known, given.having
    )
    print(f"{len(recording.texts)} subgraphs", flush=True)
    pool = LocalPool(recording.target, MeasureConfig())
    counts = [int(n) for n in given.rounds.split(",")]
    for n_round, n in enumerate(counts):
        search_round(recording, n_round, n, given.clusterings, given.spaces)
        measure_rounds(recording, pool, "measurements", [n_round], seed=n_round)
        recording.merge(n_round + 1)
    if given.passes == 2:
        measure_rounds(recording, pool, "again", list(range(len(counts))), seed=100)
    recording.merge(len(counts))
    pool.close()


if __name__ == "__main__":
    main()
