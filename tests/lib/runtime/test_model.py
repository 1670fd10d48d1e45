import ast
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from lib.contracts.files import CompiledFiles
from lib.runtime.family_tuner_runtime import BundleError, InputError, Model
from lib.runtime.family_tuner_runtime import session as sessions
from lib.runtime.family_tuner_runtime.model import _tensor, aligned_empty
from lib.tir.numerics import relative_error
from tests.helpers import SMALL, with_runtime
from tests.lib.runtime.conftest import changed, values

needs_affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")


@pytest.fixture(scope="module")
def model(small):
    return Model(small.folder)


@pytest.fixture
def copy(small, tmp_path):
    """A bundle that a test may damage."""
    shutil.copytree(small.folder, tmp_path / "copy")
    return CompiledFiles(tmp_path / "copy")


def expected(*inputs):
    session = onnxruntime.InferenceSession(SMALL)
    return [session.run(None, {"x": x})[0] for x in inputs]


def test_a_model_computes_what_onnx_runtime_computes_of_its_file(model):
    x = values(seed=3)

    y = model(x)

    assert relative_error(y, *expected(x)) < 1e-5


def test_inputs_come_in_order_by_name_or_as_a_mapping_and_outputs_by_name(pair):
    model, x, ids = Model(pair.folder), np.ones((5, 8), np.float32), np.array([3, 1, 4, 1, 5, 9, 2])

    results = [model(x, ids), model(ids=ids, x=x), model({"ids": ids, "x": x})]

    for found in results:
        assert list(found) == ["product", "found", "constant", "same"]
        assert np.array_equal(found["product"], x @ np.arange(24, dtype=np.float32).reshape(8, 3))
        assert np.array_equal(found["found"], ids)
        assert np.array_equal(found["constant"], np.arange(24).reshape(8, 3))


def test_an_output_that_is_a_weight_or_an_input_may_be_written_to(pair):
    model, x = Model(pair.folder), aligned_empty((5, 8), "float32")
    x[...] = 1

    found = model(x, np.arange(7))
    for array in found.values():
        array[...] = 9

    assert np.array_equal(model(x, np.arange(7))["constant"], np.arange(24).reshape(8, 3))
    assert np.array_equal(x, np.ones((5, 8)))


@pytest.mark.parametrize(
    ("args", "named", "told"),
    [
        ((), {}, r"0 inputs were given. The model takes 2: x: float32\[5, 8\]; ids: int64\[7\]"),
        ((np.ones((5, 8), np.float32),), {}, "1 inputs were given"),
        ((), {"x": 0, "idz": 0}, "no input 'idz'. The model takes 2: x"),
        ((), {"ids": np.arange(7)}, "no value for x"),
        (({"ids": np.arange(7)},), {}, "no value for x"),
        ((0,), {"ids": 0}, "in their order or by their names, not both"),
        ((np.ones((5, 9), np.float32), np.arange(7)), {}, r"x: float32\[5, 8\] is .*, and float32\[5, 9\] was given"),
        ((np.ones((5, 8)), np.arange(7)), {}, r"and float64\[5, 8\] was given"),
        ((np.ones((5, 8), np.float32), np.arange(7, dtype=np.int32)), {}, r"ids: int64\[7\] is .*, and int32\[7\] was"),
        ((np.ones((5, 8), np.float32), [0.5] * 7), {}, r"and float64\[7\] was given"),
    ],
)
def test_wrong_names_numbers_shapes_and_types_are_told(pair, args, named, told):
    with pytest.raises(InputError, match=told):
        Model(pair.folder)(*args, **named)


class Foreign:
    """An array of another library, as DLPack shows it."""

    def __init__(self, array, kind=1):
        self._array, self._kind = array, kind

    def __dlpack__(self, **_options):
        return self._array.__dlpack__()

    def __dlpack_device__(self):
        return self._kind, 0


def test_an_aligned_input_is_used_as_it_is_and_others_are_copied(model):
    [value] = model.inputs
    aligned = model.empty("x")
    aligned[...] = values()
    whole = aligned_empty((1, 8, 8, 16), "float32")
    strided = whole[..., ::2]
    unaligned = aligned_empty((1 + aligned.size,), "float32")[1:].reshape(aligned.shape)
    for array in (strided, unaligned):
        array[...] = aligned
    frozen = aligned.view()
    frozen.flags.writeable = False

    assert _tensor(aligned, value).data_ptr() == aligned.ctypes.data
    assert _tensor(frozen, value).data_ptr() == aligned.ctypes.data
    assert _tensor(Foreign(aligned), value).data_ptr() == aligned.ctypes.data
    assert _tensor(unaligned, value).data_ptr() != unaligned.ctypes.data
    results = [model(x) for x in (aligned, frozen, strided, unaligned, Foreign(aligned), Foreign(unaligned))]
    assert all(np.array_equal(result, results[0]) for result in results)
    assert relative_error(results[0], *expected(values())) < 1e-5


