import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph.rules import convolution
from lib.graph.rules.sums import RULES
from lib.graph.simplify import simplify
from tests.lib.graph.rules.helpers import becomes, const, module, random, rewritten, stays

IMAGE = (2, 6, 9, 8)


def conv(x, *size, seed=0, outputs=6, padding=None, groups=1, **attrs):
    kernel = const(random((outputs, 6 // groups, *size), seed + sum(size)))
    operator = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}[len(size)]
    return operator(x, kernel, padding=[n // 2 for n in size] if padding is None else padding, groups=groups, **attrs)


def shifted(y, seed=0):
    return op.add(y, const(random((6, 1, 1), seed)))


def kernels(build, *inputs):
    """Shapes of the kernels that are left."""
    found = rewritten(RULES, module(build, *inputs))
    calls = [binding.value for block in found["main"].body.blocks for binding in block.bindings]
    return [[int(n) for n in call.args[1].ty.shape.values] for call in calls if "conv" in str(getattr(call, "op", ""))]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.add(conv(x, 3, 3), conv(x, 1, 1)),
        lambda x: op.add(conv(x, 1, 1), conv(x, 5, 5)),
        lambda x: op.add(op.add(conv(x, 3, 3), conv(x, 1, 3)), conv(x, 3, 1)),
        lambda x: op.add(conv(x, 3, 3), conv(x, 3, 3, seed=9)),
        lambda x: op.add(conv(x, 7, 7, groups=6), conv(x, 3, 3, groups=6)),
        lambda x: op.add(conv(x, 3, 3, strides=2), conv(x, 1, 1, strides=2)),
        lambda x: op.add(conv(x, 3, 3, dilation=2, padding=[2, 2]), conv(x, 1, 1)),
        lambda x: op.add(conv(x, 3, 3, padding=[0, 1, 2, 1]), conv(x, 1, 1)),
        lambda x: op.add(
            conv(x, 4, 4, padding=[1, 1, 2, 2], strides=3), conv(x, 2, 2, padding=[0, 0, 1, 1], strides=3)
        ),
    ],
)
def test_two_convolutions_of_the_same_data_are_one_with_the_sum_of_their_kernels(build):
    _, after = becomes(RULES, build, IMAGE)

    assert after == ["nn.conv2d"]


@pytest.mark.parametrize(("shape", "size"), [((2, 6, 20), (5,)), ((1, 6, 4, 5, 6), (3, 3, 3))])
def test_signals_and_volumes_likewise(shape, size):
    ones = [1] * len(size)

    _, after = becomes(RULES, lambda x: op.add(conv(x, *ones), conv(x, *size)), shape)

    assert after == [f"nn.conv{len(size)}d"]


def test_the_kernel_is_as_large_as_the_larger_one():
    assert kernels(lambda x: op.add(conv(x, 1, 1), conv(x, 5, 3)), IMAGE) == [[6, 6, 5, 3]]


def test_what_is_added_behind_each_is_added_once():
    _, after = becomes(RULES, lambda x: op.add(shifted(conv(x, 3, 3), 1), shifted(conv(x, 1, 1), 2)), IMAGE)

    assert after == ["nn.conv2d", "add"]


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("scale", [None, 2.0, random((6, 1, 1), 3), random((1, 6, 1, 1), 4)])
def test_the_data_are_a_kernel_of_one_tap(groups, scale):
    def build(x):
        data = x if scale is None else op.multiply(x, const(scale))
        return op.add(conv(x, 3, 3, groups=groups), shifted(data, 5))

    _, after = becomes(RULES, build, IMAGE)

    assert after == ["nn.conv2d", "add"]


def test_a_block_as_it_was_trained_is_one_convolution():
    """RepVGG's: three branches, each with its batch norm."""

    def norm(y, seed):
        values = [const(np.abs(random((6,), seed + n)) + 0.5) for n in range(4)]
        return relax.TupleGetItem(op.nn.batch_norm(y, *values, 1, training=False), 0)

    def build(x):
        return op.nn.relu(op.add(op.add(norm(conv(x, 3, 3), 1), norm(conv(x, 1, 1), 2)), norm(x, 3)))

    _, after = becomes(simplify, build, IMAGE)

    assert after == ["nn.conv2d", "add", "nn.relu"]


def test_means_of_several_sizes_are_one_convolution():
    """As of an inception of periods (TimesNet)."""

    def build(x):
        parts = [shifted(conv(x, 2 * n + 1, 2 * n + 1), n) for n in range(4)]
        return op.multiply(op.add(op.add(op.add(parts[0], parts[1]), parts[2]), parts[3]), const(0.25))

    _, after = becomes([*RULES, *convolution.RULES], build, IMAGE)

    assert after == ["nn.conv2d", "add"]


@pytest.mark.parametrize(
    "build",
    [
        lambda x: op.add(conv(x, 1, 5), conv(x, 5, 1)),  # 25 taps for 10
        lambda x: op.add(conv(x, 3, 3), conv(op.nn.relu(x), 1, 1)),
        lambda x: op.add(conv(x, 3, 3, groups=2), conv(x, 1, 1)),
        lambda x: op.add(conv(x, 3, 3, dilation=2, padding=[2, 2]), conv(x, 3, 3)),
        lambda x: op.add(conv(x, 3, 3, dilation=2, padding=[2, 2]), conv(x, 3, 3, padding=[3, 3, 1, 1], dilation=2)),
        lambda x: op.add(conv(x, 3, 3, outputs=1), x),
        lambda x: op.add(conv(x, 3, 3, strides=2), op.nn.max_pool2d(x, (2, 2), (2, 2), ceil_mode=True)),
        lambda x: op.add(conv(x, 3, 3), op.multiply(x, const(random((9, 8), 1)))),
        lambda x: [op.add(y := conv(x, 3, 3), conv(x, 1, 1)), op.exp(y)],
        lambda x: op.add(op.add(conv(x, 3, 3), const(random((9, 8), 1))), shifted(conv(x, 1, 1), 2)),
        lambda x: op.add(x, op.multiply(x, const(2.0))),
    ],
)
def test_other_sums_stay(build):
    assert stays(RULES, build, IMAGE)


def test_a_kernel_that_is_no_constant_stays():
    def build(x, kernel):
        return op.add(op.nn.conv2d(x, kernel, padding=(1, 1)), conv(x, 1, 1))

    assert stays(RULES, build, IMAGE, (6, 6, 3, 3))
