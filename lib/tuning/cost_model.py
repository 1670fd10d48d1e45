"""One XGBoost model for each family: scores programs from their features, learns from measurements and from a base.

What a model is to know is which of a workload's programs is faster, not how fast a workload can be. So it is trained on
the differences of logarithms of latencies within each workload: a score is right up to a constant, and samples of
workloads of which few were measured, or only slow programs, teach as much as others. That spans workloads of any size,
which is what lets a model be trained on other models' workloads and be taken for new ones (AutoTVM, NeurIPS 2018,
section 4): a base model's trees come first then, and those for a run's own samples correct them.

XGBoost is imported where it is used: with SciPy and pandas that takes a second, which no other command need wait for.
"""

import os
import warnings
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

# XGBoost's threads wait for each other asleep: spinning, they take ten times as long where something else runs, say the
# process that loads TVM for workers. OpenMP reads it when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_SLOWEST = 2.0  # logarithm: programs that are slower, as those that failed, count as e**2 times as slow as the best
LOOKS = 10  # programs of a first look whose regrets are told
_FOLDS = 4  # of workloads, to tell them
_LEAST_PROGRAMS = 5  # of a workload that takes part
_LEAST_WEIGHT = 0.05  # of the slowest programs; the fastest of a workload weigh 1 more


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How a family's model is trained."""

    num_boost_round: int = 150
    max_depth: int = 6
    learning_rate: float = 0.1
    subsample: float = 0.8  # of the programs, for each tree
    colsample: float = 0.5  # of the features, for each split
    min_samples: int = 16  # programs measured in a family before it gets a model of its own
    max_samples: int = 6000  # programs of its family that a model is trained on: the latest ones
    others: float = 0.5  # weight of other families' programs, which a model learns from, too; 0: it does not
    max_others: int = 2000  # of these: the latest ones
    base: str = "yes"  # begin with the base models of this project, or not: no
    device: str = limit("cpu")  # that trains: `cpu` or `cuda`

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"[train] device must be cpu or cuda, but got {self.device!r}.")
        if self.base not in ("yes", "no"):
            raise ConfigError(f"[train] base must be yes or no, but got {self.base!r}.")
        if not 0 <= self.others <= 1:
            raise ConfigError(f"[train] others is a weight between 0 and 1, but got {self.others}.")
        if self.min_samples < 2 or self.max_samples < self.min_samples or self.max_others < 0:
            raise ConfigError(f"[train] needs 2 <= min_samples <= max_samples and max_others >= 0, but got {self}.")


