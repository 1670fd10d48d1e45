"""Exported programs run by torch in a process of their own."""

import numpy as np
import pytest

from lib.measure import file_peer
from lib.measure.file_peer import Original
from lib.measure.runner import ModelFailed
from tests.lib.models.torch_helpers import save

torch = pytest.importorskip("torch")


class Rows(torch.nn.Module):
    """Of any number of rows."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(1), x * 2


@pytest.fixture
def file(tmp_path, cpu):
    rows = torch.export.Dim("rows", min=2, max=9)
    save(torch, tmp_path / "rows.pt2", Rows(), torch.ones(4, 3), dynamic_shapes=({0: rows},))
    return Original(tmp_path / "rows.pt2", cpu, is_timed=True)


def written(folder, rows, seed):
    array = np.random.default_rng(seed).normal(size=(rows, 3)).astype(np.float32)
    np.savez(folder / f"{seed}.npz", array)
    return array, folder / f"{seed}.npz"


def test_one_process_computes_what_a_program_does_of_any_shape(file, tmp_path):
    with file_peer.opened(file, 60) as peer:
        for rows in (2, 5, 9):
            array, inputs = written(tmp_path, rows, seed=rows)
            (sums, twice), told = peer.outputs(file, inputs, tmp_path / "out.npz")

            np.testing.assert_allclose(sums, array.sum(1), rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(twice, 2 * array)
            assert told.by == f"torch {torch.__version__}"
            assert not told.is_timed


def test_it_is_compared_with_other_inputs_but_not_without_optimisations_since_torch_has_none(file, tmp_path):
    (_, inputs), (array, others) = (written(tmp_path, 4, seed) for seed in (0, 1))
    with file_peer.opened(file, 60) as peer:
        peer.outputs(file, inputs, tmp_path / "out.npz")

        _, twice = peer.outputs_otherwise(file, others, tmp_path / "other.npz", as_written=False)
        np.testing.assert_array_equal(twice, 2 * array)
        with pytest.raises(ModelFailed, match="runs each operator by itself anyway"):
            peer.outputs_otherwise(file, others, tmp_path / "other.npz", as_written=True)


def test_a_file_that_is_no_program_is_told(cpu, tmp_path):
    broken = Original(tmp_path / "broken.pt2", cpu, is_timed=True)
    broken.path.write_bytes(b"no archive")
    _, inputs = written(tmp_path, 4, seed=0)

    with (
        file_peer.opened(broken, 60) as peer,
        pytest.raises(ModelFailed, match=r"is damaged or was not written by torch\.export\.save"),
    ):
        peer.outputs(broken, inputs, tmp_path / "out.npz")
