"""What a workload without a register tile is. Of contractions and windows: test_nest.py."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.search import described
from tests.helpers import matmul, subgraph
from tests.lib.search.spaces.test_columns import pooled
from tests.lib.search.spaces.test_elementwise import quantized, windows
from tests.lib.search.spaces.test_rows import softmax
from tests.lib.search.spaces.test_transposition import HEADS, SIZE, TOKENS, keys


def context(workload, cpu):
    return dict(zip(described.CONTEXT, described.describe(workload, cpu.tvm()).context, strict=True))


def size(found, name):
    return round(2 ** float(found[name]) - 1)


def sizes(found, *names):
    return [size(found, name) for name in names]


def biased(_, x, bias):
    return op.add(x, bias)


def test_a_chain_is_told_by_what_it_writes_and_reads(cpu):
    found = context(subgraph(cpu, biased, (6, 10, 48), (48,)), cpu)

    assert sizes(found, "rows", "last row", "columns", "channels", "run") == [60, 10, 48, 1, 48]
    assert [found[name] for name in ("reads", "reads across", "reads again")] == [2, 0, 0]
    assert [found[name] for name in ("functions", "conditions", "bytes read", "bytes written")] == [0, 0, 4, 4]


def test_what_each_element_costs_is_told(cpu):
    """Rounding to bytes is a function of a chain whose blocks are one by then."""
    found = context(subgraph(cpu, quantized, (4, 96)), cpu)
    plain = context(subgraph(cpu, lambda _, x: op.multiply(x, relax.const(3.0)), (4, 96)), cpu)

    assert found["functions"] > plain["functions"] == 0
    assert (found["bytes read"], found["bytes written"]) == (4, 1)
    assert size(found, "run") == 4 * 96


def test_a_run_ends_where_windows_of_an_image_do(cpu):
    found = context(subgraph(cpu, windows, (14, 14, 32)), cpu)

    assert size(found, "run") == 7 * 32
    assert found["divisions"] > 0
    assert found["reads across"] == 0


def test_what_is_read_across_is_told(cpu):
    assert context(subgraph(cpu, keys, (TOKENS, 3 * HEADS * SIZE)), cpu)["reads across"] == 1


def test_a_reduction_over_lines_is_told_by_its_lines_and_channels(cpu):
    found = context(subgraph(cpu, pooled, (2, 7, 9, 40)), cpu)

    assert sizes(found, "rows", "columns", "channels") == [2, 40, 63]
    assert found["blocks after"] == 1  # the division
    assert size(found, "data bytes") == pytest.approx(4 * 2 * 7 * 9 * 40, rel=1e-5)


def test_a_reduction_over_rows_is_told_by_them(cpu):
    found = context(softmax(cpu, 12, 80), cpu)

    assert sizes(found, "last row", "channels") == [1, 80]
    assert size(found, "rows") * size(found, "columns") == 12


def test_of_a_contraction_there_is_nothing_on_chains(cpu):
    found = context(matmul(), cpu)

    assert np.isnan([found[name] for name in described.CONTEXT[described.CONTEXT.index("run") :]]).all()