def test_what_lies_on_another_device_is_refused(model):
    with pytest.raises(InputError, match="x is not in the CPU's memory"):
        model(Foreign(values(), kind=2))


def test_outputs_are_the_callers_own_and_pass_on_without_a_copy(model):
    first = model(values(seed=1))
    kept = first.copy()

    others = [model(values(seed=n)) for n in range(2, 6)]

    assert np.array_equal(first, kept)
    assert all(not np.array_equal(first, other) for other in others)
    assert np.from_dlpack(first).ctypes.data == first.ctypes.data
    first[...] = 0  # they may be written to
    assert np.array_equal(model(values(seed=1)), kept)


def test_threads_that_call_one_session_each_get_their_own_result(model):
    inputs = [values(seed=n) for n in range(8)]
    wanted = [model(x) for x in inputs]

    def call(n):
        return all(np.array_equal(model(inputs[n]), wanted[n]) for _ in range(200))

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(call, range(len(inputs))))
    for found, x in zip(wanted, expected(*inputs), strict=True):
        assert relative_error(found, x) < 1e-5


def test_sessions_run_beside_each_other_and_share_the_weights(model):
    inputs = [values(seed=n) for n in range(4)]
    wanted = [model(x) for x in inputs]
    others = [model.session(threads=1 + n % 2) for n in range(4)]

    def call(n):
        return all(np.array_equal(others[n](inputs[n]), wanted[n]) for _ in range(200))

    with ThreadPoolExecutor(len(inputs)) as callers:
        assert all(callers.map(call, range(len(inputs))))
    assert len({id(each._loaded.weights) for each in (model, *others)}) == 1


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not tell of pages")
def test_weights_stay_pages_of_their_file_which_processes_share(small):
    code = (
        "import re\nfrom family_tuner_runtime import Model\n"
        f"model = Model({str(small.folder)!r})\nmodel(model.empty('x'))\nmodel.session()(model.empty('x'))\n"
        "text = open('/proc/self/smaps').read()\n"
        "maps = re.split(r'^(?=[0-9a-f]+-[0-9a-f]+ )', text, flags=re.MULTILINE)\n"
        "print(*[each for each in maps if 'weights.safetensors' in each])"
    )

    done = subprocess.run([sys.executable, "-c", code], env=with_runtime(), capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    facts = dict(re.findall(r"^(\w+): +(\d+) kB$", done.stdout, re.MULTILINE))
    assert done.stdout.count("weights.safetensors") == 1
    assert " r--s " in done.stdout.splitlines()[0]
    assert int(facts["Rss"]) > 0
    assert facts["Anonymous"] == "0"


def native_ids():
    return {thread.native_id for thread in threading.enumerate() if thread.name == "family_tuner_runtime"}


@needs_affinity
def test_a_session_runs_on_its_cores_and_the_caller_where_it_was(model):
    before, core = os.sched_getaffinity(0), max(os.sched_getaffinity(0))
    known = native_ids()

    session = model.session(cores=[core])
    session(values())

    [driver] = native_ids() - known
    assert session.threads == 1
    assert os.sched_getaffinity(driver) == {core}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("options", "told"),
    [({"cores": [100_000]}, "may not use the cores"), ({"cores": []}, "is empty"), ({"threads": 0}, "at least one")],
)
def test_a_session_that_cannot_be_placed_is_refused(model, options, told):
    with pytest.raises(InputError, match=told):
        model.session(**options)


