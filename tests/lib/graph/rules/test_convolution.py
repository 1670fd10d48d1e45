import numpy as np
import pytest
from tvm import relax, topi
from tvm.relax import op

from lib.graph.rewrite import rewrite
from lib.graph.rules import convolution as rules
from tests.lib.graph.rules.helpers import becomes, const, module, operators, random, run, stays

ROW = np.array([0.5, -2, 3], np.float32)
NCHW, NHWC = (2, 4, 5, 6), (2, 5, 6, 4)


def norm(x, axis=1, kind="float32", channels=None, **options):
    extent = channels or int(x.ty.shape[axis])
    channels = [const(np.linspace(low, 1.5, extent, dtype=kind)) for low in (0.5, -1, -2, 0.1)]
    return relax.TupleGetItem(op.nn.batch_norm(x, *channels, axis, training=False, **options), 0)


@pytest.mark.parametrize(("axis", "shape"), [(1, NCHW), (3, NHWC), (-1, (2, 4)), (1, (2, 1))])
def test_a_batch_norm_is_a_scale_and_a_shift(axis, shape):
    assert becomes([rules.fold_batch_norm], lambda x: norm(x, axis), shape)[1] == ["multiply", "add"]


@pytest.mark.parametrize("options", [{"scale": False}, {"center": False}, {"epsilon": 0.5}])
def test_a_batch_norm_uses_what_it_is_told_to(options):
    assert becomes([rules.fold_batch_norm], lambda x: norm(x, **options), NCHW)[1] == ["multiply", "add"]


def test_a_batch_norm_keeps_its_type():
    half = random(NCHW).astype(np.float16)
    made = module(lambda x: norm(x, kind="float16"), half)

    found = rewrite(made, [rules.fold_batch_norm])

    assert operators(found) == ["multiply", "add"]
    assert run(found, half)[0].dtype == np.float16  # TVM's own kernel returns float32, whatever its type says


def test_a_batch_norm_of_unknown_statistics_or_in_training_stays():
    def learnt(x, mean):
        values = [mean if n == 2 else const(np.ones(4, np.float32)) for n in range(4)]
        return relax.TupleGetItem(op.nn.batch_norm(x, *values, 1, training=False), 0)

    def training(x):
        values = [const(np.ones(4, np.float32))] * 4
        return relax.TupleGetItem(op.nn.batch_norm(x, *values, 1, training=True), 0)

    assert stays([rules.fold_batch_norm], learnt, NCHW, (4,))
    assert stays([rules.fold_batch_norm], training, NCHW)


@pytest.mark.parametrize("shape", [(6,), (4, 1, 1), (5, 1)])
def test_a_constant_gets_the_rank_of_its_image(shape):
    def build(x):
        return op.multiply(x, const(random(shape)))

    found = rewrite(module(build, NCHW), [rules.equal_ranks])["main"].body.blocks[0].bindings[0].value

    assert len(found.args[1].ty.shape) == 4
    assert becomes([rules.equal_ranks], build, NCHW)


@pytest.mark.parametrize(
    ("image", "shape"), [((3, 6), (6,)), (NCHW, ()), (NCHW, (1, 4, 1, 1)), (NCHW, (1, 1, 1, 1, 6))]
)
def test_other_ranks_stay(image, shape):
    assert stays([rules.equal_ranks], lambda x: op.add(x, const(random(shape))), image)


def conv(x, groups=1, layout="NCHW", kernel_layout="OIHW", out=8, **options):
    extents = {"O": out, "I": 4 // groups, "H": 3, "W": 2}
    weight = const(random([extents[axis] for axis in kernel_layout], 1))
    return op.nn.conv2d(x, weight, groups=groups, data_layout=layout, kernel_layout=kernel_layout, **options)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("layout", "kernel_layout"), [("NCHW", "OIHW"), ("NHWC", "HWIO")])
