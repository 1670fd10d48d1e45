import re
from collections import Counter

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op
from tvm.target import Target

from lib.graph import carrying, fusion
from lib.graph.reweight import shape_of
from lib.graph.subgraphs import extract_subgraphs
from lib.search import evolution
from lib.tir import traces
from lib.tir.workload import load_module
from tests.lib.graph.rules.helpers import const, module, random, run

LANES = 16
IMAGE = (1, 6, 7, 8)  # N, H, W, C


def conv(x, out, channels, seed=1, size=1, groups=1, **attrs):
    weight = const(random((size, size, channels // groups, out), seed))
    return op.nn.conv2d(x, weight, padding=size // 2, groups=groups, data_layout="NHWC", kernel_layout="HWIO", **attrs)


def shifted(x, channels, seed=7):
    return op.add(x, const(random((channels,), seed)))


def block(x, wide=36, out=24, **attrs):
    """Channels are spread, convolved one by one, and summed again, as in MobileNets."""
    spread = op.nn.silu(shifted(conv(x, wide, IMAGE[3]), wide))
    apart = op.minimum(op.nn.relu(shifted(conv(spread, wide, wide, 2, 3, wide, **attrs), wide)), const(np.float32(6)))
    return conv(apart, out, wide, 3)


def gated(x, wide=36):
    """Squeeze and excitation."""
    image = op.nn.relu(conv(x, wide, IMAGE[3], size=3))
    gate = op.sigmoid(
        shifted(conv(op.nn.relu(conv(op.mean(image, [1, 2], keepdims=True), 9, wide, 2)), wide, 9, 3), wide)
    )
    return conv(op.multiply(image, gate), 16, wide, 4)


def residual(x, wide=20):
    first = conv(x, wide, IMAGE[3])
    second = conv(op.nn.relu(first), wide, wide, 2)
    return conv(op.add(first, second), 16, wide, 3)


def pooled(x, wide=36):
    image = op.nn.max_pool2d(conv(x, wide, IMAGE[3]), (2, 2), layout="NHWC")
    return conv(op.subtract(image, const(random((1, 1, 1, wide), 5))), 16, wide, 2)


def volumes(x, wide=36):
    """Frames, as X3D has them: 1x1 convolutions are of images, depthwise ones of volumes."""
    frames = op.reshape(op.nn.relu(conv(x, wide, IMAGE[3])), (1, 2, 3, 7, wide))
    weight = const(random((3, 3, 3, 1, wide), 2))
    apart = op.nn.conv3d(frames, weight, padding=1, groups=wide, data_layout="NDHWC", kernel_layout="DHWIO")
    gated = op.multiply(apart, op.sigmoid(op.mean(apart, [1, 2, 3], keepdims=True)))
    return conv(op.reshape(gated, (1, *IMAGE[1:3], wide)), 16, wide, 3)


def more_channels(x, less=20, wide=36):
    """Sums of an image with one of fewer channels, as BlazeFace has them."""
    image = op.nn.relu(conv(x, less, IMAGE[3]))
    apart = conv(image, less, less, 2, 3, less)
    beside = op.nn.pad(image, [0, 0, 0, 0, 0, 0, 0, wide - less])
    image = op.nn.relu(op.add(conv(apart, wide, less, 3), beside))
    return conv(conv(image, wide, wide, 4, 3, wide), 16, wide, 5)


def sixty_four_at_once(x):
    return conv(op.nn.relu(conv(x, 10, IMAGE[3])), 24, 10, 2, strides=2)


def times_the_data(x):
    joined = op.concat([*[x] * 4, op.strided_slice(x, [3], [0], [4])], 3)
    return conv(op.multiply(conv(x, 36, IMAGE[3]), joined), 16, 36)


CARRIED = [
    block,
    lambda x: block(x, strides=2),
    lambda x: block(x, 24),
    gated,
    residual,
    pooled,
    volumes,
    more_channels,
    sixty_four_at_once,
]


def carried(build, *, reads_all=False):
    model = fusion.lift_constants(module(build, IMAGE))
    return model, carrying.carried(model, LANES, reads_all=reads_all)


def channels(model):
    """How often each number of channels is computed."""
    values = [binding.value for block in model.module["main"].body.blocks for binding in block.bindings]
    return Counter(shape_of(v)[-1] for v in values if isinstance(v, relax.Call) and "slice" not in v.op.name)


@pytest.mark.parametrize("reads_all", [False, True])
@pytest.mark.parametrize("build", CARRIED)
def test_what_is_computed_stays_the_same_in_whole_vectors(build, reads_all, cpu):
    model, found = carried(build, reads_all=reads_all)
    x = random(IMAGE)

    [y] = run(fusion.fuse(found.module, cpu.tvm()), x, *found.weights.values())

    np.testing.assert_allclose(y, run(module(build, IMAGE), x)[0], rtol=1e-4, atol=1e-5)
    inner = {n: count for n, count in channels(found).items() if n != shape_of(model.module["main"].body)[-1]}
    assert not any(n % LANES for n in inner)
    assert any(n % LANES for n in channels(model))


def test_no_weight_is_padded_when_the_model_runs():
    _, found = carried(gated, reads_all=True)

    assert "nn.pad" not in found.module.script()
    assert {value.shape[-1] for value in found.weights.values()} == {48, 16}


def test_convolutions_read_the_channels_that_there_were_unless_they_read_all():
    _, own = carried(block)
    _, every = carried(block, reads_all=True)

    assert [value.shape[2] for value in own.weights.values() if value.shape[:2] == (1, 1)] == [8, 36]
    assert [value.shape[2] for value in every.weights.values() if value.shape[:2] == (1, 1)] == [8, 48]


def test_no_kernel_copies_and_all_of_them_have_whole_vectors():
    target = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512", "num-cores": 2})
    _, found = carried(lambda x: block(x, out=16))
    subgraphs = extract_subgraphs(fusion.fuse(found.module, target))

    assert sorted(each.core_operator for each in subgraphs) == ["conv2d_1x1", "conv2d_1x1", "depthwise_conv2d"]
    for each in subgraphs:
        workload = load_module(each.workload)
        [program] = evolution.sample(workload, target, 1, known=set(), seed=0)
        lanes = re.findall(r"T\.vectorized\((?:T\.int64\()?(\d+)", traces.apply(workload, program.trace).mod.script())
        assert set(lanes) == {"16"}


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda x: block(x, 32), "its channels fill vectors"),
        (lambda x: conv(op.nn.relu(conv(x, 24, IMAGE[3])), 16, 24), "vectors of a half fill them, and nothing is slow"),
        (lambda x: op.nn.relu(conv(x, 36, IMAGE[3])), "the caller reads it"),
        (lambda x: conv(op.nn.relu(conv(x, 36, IMAGE[3])), 16, 36, size=3), "a convolution of 3x3 may be Winograd's"),
        (lambda x: op.nn.softmax(conv(x, 36, IMAGE[3])), "a softmax is over all channels"),
        (times_the_data, "what it is multiplied with has no more channels"),
        (lambda x: [joined := conv(x, 36, IMAGE[3]), conv(op.nn.relu(joined), 16, 36)], "the caller reads it as well"),
    ],
)  # fmt: skip
def test_what_gains_nothing_or_is_read_otherwise_stays(build, why):
    model, found = carried(build)

    assert found is model, why
