import pytest
import tvm
from tvm.s_tir import Schedule
from tvm.script import tirx as T

from lib.search.evolution import sample
from lib.tir import dot, traces
from lib.tir.outline import outline
from tests.helpers import matmul


def tiled():
    """A product with tiles of 4 x 2 vectors of 8 lanes and a sum unrolled by 2, by hand."""
    schedule = Schedule(matmul(16, 32, 64), debug_mask="none")
    block = schedule.get_sblock("product")
    i, j, k = schedule.get_loops(block)
    i0, i1 = schedule.split(i, [None, 4])
    j0, j1, j2 = schedule.split(j, [None, 2, 8])
    k0, k1 = schedule.split(k, [None, 2])
    schedule.reorder(i0, j0, k0, k1, i1, j1, j2)
    schedule.parallel(i0)
    for loop in (k1, i1, j1):
        schedule.unroll(loop)
    schedule.vectorize(j2)
    schedule.annotate(k1, "prefetch_weights", 1)
    return schedule.mod


def test_a_register_tile_is_what_a_step_of_the_sum_computes():
    assert outline(tiled()).tile == "4 x 2 x 8 lanes"


def test_lanes_that_an_instruction_multiplies_are_part_of_the_tile():
    """Of matrices: two columns of registers with 32 rows each."""
    schedule = Schedule(matmul(64, 64, 64), debug_mask="none")
    i, j, k = schedule.get_loops(schedule.get_sblock("product"))
    i0, i1 = schedule.split(i, [None, 32])
    j0, j1, j2 = schedule.split(j, [None, 2, 16])
    k0, k1, k2 = schedule.split(k, [None, 16, 2])
    schedule.reorder(i0, j0, j1, k0, k1, i1, j2, k2)
    for loop in (j1, i1, k2):
        schedule.unroll(loop)
    schedule.annotate(j2, dot.MARK, "vdpbf16ps")

    assert outline(schedule.mod).tile == "2 x 32 x 16 lanes"


def test_loops_are_indented_as_they_are_nested():
    assert outline(tiled()).lines == (
        "parallel 4",
        "  for 2",
        "    for 32",
        "      unrolled 2, prefetch_weights",
        "        unrolled 4",
        "          unrolled 2",
        "            vectorised 8",
        "              product",
    )


def test_of_an_untouched_program_there_is_no_tile_and_loops_of_one_step_are_left_out():
    found = outline(matmul(1, 32, 64))

    assert found.tile == ""
    assert found.lines == ("for 32", "  for 64", "    product")


def test_what_packs_weights_ahead_is_left_out(cpu):
    workload = matmul(64, 64, 64)
    workload = tvm.IRModule({"main": workload["main"].with_attr("layout_free_buffers", [1])})
    [proposal] = sample(workload, cpu.tvm(), 1, known=(), seed=0)

    found = outline(traces.apply(workload, proposal.trace).mod)

    assert "layout_rewrite_preproc" in proposal.trace
    assert not [line for line in found.lines if "_global" in line]
    assert "lanes" in found.tile


@pytest.mark.parametrize("tag", ["blockIdx.x", "threadIdx.x"])
def test_threads_of_gpus_are_named(tag):
    @T.prim_func(s_tir=True)
    def main(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        for i in T.thread_binding(8, thread=tag):
            with T.sblock("copy"):
                v = T.axis.spatial(8, i)
                y[v] = x[v]

    assert outline(tvm.IRModule({"main": main})).lines == (f"{tag} 8", "  copy")
