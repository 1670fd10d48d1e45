"""Enlarged images, their sums, and maps of the caller's: which kernels they become, and that these compute the same."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import enlarging, fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.search.spaces import table
from lib.tir.workload import as_workload, load_module
from tests.lib.graph.rules import helpers as rules
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


MAP = (2, 6, 7, 21)


def enlarged(size=(17, 20), order=(0, 3, 1, 2), **attrs):
    """A map of classes as large as the image, channels first."""

    def build(x):
        return op.nn.relu(op.permute_dims(op.image.resize2d(x, size, layout="NHWC", **attrs), list(order)))

    return build


@pytest.mark.parametrize("mode", ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("size", [(17, 20), (12, 7), (13, 3)])
def test_maps_that_become_larger_are_computed_lines_at_a_time(mode, size, cpu):
    given, x = rules.module(enlarged(size, coordinate_transformation_mode=mode), MAP), rules.random(MAP)
    found = fusion.fuse(given, cpu.tvm())

    np.testing.assert_allclose(rules.run(found, x)[0], rules.run(given, x)[0], rtol=1e-6, atol=1e-6)
    first, second = sorted(extract_subgraphs(found), key=lambda each: "more_lines" in each.functions[0])
    assert "longer_lines" in first.functions[0]
    assert "relu" in second.functions[0]
    if size[1] > 16:
        assert table.fitting(load_module(second.workload), cpu.tvm()).name == "elementwise"


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (enlarged((11, 20)), "not twice as many lines"),
        (enlarged(method="nearest_neighbor"), "its elements are moved, not summed"),
        (enlarged(method="cubic"), "four lines make one"),
        (enlarged(order=(0, 2, 1, 3)), "its channels stay last"),
        (lambda x: op.permute_dims(op.nn.relu(op.image.resize2d(x, (17, 20), layout="NHWC")), [0, 3, 1, 2]), "a ReLU"),
    ],
)
def test_other_resizes_stay_as_they_are(build, why):
    assert "longer_lines" not in enlarging.by_lines(rules.module(build, MAP)).script(), why
