from functools import partial

import numpy as np
import pytest
from tvm import te, topi

from lib.graph import strassen
from lib.machine.registers import registers
from lib.search import evolution
from lib.search.spaces.table import fitting
from lib.tir import traces
from lib.tir.workload import as_workload
from tests.helpers import run_on
from tests.lib.graph.test_strassen import SHAPES, arrays, expected_of, workload


@pytest.mark.parametrize("rows", [*SHAPES, (1, 197)])
def test_every_program_computes_the_product(cpu, rows):
    machine = registers(cpu.tvm())
    data, weight, shift = arrays(rows, 64, 6 * machine.lanes)
    given = workload(rows, 64, 6 * machine.lanes, machine)
    expected = expected_of(data, weight, shift)
    inputs = [data, strassen.summed(weight, machine.lanes), shift]

    proposals = evolution.sample(given, cpu.tvm(), 12, known=set(), seed=0)

    assert proposals
    assert {proposal.space for proposal in proposals} == {"strassen"}
    for proposal in proposals:
        program = traces.program(given, proposal.trace, cpu.tvm())
        found = run_on(traces.apply(given, proposal.trace).mod, cpu.tvm(), inputs, np.zeros_like(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        assert "layout_rewrite_preproc" in program.script()  # weights are packed as they are read


def test_tasks_have_parts_of_the_columns_or_all_of_them(cpu):
    machine = registers(cpu.tvm())
    given = workload((1, 256), 128, 12 * machine.lanes, machine)

    texts = [
        traces.apply(given, proposal.trace).mod.script()
        for proposal in evolution.sample(given, cpu.tvm(), 24, known=set(), seed=0)
    ]

    assert {text.count("T.parallel(") for text in texts} == {1, 2}  # sums of data in tasks, or before them
    for text in texts:
        assert text.count('scope="local"') == 2  # accumulators, and what the results are made of


def test_the_rows_of_a_task_are_whole_register_tiles(cpu):
    """No remainders: a loop over rows that ends within a tile would be two loops."""
    machine = registers(cpu.tvm())
    given = workload((1, 197), 64, 6 * machine.lanes, machine)

    for proposal in evolution.sample(given, cpu.tvm(), 12, known=set(), seed=0):
        text = traces.apply(given, proposal.trace).mod.script()
        assert text.count("T.where(") == 1  # the line of zeros is not written


def test_other_products_have_their_own_space(cpu):
    names = {(rows, batch): fitting(product(rows, batch), cpu.tvm()).name for rows in (8, 197) for batch in (0, 7)}

    assert set(names.values()) == {"contraction"}


def product(rows, batch):
    """A product, or several with weights of their own, and a ReLU."""
    outer, multiply = ([batch], partial(topi.nn.batch_matmul, transpose_b=False)) if batch else ([], topi.matmul)
    data, weight = te.placeholder((*outer, rows, 64)), te.placeholder((*outer, 64, 96))
    return as_workload(te.create_prim_func([data, weight, topi.nn.relu(multiply(data, weight))]))
