"""Sums of enlarged images: which kernels they become, and that these compute the same."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import enlarging, fusion
from lib.search.spaces import table
from lib.tir.workload import as_workload
from tests.lib.graph.test_gates import convolved, kernels, module

LARGE, KERNEL, SMALL, SMALLER = (1, 16, 16, 16), (1, 1, 16, 16), (1, 8, 8, 16), (1, 4, 4, 16)


def head(emit, large, kernel, small, smaller):
    """As SegFormer's, of three sizes."""
    enlarged = [emit(op.image.resize2d(image, (16, 16), layout="NHWC")) for image in (small, smaller)]
    return emit(op.nn.relu(emit(op.add(emit(op.add(*enlarged)), convolved(emit, large, kernel)))))


@pytest.fixture
def model():
    return module(head, LARGE, KERNEL, SMALL, SMALLER)


def test_enlarged_images_are_summed_in_one_kernel_which_a_space_takes(model, cpu):
    found = kernels(model, cpu.tvm())

    read = {name: [tuple(map(int, param.ty.shape)) for param in f.params[:-1]] for name, f in found.items()}
    assert sorted(read.values()) == sorted([[SMALL, SMALLER], [LARGE, KERNEL, LARGE]])
    [own] = [f for name, f in found.items() if SMALL in read[name]]
    assert table.fitting(as_workload(own), cpu.tvm()).name == "elementwise"


def test_the_kernels_compute_what_the_model_does(model, cpu):
    given = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in
             enumerate((LARGE, KERNEL, SMALL, SMALLER))]  # fmt: skip

    def run(built):
        machine = relax.VirtualMachine(tvm.compile(built, cpu.tvm()), tvm.cpu())
        return machine["main"](*(tvm.runtime.tensor(array) for array in given)).numpy()

    np.testing.assert_allclose(run(fusion.fuse(model, cpu.tvm())), run(model), rtol=1e-5, atol=1e-5)


def test_other_sums_stay_as_they_are(cpu):
    def summed(emit, image, kernel, other):
        return emit(op.add(emit(op.image.resize2d(other, (16, 16), layout="NHWC")), convolved(emit, image, kernel)))

    given = module(summed, LARGE, KERNEL, SMALL)

    assert len(enlarging.summed(given).functions) == 1
