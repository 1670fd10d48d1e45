"""Where time goes, from kernels made by hand and from a run."""

import in_place
import kernels
import numpy as np
import pytest
from kernels import Kernel, Library

from tests.helpers import SMALL, luigi

NET = Library(
    "net",
    2.5e-3,
    {"peak_flops": 100e9, "peak_flops_bf16": 200e9},
    (
        Kernel("matmul_bf16", "contraction", 2, 0.5e-3, 50e6, 2_000_000),
        Kernel("conv2d", "contraction", 1, 0.5e-3, 25e6, 1_000_000),
        Kernel("gather", "metaschedule", 1, 0.4e-3, 0.0, 4_000_000),
        Kernel("scan", "untuned", 1, 0.1e-3, 0.0, 1_000_000),
    ),
)


def test_shares_are_of_the_kernels_time_and_what_no_space_has_is_named():
    _, _, line = kernels.spaces_table([NET])

    assert line == "| net | 2.5 | 80.0% | 75.0% | 20.0% | 5.0% | gather 20.0%, scan 5.0% |"


def test_the_heaviest_kernels_are_beside_the_peak_of_their_own_instruction():
    _, _, *lines = kernels.roofline_table([NET])

    assert lines == [
        "| net | matmul_bf16 | 2 | 50.0% | 500 | 100 | 50% | 4 |",
        "| net | conv2d | 1 | 25.0% | 500 | 50 | 50% | 2 |",
        "| net | gather | 1 | 20.0% | 400 | 0 | 0% | 10 |",
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of a small model."""
    folder = tmp_path_factory.mktemp("run")
    done = luigi(folder, "TuneModel", "--model", str(SMALL), "--trials", "4")
    assert done.returncode == 0, done.stderr
    [found] = (folder / "artifacts").glob("*/small-*/runs/*")
    return found


@pytest.mark.acceptance
def test_a_run_is_read(run):
    found = kernels.read(run)

    assert found.name.startswith("small-")
    assert "conv2d" in {kernel.operator for kernel in found.kernels}
    assert "contraction" in {kernel.space for kernel in found.kernels}
    assert all(kernel.moved_bytes > 0 for kernel in found.kernels)
    assert found.latency_s > 0


@pytest.mark.acceptance
def test_kernels_that_are_called_in_place_compute_what_the_model_does(run):
    session, *_ = in_place.sessions_of(run / "compiled")
    expected = session.model(*session.arrays)
    *_, (_, _, arguments) = session.kernels
    result = np.from_dlpack(arguments[-1])
    result[...] = 0

    session.turn()

    np.testing.assert_array_equal(result.reshape(expected.shape), expected)
    assert all(len(times) == len(session.kernels) for times in session.times["kernels"])
    assert session.row().startswith("| small-")
