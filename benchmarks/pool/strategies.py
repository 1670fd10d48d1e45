"""Trials that a search needs to come near the best of a pool: {foresee, gradient, round-robin} x {one model a family,
one for all, one each}, from scratch and from base models, replayed without noise.

    python benchmarks/pool/strategies.py --pool FOLDER --out FILE.parquet [--seeds 5] [--per-round 16] [--warm-up 10]

Planning, choosing and training are the tuner's own; the candidates are those of the pool, ranked by the models as a
search ranks what it finds (`lib.search.recorded`), and a measurement is the program's latency over both passes. What is
to become small is the mean of the models' latencies, each relative to the pool's best. Variants of one seed begin with
the same random programs. A subgraph of the pool has fewer programs than a space, so rounds are smaller than the
tuner's. Intervals of 95 % are by bootstrap over seeds.
"""

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # a process a core
sys.path.append(str(Path(__file__).resolve().parents[1]))

import intervals
import numpy as np
import pandas as pd
import pyarrow as pa
from deep import DeepPool, in_parallel

from lib.contracts import digests, tables
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, PLAN
from lib.contracts.statuses import Status
from lib.machine import targets
from lib.search.evolution import Proposal, SearchConfig
from lib.search.recorded import Recorded
from lib.searching import Searched, Searcher
from lib.tuning.base import NONE, base_models
from lib.tuning.cost_model import TrainConfig
from lib.tuning.families import cluster
from lib.tuning.history import History, model_latency_s
from lib.tuning.planning import STRATEGIES, Member, PlanConfig, plan_round
from stages.train import fit

CLUSTERINGS = ("core-operator", "single", "each")
NEAR = (0.05, 0.02, 0.01)  # of the pool's best
_KEYS = ["strategy", "clustering", "base", "others", "oracle"]
_ANSORS = ("gradient", "single", False, False, False)


@dataclass(frozen=True)
class Variant:
    """One way to tune."""

    strategy: str
    clustering: str
    base: bool
    others: bool = False  # whether a family's model learns from other families, too
    oracle: bool = False  # models that know the latencies: what no model can do better

    @property
    def name(self) -> str:
        others = " and others" if self.others else ""
        kind = "oracle" if self.oracle else self.clustering + others
        return f"{self.strategy}, {kind}{', on base' if self.base else ''}"


