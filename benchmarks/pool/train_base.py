"""Train the base models of a class of targets from recorded pools, and write their card.

    python benchmarks/pool/train_base.py --pools FOLDER ... --out lib/tuning/base_models/avx512 [--without MODEL ...]
        [--beside FOLDER ...] [--disturbed] [--operators OPERATOR ... --add] [--stock]

Pools of another class of targets may be trained on beside the class's own: features say how many lanes a machine has.
Trained on is what was measured while the anchor was about as fast as ever, or with `--disturbed` all; foretold is only
the former, and only of the class's own pools. With `--add`, models of other operators than are trained stay, and
the card says of both what they were trained on. What the card says of a model was found by leaving models out: for each
model of the pools in turn, all its subgraphs are kept from training, and those that no other model has are foretold.
`regrets` has, for n = 1, 2, ... 10, how much slower the fastest of the first n of a subgraph's recorded programs, in
the order in which they were foretold, is than the fastest of all of them; the geometric mean over subgraphs. Programs
of a pool are in part those that an earlier model liked; those of MetaSchedule's space are left out where a subgraph has
a space of this project by now, and where it has none, models see of them what traces say: there are too few for what
`PerStoreFeature` says of lowered programs beside it. With `--stock` models learn from programs of MetaSchedule's space
alone, and see all of that (`lib.tuning.base.stock_base_models`).
"""

import argparse
import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from deep import moments
from tvm.target import Target

from lib.contracts import tables
from lib.contracts.schemas import CANDIDATES, FEATURE_VERSION, MEASUREMENTS, MODELS, SUBGRAPHS
from lib.machine import targets
from lib.search import nest
from lib.search.evolution import METASCHEDULE
from lib.search.spaces.table import fitting
from lib.tir.workload import load_module
from lib.tuning.base import CARD
from lib.tuning.cost_model import LOOKS, FamilyModel, Samples, TrainConfig, accuracy, regrets, train
from lib.tuning.history import latencies_s, matrix

_LEAST_SUBGRAPHS = 4  # that an operator must have
_LEAST_PROGRAMS = 5  # of a group, to be foretold
_LEAST_FORETOLD = 2  # groups: one says little of how many programs are enough
_SEEDS = 4  # of models that are asked for what they foretell
_QUIET = 1.25  # times what the fastest fifth of an anchor's measurements take at most
CONFIG = TrainConfig(num_boost_round=150, max_depth=5, learning_rate=0.05, colsample=0.3)


class Pool:
    """Recorded programs, a row for each measurement: features, subgraph, core operator, latency, what it may be
    compared with, and whether it was undisturbed and is of the class's own. And which model has what."""

    def __init__(self, folders: list[Path], beside: list[Path], of_stock: bool = False) -> None:
        """Read it.

        Args:
            of_stock: Programs of MetaSchedule's space alone, with what is known of them lowered.
        """
        parts = [_measured(folder, of_stock) for folder in [*folders, *beside]]
        rows = pd.concat([rows for rows, _ in parts], ignore_index=True)
        self.is_quiet = rows["is_quiet"].to_numpy(bool)
        self.is_own = np.repeat([True] * len(folders) + [False] * len(beside), [len(found) for found, _ in parts])
        self.features = np.concatenate([features for _, features in parts])
        if not of_stock:
            self.features[:, len(nest.NAMES) :] = np.nan
        self.subgraphs, self.operators = rows["subgraph_id"].to_numpy(str), rows["operator"].to_numpy(str)
        self.latencies, self.groups = rows["latency"].to_numpy(float), rows["group"].to_numpy(str)
        self.lowerings = sorted({row["lowering"] for folder in folders for row in _conditions(folder)})
        self.models: dict[str, set[str]] = {}  # subgraphs by name
        for folder in [*folders, *beside]:
            for row in tables.read(folder / "models.parquet", MODELS).to_pylist():
                self.models.setdefault(row["name"], set()).update(row["subgraphs"])

    def samples(self, chosen: np.ndarray) -> Samples:
        return Samples(self.features[chosen], self.groups[chosen], self.latencies[chosen])


