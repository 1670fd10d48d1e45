import ml_dtypes
import numpy as np
from tvm import relax

from lib import deploy, sharing
from lib.graph import fusion
from lib.measure.device_source import LocalDevice
from lib.measure.libraries import Libraries
from lib.measure.protocol import Infer, OpenLibrary
from lib.runtime.family_tuner_runtime.weights import Mapped


def test_equal_bytes_stand_once_and_each_library_finds_them_in_its_own_shape(tmp_path):
    table, other = np.arange(48, dtype=np.float32), np.ones((4, 4), np.float32)
    of_each = [[table.reshape(6, 8), other], [other, table.reshape(2, 3, 8), table.astype(np.int32)]]

    found = sharing.write(tmp_path / "all", of_each)

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

    found = sharing.write(tmp_path / "all", of_each)

    mapped = Mapped(tmp_path / "all")
    for own, arrays in zip(found.of_each, of_each, strict=True):
        for (name, shape), array in zip(own, arrays, strict=True):
            np.testing.assert_array_equal(np.from_dlpack(mapped.view(name, shape)), array)
    kept = [longest, other, longest[8:16], longest[:8]]  # the last has another type
    assert found.n_bytes == sum(array.nbytes for array in kept)
    found.write(tmp_path / "together.json")
    assert sharing.read_together(tmp_path / "together.json") == found


def test_weights_of_libraries_that_are_left_out_are_taken_out_of_the_file(tmp_path):
    table, other, narrow = np.arange(48, dtype=np.float32), np.ones(7, np.int8), np.ones(3, ml_dtypes.bfloat16)
    of_each = [[table], [other, table[:8]], [narrow, table.reshape(6, 8)]]
    together = sharing.write(tmp_path / "all", of_each)
    size = (tmp_path / "all").stat().st_size

    same = sharing.without(tmp_path / "all", together, [0])
    found = sharing.without(tmp_path / "all", same, [0])

    assert same.of_each == together.of_each[1:]
    assert same.n_bytes == together.n_bytes
    mapped = Mapped(tmp_path / "all")
    [(_, whole), (name, array)] = mapped.arrays().items()
    assert found.of_each == together.of_each[2:]
    assert found.of_each[0][0] == (name, [3])
    np.testing.assert_array_equal(array, narrow)
    np.testing.assert_array_equal(whole.reshape(-1), table)
    assert found.n_bytes == found.n_bytes_least == table.nbytes + narrow.nbytes
    assert (tmp_path / "all").stat().st_size < size


def test_libraries_are_run_with_what_they_take_of_a_shared_file(cpu, tmp_path):
    table = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
    together = sharing.write(tmp_path / "all", [[table], [table[:8]]])
    libraries = Libraries(LocalDevice("llvm"))

    for n, rows in enumerate((16, 8)):
        files = [tmp_path / f"{n}.{kind}" for kind in ("so", "json", "in.npz", "out.npz")]
        sharing.list_weights(files[1], tmp_path / "all", together.of_each[n])
        given = np.full((rows, 4), n + 1, np.float32)
        np.savez(files[2], given)
        deploy.build(fusion.fuse(product(rows), cpu.tvm()), {}, cpu.tvm(), files[0])
        libraries.open(OpenLibrary("tuned", *files[:3]))
        libraries.infer(Infer("tuned", files[3]))

        [found] = np.load(files[3]).values()
        np.testing.assert_allclose(found, given * table[:rows], rtol=1e-6)


def product(rows):
    """Of an input and a weight."""
    builder = relax.BlockBuilder()
    given, weight = (relax.Var(name, relax.TensorType((rows, 4), "float32")) for name in ("given", "weight"))
    with builder.function("main", [given, weight]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.multiply(given, weight))
        builder.emit_func_output(out)
    return builder.get()