class Oracle:
    """Stands for a model, from the first round on."""

    def __init__(self, pool: DeepPool) -> None:
        speeds = np.nan_to_num(-np.log(pool.rows["latency"].to_numpy()), nan=-99.0)  # those that failed
        self._scores = dict(zip(map(_key, pool.features), speeds, strict=True))

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Logarithms of speeds."""
        return np.array([self._scores[_key(row)] for row in features], np.float32)


def _key(features: np.ndarray) -> bytes:
    return np.asarray(features, np.float32).tobytes()


VARIANTS = [
    *(Variant(strategy, "single", False, oracle=True) for strategy in STRATEGIES),
    *(Variant(strategy, clustering, base, others)
    for strategy, clustering, base, others in itertools.product(STRATEGIES, CLUSTERINGS, (False, True), (False, True))
    if not (base and clustering == "single")  # there is a base model for each operator
    and (not others or (clustering == "core-operator" and strategy == "foresee"))),
]  # fmt: skip


class Replay:
    """A run over a pool."""

    def __init__(self, pool: DeepPool, recorded: Recorded, variant: Variant, plan: PlanConfig, seed: int) -> None:
        self.pool, self.recorded, self.plan, self.seed, self.variant = pool, recorded, plan, seed, variant
        self.target = targets.cpu_target()
        self.candidates = tables.read(pool.folder / "candidates.parquet", CANDIDATES)
        self.place = {key: n for n, key in enumerate(pool.rows["program_hash"])}
        families = cluster([SimpleNamespace(**row) for row in pool.subgraphs], variant.clustering)
        bases = base_models(self.target.instructions) if variant.base else NONE
        self.weights = pool.weights()
        self.searched = [
            Searched(row["subgraph_id"], family, row["workload"], 1 / len(families),
                     base.regrets if (base := bases.of(row["core_operator"])) else ())
            for row, family in zip(pool.subgraphs, families, strict=True)
        ]  # fmt: skip
        self.members = [Member(s.subgraph_id, s.family_id, self.weights[s.subgraph_id]) for s in self.searched]
        of_family = {
            family: bases.of(row["core_operator"]) for row, family in zip(pool.subgraphs, families, strict=True)
        }
        self.base_of = {family: base.model() if base else None for family, base in of_family.items()}
        self.models = {family: model for family, model in self.base_of.items() if model}
        self.oracle = Oracle(pool) if variant.oracle else None
        self.history = History()
        self.measured: dict[str, list[int]] = {}  # by family: places

    def rounds(self) -> Iterator[tuple[int, float]]:
        """After each round: trials so far, and the latency."""
        while rows := plan_round(self.history, self.members, self.plan):
            searcher = Searcher(
                self.searched, self.history, self.models, self.target.tvm(), SearchConfig(),
                digests.seed(self.seed, self.history.n_rounds), recorded=self.recorded,
            )  # fmt: skip
            rows = [searcher.choose(rows)] if rows[0].kind == "foresee" else rows
            found = {row: searcher.propose(row) for row in rows}
            self._measure(pa.Table.from_pylist([asdict(row) for row in rows], schema=PLAN), found)
            yield self.history.n_trials, model_latency_s(self.history, self.weights)
            for family_id in {row.family_id for row in rows}:
                model = self._trained(family_id)
                self.models |= {family_id: model} if model else {}

    def _trained(self, family_id: str) -> Any:
        if self.oracle:
            return self.oracle
        measured = [place for family, places in self.measured.items() if family != family_id for place in places]
        own, others = (self.pool.samples(np.array(places, int)) for places in (self.measured[family_id], measured))
        return fit(own, TrainConfig(), self.seed, self.base_of[family_id], others if self.variant.others else None)

    def _measure(self, plan: pa.Table, found: dict[Any, list[Proposal]]) -> None:
        places = []
        for row, proposals in found.items():
            new = [self.place[proposal.program_hash] for proposal in proposals]
            self.measured.setdefault(row.family_id, []).extend(new)
            places += new
        rows = [
            {"candidate_id": row.candidate_id, "subgraph_id": row.subgraph_id, "build_s": 0.0, "run_s": 0.0,
             **({"status": Status.OK, "latencies": [row.latency]} if np.isfinite(row.latency)
                else {"status": Status.RUN_ERROR, "latencies": []})}
            for row in self.pool.rows.iloc[places].itertuples()
        ]  # fmt: skip
        names = ("candidate_id", "subgraph_id", "status", "latencies", "build_s", "run_s")
        columns = [MEASUREMENTS.field(name) for name in names]
        self.history.add_round(
            plan,
            self.candidates.take(pa.array(places, pa.int64())),
            pa.Table.from_pylist(rows, schema=pa.schema(columns)),
        )


def of_variant(folder: Path, variant: Variant, plan: PlanConfig, seed: int) -> list[dict[str, Any]]:
    """The curve of a run, until it is within the nearest distance of the pool's best or finds no more."""
    pool, started = DeepPool(folder), time.perf_counter()
    replay = Replay(pool, Recorded(folder), variant, plan, seed)
    best = pool.rows.groupby("subgraph_id")["latency"].min()
    goal = sum(weight * best[key] for key, weight in replay.weights.items())
    rows = []
    for trials, latency_s in replay.rounds():
        rows.append({**asdict(variant), "seed": seed, "trials": trials, "regret": latency_s / goal - 1})
        if latency_s <= goal * (1 + min(NEAR)):
            break
    print(f"{variant.name}, seed {seed}: {len(rows)} rounds, {time.perf_counter() - started:.0f} s", flush=True)
    return rows


def needed(rows: pd.DataFrame) -> pd.DataFrame:
    """Trials to each distance: a row for each variant and seed; all of the pool's where it was not reached."""
    found = []
    for key, curve in rows.groupby([*_KEYS, "seed"]):
        reached = {near: curve.loc[curve["regret"] <= near, "trials"].min() for near in NEAR}
        found.append((*key, *(n if np.isfinite(n) else curve["trials"].max() for n in reached.values())))
    return pd.DataFrame(found, columns=[*_KEYS, "seed", *NEAR])


def summary(rows: pd.DataFrame) -> Iterator[str]:
    """A line of Markdown for each variant; the ratios are of gradient with one model for all to it."""
    variants: dict[Any, pd.DataFrame] = {key: each.set_index("seed") for key, each in needed(rows).groupby(_KEYS)}
    ansors = variants[_ANSORS]
    yield "| variant | " + " | ".join(f"trials to {near:.0%}" for near in NEAR) + " | fewer, to 2 % |"
    yield "|---|" + "---|" * (len(NEAR) + 1)
    for key, own in variants.items():
        counts = [intervals.estimate(intervals.median_of(own[near]), len(own)).text(digits=4) for near in NEAR]
        ratio = intervals.estimate(intervals.geometric_mean_of(ansors[0.02] / own[0.02]), len(own)).text()
        yield f"| {Variant(*key).name} | {' | '.join(counts)} | {ratio} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pool", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--per-round", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=[], help="variants, by name, beside Ansor's; default: all")
    given = parser.parse_args()
    orders = []
    chosen = [v for v in VARIANTS if not given.only or v.name in (*given.only, Variant(*_ANSORS).name)]
    for seed, variant in itertools.product(range(given.seeds), chosen):
        plan = PlanConfig(
            strategy=variant.strategy, num_trials_per_round=given.per_round, num_trials_warmup=given.warm_up
        )
        orders.append((given.pool, variant, plan, seed))
    print("\n".join(summary(in_parallel(of_variant, orders, given.out))))


if __name__ == "__main__":
    main()