def _measured(folder: Path, of_stock: bool) -> tuple[pd.DataFrame, np.ndarray]:
    """The measurements of a pool with the programs' features, and whether its anchor was as fast as ever then.

    Those of a subgraph of one moment are a group: a machine that is slower an hour later tells nothing of programs.
    """
    candidates = tables.read(folder / "candidates.parquet", CANDIDATES)
    described = tables.read(folder / "subgraphs.parquet", SUBGRAPHS).select(["subgraph_id", "core_operator"])
    operator = dict(described.to_pandas().to_numpy())
    is_stock = pc.equal(candidates["space"], METASCHEDULE)
    candidates = candidates.filter(is_stock) if of_stock else _of_spaces_of_now(candidates, folder)
    place = {key: n for n, key in enumerate(candidates["candidate_id"].to_pylist())}
    paths = [folder / f"{name}.parquet" for name in ("measurements", "again")]
    found = pa.concat_tables([tables.read(path, MEASUREMENTS) for path in paths if path.exists()])
    rows = found.select(["candidate_id", "subgraph_id", "measured_at"]).to_pandas().assign(latency=latencies_s(found))
    rows = rows.assign(is_quiet=_is_quiet(rows["measured_at"].to_numpy(), folder))
    rows = rows[rows["candidate_id"].isin(place)]
    rows = rows.sort_values(["subgraph_id", "measured_at"]).reset_index(drop=True)
    rows["group"] = [f"{folder.name}-{n}" for n in moments(rows, "measured_at")]
    rows["operator"] = rows["subgraph_id"].map(operator)
    chosen = [place[key] for key in rows["candidate_id"]]
    return rows, matrix(candidates["features"])[chosen]


def _of_spaces_of_now(candidates: pa.Table, folder: Path) -> pa.Table:
    """Candidates but for those of MetaSchedule's space of subgraphs that have a space of this project by now."""
    target, is_stock = target_of(folder), pc.equal(candidates["space"], METASCHEDULE)
    ids = set(candidates.filter(is_stock)["subgraph_id"].to_pylist())
    rows = tables.read(folder / "subgraphs.parquet", SUBGRAPHS).select(["subgraph_id", "workload"]).to_pylist()
    moved = [row["subgraph_id"] for row in rows
             if row["subgraph_id"] in ids and fitting(load_module(row["workload"]), target)]  # fmt: skip
    has_moved = pc.is_in(candidates["subgraph_id"], pa.array(moved, pa.string()))
    return candidates.filter(pc.invert(pc.and_(is_stock, has_moved)))


def target_of(folder: Path) -> Target:
    """What a pool's programs were compiled for."""
    return _target(folder).tvm()


def target_class(folder: Path) -> str:
    """The class of targets that this is of, as base models have them."""
    return _target(folder).instructions


def _target(folder: Path) -> targets.CpuTarget:
    [text] = {row["target"] for row in _conditions(folder)}
    return targets.cpu_target(text)


def _is_quiet(moments: np.ndarray, folder: Path) -> np.ndarray:
    """Whether the anchors before and after each moment were both about as fast as they can be; pools without anchors
    (`gather.py`) are of quiet machines."""
    if not (folder / "anchors.parquet").exists():
        return np.ones(len(moments), bool)
    anchors = tables.read(folder / "anchors.parquet", MEASUREMENTS).select(["candidate_id", "latencies", "measured_at"])
    rows = anchors.to_pandas().sort_values("measured_at")
    rows["latency"] = [float(np.median(found)) if len(found) else np.inf for found in rows["latencies"]]
    usual = rows.groupby("candidate_id")["latency"].transform(lambda found: found.quantile(0.2))
    quiet = (rows["latency"] <= _QUIET * usual).to_numpy()
    after = np.searchsorted(rows["measured_at"].to_numpy(), moments)
    before = np.clip(after - 1, 0, len(quiet) - 1)
    return np.asarray(quiet[before] & quiet[np.clip(after, 0, len(quiet) - 1)])


def _conditions(folder: Path) -> list[dict[str, str]]:
    column = tables.read(folder / "measurements.parquet", MEASUREMENTS)["conditions"]
    return [dict(row) for row in {tuple(sorted(row.items())) for row in column.to_pylist()}]


def foretold(pool: Pool, usable: np.ndarray, operator: str, without: list[str]) -> pd.DataFrame:
    """How programs of unseen models were foretold: a row for each group of a subgraph and each of some seeds, since
    what one model of few samples likes best is half chance.

    Args:
        usable: What may be trained on.
    """
    rows = []
    own = pool.operators == operator
    for name, calls in pool.models.items():
        others = set().union(*(found for other, found in pool.models.items() if other not in (name, *without)))
        unseen = own & pool.is_own & pool.is_quiet & np.isin(pool.subgraphs, sorted(calls - others))
        seen = own & usable & np.isin(pool.subgraphs, sorted(others - calls))
        if not unseen.any() or len(np.unique(pool.subgraphs[seen])) < _LEAST_SUBGRAPHS:
            continue
        models = [train(pool.samples(seen), CONFIG, seed) for seed in range(_SEEDS)]
        for group in np.unique(pool.groups[unseen]):
            chosen = np.flatnonzero(unseen & (pool.groups == group) & np.isfinite(pool.latencies))
            if len(chosen) >= _LEAST_PROGRAMS:
                told = [_told(each.predict(pool.features[chosen]), pool.latencies[chosen]) for each in models]
                of = {"model": name, "group": group, "subgraph": pool.subgraphs[chosen[0]], "operator": operator,
                      "best": pool.latencies[chosen].min(), "programs": len(chosen)}  # fmt: skip
                rows += [of | one for one in told]
    return pd.DataFrame(rows)


