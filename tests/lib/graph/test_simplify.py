"""Layouts of whole models: from what a file has to channels last, with what surrounds convolutions folded into them."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import fusion, simplify
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.search.spaces import table
from lib.tir import traces
from lib.tir.workload import load_module
from tests.helpers import run_on
from tests.lib.graph.rules.helpers import const, module, operators, random, run

VOLUME = (1, 3, 4, 10, 9)
KERNEL, SHIFT = random((32, 3, 3, 3, 3), 1), random((32,), 2)


def padded(x):
    """A volume with a border of zeros through a convolution, a batch norm and a maximum over windows."""
    around = op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1, 0, 2], "constant", 0.0)
    found = op.nn.conv3d(around, const(KERNEL), strides=(1, 2, 1))
    ones, zeros = const(np.ones(32, np.float32)), const(np.zeros(32, np.float32))
    scale = const(2 * np.ones(32, np.float32))
    found = op.nn.batch_norm(found, scale, const(SHIFT), zeros, ones, 1, training=False)[0]
    return op.nn.max_pool3d(op.nn.relu(found), (1, 2, 2), (1, 2, 2))


def in_loops(x):
    """The convolution with its border, its scale and its shift, channels last, in double precision."""
    around = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 2))).astype(np.float64)
    depth, height, width = (around.shape[n] - 2 for n in (2, 3, 4))
    found = np.zeros((1, depth, -(-height // 2), width, 32))
    for d in range(depth):
        for y in range(0, height, 2):
            for left in range(width):
                window = around[0, :, d : d + 3, y : y + 3, left : left + 3]
                found[0, d, y // 2, left] = np.tensordot(KERNEL, window, 4)
    return np.maximum(2 / np.sqrt(1 + 1e-5) * found + SHIFT, 0)


@pytest.fixture(scope="module")
def simplified():
    return simplify.channels_last(simplify.simplify(module(padded, VOLUME)))


def test_convolutions_of_volumes_have_their_channels_last(simplified):
    [convolution] = [
        binding.value
        for block in simplified["main"].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, relax.Call) and binding.value.op.name == "relax.nn.conv3d"
    ]

    assert (str(convolution.attrs.data_layout), str(convolution.attrs.kernel_layout)) == ("NDHWC", "DHWIO")
    assert [int(p) for p in convolution.attrs.padding] == [1, 1, 0, 1, 1, 2]


def test_borders_and_norms_of_volumes_are_folded(simplified):
    assert operators(simplified) == [
        "permute_dims", "nn.conv3d", "add", "nn.relu", "nn.max_pool3d", "permute_dims",
    ]  # fmt: skip


def test_a_model_of_volumes_computes_what_it_did(simplified):
    x = random(VOLUME)
    expected = in_loops(x)
    expected = expected[:, :, : expected.shape[2] // 2 * 2, : expected.shape[3] // 2 * 2]
    n, depth, height, width, channels = expected.shape
    expected = expected.reshape(n, depth, height // 2, 2, width // 2, 2, channels).max((3, 5)).transpose(0, 4, 1, 2, 3)

    np.testing.assert_allclose(run(simplified, x)[0], expected, rtol=1e-4, atol=1e-4)


def test_every_program_of_a_convolution_of_volumes_computes_it(simplified, cpu):
    model = fusion.lift_constants(simplified)
    lifted = tvm.IRModule({"main": model.module["main"]}, attrs=model.module.attrs)
    [subgraph] = [
        found for found in extract_subgraphs(fusion.fuse(lifted, cpu.tvm())) if found.core_operator == "conv3d"
    ]
    workload = load_module(subgraph.workload)
    space = table.fitting(workload, cpu.tvm())
    assert space is not None
    assert space.name == "contraction"
    x = random(VOLUME)
    kernel, shift = model.weights.values()

    for proposal in evolution.sample(workload, cpu.tvm(), 8, known=set(), seed=0):
        program = traces.program(workload, proposal.trace, cpu.tvm())
        expected = in_loops(x)
        found = run_on(
            program, cpu.tvm(), [x.transpose(0, 2, 3, 4, 1).copy(), kernel, shift], np.zeros(expected.shape, np.float32)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
