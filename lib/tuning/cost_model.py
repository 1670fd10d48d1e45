"""One XGBoost model for each family: scores programs from per-store features, learns from measurements.

A program is a matrix `n_stores x 164`; its score is the sum of the trees' outputs over its rows, as in Ansor
(OSDI 2020, section 5.2) and MetaSchedule's `XGBModel`. The training is our own: TVM's ignores its
`tree_method`, predicts at random for its first 100 samples and saves pickles.

XGBoost is imported where it is used: with SciPy and pandas that takes a second, which no other command need wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lib.contracts.errors import ConfigError, ContractError, MissingInput
from lib.contracts.schemas import FEATURE_VERSION, N_FEATURES
from lib.contracts.settings import limit
from lib.machine import host

if TYPE_CHECKING:
    import xgboost as xgb

Features = Sequence[np.ndarray]  # one float32 matrix n_stores x 164 for each program


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a family's model is trained."""

    num_boost_round: int = 100
    max_depth: int = 8
    learning_rate: float = 0.15
    min_samples: int = 16  # programs measured in a family before it gets a model
    max_samples: int = 6000  # programs a model is trained on: the latest ones
    slow_weight: float = 0.1  # weight of the slowest programs; the fastest of a workload weigh 1 more
    device: str = limit("cpu")  # that trains: `cpu` or `cuda`

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"[train] device must be cpu or cuda, but got {self.device!r}.")
        if self.min_samples < 2 or self.max_samples < self.min_samples:
            raise ConfigError(f"[train] needs 2 <= min_samples <= max_samples, but got {self}.")


class FamilyModel:
    """A trained model; scores are unitless, about 1 for the fastest known program of a workload, 0 for failures."""

    def __init__(self, booster: "xgb.Booster") -> None:
        self._booster = booster

    def predict(self, features: Features) -> np.ndarray:
        """Scores, float32, one for each program."""
        if not features:
            return np.zeros(0, dtype=np.float32)
        rows, program = _stack(features)
        scores = self._booster.inplace_predict(rows)
        return np.bincount(program, weights=scores, minlength=len(features)).astype(np.float32)

    def save(self, path: Path) -> None:
        """Write the model as UBJSON; `path` must end in `.ubj`, since XGBoost goes by the suffix when it reads.

        Raises:
            OSError: The disk is full, say; XGBoost itself would raise an error of its own.
        """
        path.write_bytes(self._booster.save_raw("ubj"))

    @staticmethod
    def load(path: Path) -> "FamilyModel":
        """Read a model.

        Raises:
            MissingInput: There is no such file.
            ContractError: It is damaged, or the model was trained on other features.
        """
        if not path.exists():
            raise MissingInput(f"{path} does not exist. Run the stage that trains it first.")
        import xgboost as xgb

        booster = xgb.Booster({"nthread": 1})
        try:
            booster.load_model(path)
        except (xgb.core.XGBoostError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ContractError(
                f"{path} is damaged: expected an XGBoost model in UBJSON, found: {reason}\n"
                "Delete it to have it trained again; the measurements are kept."
            ) from error
        found = booster.attr("features")
        if found != FEATURE_VERSION or booster.num_features() != N_FEATURES:
            raise ContractError(
                f"{path} was trained on other features: expected {FEATURE_VERSION} with {N_FEATURES} columns, found "
                f"{found} with {booster.num_features()}.\n"
                "Delete it to have it trained again; the measurements are kept."
            )
        return FamilyModel(booster)


def labels(latencies_s: np.ndarray, workloads: np.ndarray) -> np.ndarray:
    """Targets of training in [0, 1]: best latency of the workload / latency; 0 for failures.

    Args:
        latencies_s: Shape (n,), in seconds; NaN for a program that failed.
        workloads: Shape (n,), which workload each program belongs to.
    """
    different, workload = np.unique(workloads, return_inverse=True)
    best = np.full(len(different), np.nan)
    np.fmin.at(best, workload, latencies_s)  # the smaller one; of NaN and a number, the number
    return np.nan_to_num(best[workload] / latencies_s, nan=0.0)


def train(features: Features, targets: np.ndarray, config: TrainConfig, seed: int) -> FamilyModel:
    """Train from scratch: weighted squared error of the sums over rows. Equal inputs give equal models.

    Args:
        features: n matrices.
        targets: Shape (n,), from `labels`.
    """
    import xgboost as xgb

    rows, program = _stack(features)
    weights = (config.slow_weight + targets)[program]

    def objective(predicted: np.ndarray, _data: "xgb.DMatrix") -> tuple[np.ndarray, np.ndarray]:
        sums = np.bincount(program, weights=predicted, minlength=len(features))
        return weights * (sums - targets)[program], weights

    parameters = {
        "tree_method": "hist",
        "device": config.device,
        "max_depth": config.max_depth,
        "learning_rate": config.learning_rate,
        "min_child_weight": 0,
        "gamma": 0.001,
        "base_score": 0.0,
        "disable_default_eval_metric": True,
        "seed": seed,
    }
    booster = xgb.train(parameters, xgb.DMatrix(rows), config.num_boost_round, obj=objective)
    booster.set_attr(features=FEATURE_VERSION)
    booster.set_param({"nthread": 1, "device": "cpu"})
    return FamilyModel(booster)


def without_cuda() -> str:
    """Why XGBoost cannot train on a GPU here; empty if it can."""
    import xgboost as xgb

    if not xgb.build_info().get("USE_CUDA"):
        return f"XGBoost {xgb.__version__} was built without CUDA"
    return "" if host.gpus() else "nvidia-smi lists no GPU"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well scores foretold speeds; NaN where there was nothing to compare."""

    pairwise: float  # share of pairs ordered right
    rank_correlation: float  # Spearman's
    top_recall: float  # share of the fastest eighth that is among the best scored quarter


def accuracy(scores: np.ndarray, speeds: np.ndarray) -> Accuracy:
    """Compare the scores of one workload's programs with their speeds (higher is faster; 0 for failures)."""
    import pandas as pd

    n = len(scores)
    if n < 2:
        return Accuracy(np.nan, np.nan, np.nan)
    first, second = np.triu_indices(n, k=1)
    order = np.sign(speeds[first] - speeds[second])
    told = np.sign(scores[first] - scores[second])
    differ = order != 0
    pairwise = float(np.mean(order[differ] == told[differ])) if differ.any() else np.nan
    a, b = pd.Series(scores).rank(), pd.Series(speeds).rank()
    correlation = float(a.corr(b)) if a.nunique() > 1 and b.nunique() > 1 else np.nan
    fastest = set(np.argsort(-speeds, kind="stable")[: max(1, n // 8)])
    chosen = set(np.argsort(-scores, kind="stable")[: max(1, n // 4)])
    return Accuracy(pairwise, correlation, len(fastest & chosen) / len(fastest))


def _stack(features: Features) -> tuple[np.ndarray, np.ndarray]:
    """All rows in one matrix, and for each row the program it belongs to."""
    program = np.repeat(np.arange(len(features)), [len(matrix) for matrix in features])
    return np.concatenate(features, axis=0, dtype=np.float32), program
