"""Measurements in, one model for each family out: needs Parquet and XGBoost alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.conditions import Conditions, require_equal
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import FAMILIES, TRAINING
from lib.contracts.tables import Provenance
from lib.tuning import history
from lib.tuning.base import Base
from lib.tuning.cost_model import Accuracy, FamilyModel, Samples, TrainConfig, accuracy, train, unseen_regrets
from lib.tuning.history import RoundSamples


def run(
    families: Path,
    past: Sequence[RoundFiles],
    config: TrainConfig,
    *,
    seed: int,
    provenance: Provenance,
    out: RoundFiles,
    base_of: Mapping[str, Base | None] | None = None,
) -> Path:
    """Train the models of the families that the last round measured; the others keep theirs.

    Args:
        families: A FAMILIES table.
        past: The finished rounds of this run, the last of them measured, but not trained on yet.
        seed: Equal inputs and seeds give equal models.
        out: Gets the models and, last, the TRAINING table: which model each family has now, and how well the
            round's candidates were foretold.
        base_of: By family: what one without enough samples has for a model, and others begin with.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    families_table = tables.read(families, FAMILIES)
    family_ids = sorted(set(families_table["family_id"].to_pylist()))
    bases = base_of or {}
    rounds = [history.samples(files) for files in past]
    shared: Conditions | None = None
    for files, part in zip(past, rounds, strict=True):
        shared = require_equal(part.conditions, shared, files.measurements)
    earlier = _earlier_models(past)
    rows, written = [], []
    for family_id in family_ids:
        base = bases.get(family_id)
        foretold = forecast_accuracy(rounds[-1], family_id)
        row = dict(earlier.get(family_id, {})) or {
            "family_id": family_id,
            "num_samples": 0,
            "model": "",
            "model_digest": "",
            "regrets": [],
        }
        if (rounds[-1].families == family_id).any() or (base and not row["model"]):
            with clock.spent("train"):
                data, others = gather(rounds, family_id, config)
                model = fit(data, config, seed, base.model() if base else None, others)
                if base is None and out.is_recalled and _has_unknown(families_table, family_id, data):
                    row["regrets"] = unseen_regrets(data, config, seed)
            if model is not None:
                path = out.model(family_id)
                with tables.written_whole(path) as partial:
                    model.save(partial)
                written.append(path)
                row |= {"num_samples": len(data), "model": str(path.relative_to(out.run)),
                        "model_digest": digests.of_file(path)}  # fmt: skip
        rows.append({**row, **foretold})
    table = pa.Table.from_pylist(rows, schema=TRAINING)
    return tables.write(table, out.training, TRAINING, provenance, clock=clock.read(), files=written)


def gather(rounds: Sequence[RoundSamples], family_id: str, config: TrainConfig) -> tuple[Samples, Samples]:
    """A family's latest `max_samples` programs, oldest first, and the latest `max_others` of all other families."""
    own = [part.families == family_id for part in rounds]
    return _latest(rounds, own, config.max_samples), _latest(rounds, [~each for each in own], config.max_others)


def _latest(rounds: Sequence[RoundSamples], chosen: Sequence[np.ndarray], n: int) -> Samples:
    def column(name: str) -> np.ndarray:
        parts = [getattr(part, name)[which] for part, which in zip(rounds, chosen, strict=True)]
        return np.concatenate(parts)[max(0, sum(map(len, parts)) - n) :]

    return Samples(column("features"), column("subgraphs"), column("latencies_s"))


def fit(
    data: Samples, config: TrainConfig, seed: int, base: FamilyModel | None = None, others: Samples | None = None
) -> FamilyModel | None:
    """A model; the base itself, or None, if too few programs of the family were measured, or none worked."""
    if len(data) < config.min_samples or np.isnan(data.latencies_s).all():
        return base
    return train(data, config, seed, base, others)


def _has_unknown(families: pa.Table, family_id: str, data: Samples) -> bool:
    """Whether a family has a subgraph of which nothing is known, so that a first look will ask how many are enough."""
    members = families.filter(pc.equal(families["family_id"], family_id))["subgraph_id"].to_pylist()
    return bool(set(members) - set(data.workloads))


def forecast_accuracy(last: RoundSamples, family_id: str) -> dict[str, float | int | None]:
    """Columns of TRAINING: how a family's candidates of the last round were foretold, a mean over subgraphs."""
    scored = (last.families == family_id) & ~np.isnan(last.scores)
    found: list[Accuracy] = []
    ceilings: list[float] = []
    for subgraph_id in np.unique(last.subgraphs[scored]):
        chosen = scored & (last.subgraphs == subgraph_id)
        speeds = np.nan_to_num(1.0 / last.latencies_s[chosen], nan=0.0)
        found.append(accuracy(last.scores[chosen], speeds))
        first, second = last.repeats_s[chosen][~np.isnan(last.repeats_s[chosen]).any(axis=1)].T
        ceilings.append(accuracy(-first, 1.0 / second).pairwise)

    def mean(values: list[float]) -> float | None:
        known = [value for value in values if not np.isnan(value)]
        return float(np.mean(known)) if known else None

    return {
        "num_predicted": int(scored.sum()),
        "pairwise_accuracy": mean([a.pairwise for a in found]),
        "noise_ceiling": mean(ceilings),
        "rank_correlation": mean([a.rank_correlation for a in found]),
        "top_recall": mean([a.top_recall for a in found]),
    }


def _earlier_models(past: Sequence[RoundFiles]) -> dict[str, dict[str, object]]:
    if len(past) < 2:
        return {}
    columns = ["family_id", "num_samples", "model", "model_digest", "regrets"]
    return {row["family_id"]: row for row in tables.read(past[-2].training, TRAINING).select(columns).to_pylist()}
