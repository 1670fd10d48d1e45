import ml_dtypes
import numpy as np

from lib.contracts import arrays


def test_arrays_come_back_in_order_with_their_types(tmp_path):
    written = {
        "narrow": np.array([[1.5, -2.0]]).astype(ml_dtypes.bfloat16), "b": np.arange(3, dtype=np.int8),
        "a": np.float32([0.5]),
    }  # fmt: skip
    np.savez(tmp_path / "a.npz", **written)

    found = arrays.load(tmp_path / "a.npz")

    assert list(found) == list(written)
    assert [array.dtype for array in arrays.values(tmp_path / "a.npz")] == [array.dtype for array in written.values()]
    for name, array in written.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), array.astype(np.float32))


def test_types_are_told_without_the_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.zeros((2, 3), np.int8), b=np.zeros(4, np.float32))

    assert arrays.dtypes(tmp_path / "a.npz") == {np.dtype(np.int8), np.dtype(np.float32)}
