import numpy as np
import pytest

from lib.search import evolution
from lib.tir.packings import packing
from lib.tir.traces import EMPTY_TRACE, apply
from tests.helpers import matmul_of_weights


def layouts(workload, trace):
    """What each weight becomes, computed with the index maps of the program itself."""
    found = []
    for instruction in apply(workload, trace).trace.insts:
        if instruction.kind.name == "TransformLayout":
            index_map, shape = instruction.inputs[1], (32, 96)
            values = np.arange(np.prod(shape)).reshape(shape)
            packed = np.empty([int(n) for n in index_map.map_shape(list(shape))], np.int64)
            for index in np.ndindex(*shape):
                packed[tuple(int(n) for n in index_map.map_indices(list(index)))] = values[index]
            found.append(tuple(packed.ravel()))
    return tuple(found)


def test_programs_have_equal_packings_where_they_bring_weights_into_equal_orders_of_bytes(cpu):
    workload = matmul_of_weights(24, 96, 32)  # tiles of two vectors and of three, on any CPU
    proposals = evolution.sample(workload, cpu.tvm(), 24, known=set(), seed=0)
    told = {}
    for proposal in proposals:
        told.setdefault(packing(proposal.trace), set()).add(layouts(workload, proposal.trace))

    assert len(told) > 1
    assert all(len(orders) == 1 for orders in told.values())
    assert len(set.union(*told.values())) == len(told)


def test_programs_of_other_numbers_of_rows_can_have_the_same_packing(cpu):
    few, many = (evolution.sample(matmul_of_weights(n, 96, 32), cpu.tvm(), 24, known=set(), seed=0) for n in (8, 24))

    assert len({packing(each.trace) for each in few} & {packing(each.trace) for each in many}) > 1


@pytest.mark.parametrize("trace", ["", EMPTY_TRACE])
def test_what_packs_nothing_has_no_packing(trace):
    assert packing(trace) == ""
