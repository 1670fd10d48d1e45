import pytest
import tvm
from tvm import te
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from lib import graph, workloads, zoo
from tests.helpers import matmul


def renamed():
    x, w = te.placeholder((16, 64), name="left"), te.placeholder((64, 32), name="right")
    axis = te.reduce_axis((0, 64), "other")
    product = te.compute((16, 32), lambda i, j: te.sum(x[i, axis] * w[axis, j], axis=axis), name="product")
    return workloads.as_workload(te.create_prim_func([x, w, product]))


def test_the_id_does_not_depend_on_the_names_of_buffers_and_variables():
    assert workloads.workload_id(renamed()) == workloads.workload_id(matmul())


@pytest.mark.parametrize("other", [matmul(n=8), matmul(k=32)])
def test_the_id_depends_on_shapes(other):
    assert workloads.workload_id(other) != workloads.workload_id(matmul())


def test_a_workload_keeps_its_id_through_json():
    module = matmul()

    assert workloads.workload_id(workloads.load(tvm.ir.save_json(module))) == workloads.workload_id(module)


def test_resnet50_has_24_subgraphs_with_fused_residuals(cpu):
    found = workloads.extract(graph.fuse(zoo.load("resnet50").module, cpu.tvm()))

    assert len(found) == 24
    assert sum(s.weight for s in found) == 53 + 3  # convolutions; pooling, mean, classifier
    assert sum(s.flop * s.weight for s in found) == pytest.approx(7.7e9, rel=0.01)  # 3.86 G multiply-adds
    assert all(s.tunable for s in found)


def test_equal_subgraphs_are_one_with_the_weight_of_all(cpu):
    found = workloads.extract(graph.fuse(zoo.load("tiny_transformer").module, cpu.tvm()))

    assert len({s.subgraph_id for s in found}) == len(found)
    assert {s.weight for s in found if s.core_operator == "layer_norm"} == {3}


class OneRow(nn.Module):
    """Softmax by rows, then all rows as one."""

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.reshape(op.softmax(x), (1, 32))


def test_views_are_kept_apart_as_not_tunable(cpu):
    found = workloads.extract(graph.fuse(zoo.export(OneRow(), (4, 8), "float32").module, cpu.tvm()))

    assert [s.note for s in found if not s.tunable] == ["a reshape: a view, no kernel"]
