import ml_dtypes
import numpy as np
import pytest

from lib.contracts import arrays
from lib.contracts.errors import ContractError


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


@pytest.fixture
def shapes(tmp_path):
    """A model in two shapes: a large array and a narrow one are equal, the table of positions is not."""
    random = np.random.default_rng(0)
    common = {"large": random.normal(size=(64, 1000)), "narrow": np.ones((4, 4)).astype(ml_dtypes.bfloat16)}
    written = {}
    for name, positions in (("first", 8), ("second", 5)):
        path = tmp_path / name / "weights.npz"
        path.parent.mkdir()
        written[path] = {"positions": np.arange(positions, dtype=np.float32), **common, "zero": np.zeros(2, np.float32)}
        arrays.write(path, path, written[path], like=next(iter(written)) if len(written) > 1 else None)
    return written


def test_what_another_file_has_is_not_written_again(shapes):
    first, second = shapes

    assert second.stat().st_size < 2000 < 64 * 1000 * 8 < first.stat().st_size
    for path, written in shapes.items():
        found = arrays.load(path)
        assert list(found) == list(written)
        for name, array in written.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name].astype(np.float64), array.astype(np.float64))


def test_contents_are_equal_where_arrays_are(shapes):
    first, second = map(arrays.contents, shapes)

    assert {name for name in first if first[name] == second[name]} == {"large", "narrow", "zero"}
    assert list(first) == list(second) == list(next(iter(shapes.values())))


def test_a_third_file_refers_to_the_first_and_the_first_never_to_itself(shapes):
    first, second = shapes
    third = second.parent.parent / "third.npz"

    arrays.write(third, third, shapes[second], like=second)
    arrays.write(first, first, shapes[first], like=second)
    second.unlink()

    assert list(arrays.load(third)["positions"]) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(arrays.load(first)["large"], shapes[first]["large"])


def test_bits_decide_not_values(tmp_path):
    paths = [tmp_path / f"{name}.npz" for name in ("plus", "minus")]
    for path, zero in zip(paths, (0.0, -0.0), strict=True):
        arrays.write(path, path, {"a": np.float32([zero, np.nan])}, like=paths[0] if path.name == "minus.npz" else None)

    assert [bool(np.signbit(arrays.load(path)["a"][0])) for path in paths] == [False, True]


@pytest.mark.parametrize(("change", "said"), [("gone", "is gone"), ("changed", "has another one now")])
def test_a_file_whose_other_file_changed_says_what_to_do(shapes, change, said):
    first, second = shapes
    if change == "gone":
        first.unlink()
    else:
        arrays.write(first, first, {name: array + 1 for name, array in shapes[first].items()})

    with pytest.raises(ContractError, match=f"{said}.*Remove the folder second"):
        arrays.load(second)
