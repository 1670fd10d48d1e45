"""Factors of a weight's channels."""

import pytest
from tvm.relax import op

from lib.graph import simplify
from lib.graph.rules.modulation import RULES
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, stays

IMAGE, STYLE = (2, 4, 5, 5), (1, 4)
WEIGHT = random((6, 4, 3, 3), 1)


def modulated(x, style, conv=op.nn.conv2d, weight=WEIGHT):
    """A layer of StyleGAN2: weights times a style, divided by their lengths."""
    scaled = op.multiply(const(weight), op.reshape(style, (1, 4, *[1] * (weight.ndim - 2))))
    axes = [*range(1, weight.ndim)]
    length = op.sqrt(op.add(op.sum(op.multiply(scaled, scaled), axes, keepdims=True), const(1e-5)))
    return conv(x, op.divide(scaled, length), padding=1)


def test_weights_that_depend_on_a_style_become_constants():
    _, after = becomes(RULES, modulated, IMAGE, STYLE)

    assert [name for name in after if name not in ("reshape", "add", "sqrt")] == [
        "multiply",  # the style with itself
        "matmul",  # with the sums of squares of the weights
        "multiply",  # the image with the style
        "nn.conv2d",
        "divide",  # by the lengths
    ]


def test_models_are_simplified_so():
    after = operators(simplify.simplify(module(modulated, IMAGE, STYLE)))

    assert "sum" not in after
    assert after.index("nn.conv2d") < after.index("divide")


@pytest.mark.parametrize(
    ("conv", "image", "weight"),
    [
        (op.nn.conv1d, (2, 4, 9), random((6, 4, 3), 1)),
        (op.nn.conv3d, (1, 4, 3, 5, 5), random((6, 4, 3, 3, 3), 1)),
    ],
)
def test_of_signals_and_volumes_too(conv, image, weight):
    _, after = becomes(RULES, lambda x, style: modulated(x, style, conv, weight), image, STYLE)

    assert after.count("sum") == 0
    assert after.index("matmul") < after.index(f"nn.{conv.__name__}") < after.index("divide")


@pytest.mark.parametrize("layouts", [("NHWC", "HWIO"), ("NCHW", "OIHW")])
def test_channels_are_found_by_layout(layouts):
    data, kernel = layouts
    shape, factors = [{"N": 1, "C": 4, "H": 5, "W": 5}[axis] for axis in data], []
    for axis in kernel:
        factors.append({"O": 1, "I": 4, "H": 1, "W": 1}[axis])
    weight = random([{"O": 6, "I": 4, "H": 3, "W": 3}[axis] for axis in kernel], 1)

    def build(x, factor):
        return op.nn.conv2d(x, op.multiply(factor, const(weight)), data_layout=data, kernel_layout=kernel)

    assert becomes(RULES, build, shape, factors)[1][-2:] == ["multiply", "nn.conv2d"]


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize(
    ("weight", "factor", "axes"),
    [((3, 4, 5), (1, 4, 1), [1, 2]), ((3, 4, 5), (1, 4, 5), [1, 2]), ((3, 4, 5), (3, 1, 5), [0, -1])],
)
def test_a_sum_of_a_constant_with_factors_is_a_product(weight, factor, axes, keepdims):
    def build(x):
        return op.sum(op.multiply(const(random(weight, 2)), x), axes, keepdims=keepdims)

    assert becomes(RULES, build, factor)[1] == ["reshape", "matmul", "reshape"]


@pytest.mark.parametrize(
    ("build", "inputs", "why"),
    [
        (lambda x, s: op.nn.conv2d(x, op.multiply(const(random((6, 2, 3, 3))), s), groups=2), [IMAGE, (1, 2, 1, 1)],
         "each group has factors of its own"),
        (lambda x, s: op.nn.conv2d(x, op.multiply(const(WEIGHT), s)), [IMAGE, (6, 4, 1, 1)], "both axes have factors"),
        (lambda x, w, s: op.nn.conv2d(x, op.multiply(w, s)), [IMAGE, (6, 4, 3, 3), (1, 4, 1, 1)], "no constant left"),
        (lambda x: op.sum(op.multiply(const(random((3, 4))), x), [1]), [(3, 4)], "a factor for each sum"),
        (lambda x: op.multiply(op.multiply(w := const(random((3, 4))), x), op.multiply(w, w)), [(1, 4)], "no square"),
    ],
)  # fmt: skip
def test_what_is_no_factor_of_channels_stays(build, inputs, why):
    assert stays(RULES, build, *inputs), why
