"""Channels that are added to those of each group: copied in vectors, and zeros after them."""

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from lib.graph import fusion
from lib.graph.reweight import deeper_data
from lib.search.spaces import elementwise
from lib.tir import analysis, gaps, lowering
from tests.lib.search.spaces.test_contraction import sampled


def deeper(cpu, shape, groups, more, dtype):
    """The workload that adds so many channels to each group."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(deeper_data(builder, x, more, groups))
        builder.emit_func_output(result)
    module = builder.get()
    module.update_func(module.get_global_var("main"), module["main"].with_attr("num_input", 1))
    fused = fusion.fuse(module, cpu.tvm())
    [function] = [f for _, f in fused.functions_items() if isinstance(f, tirx.PrimFunc)]
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


@pytest.mark.parametrize(
    ("shape", "groups", "more", "dtype"),
    [
        ((1, 7, 5, 272), 4, 4, "bfloat16"),
        ((1, 3, 4, 51), 3, 1, "bfloat16"),
        ((2, 3, 184), 1, 8, "bfloat16"),
        ((1, 3, 4, 40), 2, 4, "uint8"),
        ((1, 3, 4, 40), 2, 12, "float32"),
    ],
)
def test_every_program_copies_channels_and_leaves_zeros_after_them(cpu, shape, groups, more, dtype):
    workload = deeper(cpu, shape, groups, more, dtype)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.default_rng(0).uniform(1, 200, shape).astype(kind)
    apart = x.reshape(*shape[:-1], groups, -1)
    expected = np.pad(apart, [(0, 0)] * len(shape) + [(0, more)]).reshape(*shape[:-1], -1)

    schedules = sampled(workload, cpu)

    assert elementwise.fits(workload, cpu.tvm())
    for schedule in schedules:
        text = schedule.mod.script()
        assert gaps.MARK in text
        assert "T.vectorized(" in text
        given, made = tvm.runtime.tensor(x), tvm.runtime.empty(expected.shape, dtype)
        lowering.build(schedule.mod, cpu.tvm())["main"](given, made)
        np.testing.assert_array_equal(made.numpy().view(np.uint8), expected.view(np.uint8))


def test_a_gap_is_a_loop_of_its_own(cpu):
    schedule = sampled(deeper(cpu, (1, 3, 4, 40), 2, 12, "float32"), cpu)[0]

    split = gaps.split(schedule.mod["main"])

    extents = [
        int(nest[-1].extent) for nest in analysis.nests(split.body) if not analysis.walk(nest[-1].body, tirx.For)
    ]
    assert extents == [20, 12]
    assert gaps.split(split).same_as(split)
