import re

import numpy as np
import pytest
from tvm import relax, te, tirx, topi
from tvm.relax import op
from tvm.s_tir import Schedule

from lib.graph import fusion, precision
from lib.graph.fusion import SCHEDULE_RULE, schedule_rules
from lib.machine.registers import registers
from lib.search.spaces import window
from lib.tir import lowering, remainder
from lib.tir.operators import core_operator, operators
from lib.tir.workload import as_workload
from tests.helpers import matmul, run_on
from tests.lib.graph.test_precision import of_bytes
from tests.lib.graph.test_words import convolution, convolved
from tests.lib.search.spaces.test_contraction import sampled
from tests.lib.tir.test_dot import needs_vnni

SIZE, CHANNELS = 14, 32


def depthwise(stride, channels=CHANNELS):
    image = te.placeholder((1, SIZE, SIZE, channels), name="image")
    weight = te.placeholder((3, 3, 1, channels), name="weight")
    out = topi.nn.relu(topi.nn.group_conv2d_nhwc(image, weight, stride, 1, 1, channels))
    return as_workload(te.create_prim_func([image, weight, out]))


def depthwise_signal(dilation, extent=30, batch=1):
    signal = te.placeholder((batch, extent, CHANNELS), name="signal")
    weight = te.placeholder((5, 1, CHANNELS), name="weight")
    convolved = topi.nn.group_conv1d_nwc(signal, weight, 1, 2 * dilation, dilation, CHANNELS, "float32")
    return as_workload(te.create_prim_func([signal, weight, topi.nn.relu(convolved)]))


def depthwise_volume():
    volume = te.placeholder((1, 4, 6, 7, CHANNELS), name="volume")
    weight = te.placeholder((3, 3, 3, 1, CHANNELS), name="weight")
    out = topi.nn.conv(volume, weight, 1, 1, 1, CHANNELS, "NDHWC", "DHWIO", "float32")
    return as_workload(te.create_prim_func([volume, weight, out]))


def pooling(kind, channels=CHANNELS):
    image = te.placeholder((1, SIZE, SIZE, channels), name="image")
    out = topi.nn.pool2d(image, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), kind, layout="NHWC")
    schedule = Schedule(as_workload(te.create_prim_func([image, out])))
    for block, rule in schedule_rules(schedule.mod["main"]).items():  # `graph.fuse` does so
        assert rule.startswith("meta_schedule.pool")
        schedule.unannotate(schedule.get_sblock(block), SCHEDULE_RULE)
    return schedule.mod


def windows(image, fill, stride):
    """Shape (1, y, x, C, 3, 3)."""
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=fill)
    return np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::stride, ::stride]


@pytest.mark.parametrize(("stride", "channels"), [(1, CHANNELS), (2, CHANNELS), (1, 57), (2, 38), (1, 100), (1, 9)])
def test_every_program_of_a_depthwise_convolution_computes_it(cpu, stride, channels):
    rng = np.random.default_rng(0)
    image, weight = (rng.normal(size=s).astype(np.float32) for s in ((1, SIZE, SIZE, channels), (3, 3, 1, channels)))
    expected = np.maximum(np.einsum("nyxcij,ijmc->nyxc", windows(image, 0, stride), weight), 0)

    schedules = sampled(depthwise(stride, channels), cpu)

    assert len(schedules) > 6
    assert window.fits(depthwise(stride, channels), cpu.tvm())
    for schedule in schedules:
        assert "T.parallel(" in schedule.mod.script()
        found = run_on(schedule.mod, cpu.tvm(), [image, weight], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_last_vector_of_channels_that_fill_none_begins_earlier_or_is_shorter_in_a_task_that_pads(cpu):
    lanes = registers(cpu.tvm()).lanes
    found = set()

    for schedule in sampled(depthwise(1, 57), cpu):
        tiles = remainder.peel(schedule.mod["main"]).script().partition("nhwc_init")[2]
        assert "T.where" not in tiles
        found.add(frozenset(re.findall(r"T\.vectorized\((\d+)\)", tiles)))
    assert found == {frozenset({str(lanes)}), frozenset({str(lanes), str(57 % lanes)})}


def test_weights_are_packed_where_channels_fill_vectors(cpu):
    assert window.packs_weights(depthwise(1, 64), cpu.tvm())
    assert not window.packs_weights(depthwise(1, 57), cpu.tvm())


@pytest.mark.parametrize("dilation", [1, 8])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_program_of_a_depthwise_convolution_of_signals_computes_it(cpu, dilation, batch):
    rng = np.random.default_rng(0)
    signal = rng.normal(size=(batch, 30, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(5, 1, CHANNELS)).astype(np.float32)
    padded = np.pad(signal, ((0, 0), (2 * dilation, 2 * dilation), (0, 0)))
    taps = [padded[:, n * dilation : n * dilation + 30] * weight[n, 0] for n in range(5)]

    schedules = sampled(depthwise_signal(dilation, batch=batch), cpu)

    assert len(schedules) > 6
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [signal, weight], np.zeros(signal.shape, np.float32))
        np.testing.assert_allclose(found, np.maximum(sum(taps), 0), rtol=1e-4, atol=1e-4)


def test_elements_of_a_signal_are_shared_out(cpu):
    """Not its channels alone: what is before and after it is shared out so."""
    texts = [schedule.mod.script() for schedule in sampled(depthwise_signal(1), cpu)]
    tasks = [int(re.findall(r"T\.parallel\((\d+)", text)[-1]) for text in texts]  # of the last kernel

    assert max(tasks) > CHANNELS // 16


def test_every_program_of_a_depthwise_convolution_of_volumes_computes_it(cpu):
    rng = np.random.default_rng(0)
    volume = rng.normal(size=(1, 4, 6, 7, CHANNELS)).astype(np.float32)
    weight = rng.normal(size=(3, 3, 3, 1, CHANNELS)).astype(np.float32)
    padded = np.pad(volume, ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)))
    seen = np.lib.stride_tricks.sliding_window_view(padded, (3, 3, 3), axis=(1, 2, 3))
    expected = np.einsum("ndyxcijk,ijkmc->ndyxc", seen, weight)

    schedules = sampled(depthwise_volume(), cpu)

    assert len(schedules) > 6
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [volume, weight], np.zeros(expected.shape, np.float32))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("size", "window_size", "stride", "channels"), [(14, 3, 1, 32), (12, 5, 2, 48), (9, 7, 1, 8)])
def test_every_program_of_a_depthwise_convolution_of_bytes_computes_it(cpu, size, window_size, stride, channels):
    workload, image, weight, expected = of_words(cpu, size, window_size, stride, channels)

    schedules = sampled(workload, cpu)

    assert window.fits(workload, cpu.tvm(), words=True)
    assert core_operator(operators(workload)) == "depthwise_conv2d_int8"
    assert len(schedules) > 6
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [image, weight], np.zeros(expected.shape, np.float32))
        np.testing.assert_array_equal(found, expected)


