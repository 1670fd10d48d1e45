import pytest
import tvm
from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from lib.graph import fusion
from lib.graph.subgraphs import _untunable, extract_subgraphs
from lib.models.zoo import catalogue
from lib.tir.workload import as_workload, load_module, workload_id
from tests.helpers import matmul


def renamed():
    x, w = te.placeholder((16, 64), name="left"), te.placeholder((64, 32), name="right")
    axis = te.reduce_axis((0, 64), "other")
    product = te.compute((16, 32), lambda i, j: te.sum(x[i, axis] * w[axis, j], axis=axis), name="product")
    return as_workload(te.create_prim_func([x, w, product]))


def test_the_id_does_not_depend_on_the_names_of_buffers_and_variables():
    assert workload_id(renamed()) == workload_id(matmul())


@pytest.mark.parametrize("other", [matmul(n=8), matmul(k=32)])
def test_the_id_depends_on_shapes(other):
    assert workload_id(other) != workload_id(matmul())


def test_a_workload_keeps_its_id_through_json():
    module = matmul()

    assert workload_id(load_module(tvm.ir.save_json(module))) == workload_id(module)


def test_resnet50_has_24_subgraphs_with_fused_residuals(cpu):
    found = extract_subgraphs(fusion.fuse(catalogue.load("resnet50").module, cpu.tvm()))

    assert len(found) == 24
    assert sum(s.weight for s in found) == 53 + 3  # convolutions; pooling, mean, classifier
    assert sum(s.flop * s.weight for s in found) == pytest.approx(7.7e9, rel=0.01)  # 3.86 G multiply-adds
    assert all(s.tunable for s in found)


def test_equal_subgraphs_are_one_with_the_weight_of_all(cpu):
    found = extract_subgraphs(fusion.fuse(catalogue.load("tiny_transformer").module, cpu.tvm()))

    assert len({s.subgraph_id for s in found}) == len(found)
    assert {s.weight for s in found if s.core_operator == "layer_norm"} == {3}


class OneRow(nn.Module):
    """Softmax by rows, then all rows as one."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.reshape(op.softmax(x), (1, 32))


def test_a_tensor_without_elements_is_not_tuned(cpu):
    x, y = te.placeholder((0, 4), name="x"), te.placeholder((2, 4), name="y")
    joined = te.compute((2, 4), lambda i, j: te.if_then_else(i < 0, x[i, j], y[i, j]), name="joined")

    assert _untunable(te.create_prim_func([x, y, joined])) == "a tensor without elements"


def test_views_are_kept_apart_as_not_tunable(cpu):
    found = extract_subgraphs(fusion.fuse(catalogue.export(OneRow(), (4, 8), "float32").module, cpu.tvm()))

    assert [s.note for s in found if not s.tunable] == ["a reshape: a view, no kernel"]
