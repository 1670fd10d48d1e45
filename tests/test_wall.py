"""Fifteen small models of today, of all kinds, from an ONNX file to a library that computes what ONNX Runtime computes.

One is tuned and verified, the others are compiled as they are imported, which takes seconds; `benchmarks/wall.py` tunes
all of them and more. See `tests/wall_files.py` for what is kept of these.
"""

import sys

import numpy as np
import onnxruntime
import pytest

from lib.tir.numerics import random_values, relative_error
from tests import wall_files
from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other so
from wall_stages import Stages

MODELS = sorted(path.name.partition(".")[0] for path in wall_files.FOLDER.iterdir())
_TYPES = {"tensor(float)": "float32", "tensor(int64)": "int64", "tensor(bool)": "bool"}
_IDS = 100  # below all vocabularies


@pytest.fixture(scope="module")
def stages():
    return Stages()


def test_there_are_fifteen():
    assert len(MODELS) == 15


@pytest.mark.parametrize(("name", "is_tuned"), [*((name, False) for name in MODELS), ("patchtst", True)])
def test_a_model_of_today_computes_what_onnx_runtime_computes(stages, tmp_path, name, is_tuned):
    file = wall_files.fill(name, tmp_path / f"{name}.onnx")
    session = onnxruntime.InferenceSession(file)
    feed = {
        value.name: random_values(tuple(value.shape), _TYPES[value.type], 2 if "mask" in value.name else _IDS, seed=n)
        for n, value in enumerate(session.get_inputs())
    }
    expected = session.run(None, feed)

    found = (stages.outputs if is_tuned else stages.untuned)(file, tmp_path, list(feed.values()))

    assert [value.shape for value in found] == [value.shape for value in expected]
    assert max(map(relative_error, found, expected)) < 1e-3
    assert all(np.isfinite(value).all() for value in expected)