def test_a_scale_of_channels_moves_into_the_kernel(groups, layout, kernel_layout):
    factor = random([8 if axis == "C" else 1 for axis in layout], 2)

    def build(x):
        return op.multiply(conv(x, groups, layout, kernel_layout, strides=2, padding=1), const(factor))

    assert becomes([rules.scale_into_weights], build, NCHW if layout == "NCHW" else NHWC)[1] == ["nn.conv2d"]


@pytest.mark.parametrize(
    "factor", [const(0.5), const(random((1,))), const(random((1, 1, 1, 1))), const(random((8, 1, 1)))]
)
def test_scalars_and_shorter_shapes_move_into_the_kernel(factor):
    assert becomes([rules.scale_into_weights], lambda x: op.multiply(conv(x), factor), NCHW)[1] == ["nn.conv2d"]


@pytest.mark.parametrize(
    ("shape", "factor"), [((4,), ROW), ((4,), 2.0), ((2, 4), ROW), ((2, 4), 2.0), ((3, 2, 4), ROW.reshape(1, 3))]
)
def test_a_scale_moves_into_a_dense_layer(shape, factor):
    weight = const(random((4, 3), 1))

    def build(x):
        return op.multiply(op.matmul(x, weight), const(factor))

    assert becomes([rules.scale_into_weights], build, shape)[1] == ["matmul"]


@pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 8, 8), (8, 1, 1, 1), (1, 8, 1, 1, 1), (1, 1, 1, 1, 1)])
def test_a_scale_along_another_axis_stays(shape):
    image = (8, 4, 10, 9)  # the result is (8, 8, 8, 8): extents alone do not tell its axes apart
    assert stays([rules.scale_into_weights], lambda x: op.multiply(conv(x), const(random(shape))), image)


def test_a_scale_of_what_others_read_stays():
    def build(x):
        product = conv(x)
        return [op.multiply(product, const(2.0)), op.exp(product)]

    assert stays([rules.scale_into_weights], build, NCHW)


def test_a_scale_of_an_output_stays():
    def build(x):
        product = conv(x)
        return [product, op.multiply(product, const(2.0))]

    assert stays([rules.scale_into_weights], build, NCHW)


def test_a_scale_of_unknown_or_batched_weights_stays():
    assert stays([rules.scale_into_weights], lambda x, w: op.multiply(op.matmul(x, w), const(2.0)), (2, 3), (3, 4))
    batched = const(random((2, 3, 4)))
    assert stays([rules.scale_into_weights], lambda x: op.multiply(op.matmul(x, batched), const(2.0)), (2, 5, 3))


@pytest.mark.parametrize("inner", ["add", "multiply"])
def test_a_scale_passes_a_shift_or_joins_another_scale(inner):
    def build(x):
        product = op.matmul(x, const(random((4, 3), 1)))
        return op.multiply(getattr(op, inner)(product, const(ROW)), const(random((2, 1), 2)))

    after = {"add": ["matmul", "multiply", "add"], "multiply": ["matmul", "multiply"]}[inner]
    assert becomes([rules.scale_before_shift], build, (2, 4))[1] == after


def test_a_scale_of_a_shifted_image_stays_unless_that_is_scaled_or_made_here():
    assert stays([rules.scale_before_shift], lambda x: op.multiply(op.add(x, const(1.0)), const(ROW)), (2, 3))


def test_shifts_are_joined():
    def build(x):
        return op.add(op.add(x, const(ROW)), const(random((2, 1))))

    assert becomes([rules.join_shifts], build, (2, 3)) == (["add", "add"], ["add"])


@pytest.mark.parametrize("rule", [rules.join_shifts, rules.scale_before_shift])
def test_a_shift_that_is_broadcast_later_stays(rule):
    def build(x):
        last = op.add if rule is rules.join_shifts else op.multiply
        return last(op.add(op.multiply(x, const(2.0)), const(ROW)), const(random((4, 1, 1))))

    assert stays([rule], build, (2, 3))


@pytest.mark.parametrize("rule", [rules.join_shifts, rules.scale_before_shift])
def test_a_shift_that_others_read_stays(rule):
    def build(x):
        shifted = op.add(op.multiply(x, const(2.0)), const(ROW))
        last = op.add if rule is rules.join_shifts else op.multiply
        return [last(shifted, const(3.0)), op.exp(shifted)]

    assert stays([rule], build, (2, 3))


