import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fused_layers, fusion
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import extract_subgraphs
from lib.machine import targets
from lib.machine.dots import BF16
from lib.machine.registers import registers
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, run

LANES = registers(targets.cpu_target().tvm()).lanes
NARROW, WIDE = 8, 32  # channels
LINES, PIXELS = 64, 8 * LANES  # the wide image has 64 KB for each lane
PART = LANES * 3 // 2  # channels that leave part of a vector
IMAGE = (1, LINES, PIXELS, NARROW)
DIRECT = AlgorithmConfig(winograd="never")


def conv(x, inputs, outputs, size=1, groups=1, **attrs):
    weight = const(random((size, size, inputs // groups, outputs), inputs + outputs) / np.float32(size * inputs) ** 0.5)
    return op.nn.conv2d(x, weight, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def shifted(x, channels):
    return op.add(x, const(random((1, 1, 1, channels), channels)))


def relu6(x):
    return op.minimum(op.maximum(x, const(0.0)), const(6.0))


def silu(x):
    return op.multiply(x, op.sigmoid(x))


def wide(x, act=relu6, size=1, inputs=NARROW, channels=WIDE, **attrs):
    """The first of a block's convolutions; act(0) is not zero where its bias is not."""
    return act(shifted(conv(x, inputs, channels, size, **attrs), channels))


def slid(x, act=relu6, padding=1, size=3, channels=WIDE, **attrs):
    return act(shifted(conv(x, channels, channels, size, groups=channels, padding=padding, **attrs), channels))


def block(x, outputs=NARROW, **attrs):
    return shifted(conv(slid(wide(x), **attrs), WIDE, outputs), outputs)


def residual(x):
    return op.add(block(x), x)


def chained(build, *shapes):
    """The operators before and after, which compute the same."""
    return becomes([fused_layers.chained(LANES)], build, *shapes)


def subgraphs(cpu, build, *shapes, config=DIRECT):
    model = choose_algorithms(fusion.lift_constants(module(build, *shapes)), cpu, config)
    return extract_subgraphs(fusion.fuse(model.module, cpu.tvm()))


@pytest.mark.parametrize(
    "build",
    [
        block,
        residual,
        lambda x: block(x, strides=2),
        lambda x: block(x, strides=2, padding=[0, 0, 1, 1]),  # as TensorFlow's files have it
        lambda x: block(x, size=5, padding=2),
        lambda x: block(x, dilation=2, padding=2),
        lambda x: block(x, padding=0),
        lambda x: block(x, act=silu),
        lambda x: slid(wide(x, silu)),
        lambda x: slid(wide(x, lambda y: op.clip(y, 0, 6))),  # as .pt2 files have it
        lambda x: slid(wide(x, size=3, padding=1)),
        lambda x: slid(conv(x, NARROW, WIDE)),  # nothing between
    ],
)
def test_zeros_are_around_what_the_first_convolution_gives_and_not_around_its_data(build):
    after = chained(build, IMAGE)[1]

    assert after.count("border") == 1


def test_the_first_convolution_of_a_network_has_a_stride():
    after = chained(lambda x: slid(wide(x, size=3, inputs=3, strides=2, padding=1)), (1, 2 * LINES, 2 * PIXELS, 3))[1]

    assert after.count("border") == 1


@pytest.mark.parametrize(
    ("build", "shapes", "why"),
    [
        (block, [(1, LINES // 2, PIXELS, NARROW)], "its image stays near"),
        (
            lambda x: slid(wide(x, channels=PART), channels=PART),
            [(1, 2 * LINES, 2 * PIXELS, NARROW)],
            "part of a vector",
        ),
        (lambda x: slid(wide(x, inputs=160)), [(1, LINES, PIXELS, 160)], "the products take longer than the image"),
        (lambda x: [slid(y := wide(x)), op.nn.relu(y)], [IMAGE], "another operator reads the image"),
        (lambda x: slid(op.nn.max_pool2d(wide(x), 3, padding=1, layout="NHWC")), [IMAGE], "a window is between"),
        (lambda x: slid(op.nn.relu(x)), [(1, LINES, PIXELS, WIDE)], "no convolution makes the image"),
        (lambda x, y: slid(op.add(wide(x), y)), [IMAGE, (1, LINES, PIXELS, WIDE)], "another image is added"),
        (lambda x: conv(wide(x), WIDE, WIDE, 3, groups=4, padding=1), [IMAGE], "groups of several channels"),
    ],
)
def test_others_stay(build, shapes, why):
    before, after = chained(build, *shapes)

    assert after == before, why


@pytest.mark.parametrize("build", [block, residual, lambda x: block(x, strides=2)])
def test_a_block_is_one_subgraph(cpu, build):
    [found] = subgraphs(cpu, build, IMAGE)

    assert found.core_operator == "fused_layers"
    assert [name for name in found.operators if "conv" in name] == ["conv2d_1x1", "depthwise_conv2d", "conv2d_1x1"]


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda x: [y := slid(wide(x)), op.mean(y, [1, 2])], ["fused_layers", "reduce"]),
        (lambda x: conv(slid(wide(x)), WIDE, NARROW, strides=2), ["fused_layers", "conv2d_1x1"]),
        (lambda x: conv(slid(wide(x)), WIDE, NARROW, size=3, padding=1), ["conv2d", "fused_layers"]),
        (lambda x: slid(wide(slid(wide(x)), inputs=WIDE)), ["fused_layers", "fused_layers"]),
    ],
    ids=["two readers", "every second pixel", "a window", "the first of the next"],
)
def test_what_reads_the_windows_otherwise_stays_apart(cpu, build, names):
    assert sorted(each.core_operator for each in subgraphs(cpu, build, IMAGE)) == sorted(names)


def test_blocks_write_their_channels_of_a_concatenation(cpu):
    found = subgraphs(cpu, lambda x: op.concat([block(x), block(x, size=5, padding=2)], 3), IMAGE)

    assert [(each.core_operator, each.operators[-1]) for each in found] == [("fused_layers", "place")] * 2


def test_columns_that_fill_no_vectors_stay_apart(cpu):
    config = AlgorithmConfig(winograd="never", widen="never")
    found = subgraphs(cpu, lambda x: block(x, outputs=3), IMAGE, config=config)

    assert sorted(each.core_operator for each in found) == ["conv2d_1x1", "fused_layers"]


def test_a_subgraph_that_is_not_tuned_computes_the_same(cpu):
    model = fusion.lift_constants(module(residual, IMAGE))
    given = [random(IMAGE, 3), *model.weights.values()]
    chosen = choose_algorithms(model, cpu, AlgorithmConfig()).module

    [found] = run(chosen, *given)
    [fused] = run(fusion.fuse(chosen, cpu.tvm()), *given)
    [expected] = run(model.module, *given)

    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fused, expected, rtol=1e-4, atol=1e-5)


def test_two_blocks_of_one_shape_are_one_subgraph_twice(cpu):
    [found] = subgraphs(cpu, lambda x: residual(residual(x)), IMAGE)

    assert found.weight == 2


@pytest.mark.parametrize("config", [AlgorithmConfig(winograd="never", fused_layers="never"), DIRECT.for_all_shapes])
def test_whoever_wants_none_gets_none_and_neither_do_ranges_whose_shapes_share_weights(cpu, config):
    assert len(subgraphs(cpu, block, IMAGE, config=config)) == 3


def test_in_bf16_convolutions_stay_apart(cpu):
    if BF16 not in registers(cpu.tvm()).dots:
        pytest.skip("needs a CPU with AVX512-BF16")
    found = subgraphs(cpu, block, IMAGE, config=AlgorithmConfig(winograd="never", precision="bf16"))

    assert "fused_layers" not in {each.core_operator for each in found}


def test_a_model_without_any_stays_as_it_is():
    made = fusion.lift_constants(module(lambda x: wide(x), IMAGE))

    assert fusion.rewritten(made, [fused_layers.chained(LANES)]) is made
    assert operators(made.module) == ["nn.conv2d", "add", "maximum", "minimum"]
