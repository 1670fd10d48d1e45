import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.search.spaces import transposition
from tests.helpers import matmul, run_on, subgraph
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.search.spaces.test_rows import softmax

TOKENS, HEADS, SIZE = 32, 4, 16


def keys(builder, x):
    """(tokens, 3 * heads * size) to the keys of each head, (heads, size, tokens)."""
    part = builder.emit(op.strided_slice(x, [1], [HEADS * SIZE], [2 * HEADS * SIZE], [1]))
    heads = builder.emit(op.reshape(part, (TOKENS, HEADS, SIZE)))
    return op.permute_dims(heads, [1, 2, 0])


def shuffled(builder, x):
    """Channels of three groups, one of each in turn."""
    groups = builder.emit(op.reshape(x, (2, 5, 3, 8)))
    return op.reshape(builder.emit(op.permute_dims(groups, [0, 1, 3, 2])), (2, 5, 24))


def pairs(builder, x):
    """Keys with two neighbours of each head side by side for each token, as `lib.graph.packing` has them."""
    heads = builder.emit(op.reshape(builder.emit(keys(builder, x)), (HEADS, SIZE // 2, 2, TOKENS)))
    return op.permute_dims(heads, [0, 1, 3, 2])


def to_channels_last(builder, x):
    return op.nn.relu(builder.emit(op.permute_dims(x, [0, 2, 3, 1])))


@pytest.mark.parametrize(
    ("make", "shape", "numpy"),
    [
        (
            keys,
            (TOKENS, 3 * HEADS * SIZE),
            lambda x: x[:, HEADS * SIZE : 2 * HEADS * SIZE].reshape(TOKENS, HEADS, SIZE).transpose(1, 2, 0),
        ),
        (
            pairs,
            (TOKENS, 3 * HEADS * SIZE),
            lambda x: x[:, HEADS * SIZE : 2 * HEADS * SIZE].reshape(TOKENS, HEADS, -1, 2).transpose(1, 2, 0, 3),
        ),
        (to_channels_last, (1, 12, 8, 20), lambda x: np.maximum(x.transpose(0, 2, 3, 1), 0)),
        (lambda _, x: op.permute_dims(x, [1, 0]), (7, 48), lambda x: x.T),
        (shuffled, (2, 5, 24), lambda x: x.reshape(2, 5, 3, 8).transpose(0, 1, 3, 2).reshape(2, 5, 24)),
    ],
)
def test_every_program_moves_each_number_to_its_place(cpu, make, shape, numpy):
    workload = subgraph(cpu, make, shape)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)

    schedules = sampled(workload, cpu)

    assert transposition.fits(workload, cpu.tvm())
    assert len(schedules) >= 2
    for schedule in schedules:
        text = schedule.mod.script()
        assert "T.parallel(" in text
        assert "T.unroll(" in text
        found = run_on(schedule.mod, cpu.tvm(), [x], np.zeros(numpy(x).shape, np.float32))
        np.testing.assert_array_equal(found, numpy(x))


@pytest.mark.parametrize("name", ["copy", "broadcast", "softmax", "product"])
def test_what_keeps_together_what_lies_together_is_left_alone(cpu, name):
    workload = {
        "copy": lambda: subgraph(cpu, lambda _, x: op.permute_dims(x, [1, 0, 2]), (8, 4, 16)),
        "broadcast": lambda: subgraph(cpu, lambda _, x, y: op.add(x, y), (8, 16), (8, 1)),
        "softmax": lambda: softmax(cpu, 8, 32),
        "product": matmul,
    }[name]()

    assert not transposition.fits(workload, cpu.tvm())


def test_an_order_of_lines_is_no_transposition(cpu):
    workload = subgraph(cpu, lambda _, x: op.take(x, relax.const(np.array([2, 0, 1])), axis=0), (3, 16))

    assert not transposition.fits(workload, cpu.tvm())
