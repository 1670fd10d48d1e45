"""Per-store features of scheduled programs, the input of the cost models."""

from collections.abc import Sequence

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from lib.contracts.schemas import N_FEATURES


def extract(context: ms.TuneContext, schedules: Sequence[Schedule]) -> list[np.ndarray]:
    """MetaSchedule's `PerStoreFeature` of each program: float32, `n_stores x 164`; n_stores varies.

    Runs on `context.num_threads` threads.
    """
    if not schedules:
        return []
    candidates = [ms.MeasureCandidate(schedule, []) for schedule in schedules]
    found = ms.feature_extractor.PerStoreFeature(extract_workload=False).extract_from(context, candidates)
    return [np.asarray(matrix.numpy(), dtype=np.float32).reshape(-1, N_FEATURES) for matrix in found]