@pytest.mark.parametrize(
    ("threads", "cores", "found"),
    [
        (None, None, (2, [0, 1])), (1, None, (1, [0, 1, 2, 3])), (4, None, (4, [0, 1, 2, 3])),
        (6, None, (6, [0, 1, 2, 3])), (None, [2, 3, 2], (2, [2, 3])), (1, [2, 3], (1, [2, 3])),
        (3, [1, 2], (3, [1, 2])), (2, [3, 1, 0], (2, [3, 1])),
    ],
)  # fmt: skip
def test_threads_and_cores_follow_from_each_other(monkeypatch, threads, cores, found):
    monkeypatch.setattr(sessions, "allowed_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(sessions, "_by_siblings", list)
    monkeypatch.setattr(sessions, "_turns", iter([0]))

    assert sessions.placed(2, threads, cores) == found


def test_sessions_of_several_threads_take_the_cores_in_turn(monkeypatch):
    monkeypatch.setattr(sessions, "allowed_cores", lambda: [0, 1, 2, 3, 4])
    monkeypatch.setattr(sessions, "_by_siblings", list)
    monkeypatch.setattr(sessions, "_turns", iter(range(3)))

    assert [sessions.placed(2, None, None)[1] for _ in range(3)] == [[0, 1], [2, 3], [4, 0]]


def test_many_bundles_run_in_one_process(small, tmp_path):
    folders = [shutil.copytree(small.folder, tmp_path / str(n)) for n in range(20)]

    models = [Model(folder) for folder in folders]

    results = [model(values()) for model in models]
    assert all(np.array_equal(result, results[0]) for result in results)


def test_an_error_reaches_the_caller_and_the_session_goes_on(model):
    with pytest.raises(ZeroDivisionError):
        model._driver.run(lambda: 1 / 0)

    assert relative_error(model(values()), *expected(values())) < 1e-5


@needs_affinity
def test_a_session_whose_cores_went_away_says_so_at_each_call():
    driver = sessions.Driver(1, [100_000])

    for _ in range(2):
        with pytest.raises(OSError, match="Invalid argument"):
            driver.run(lambda: 1)


def test_the_thread_of_a_session_that_nobody_has_ends(model):
    known = native_ids()
    session = model.session()
    session(values())
    assert native_ids() - known

    del session
    gc.collect()

    end = time.monotonic() + 30
    while native_ids() - known and time.monotonic() < end:
        time.sleep(0.01)
    assert not native_ids() - known


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_may_use_a_model_that_was_loaded_and_used_before_the_fork(small):
    code = (
        "import os, sys\nimport numpy as np\nfrom family_tuner_runtime import Model\n"
        f"model = Model({str(small.folder)!r})\nx = np.ones((1, 8, 8, 8), np.float32)\ny = model(x)\n"
        "if not (child := os.fork()):\n    os._exit(0 if np.array_equal(model(x), y) else 3)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not np.array_equal(model(x), y))"
    )

    done = subprocess.run([sys.executable, "-c", code], env=with_runtime(), timeout=60)

    assert done.returncode == 0


def test_neither_tvms_compiler_nor_the_tuner_is_imported(small):
    code = (
        "import sys\nsys.modules['torch'] = None\n"  # which tvm_ffi imports where it is installed
        f"from family_tuner_runtime import Model\nmodel = Model({str(small.folder)!r})\nmodel(model.empty('x'))\n"
        "found = {name.split('.')[0] for name in sys.modules if sys.modules[name]}\n"
        "print(sorted(found - set(sys.stdlib_module_names)))"
    )

    done = subprocess.run([sys.executable, "-c", code], env=with_runtime(), capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    found = {name for name in ast.literal_eval(done.stdout) if not name.startswith(("_", "cython_runtime"))}
    assert found <= {"family_tuner_runtime", "numpy", "tvm_ffi", "ml_dtypes", "typing_extensions"}
    assert {"family_tuner_runtime", "numpy", "tvm_ffi"} <= found


def test_it_runs_beside_all_of_tvm_in_one_process(small):
    code = (
        "import numpy as np\nfrom family_tuner_runtime import Model\n"
        f"model = Model({str(small.folder)!r})\nx = np.ones((1, 8, 8, 8), np.float32)\nbefore = model(x)\n"
        f"import tvm\nlater = Model({str(small.folder)!r})\n"
        "assert np.array_equal(before, model(x)) and np.array_equal(before, later(x))"
    )

    done = subprocess.run([sys.executable, "-c", code], env=with_runtime(), capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"instructions": ["no_such_instruction"]}, "this CPU lacks no_such_instruction, which it was compiled with"),
        ({"target": {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}}, "compiled for riscv64, and this machine is"),
        ({"target": {"kind": "cuda"}}, "compiled for cuda, and this runtime is for CPUs"),
        ({"versions": "apache-tvm 0.26.0, numpy 2.2"}, "compiled with TVM 0.26.0, and TVM 0.27"),
        ({"format": 4}, "a bundle of format 4, and this runtime reads 3"),
        ({"format": 0}, "compiled before there were bundles"),
    ],
)
def test_a_bundle_for_something_else_says_so(copy, facts, told):
    changed(copy, **facts)

    with pytest.raises(BundleError, match=told):
        Model(copy.folder)


def test_a_bundle_that_misses_a_file_or_was_cut_short_says_which(copy):
    copy.library.unlink()
    copy.params.write_bytes(copy.params.read_bytes()[:-1])

    with pytest.raises(BundleError, match=r"model\.so is missing.*weights\.safetensors has \d+ bytes, and should have"):
        Model(copy.folder)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"seal": "?"}'])
def test_a_damaged_manifest_says_so(copy, content):
    copy.manifest.write_bytes(content)

    with pytest.raises(BundleError, match=r"manifest\.json is damaged"):
        Model(copy.folder)


def test_a_manifest_that_was_changed_by_hand_says_so(copy):
    facts = json.loads(copy.manifest.read_text())
    copy.manifest.write_text(json.dumps({**facts, "threads": 64}))

    with pytest.raises(BundleError, match="do not fit its seal"):
        Model(copy.folder)


def test_what_is_no_bundle_says_so(tmp_path):
    with pytest.raises(BundleError, match="is no bundle: it has no manifest"):
        Model(tmp_path)
