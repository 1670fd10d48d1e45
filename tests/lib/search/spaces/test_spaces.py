import pytest
from tvm.relax import op

from lib.machine import targets
from lib.search.spaces import contraction
from lib.search.spaces.space import Space
from lib.search.spaces.table import SPACES, fitting
from tests.helpers import matmul, running_sum, subgraph
from tests.lib.search.spaces.test_contraction import convolution
from tests.lib.search.spaces.test_rows import softmax
from tests.lib.search.spaces.test_window import depthwise


def test_no_space_fits_a_gpu():
    gpu = targets.target("nvidia/nvidia-h100").tvm()

    assert fitting(matmul(), gpu) is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda cpu: matmul(), "contraction"),
        (lambda cpu: convolution(), "contraction"),
        (lambda cpu: depthwise(1), "window"),
        (lambda cpu: softmax(cpu, 24, 64), "rows"),
        (lambda cpu: subgraph(cpu, lambda _, x: op.permute_dims(x, [1, 0]), (7, 48)), "transposition"),
        (lambda cpu: subgraph(cpu, lambda _, x: op.mean(x, [0]), (7, 48)), "columns"),
        (lambda cpu: subgraph(cpu, lambda _, x, y: op.add(x, y), (7, 48), (48,)), "elementwise"),
    ],
)
def test_a_workload_gets_the_space_of_its_kind(cpu, make, name):
    assert fitting(make(cpu), cpu.tvm()).name == name


def test_the_first_space_that_fits_is_taken_and_the_others_are_not_asked(cpu):
    asked = []
    spaces = [
        Space(name, fits=lambda *_, fits=fits, name=name: asked.append(name) or fits, sketches=lambda *_: [])
        for name, fits in (("a", False), ("b", True), ("c", True))
    ]

    assert fitting(matmul(), cpu.tvm(), spaces).name == "b"
    assert asked == ["a", "b"]
    assert fitting(running_sum(cpu), cpu.tvm(), SPACES) is None


def test_without_remainders_tiles_divide_the_output(cpu):
    workload, target = matmul(37, 53, 29), cpu.tvm()

    assert contraction.space().fits(workload, target)
    assert not contraction.space(remainders=False).fits(workload, target)
    assert contraction.space(remainders=False).fits(matmul(), target)