class FamilyModel:
    """A trained model. Scores are logarithms of speeds, up to a constant for each workload."""

    def __init__(self, booster: "xgb.Booster") -> None:
        self.booster = booster

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Scores, float32, one for each row.

        Args:
            features: Shape (n, N_FEATURES).
        """
        if not len(features):
            return np.zeros(0, dtype=np.float32)
        return np.asarray(self.booster.inplace_predict(features, validate_features=False), np.float32)

    def save(self, path: Path) -> None:
        """Write the model as UBJSON; `path` must end in `.ubj`, since XGBoost goes by the suffix when it reads.

        Raises:
            OSError: The disk is full, say; XGBoost itself would raise an error of its own.
        """
        path.write_bytes(self.booster.save_raw("ubj"))

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


@dataclass(frozen=True, slots=True)
class Samples:
    """Programs that were measured.

    Attributes:
        features: Shape (n, N_FEATURES).
        workloads: Shape (n,), which workload each program belongs to.
        latencies_s: Shape (n,), in seconds; NaN for a program that failed.
    """

    features: np.ndarray
    workloads: np.ndarray
    latencies_s: np.ndarray

    def __len__(self) -> int:
        return len(self.features)

    def __add__(self, others: "Samples") -> "Samples":
        return Samples(
            np.concatenate([self.features, others.features]),
            np.concatenate([self.workloads, others.workloads]),
            np.concatenate([self.latencies_s, others.latencies_s]),
        )


def labels(latencies_s: np.ndarray, workloads: np.ndarray) -> np.ndarray:
    """Targets of training: the logarithm of the best latency of the workload / latency, at most 0; -2 for failures and
    for what is slower than that. NaN where nothing of a workload works.

    Args:
        latencies_s, workloads: See `Samples`.
    """
    different, workload = np.unique(workloads, return_inverse=True)
    best = np.full(len(different), np.nan)
    np.fmin.at(best, workload, latencies_s)  # the smaller one; of NaN and a number, the number
    found = np.maximum(np.nan_to_num(np.log(best[workload] / latencies_s), nan=-_SLOWEST), -_SLOWEST)
    return np.where(np.isnan(best[workload]), np.nan, found)


def train(
    samples: Samples,
    config: TrainConfig,
    seed: int,
    base: FamilyModel | None = None,
    others: Samples | None = None,
) -> FamilyModel:
    """Train a model. Equal inputs give equal models.

    Minimised is the weighted square of the differences between scores and labels, less their mean over the workload.

    Args:
        base: Its trees come first; None: from scratch. One that orders the samples worse than chance is left out.
        others: Programs of other families, which count `config.others` times as much.
    """
    import xgboost as xgb

    if base is not None and misleads(base, samples):
        base = None
    shares = np.ones(len(samples))
    if others is not None and config.others:
        shares = np.concatenate([shares, np.full(len(others), config.others)])
        samples = samples + others
    targets = labels(samples.latencies_s, samples.workloads)
    known = ~np.isnan(targets)
    targets, (_, workload) = targets[known], np.unique(samples.workloads[known], return_inverse=True)
    weights = shares[known] * (np.exp(targets) + _LEAST_WEIGHT)
    totals = np.bincount(workload, weights)

    def objective(predicted: np.ndarray, _data: "xgb.DMatrix") -> tuple[np.ndarray, np.ndarray]:
        residuals = predicted - targets
        means = np.bincount(workload, weights * residuals) / totals
        return weights * (residuals - means[workload]), weights

    parameters = {
        "tree_method": "hist",
        "device": config.device,
        "max_depth": config.max_depth,
        "learning_rate": config.learning_rate,
        "subsample": config.subsample,
        "colsample_bynode": config.colsample,
        "base_score": 0.0,
        "disable_default_eval_metric": True,
        "seed": seed,
    }
    if base is not None:  # XGBoost seeds a new model, but goes on with the process's generator where trees are added
        parameters["seed_per_iteration"] = True
    data = xgb.DMatrix(samples.features[known])
    booster = xgb.train(
        parameters, data, config.num_boost_round, obj=objective, xgb_model=base.booster if base else None
    )
    booster.set_attr(features=FEATURE_VERSION)
    booster.set_param({"nthread": 1, "device": "cpu"})
    return FamilyModel(booster)


def misleads(model: FamilyModel, samples: Samples) -> bool:
    """Whether a model orders fewer than half of the pairs of samples right: one of another kind of CPU may."""
    found = [each.pairwise for each in accuracies(model.predict(samples.features), samples)]
    known = [value for value in found if not np.isnan(value)]
    return bool(known) and float(np.mean(known)) < 0.5


def regrets(scores: np.ndarray, latencies_s: np.ndarray) -> np.ndarray:
    """How much slower than the fastest of one workload's programs is the fastest of the first 1, 2, ... LOOKS of them,
    in the order of their scores: 0.1 for a tenth; shape (LOOKS,).

    Args:
        latencies_s: NaN for programs that failed, which count like very slow ones.
    """
    times = np.exp(-labels(latencies_s, np.zeros(len(latencies_s))))
    best = np.minimum.accumulate(times[np.argsort(-scores, kind="stable")])
    return np.asarray(best[np.minimum(np.arange(LOOKS), len(best) - 1)] - 1)


def looks(known: Sequence[float], tolerated: float) -> int:
    """How many of the programs that a model likes best have to be measured, for a regret that is tolerated.

    Args:
        known: The regrets of its first 1, 2, ... programs.
    """
    enough = (n for n, regret in enumerate(known, start=1) if regret <= tolerated)
    return next(enough, len(known))


def unseen_regrets(samples: Samples, config: TrainConfig, seed: int) -> list[float]:
    """The regrets of models on workloads that they were not trained on: geometric means over workloads, a quarter of
    which is left out at a time. Empty where too few are known to say."""
    different, counts = np.unique(samples.workloads[~np.isnan(samples.latencies_s)], return_counts=True)
    asked = different[counts >= _LEAST_PROGRAMS]
    if len(asked) < _FOLDS:
        return []
    fold_of = dict(zip(asked, np.random.default_rng(seed).permutation(len(asked)) % _FOLDS, strict=True))
    folds = np.array([fold_of.get(workload, -1) for workload in samples.workloads])
    found = []
    for fold in range(_FOLDS):
        rest = folds != fold
        known = Samples(samples.features[rest], samples.workloads[rest], samples.latencies_s[rest])
        scores = train(known, config, seed).predict(samples.features)
        of_workloads = [samples.workloads == workload for workload in asked if fold_of[workload] == fold]
        found += [regrets(scores[chosen], samples.latencies_s[chosen]) for chosen in of_workloads]
    return [float(value) for value in np.exp(np.log1p(found).mean(axis=0)) - 1]


def without_cuda() -> str:
    """Why XGBoost cannot train on a GPU here; empty if it can."""
    import xgboost as xgb

    if not xgb.build_info().get("USE_CUDA"):
        return f"XGBoost {xgb.__version__} was built without CUDA"
    if not host.gpus():
        return "nvidia-smi lists no GPU"
    with warnings.catch_warnings(record=True) as told:  # it trains on the CPU, and warns
        warnings.simplefilter("always")
        xgb.train({"device": "cuda"}, xgb.DMatrix(np.zeros((2, 1)), np.zeros(2)), 1)
    return "XGBoost sees no GPU: is the driver too old for it?" if told else ""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How well scores foretold speeds; NaN where there was nothing to compare."""

    pairwise: float  # share of pairs ordered right
    rank_correlation: float  # Spearman's
    top_recall: float  # share of the fastest eighth that is among the best scored quarter


def accuracies(scores: np.ndarray, samples: Samples) -> list[Accuracy]:
    """`accuracy` of each workload."""
    speeds = np.nan_to_num(1.0 / samples.latencies_s, nan=0.0)
    return [accuracy(scores[chosen], speeds[chosen])
            for chosen in (samples.workloads == each for each in np.unique(samples.workloads))]  # fmt: skip


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
