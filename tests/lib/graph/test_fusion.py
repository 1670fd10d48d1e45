"""What is marked as free to be packed."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.models import onnx_import
from lib.search import evolution
from lib.tir import traces
from lib.tir.parameters import weight_positions
from lib.tir.workload import load_module
from tests.helpers import run_on

INDICES = np.stack([np.zeros(128, int), np.random.default_rng(0).permutation(128)], -1)


def only_subgraph(operator, weight, shape, folder, target):
    """That of an ONNX file with one operator, of x and a weight."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", "weight"], ["y"])], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [numpy_helper.from_array(weight, "weight")],
    )  # fmt: skip
    path = folder / "m.onnx"
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    [found] = extract_subgraphs(fusion.fuse(onnx_import.load(path).module, target))
    return found


@pytest.fixture
def subgraph(tmp_path, cpu):
    """A GatherND whose indices are known."""
    return only_subgraph("GatherND", INDICES, [1, 128], tmp_path, cpu.tvm())


def test_indices_are_not_packed(subgraph):
    assert weight_positions(load_module(subgraph.workload)["main"]) == []


def test_every_program_of_a_gather_with_known_indices_computes_it(subgraph, cpu):
    workload = load_module(subgraph.workload)
    x = np.random.default_rng(1).normal(size=(1, 128)).astype(np.float32)

    found = evolution.sample(workload, cpu.tvm(), 16, known=set(), seed=0)

    assert found
    for proposal in found:
        program = traces.program(workload, proposal.trace, cpu.tvm())
        np.testing.assert_array_equal(
            run_on(program, cpu.tvm(), [x, INDICES], np.zeros(128, np.float32)), x[0, INDICES[:, 1]]
        )


def test_weights_that_are_multiplied_are_packed(tmp_path, cpu):
    found = only_subgraph("MatMul", np.ones((64, 32), np.float32), [16, 64], tmp_path, cpu.tvm())

    assert weight_positions(load_module(found.workload)["main"]) == [1]
