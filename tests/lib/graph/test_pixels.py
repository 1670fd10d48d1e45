"""The rows of a tile of 32 registers are 4 to 14 pixels; of 16 registers, 4 to 6."""

import numpy as np
import pytest
from tvm.relax import op

from lib.graph import fusion, pixels
from lib.graph.fusion import Model
from lib.graph.subgraphs import extract_subgraphs
from tests.lib.graph.rules.helpers import becomes, const, module, random

IMAGE = (1, 3, 19, 8)  # N, H, W, C
REGISTERS = 32


def conv(x, out, channels=8, size=1, groups=1, **attrs):
    weight = const(random((size, size, channels // groups, out), 1))
    return op.nn.conv2d(x, weight, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def shifted(x):
    return op.nn.relu(op.add(x, const(random((1, 1, 1, 8), 7))))


def residual(x):
    return op.nn.relu(op.add(shifted(conv(x, 8)), x))


def of_a_slice(x):
    return conv(op.strided_slice(x, [3], [2], [7], [1]), 16, 5)


def of_pixels_in_a_slice(x):
    return conv(op.strided_slice(x, [2], [1], [18], [1]), 16)


def in_halves(x):
    weight = const(random((1, 1, 8, 16)).astype("float16"))
    return op.nn.conv2d(op.astype(x, "float16"), weight, data_layout="NHWC", kernel_layout="HWIO")


def of_bytes(x):
    weight = const(np.random.default_rng(0).integers(-127, 128, (1, 1, 8, 16)).astype("int8"))
    data = op.astype(op.abs(x), "uint8")
    return op.nn.conv2d(data, weight, data_layout="NHWC", kernel_layout="HWIO", out_dtype="int32")


def at_once(build, *inputs, registers=REGISTERS, takes_bytes=False):
    return becomes(lambda made: pixels.at_once(Model(made, {}), registers, of_bytes=takes_bytes).module, build, *inputs)


@pytest.mark.parametrize(
    ("build", "shape", "after"),
    [
        (lambda x: conv(x, 16), IMAGE, ["reshape", "nn.conv2d", "reshape"]),
        (lambda x: conv(x, 16), (2, 3, 17, 8), ["reshape", "nn.conv2d", "reshape"]),
        (lambda x: conv(x, 16), (1, 19, 1, 8), ["reshape", "nn.conv2d", "reshape"]),
        (residual, IMAGE, ["reshape", "nn.conv2d", "add", "nn.relu", "reshape", "add", "nn.relu", "reshape"]),
        (of_a_slice, IMAGE, ["reshape", "strided_slice", "nn.conv2d", "reshape"]),
        (of_pixels_in_a_slice, IMAGE, ["strided_slice", "reshape", "nn.conv2d", "reshape"]),
    ],
)
def test_convolutions_of_lines_without_whole_tiles_are_of_all_pixels(build, shape, after):
    _, found = at_once(build, shape)

    assert found == after


@pytest.mark.parametrize(("takes_bytes", "n_reshapes"), [(True, 2), (False, 0)])
def test_those_of_bytes_are_where_another_instruction_adds_their_products(takes_bytes, n_reshapes):
    _, found = at_once(of_bytes, IMAGE, takes_bytes=takes_bytes)

    assert "nn.conv2d" in found
    assert found.count("reshape") == n_reshapes


@pytest.mark.parametrize(
    ("build", "shape", "why"),
    [
        (lambda x: conv(x, 16), (1, 3, 14, 8), "14 rows are a tile"),
        (lambda x: conv(x, 16), (1, 3, 38 * 5, 8), "and so are 10"),
        (lambda x: conv(x, 16), (1, 1, 19, 8), "there is one line"),
        (lambda x: conv(x, 16, size=3), IMAGE, "a kernel of 3x3 sees where lines end"),
        (lambda x: conv(x, 16, strides=2), IMAGE, "every second pixel of every second line"),
        (lambda x: conv(x, 16, padding=1), IMAGE, "there are pixels around the image"),
        (lambda x: conv(x, 16, groups=2), IMAGE, "groups have columns of their own"),
        (in_halves, IMAGE, "another type"),
    ],
)
def test_others_stay(build, shape, why):
    before, after = at_once(build, shape)

    assert after == before, why


def test_which_lines_have_whole_tiles_depends_on_the_registers():
    image = (1, 3, 14, 8)

    assert at_once(lambda x: conv(x, 16), image)[1] == ["nn.conv2d"]
    assert at_once(lambda x: conv(x, 16), image, registers=16)[1] == ["reshape", "nn.conv2d", "reshape"]


def test_what_follows_element_by_element_stays_in_the_kernel_and_views_are_no_kernels(cpu):
    made = fusion.lift_constants(module(lambda x: residual(shifted(conv(x, 8, size=3))), IMAGE))
    subgraphs = extract_subgraphs(fusion.fuse(pixels.at_once(made, REGISTERS).module, cpu.tvm()))

    assert [each.core_operator for each in subgraphs] == ["conv2d", "conv2d_1x1"]


def silu(x):
    return op.multiply(x, op.sigmoid(x))


def hard_swish(x):
    return op.multiply(x, op.clip(op.add(x, const(3.0)), 0, 6))


@pytest.mark.parametrize(("gated", "steps"), [(silu, ["sigmoid"]), (hard_swish, ["add", "clip"])])
def test_gates_are_of_all_pixels_as_well(gated, steps):
    after = at_once(lambda x: gated(shifted(conv(x, 8))), IMAGE)[1]

    assert after == ["reshape", "nn.conv2d", "add", "nn.relu", *steps, "multiply", "reshape"]


def test_a_model_without_any_stays_as_it_is():
    made = fusion.lift_constants(module(lambda x: op.reshape(shifted(op.reshape(x, (1, 19, 3, 8))), IMAGE), IMAGE))

    assert pixels.at_once(made, REGISTERS) is made
