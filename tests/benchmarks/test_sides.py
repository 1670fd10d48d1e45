"""A process a side: what it computes, and that the others are stopped while it has its turn."""

import json
import os
import signal
import threading
import time
from contextlib import ExitStack

import numpy as np
import psutil
import pytest
import side
import sides


@pytest.fixture
def start(by_stock, product, tmp_path):
    """Starts sides of the product; all end with the test."""
    x = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x)
    places = {"library": by_stock, "onnxruntime": product.onnx}
    with ExitStack() as stack:

        def one(kind, model=None):
            out = tmp_path / f"{kind}.npz"
            found = sides.Side(kind, model or places[kind], tmp_path / "inputs.npz", out, threads=1)
            return stack.enter_context(found)

        one.x = x
        yield one


def status(one):
    return psutil.Process(one.process.pid).status()


@pytest.mark.parametrize("kind", ["library", "onnxruntime"])
def test_a_side_computes_the_model(start, kind, product):
    loaded = start(kind)

    [found] = loaded.load()

    np.testing.assert_allclose(found, product.reference(start.x), atol=1e-4)
    assert loaded.version


def test_all_others_are_stopped_while_one_has_its_turn(start):
    found = {kind: start(kind) for kind in ("library", "onnxruntime")}
    for one in found.values():
        one.load()
    seen, ended = [], threading.Event()

    def watch():
        while not ended.is_set():
            seen.append({name for name, one in found.items() if status(one) != psutil.STATUS_STOPPED})
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    turns = list(sides.in_turn(found, 4, warm_s=0.02, seconds=0.05))
    ended.set()
    watcher.join()

    assert {frozenset(names) for names in seen} >= {frozenset({name}) for name in found}  # each was seen to run
    assert all(len(names) <= 1 for names in seen)  # and never two
    assert all(status(one) == psutil.STATUS_STOPPED for one in found.values())
    assert len(turns) == 8
    assert all(turn.latency_s > 0 and turn.n_inferences > 1 for turn in turns)


def test_each_turn_has_an_order_of_its_own_that_the_seed_decides(start):
    found = {str(n): start("onnxruntime") for n in range(3)}
    for one in found.values():
        one.load()

    orders = [[turn.side for turn in sides.in_turn(found, 6, warm_s=0, seconds=0, seed=seed)] for seed in (0, 0, 1)]

    assert orders[0] == orders[1] != orders[2]
    assert all(sorted(orders[0][n : n + 3]) == ["0", "1", "2"] for n in range(0, 18, 3))
    assert len({tuple(orders[0][n : n + 3]) for n in range(0, 18, 3)}) > 1


def test_a_turn_has_at_least_one_inference_however_long_it_takes(start):
    loaded = start("onnxruntime")
    loaded.load()

    assert loaded.turn(0, "side", warm_s=0, seconds=0).n_inferences == 1


def test_a_side_that_dies_is_a_row_and_the_others_go_on(start):
    found = {"dying": start("library"), "living": start("onnxruntime")}
    for one in found.values():
        one.load()
    os.killpg(found["dying"].process.pid, signal.SIGKILL)

    turns = list(sides.in_turn(found, 3, warm_s=0, seconds=0))

    [dead] = [turn for turn in turns if turn.side == "dying"]
    assert "exit status -9" in dead.failure
    assert np.isnan(dead.latency_s)
    assert [turn.failure for turn in turns if turn.side == "living"] == [""] * 3


def test_a_model_that_does_not_load_says_why(start, tmp_path):
    with pytest.raises(sides.SideFailed, match=r"manifest\.json"):
        start("library", tmp_path / "nowhere").load()


def test_nothing_is_left_of_a_side_that_was_closed(start):
    one = start("onnxruntime")
    one.load()

    one.close()

    assert not psutil.pid_exists(one.process.pid)


def test_onnx_runtime_reads_inputs_and_writes_outputs_in_place(product):
    x = side.aligned(np.ones((16, 64), np.float32))
    loaded = side.onnxruntime(product.onnx, [x], 1)
    [y] = loaded.outputs()

    for values in (2.0, -3.0):
        x[...] = values
        loaded.infer()
        np.testing.assert_allclose(y, product.reference(x), atol=1e-4)


def test_openvino_computes_in_float32_in_place(product):
    pytest.importorskip("openvino")
    x = side.aligned(np.ones((16, 64), np.float32))
    loaded = side.openvino(product.onnx, [x], 1)
    for values in (2.0, -3.0):
        x[...] = values
        loaded.infer()
        np.testing.assert_allclose(loaded.outputs()[0], product.reference(x), atol=1e-4)
    assert "(f32; " in loaded.version


@pytest.mark.filterwarnings("default")  # torch's own
def test_inductor_computes_a_program_that_takes_its_inputs_by_keyword(product, tmp_path):
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.from_numpy(product.weights))

        def forward(self, x):
            return torch.relu(x @ self.weights)

    x = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)
    torch.export.save(torch.export.export(Model(), (), {"x": torch.from_numpy(x)}), tmp_path / "product.pt2")
    np.savez(tmp_path / "inputs.npz", x)
    with sides.Side("torch", tmp_path / "product.pt2", tmp_path / "inputs.npz", tmp_path / "out.npz", 1) as one:
        [found] = one.load()
        turn = one.turn(0, "torch", 0, 0)

    np.testing.assert_allclose(found, product.reference(x), atol=1e-4)
    assert turn.n_inferences == 1


@pytest.mark.parametrize("dtype", ["int64", "int32", "bool", "float32"])
def test_arrays_are_copied_to_the_beginning_of_a_cache_line(dtype):
    array = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).astype(dtype)

    found = side.aligned(array)

    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert found.ctypes.data % 64 == 0
    assert found.flags.c_contiguous


def test_a_mask_of_an_old_manifest_leaves_something_to_attend_to(tmp_path):
    values = [{"name": "attention_mask", "shape": [1, 128], "dtype": "int64", "bound": 0},
              {"name": "ids", "shape": [1, 128], "dtype": "int64", "bound": 50}]  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps({"model_inputs": values}))

    mask, ids = sides.inputs(tmp_path)

    assert set(mask.flat) == {0, 1}
    assert 1 < ids.max() < 50
