import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from lib import deploy, packing
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.measure.model_session import WorkerSession
from lib.measure.process import Worker
from lib.models.zoo import catalogue
from lib.search import evolution
from lib.tir import lowering, traces
from lib.tir.numerics import random_values, relative_error
from lib.tir.workload import load_module


@pytest.mark.parametrize("name", ["tiny_cnn", "tiny_transformer"])
def test_a_scheduled_and_packed_library_computes_what_the_untuned_one_does(cpu, tmp_path, name):
    model = catalogue.load(name)
    module = fusion.fuse(model.module, cpu.tvm())
    traces = {}
    for subgraph in extract_subgraphs(module):
        if subgraph.tunable:
            found = evolution.sample(load_module(subgraph.workload), cpu.tvm(), 1, known=set(), seed=3)
            traces |= {function: found[0].trace for function in subgraph.functions if found}
    assert traces
    deploy.build(module, traces, cpu.tvm(), tmp_path / "tuned.so", tmp_path / "packing.json")
    assert b".debug_info" not in (tmp_path / "tuned.so").read_bytes()
    deploy.build(module, {}, cpu.tvm(), tmp_path / "untuned.so")
    weights = tmp_path / "weights.npz"
    np.savez(weights, **model.weights)
    packing.write(tmp_path / "packed.safetensors", [tmp_path / "packing.json"], [weights], cpu.tvm(), None)
    [given] = deploy.interface(module)
    np.savez(tmp_path / "inputs.npz", random_values(tuple(given["shape"]), given["dtype"], given["bound"], seed=0))

    worker = Worker(cpu)
    try:
        worker.wait_until_ready()
        session = WorkerSession(worker, timeout_s=60)
        for kind, params in (("tuned", "packed.safetensors"), ("untuned", "weights.npz")):
            session.open_library(kind, tmp_path / f"{kind}.so", tmp_path / params, tmp_path / "inputs.npz")
            session.infer(kind, tmp_path / f"out-{kind}.npz")
    finally:
        worker.kill()

    tuned, untuned = (np.load(tmp_path / f"out-{kind}.npz")["arr_0"] for kind in ("tuned", "untuned"))
    assert relative_error(tuned, untuned) < 1e-5
    assert np.abs(untuned).max() > 0.1


def test_the_interface_names_inputs_and_bounds_token_ids(cpu):
    module = fusion.fuse(catalogue.load("tiny_transformer").module, cpu.tvm())

    assert deploy.interface(module) == [
        {"name": "x", "shape": [1, 16], "dtype": "int32", "values": "ids", "bound": 100}
    ]


def test_a_trace_for_a_function_that_is_not_there_is_an_error(cpu):
    module = fusion.fuse(catalogue.load("tiny_cnn").module, cpu.tvm())

    with pytest.raises(KeyError, match="no_such_function"):
        deploy.schedule(module, {"no_such_function": traces.EMPTY_TRACE})


def packing_traces(module, cpu):
    """One trace for each function, which packs its weights if it has any."""
    traces = {}
    for subgraph in extract_subgraphs(module):
        found = evolution.sample(load_module(subgraph.workload), cpu.tvm(), 4, known=set(), seed=0)
        packs = [one.trace for one in found if "RewriteLayout" in one.trace or "layout" in one.trace]
        traces |= {name: (packs or [one.trace for one in found])[0] for name in subgraph.functions if found}
    return traces


def tensors(**shapes):
    """Variables of float32."""
    return [relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()]


def test_a_cumulative_sum_beside_packed_weights_is_compiled(cpu, tmp_path):
    builder = relax.BlockBuilder()
    x, w = tensors(x=(16, 64), w=(64, 32))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(x, w))
            output = builder.emit_output(relax.op.cumsum(product, axis=1))
        builder.emit_func_output(output)
    module = fusion.fuse(builder.get(), cpu.tvm())
    traces = packing_traces(module, cpu)
    assert len(traces) == 2

    deploy.build(module, traces, cpu.tvm(), tmp_path / "tuned.so", tmp_path / "packing.json")

    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "tuned.so")), tvm.cpu())
    values = [random_values((16, 64), "float32", 0, seed=0), random_values((64, 32), "float32", 0, seed=1)]
    packs = load_module((tmp_path / "packing.json").read_text())
    [[packed]] = packing.pack([packs], [{"w": values[1]}], cpu.tvm())
    assert packed.shape != values[1].shape
    result = machine["main"](tvm.runtime.tensor(values[0]), tvm.runtime.tensor(packed)).numpy()
    assert relative_error(result, np.cumsum(values[0] @ values[1], axis=1)) < 1e-5


def test_steps_that_share_their_weights_share_the_packed_ones(cpu, tmp_path):
    """An LSTM's were packed for each of its steps: 247 MB of 33 MB, none of which stayed in a cache."""
    builder = relax.BlockBuilder()
    shapes = [(1, 64), (64, 64), (64, 64), (64,)]  # the shift is packed with the weight, in one function
    x, w, v, shift = tensors(**dict(zip("xwvs", shapes, strict=True)))
    with builder.function("main", [x, w, v, shift], attrs={"num_input": 1}):
        with builder.dataflow():
            state = x
            for weight in (w, w, v, w):
                product = builder.emit(relax.op.matmul(state, weight))
                state = builder.emit(relax.op.tanh(builder.emit(relax.op.add(product, shift))))
            output = builder.emit_output(state)
        builder.emit_func_output(output)
    module = fusion.fuse(builder.get(), cpu.tvm())
    traces = packing_traces(module, cpu)

    deploy.build(module, traces, cpu.tvm(), tmp_path / "tuned.so", tmp_path / "packing.json")

    values = [random_values(shape, "float32", 0, seed=n) for n, shape in enumerate(shapes)]
    packs = load_module((tmp_path / "packing.json").read_text())
    [packed] = packing.pack([packs], [dict(zip("wvs", values[1:], strict=True))], cpu.tvm())
    matrices = [array for array in packed if array.size == 64 * 64]
    assert len(matrices) == 2
    assert matrices[0].shape != values[1].shape
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(tmp_path / "tuned.so")), tvm.cpu())
    result = machine["main"](*map(tvm.runtime.tensor, [values[0], *packed])).numpy()
    expected = values[0]
    for weight in (values[1], values[1], values[2], values[1]):
        expected = np.tanh(expected @ weight + values[3])
    assert relative_error(result, expected) < 1e-5


def packing_of(length):
    """Of a vector into two rows of four."""

    @T.prim_func(s_tir=True)
    def main(weight: T.Buffer((length,), "float32"), packed: T.Buffer((2, 4), "float32")) -> None:
        for i in range(length):
            with T.sblock("packed"):
                at = T.axis.spatial(length, i)
                packed[at // 4, at % 4] = weight[at]

    return main


@pytest.mark.parametrize("length", [5, 8])
def test_what_packing_leaves_empty_is_zero_whatever_was_in_memory(cpu, length):
    weight, packed = np.arange(1, length + 1, dtype=np.float32), tvm.runtime.tensor(np.full((2, 4), 7, np.float32))

    function = deploy._with_zeros_in_gaps(packing_of(length))

    lowering.build(tvm.IRModule({"main": function}), cpu.tvm())["main"](tvm.runtime.tensor(weight), packed)
    np.testing.assert_array_equal(packed.numpy().ravel(), np.pad(weight, (0, 8 - length)))
    assert ("T.float32(0" in function.script()) == (length == 5)
