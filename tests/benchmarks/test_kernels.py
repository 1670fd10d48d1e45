"""Where time goes, from kernels made by hand and from a run."""

import in_place
import kernels
import numpy as np
import pytest
from apart import twin
from kernels import Kernel, Library

from tests.helpers import SMALL, luigi

NET = Library(
    "net",
    2.5e-3,
    (
        Kernel("matmul_bf16", "contraction", 2, 0.5e-3),
        Kernel("conv2d", "contraction", 1, 0.5e-3),
        Kernel("gather", "metaschedule", 1, 0.4e-3),
        Kernel("scan", "untuned", 1, 0.1e-3),
    ),
)


def test_shares_are_of_the_kernels_time_and_what_no_space_has_is_named():
    _, _, line = kernels.spaces_table([NET])

    assert line == "| net | 2.5 | 80.0% | 75.0% | 20.0% | 5.0% | gather 20.0%, scan 5.0% |"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of a small model; with so many trials, something is faster than untuned, also with other tests beside it."""
    folder = tmp_path_factory.mktemp("run")
    done = luigi(folder, "TuneModel", "--model", str(SMALL), "--trials", "24")
    assert done.returncode == 0, done.stderr
    [found] = (folder / "artifacts").glob("*/small-*/runs/*")
    return found


@pytest.mark.acceptance
def test_a_run_is_read(run):
    found = kernels.read(run)

    assert found.name.startswith("small-")
    assert "conv2d" in {kernel.operator for kernel in found.kernels}
    assert "contraction" in {kernel.space for kernel in found.kernels}
    assert found.latency_s > 0


@pytest.mark.acceptance
def test_kernels_that_are_called_in_place_compute_what_the_model_does(run):
    with twin(run / "compiled") as apart:
        session, *_ = in_place.sessions_of(run / "compiled", apart)
        expected = session.model(*session.arrays)
        *_, (_, _, arguments) = session.kernels
        result = np.from_dlpack(arguments[-1])
        result[...] = 0

        session.turn()

    np.testing.assert_array_equal(result.reshape(expected.shape), expected)
    assert all(len(times) == len(session.kernels) for times in session.times["kernels"])
    assert session.row().startswith("| small-")
