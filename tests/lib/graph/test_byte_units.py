"""Units of bytes that are chosen when the values are known, against NumPy in the words of ONNX's definition."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import byte_units, fusion
from lib.tir import byte_units as kernel
from tests.helpers import results
from tests.lib.graph.rules.helpers import operators


def quantized(x, target):
    """Bytes, scale and zero point that a model computes, and the names of its operators."""
    builder, data = relax.BlockBuilder(), relax.Var("x", relax.TensorType(x.shape, "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            found = byte_units.emit(builder, data)
            outputs = builder.emit_output(relax.Tuple([found.values, found.scale, found.zero]))
        builder.emit_func_output(outputs)
    fused = fusion.fuse(builder.get(), target.tvm())
    return results(fused, target, x), operators(fused)


def expected(x):
    least, most = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
    scale = np.float32(1) if least == most else (most - least) / np.float32(255)
    zero = np.rint(np.clip(-least / scale, 0, 255))
    return np.clip(np.rint(x / scale) + zero, 0, 255).astype(np.uint8), scale, zero.astype(np.uint8)


def values(shape, offset=0.0):
    return (np.random.default_rng(0).normal(size=shape) + offset).astype(np.float32)


CASES = {
    "a row": values((1, 768)),
    "many rows, on several threads": values((128, 768)),
    "no whole vectors": values((3, 67)),
    "fewer than a vector": values((7,)),
    "above zero": values((4, 100), 10),
    "below zero": values((4, 100), -10),
    "the largest at the end": np.concatenate([values((1027,)), np.float32([50, -70])]),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_reach_from_the_smallest_to_the_largest(cpu, name):
    (found, scale, zero), names = quantized(CASES[name], cpu)

    bytes_, scale_expected, zero_expected = expected(CASES[name])
    np.testing.assert_array_equal(found, bytes_)
    np.testing.assert_array_equal(scale, scale_expected)
    np.testing.assert_array_equal(zero, zero_expected)
    assert any(kernel.FUNCTION in each for each in names)


def test_zeros_are_zero_and_their_neighbours_one_apart(cpu):
    (found, scale, zero), _ = quantized(np.zeros((4, 5), np.float32), cpu)

    assert not found.any()
    assert (scale.item(), zero.item()) == (1.0, 0)


def test_without_threads_of_this_kind_they_are_chosen_by_operators(cpu):
    """As for GPUs, whose blocks do not wait for one another."""
    x = values((16, 40))
    builder, data = relax.BlockBuilder(), relax.Var("x", relax.TensorType(x.shape, "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            outputs = builder.emit_output(byte_units.emit(builder, data).values)
        builder.emit_func_output(outputs)
    module = byte_units.chosen(builder.get(), tvm.target.Target({"kind": "cuda", "arch": "sm_80"}))
    fused = fusion.fuse(module, cpu.tvm())

    np.testing.assert_array_equal(results(fused, cpu, x)[0], expected(x)[0])
    assert not any(kernel.FUNCTION in each for each in operators(fused))


def test_a_transpose_before_it_is_not_made_for_it(cpu):
    x = values((1, 6, 5, 5))
    builder, data = relax.BlockBuilder(), relax.Var("x", relax.TensorType(x.shape, "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            moved = builder.emit(op.permute_dims(data, [0, 2, 3, 1]))
            outputs = builder.emit_output(byte_units.emit(builder, moved).scale)
        builder.emit_func_output(outputs)

    fused = fusion.fuse(builder.get(), cpu.tvm())

    assert not any("transpose" in each for each in operators(fused))