def raw_pad(before, after, value=0.0, shape=NCHW, mode="constant"):
    """A padding as the ONNX importer writes it."""
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            if mode == "constant":
                padded = builder.emit_te(topi.nn.pad, x, before, after, value, primfunc_name_hint="pad")
            else:
                padded = builder.emit_te(topi.nn.mirror_pad, x, before, after, mode, primfunc_name_hint="pad")
            output = builder.emit_output(padded)
        builder.emit_func_output(output)
    return builder.get()


@pytest.mark.parametrize("value", [0.0, -1.5])
@pytest.mark.parametrize(("before", "after"), [([0, 0, 1, 2], [0, 0, 0, 3]), ([0, 1, 0, 0], [2, 0, 0, 0])])
def test_raw_padding_is_an_operator(before, after, value):
    made = raw_pad(before, after, value)

    found = rewrite(made, [rules.plain_pad])

    assert operators(found) == ["nn.pad"]
    expected = np.pad(random(NCHW), list(zip(before, after, strict=True)), constant_values=value)
    np.testing.assert_array_equal(run(found, random(NCHW))[0], expected)


def test_raw_padding_by_nothing_is_dropped():
    assert operators(rewrite(raw_pad([0] * 4, [0] * 4), [rules.plain_pad])) == []


def test_a_mirrored_border_stays():
    made = raw_pad([0, 0, 1, 1], [0, 0, 1, 1], mode="REFLECT")

    assert operators(rewrite(made, [rules.plain_pad])) == operators(made)


@pytest.mark.parametrize(("layout", "kernel_layout"), [("NCHW", "OIHW"), ("NHWC", "HWIO")])
def test_zeros_around_an_image_are_padding_of_the_convolution(layout, kernel_layout):
    width = [w for axis in layout for w in {"H": (1, 2), "W": (0, 3)}.get(axis, (0, 0))]

    def build(x):
        padded = op.nn.pad(x, width, "constant", 0.0)
        return conv(padded, 2, layout, kernel_layout, padding=[1, 0, 2, 1], strides=[2, 1], dilation=[1, 2])

    assert becomes([rules.pad_in_convolution], build, NCHW if layout == "NCHW" else NHWC)[1] == ["nn.conv2d"]


def test_the_type_of_a_convolution_that_pads_stays():
    def build(x):
        weight = const(random((8, 4, 3, 2)).astype(np.float16))
        return op.nn.conv2d(op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1]), weight, out_dtype="float32")

    made = rewrite(module(build, random(NCHW).astype(np.float16)), [rules.pad_in_convolution])

    assert operators(made) == ["nn.conv2d"]
    assert str(made["main"].ret_ty.dtype) == "float32"


@pytest.mark.parametrize(
    ("width", "mode", "value"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], "constant", 1.0),
        ([0, 0, 0, 0, 1, 1, 1, 1], "reflect", 0.0),
        ([1, 0, 0, 0, 1, 1, 1, 1], "constant", 0.0),
        ([0, 0, 1, 1, 1, 1, 1, 1], "constant", 0.0),
    ],
)
def test_other_borders_stay(width, mode, value):
    def build(x):
        padded = op.nn.pad(x, width, mode, value)
        return op.nn.conv2d(padded, const(random((8, 4 + sum(width[2:4]), 3, 2))))

    assert stays([rules.pad_in_convolution], build, NCHW)


def test_all_of_it_together_leaves_a_convolution_and_a_shift():
    def build(x):
        return op.multiply(norm(conv(op.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])), channels=8), const(random((8, 1, 1), 3)))

    assert becomes(rules.RULES, build, NCHW)[1] == ["nn.conv2d", "add"]


def test_integer_tensors_are_left_alone():
    ones = np.ones((3, 3), np.int32)
    assert stays([rules.scale_into_weights], lambda x: op.multiply(op.matmul(x, const(ones)), const(2, "int32")), ones)
