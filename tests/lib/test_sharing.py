import numpy as np

from lib import sharing
from lib.contracts import weights
from lib.runtime.family_tuner_runtime.weights import Mapped


def test_equal_bytes_stand_once_and_each_library_finds_them_in_its_own_shape(tmp_path):
    table, other = np.arange(48, dtype=np.float32), np.ones((4, 4), np.float32)
    of_each = [[table.reshape(6, 8), other], [other, table.reshape(2, 3, 8), table.astype(np.int32)]]
    packed = [weights.write(tmp_path / f"{n}", weights.numbered(arrays)) for n, arrays in enumerate(of_each)]

    found = sharing.write(tmp_path / "all", packed)

    mapped = Mapped(tmp_path / "all")
    assert len(mapped.entries) == 3
    for own, arrays in zip(found.of_each, of_each, strict=True):
        for (name, shape), array in zip(own, arrays, strict=True):
            np.testing.assert_array_equal(np.from_dlpack(mapped.view(name, shape)), array)
    assert found.n_bytes == table.nbytes * 2 + other.nbytes
    assert found.n_bytes_least == table.nbytes * 2 + other.nbytes


def test_the_beginning_of_a_longer_weight_is_part_of_it_if_all_bytes_are_the_same(tmp_path):
    longest = np.random.default_rng(0).normal(size=(64, 24)).astype(np.float32)
    other = longest[:16].copy()
    other[-1, -1] += 1  # begins alike
    of_each = [[longest[:8]], [other, longest], [longest[:16].reshape(4, 4, 24), longest[8:16], longest[:8].view(int)]]
    packed = [weights.write(tmp_path / f"{n}", weights.numbered(arrays)) for n, arrays in enumerate(of_each)]

    found = sharing.write(tmp_path / "all", packed)

    mapped = Mapped(tmp_path / "all")
    for own, arrays in zip(found.of_each, of_each, strict=True):
        for (name, shape), array in zip(own, arrays, strict=True):
            np.testing.assert_array_equal(np.from_dlpack(mapped.view(name, shape)), array)
    kept = [longest, other, longest[8:16], longest[:8]]  # the last has another type
    assert found.n_bytes == sum(array.nbytes for array in kept)
