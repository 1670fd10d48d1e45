"""Bundles for ranges of shapes, called with whatever is in them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

from lib import bundle
from lib.contracts import weights
from lib.runtime.family_tuner_runtime import BundleError, InputError, Model
from lib.runtime.family_tuner_runtime.ranges import Bucket, Ranges
from tests.helpers import ROOT
from tests.lib.runtime.conftest import BUCKETS, texts


@pytest.fixture(scope="module")
def model(ranged):
    return Model(ranged.folder)


@pytest.fixture(scope="module")
def expected(ranged_file):
    session = onnxruntime.InferenceSession(ranged_file)
    return lambda ids, mask: session.run(None, {"ids": ids, "mask": mask})[0]


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("sequence", [1, 4, 5, 6, 16])
def test_any_shape_of_the_range_is_computed_as_the_file_means_it(model, expected, batch, sequence):
    ids, mask = texts(batch, sequence, seed=sequence)
    found = model(ids, mask)

    assert found.shape == (batch, sequence, 32)
    np.testing.assert_allclose(found, expected(ids, mask), atol=2e-5)


def test_inputs_go_by_name_and_the_callers_arrays_stay_as_they_were(model, expected):
    ids, mask = texts(3, 7)
    before = ids.copy(), mask.copy()

    np.testing.assert_allclose(model(mask=mask, ids=ids), expected(ids, mask), atol=2e-5)
    np.testing.assert_array_equal(ids, before[0])
    np.testing.assert_array_equal(mask, before[1])


def test_arrays_that_the_model_makes_for_an_exact_bucket_are_used_without_a_copy(model, expected):
    ids, mask = texts(4, 16)
    own = {name: model.empty(name, batch=4, sequence=16) for name in ("ids", "mask")}
    own["ids"][...], own["mask"][...] = ids, mask

    assert all(array.ctypes.data % 64 == 0 and array.shape == (4, 16) for array in own.values())
    np.testing.assert_allclose(model(own), expected(ids, mask), atol=2e-5)


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        (((1, 17), (1, 17)), "sequence is 17, and the model was compiled for 1 to 16"),
        (((1, 0), (1, 0)), "sequence is 0, and the model was compiled for 1 to 16"),
        (((5, 3), (5, 3)), "batch is 5, and the model was compiled for 1 to 4"),
        (((1, 3), (1, 4)), "sequence is 3 in one input, and 4 in mask"),
        (((3,), (1, 3)), r"ids: int64\[batch, sequence\] is what the model takes, and \[3\] was given"),
    ],
)
def test_what_is_out_of_the_range_is_told(model, shapes, complaint):
    with pytest.raises(InputError, match=complaint):
        model(*(np.ones(shape, np.int64) for shape in shapes))


def test_another_type_is_told_and_an_extent_that_is_not_said(model):
    with pytest.raises(InputError, match="int32"):
        model(*(np.ones((1, 3), np.int32) for _ in range(2)))
    with pytest.raises(InputError, match="say how much sequence is"):
        model.empty("ids", batch=1)


def test_it_says_what_it_is_for(model, ranged):
    assert model.ranges == {"batch": (1, 4), "sequence": (1, 16)}
    assert [str(value) for value in model.inputs] == ["ids: int64[batch, sequence]", "mask: int64[batch, sequence]"]
    assert [value.shape for value in model.outputs] == [("batch", "sequence", 32)]
    for command in ("info", "check"):
        done = subprocess.run(
            [sys.executable, "-m", "lib.bundle", command, ranged.folder], capture_output=True, text=True, cwd=ROOT,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = "batch from 1 to 4, sequence from 1 to 16" if command == "info" else "differ from the reference by"
        assert told in done.stdout


def test_weights_stand_once_for_all_shapes(ranged):
    sizes = [array.nbytes for array in weights_of(ranged)]

    own = 4 * 32 * 32 + 2 * 32 * 64 + 50 * 32 + 2 * 32  # of the file, those that are no scalars
    own += 16 * 32  # of its positions, as many as the longest bucket has: others have the beginning
    assert sum(sizes) == pytest.approx(4 * own, rel=0.05)


def weights_of(files):
    from lib.runtime.family_tuner_runtime.weights import Mapped

    return list(Mapped(files.params).arrays().values())


def test_threads_that_call_one_session_with_other_shapes_get_what_is_theirs(model, expected):
    given = [texts(batch, sequence, seed=batch) for batch in (1, 3, 4) for sequence in (2, 5, 11, 16)] * 4
    with ThreadPoolExecutor(4) as executor:
        for found, own in zip(executor.map(lambda each: model(*each), given), given, strict=True):
            np.testing.assert_allclose(found, expected(*own), atol=2e-5)


def test_another_session_shares_what_was_loaded(model, expected):
    other = model.session(threads=1)
    ids, mask = texts(2, 9)

    np.testing.assert_allclose(other(ids, mask), expected(ids, mask), atol=2e-5)


def test_it_is_packed_and_checked_whole(ranged, tmp_path):
    copy = bundle.pack(ranged.folder, tmp_path / "copy")
    assert {path.name for path in copy.iterdir()} == {
        "manifest.json", "weights.safetensors", "reference.safetensors",
        *(f"model-{n}.so" for n in range(len(BUCKETS))),
    }  # fmt: skip

    (copy / "model-2.so").unlink()
    with pytest.raises(BundleError, match=r"model-2\.so is missing"):
        Model(copy)


def test_weights_that_the_file_lacks_are_told(ranged, tmp_path):
    copy = bundle.pack(ranged.folder, tmp_path / "copy")
    weights.write(copy / "weights.safetensors", {"000000": np.ones(4, np.float32)})

    with pytest.raises(BundleError, match="names a weight"):
        Model(copy, check=False)(*texts(1, 3))


def test_the_smallest_bucket_is_taken_that_holds_all_extents():
    ranges = Ranges.of({
        "ranges": {"a": {"from": 1, "to": 4}, "b": {"from": 1, "to": 4}},
        "buckets": [{"extents": {"a": a, "b": b}, "library": f"{a}{b}", "weights": []} for a in (4, 1) for b in (1, 4)],
    })  # fmt: skip

    def chosen(**extents):
        return ranges.buckets[ranges.smallest(extents)].library

    assert [chosen(a=1, b=1), chosen(a=2, b=1), chosen(a=1, b=3), chosen(a=2, b=2)] == ["11", "41", "14", "44"]
    assert Bucket({}, "one", None).holds({})
