"""Products of a mixture of experts, against NumPy."""

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from lib.graph import experts
from lib.graph.experts import Tiles


def products(rows, weight, ends, cpu):
    """As TVM computes them, without any schedule."""
    builder = relax.BlockBuilder()
    arrays = (rows, weight, ends)
    given_ = [relax.Var(name, relax.TensorType(a.shape, str(a.dtype))) for name, a in zip("xwe", arrays, strict=True)]
    with builder.function("main", given_):
        with builder.dataflow():
            made = builder.emit_output(experts.emit(builder, *given_, lanes=8))
        builder.emit_func_output(made)
    with cpu.tvm():
        machine = relax.VirtualMachine(relax.build(builder.get(), target=cpu.tvm()), tvm.cpu())
    return machine["main"](*map(tvm.runtime.tensor, arrays)).numpy()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    ("counts", "columns"),
    [
        ([5, 0, 9, 2], 48),  # one has none
        ([0, 0, 16, 0], 32),  # one has all
        ([1, 1, 0, 0, 1, 0, 0, 0], 10),  # a few rows; columns that fill no vectors
        ([3, 4, 0, 2], 64),  # the last seven rows belong to no expert
    ],
)
def test_each_row_is_multiplied_by_the_weights_of_its_expert(cpu, counts, columns, dtype):
    n_rows = sum(counts) + (7 if counts[0] == 3 else 0)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(n_rows, 24)).astype(np.float32)
    weight = rng.normal(size=(len(counts), 24, columns)).astype(np.float32)
    expected = np.zeros((n_rows, columns))
    expected[: sum(counts)] = np.einsum("sk,skn->sn", rows[: sum(counts)], np.repeat(weight, counts, axis=0))

    found = products(rows, weight, np.cumsum(counts).astype(dtype), cpu)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20).filter(any))
def test_there_are_tiles_enough_for_any_spread_of_the_rows(counts):
    tiles = Tiles.of(sum(counts), len(counts))

    assert sum(-(-count // tiles.rows) for count in counts) <= tiles.count


def test_a_step_of_a_decoder_has_no_empty_places_and_a_prompt_has_few():
    assert Tiles.of(8, 64) == Tiles(rows=1, count=8)
    assert Tiles.of(1024, 32).rows == 4
    assert Tiles.of(1024, 32).count * 4 < 1.1 * 1024