@needs_vnni
def test_words_are_made_in_each_task_and_multiplied_by_one_instruction(cpu):
    workload, *_ = of_words(cpu, 14, 3, 1, 32)

    for schedule in sampled(workload, cpu):
        text = schedule.mod.script()
        built = lowering.build(schedule.mod, cpu.tvm())
        assert text.rindex("T.parallel(") < text.index('T.sblock("words")') < text.index("conv2d_by_words_update")
        assert "vpdpbusd" in built.inspect_source("s")
        assert "vpmulld" not in built.inspect_source("s")


def of_words(cpu, size, window_size, stride, channels):
    """A depthwise convolution of bytes as `lib.graph.words` has it, and twice its sums as floats; an image, a weight in
    its order, and what comes of them."""
    strides, padding = (stride, stride), (window_size // 2,) * 4
    convolve = convolution(channels, strides, padding)

    def build(builder, x, w):
        sums = builder.emit(op.astype(builder.emit(convolve(builder, x, w)), "float32"))
        return op.multiply(sums, relax.const(2.0, "float32"))

    plain, x, w = of_bytes((1, size, size, channels), (window_size, window_size, 1, channels), build)
    by_words = precision.in_quads(plain, 16)
    fused = fusion.fuse(by_words.module, cpu.tvm())
    [function] = [each for _, each in fused.functions_items() if isinstance(each, tirx.PrimFunc)]
    return as_workload(function), x, by_words.weights["w"], 2.0 * convolved(x, w, strides, padding)


def test_the_padding_is_made_before_or_in_tasks_or_not_at_all(cpu):
    found = [schedule.mod.script() for schedule in sampled(depthwise(1), cpu, 24)]

    padded = [text for text in found if "pad_temp" in text]
    before = [text for text in padded if text.index('T.sblock("pad_temp")') < text.rindex("T.parallel(")]

    assert 0 < len(before) < len(padded) < len(found)


def test_every_program_of_a_max_pooling_computes_it(cpu):
    image = np.random.default_rng(0).normal(size=(1, SIZE, SIZE, CHANNELS)).astype(np.float32) - 5  # zeros would win
    expected = windows(image, -np.inf, 2).max(axis=(-2, -1))

    schedules = sampled(pooling("max"), cpu)

    assert len(schedules) > 6
    for schedule in schedules:
        found = run_on(schedule.mod, cpu.tvm(), [image], np.zeros(expected.shape, np.float32))
        np.testing.assert_array_equal(found, expected)


def across_channels():
    """Sums over five neighbouring channels, as a local response norm has them."""
    image = te.placeholder((1, SIZE, SIZE, CHANNELS + 4), name="image")
    axes = [te.reduce_axis((0, n), name) for n, name in ((1, "line"), (1, "column"), (5, "channel"))]
    sums = te.compute(
        (1, SIZE, SIZE, CHANNELS),
        lambda n, y, x, c: te.sum(image[n, y + axes[0], x + axes[1], c + axes[2]], axis=axes),
        name="pool_sum",
    )
    return as_workload(te.create_prim_func([image, sums]))


@pytest.mark.parametrize("workload", [pooling("max", 1), matmul(), across_channels()])
def test_a_single_channel_and_sums_over_channels_are_left_alone(cpu, workload):
    assert not window.fits(workload, cpu.tvm())
