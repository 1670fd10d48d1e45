import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from lib.contracts import weights
from lib.runtime.family_tuner_runtime.errors import BundleError
from lib.runtime.family_tuner_runtime.weights import Mapped, entries

_RNG = np.random.default_rng(0)
ARRAYS = {
    "three": _RNG.normal(size=3).astype(np.float32),
    "bf16": _RNG.normal(size=(2, 5)).astype(ml_dtypes.bfloat16),
    "scalar": np.array(2.5),
    "none": np.zeros((0, 3), np.int8),
    "bool": np.array([True, False, True]),
    "half": _RNG.normal(size=(3, 3)).astype(np.float16),
    "bytes": np.arange(-70, 60, dtype=np.int8),
    "ids": np.arange(5),
    "strided": np.arange(12, dtype=np.int32).reshape(3, 4).T,
}


@pytest.fixture
def file(tmp_path):
    return weights.write(tmp_path / "w.safetensors", ARRAYS)


def test_what_is_written_is_read_by_safetensors_and_begins_with_a_cache_line(file):
    with safetensors.safe_open(file, "np") as found:
        for name, array in ARRAYS.items():
            assert np.array_equal(found.get_tensor(name), array), name

    assert [entry.name for entry in entries(file)] == list(ARRAYS)
    assert all(entry.begin % 64 == 0 for entry in entries(file))


def test_a_mapped_file_has_the_same_tensors_in_their_order(file):
    mapped = Mapped(file)

    assert list(mapped.arrays()) == list(ARRAYS)
    for (name, found), tensor in zip(mapped.arrays().items(), mapped.tensors, strict=True):
        assert found.dtype == ARRAYS[name].dtype
        assert np.array_equal(found, ARRAYS[name])
        assert (tuple(tensor.shape), str(tensor.dtype)) == (ARRAYS[name].shape, ARRAYS[name].dtype.name)
        if found.size:
            assert tensor.data_ptr() == found.ctypes.data


def test_what_is_mapped_outlives_the_mapping_and_the_file(file):
    kept = Mapped(file).arrays()["three"]

    file.unlink()

    assert np.array_equal(kept, ARRAYS["three"])


def test_a_weight_of_a_type_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(KeyError, match="complex64"):
        weights.write(tmp_path / "w.safetensors", {"c": np.zeros(2, np.complex64)})


def _of_header(header, data=bytes(64)):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "longer than the file"),
        (b"\xff" * 100, "longer than the file"),
        (_of_header(b"[]"), "not one of safetensors"),
        (_of_header(b"{no json"), "not one of safetensors"),
        (_of_header({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 4]}}), "not one of safetensors"),
        (_of_header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}), "a needs 8 bytes"),
        (_of_header({"a": {"dtype": "F32", "shape": [20], "data_offsets": [0, 80]}}), "a needs 80 bytes"),
        (_of_header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}), "multiple of 64"),
    ],
)
def test_what_is_no_such_file_is_called_damaged(tmp_path, content, reason):
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)

    with pytest.raises(BundleError, match=f"w.safetensors is damaged: .*{reason}"):
        Mapped(path)


def test_a_file_whose_tensors_are_not_aligned_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(1, np.float32), "b": np.zeros(3, np.float32)}, path)

    with pytest.raises(BundleError, match="multiple of 64"):
        Mapped(path)
