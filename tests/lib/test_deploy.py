import numpy as np
import pytest

from lib import deploy, graph, search, workloads, zoo
from lib.numerics import random_values, relative_error
from lib.workers import Worker


@pytest.mark.parametrize("name", ["tiny_cnn", "tiny_transformer"])
def test_a_scheduled_and_packed_library_computes_what_the_untuned_one_does(cpu, tmp_path, name):
    model = zoo.load(name)
    module = graph.fuse(model.module, cpu.tvm())
    traces = {}
    for subgraph in workloads.extract(module):
        if subgraph.tunable:
            found = search.sample(workloads.load(subgraph.workload), cpu.tvm(), 1, known=set(), seed=3)
            traces |= {function: found[0].trace for function in subgraph.functions if found}
    deploy.build(module, traces, cpu.tvm(), tmp_path / "tuned.so", pack=True)
    deploy.build(module, {}, cpu.tvm(), tmp_path / "untuned.so", pack=False)
    np.savez(tmp_path / "weights.npz", **model.weights)
    [given] = deploy.interface(module)
    np.savez(tmp_path / "inputs.npz", random_values(tuple(given["shape"]), given["dtype"], given["bound"], seed=0))

    worker = Worker(cpu)
    try:
        worker.wait_until_ready()
        files = {key: str(tmp_path / f"{key}.npz") for key in ("weights", "packed", "inputs")}
        replies = [
            worker.ask(60, do="pack", library=str(tmp_path / "tuned.so"), weights=files["weights"], out=files["packed"])
        ]
        for kind, params in (("tuned", "packed"), ("untuned", "weights")):
            library = str(tmp_path / f"{kind}.so")
            replies.append(
                worker.ask(
                    60, do="open_library", name=kind, library=library, params=files[params], inputs=files["inputs"]
                )
            )
            replies.append(worker.ask(60, do="infer", name=kind, out=str(tmp_path / f"out-{kind}.npz")))
    finally:
        worker.kill()

    assert [reply.get("error") for reply in replies] == [None] * 5
    tuned, untuned = (np.load(tmp_path / f"out-{kind}.npz")["arr_0"] for kind in ("tuned", "untuned"))
    assert relative_error(tuned, untuned) < 1e-5
    assert np.abs(untuned).max() > 0.1


def test_the_interface_names_inputs_and_bounds_token_ids(cpu):
    module = graph.fuse(zoo.load("tiny_transformer").module, cpu.tvm())

    assert deploy.interface(module) == [{"name": "x", "shape": [1, 16], "dtype": "int32", "bound": 100}]


def test_a_trace_for_a_function_that_is_not_there_is_an_error(cpu):
    module = graph.fuse(zoo.load("tiny_cnn").module, cpu.tvm())

    with pytest.raises(KeyError, match="no_such_function"):
        deploy.schedule(module, {"no_such_function": search.EMPTY_TRACE})
