"""Measurements in, one model for each family out: needs Parquet and XGBoost alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from lib.contracts import digests, tables
from lib.contracts.clock import Clock
from lib.contracts.conditions import Conditions, require_equal
from lib.contracts.files import RoundFiles
from lib.contracts.schemas import FAMILIES, TRAINING
from lib.contracts.tables import Provenance
from lib.tuning import history
from lib.tuning.cost_model import Accuracy, FamilyModel, TrainConfig, accuracy, labels, train
from lib.tuning.history import RoundSamples


def run(
    families: Path,
    past: Sequence[RoundFiles],
    config: TrainConfig,
    *,
    seed: int,
    provenance: Provenance,
    out: RoundFiles,
) -> Path:
    """Train the models of the families that the last round measured; the others keep theirs.

    Args:
        families: A FAMILIES table.
        past: The finished rounds of this run, the last of them measured, but not trained on yet.
        seed: Equal inputs and seeds give equal models.
        out: Gets the models and, last, the TRAINING table: which model each family has now, and how well the
            round's candidates were foretold.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    family_ids = sorted(set(tables.read(families, FAMILIES)["family_id"].to_pylist()))
    rounds = [history.samples(files) for files in past]
    shared: Conditions | None = None
    for files, part in zip(past, rounds, strict=True):
        shared = require_equal(part.conditions, shared, files.measurements)
    earlier = _earlier_models(past)
    rows, written = [], []
    for family_id in family_ids:
        foretold = forecast_accuracy(rounds[-1], family_id)
        row = earlier.get(family_id) or {
            "family_id": family_id,
            "num_samples": 0,
            "model": "",
            "model_digest": "",
        }
        if (rounds[-1].families == family_id).any():
            with clock.spent("train"):
                data = gather(rounds, family_id, config)
                model = fit(data, config, seed)
            if model is not None:
                path = out.model(family_id)
                with tables.written_whole(path) as partial:
                    model.save(partial)
                written.append(path)
                row = {"family_id": family_id, "num_samples": len(data.features),
                       "model": str(path.relative_to(out.run)), "model_digest": digests.of_file(path)}  # fmt: skip
        rows.append({**row, **foretold})
    table = pa.Table.from_pylist(rows, schema=TRAINING)
    return tables.write(table, out.training, TRAINING, provenance, clock=clock.read(), files=written)


@dataclass(frozen=True, slots=True)
class Samples:
    """Training data of one family, oldest first."""

    features: list[np.ndarray]
    subgraphs: np.ndarray
    latencies_s: np.ndarray


def gather(rounds: Sequence[RoundSamples], family_id: str, config: TrainConfig) -> Samples:
    """A family's latest `max_samples` programs."""
    of_family = [np.flatnonzero(part.families == family_id) for part in rounds]
    features = [part.features[i] for part, chosen in zip(rounds, of_family, strict=True) for i in chosen]
    subgraphs = np.concatenate([part.subgraphs[chosen] for part, chosen in zip(rounds, of_family, strict=True)])
    latencies = np.concatenate([part.latencies_s[chosen] for part, chosen in zip(rounds, of_family, strict=True)])
    n = config.max_samples
    return Samples(features[-n:], subgraphs[-n:], latencies[-n:])


def fit(data: Samples, config: TrainConfig, seed: int) -> FamilyModel | None:
    """A model, or None if too few programs were measured, or none worked."""
    if len(data.features) < config.min_samples or np.isnan(data.latencies_s).all():
        return None
    return train(data.features, labels(data.latencies_s, data.subgraphs), config, seed)


def forecast_accuracy(last: RoundSamples, family_id: str) -> dict[str, float | int | None]:
    """Columns of TRAINING: how a family's candidates of the last round were foretold, a mean over subgraphs."""
    scored = (last.families == family_id) & ~np.isnan(last.scores)
    found: list[Accuracy] = []
    for subgraph_id in np.unique(last.subgraphs[scored]):
        chosen = scored & (last.subgraphs == subgraph_id)
        speeds = np.nan_to_num(1.0 / last.latencies_s[chosen], nan=0.0)
        found.append(accuracy(last.scores[chosen], speeds))

    def mean(values: list[float]) -> float | None:
        known = [value for value in values if not np.isnan(value)]
        return float(np.mean(known)) if known else None

    return {
        "num_predicted": int(scored.sum()),
        "pairwise_accuracy": mean([a.pairwise for a in found]),
        "rank_correlation": mean([a.rank_correlation for a in found]),
        "top_recall": mean([a.top_recall for a in found]),
    }


def _earlier_models(past: Sequence[RoundFiles]) -> dict[str, dict[str, object]]:
    if len(past) < 2:
        return {}
    columns = ["family_id", "num_samples", "model", "model_digest"]
    return {row["family_id"]: row for row in tables.read(past[-2].training, TRAINING).select(columns).to_pylist()}
