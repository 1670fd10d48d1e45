"""The input of the cost models: one vector for each program, wherever it comes from.

It begins with what the trace says (`lib.search.nest`). Programs of MetaSchedule's spaces, whose traces say little, have
in addition what `PerStoreFeature` finds in the lowered program: of the store with most arithmetic, and the largest
value of all stores.
"""

from collections.abc import Sequence

import numpy as np
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from lib.contracts.schemas import N_FEATURES

_ARITHMETIC = 10  # of them, the first, count operations
_PER_STORE = 164  # columns of PerStoreFeature without workload features
N_LOWERED = 2 * _PER_STORE  # values that looking at the lowered program adds


def of_lowered(context: ms.TuneContext, schedules: Sequence[Schedule], from_traces: Sequence[np.ndarray]) -> np.ndarray:
    """Vectors of programs that are looked at lowered: float32, n x N_FEATURES.

    Runs on `context.num_threads` threads.

    Args:
        from_traces: Of each of them what its trace says.
    """
    if not schedules:
        return np.zeros((0, N_FEATURES), np.float32)
    candidates = [ms.MeasureCandidate(schedule, []) for schedule in schedules]
    found = ms.feature_extractor.PerStoreFeature(extract_workload=False).extract_from(context, candidates)
    stores = [np.asarray(matrix.numpy(), np.float32).reshape(-1, _PER_STORE) for matrix in found]
    return np.stack(
        [
            np.concatenate([from_trace, of_stores(matrix)])
            for from_trace, matrix in zip(from_traces, stores, strict=True)
        ]
    )


def of_stores(matrix: np.ndarray) -> np.ndarray:
    """Of a `PerStoreFeature` matrix (n_stores x 164): the row of the store with most arithmetic, and the largest value
    of each column."""
    if not len(matrix):
        return np.full(N_LOWERED, np.nan, np.float32)
    main = matrix[np.argmax(matrix[:, :_ARITHMETIC].sum(axis=1))]
    return np.concatenate([main, matrix.max(axis=0)]).astype(np.float32)


def padded(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Vectors as one matrix, n x N_FEATURES; NaN where one says nothing."""
    found = np.full((len(vectors), N_FEATURES), np.nan, np.float32)
    for row, vector in zip(found, vectors, strict=True):
        row[: len(vector)] = vector
    return found