def _told(scores: np.ndarray, latency: np.ndarray) -> dict[str, float]:
    found = {f"regret {n}": 1 + regret for n, regret in enumerate(regrets(scores, latency), start=1)}
    pairwise = accuracy(scores, 1 / latency).pairwise
    return {"pairwise": pairwise, "median": float(np.median(latency) / latency.min()), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--beside", nargs="*", type=Path, default=[], help="pools of another class, trained on too")
    parser.add_argument("--without", nargs="*", default=[], help="models whose subgraphs are not trained on")
    parser.add_argument("--operators", nargs="*", default=[], help="models of these alone; default: of all")
    parser.add_argument("--least", type=int, default=_LEAST_FORETOLD, help="groups that must be foretold")
    parser.add_argument("--add", action="store_true", help="to the models that are there, of other operators")
    parser.add_argument("--disturbed", action="store_true", help="train on what was measured in disturbed moments, too")
    parser.add_argument("--stock", action="store_true", help="of programs of MetaSchedule's space alone")
    given = parser.parse_args()
    pool = Pool(given.pools, given.beside, given.stock)
    usable = pool.is_quiet | given.disturbed
    left_out = set().union(*(pool.models[name] for name in given.without))
    kept = set().union(*(found for name, found in pool.models.items() if name not in given.without)) - left_out
    given.out.mkdir(parents=True, exist_ok=True)
    operators = {}
    for operator in given.operators or np.unique(pool.operators):
        chosen = usable & (pool.operators == operator) & np.isin(pool.subgraphs, sorted(kept))
        if len(np.unique(pool.subgraphs[chosen])) < _LEAST_SUBGRAPHS or not np.isfinite(pool.latencies[chosen]).any():
            continue
        told = foretold(pool, usable, operator, given.without)
        if len(told) < given.least * _SEEDS:
            continue
        of_unseen = [float(np.exp(np.log(told[f"regret {n}"]).mean()) - 1) for n in range(1, LOOKS + 1)]
        model: FamilyModel = train(pool.samples(chosen), CONFIG, seed=0)
        path = given.out / f"{operator.replace('+', '-')}.ubj"
        model.save(path)
        operators[operator] = {
            "file": path.name, "samples": int(chosen.sum()), "subgraphs": len(np.unique(pool.subgraphs[chosen])),
            "pairwise": round(float(told["pairwise"].mean()), 3), "regrets": [round(value, 4) for value in of_unseen],
            "median of recorded": round(float(np.exp(np.log(told["median"]).mean()) - 1), 3),
            "unseen": len(told) // _SEEDS,
        }  # fmt: skip
        print(operator, operators[operator], f"{path.stat().st_size / 1e3:.0f} kB", flush=True)
    card = {
        "features": FEATURE_VERSION, "lowering": pool.lowerings, "made": str(datetime.date.today()),
        "models": sorted(set(pool.models) - set(given.without)), "left out": given.without,
        "programs": {"own": int((usable & pool.is_own).sum()), "beside": int((usable & ~pool.is_own).sum())},
        "operators": operators,
        "training": {key: getattr(CONFIG, key) for key in ("num_boost_round", "max_depth", "learning_rate")},
    }  # fmt: skip
    if given.add:
        card = _added(json.loads((given.out / CARD).read_text(encoding="utf-8")), card, given.operators)
        for path in given.out.glob("*.ubj"):
            if path.name not in {facts["file"] for facts in card["operators"].values()}:
                path.unlink()
    (given.out / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def _added(before: dict[str, Any], card: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """The card of before, with the operators of another one, and what those were trained on; without those that were
    wanted anew, and have too few programs.

    Raises:
        SystemExit: The models of before are of other features, or were trained otherwise.
    """
    for key in ("features", "training"):
        if before[key] != card[key]:
            raise SystemExit(f"--add: the models that are there have {key} {before[key]}, the new ones {card[key]}.")
    told = {key: card[key] for key in ("made", "lowering", "models", "left out", "programs")}
    told["operators"] = sorted(card["operators"])
    added = [each for each in before.get("added", []) if not set(each["operators"]) & set(card["operators"])]
    kept = {operator: facts for operator, facts in before["operators"].items() if operator not in wanted}
    return {
        **before,
        "operators": {**kept, **card["operators"]},
        "added": [*added, *([told] if told["operators"] else [])],
    }


if __name__ == "__main__":
    main()
