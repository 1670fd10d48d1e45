"""Products of images with gates, and what becomes of other products."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from lib.graph import fusion, widen
from lib.search.spaces import table
from lib.tir.workload import as_workload
from tests.helpers import results

IMAGE, GATE = (1, 14, 14, 32), (1, 1, 1, 32)


def module(make, *shapes):
    """A module of `make(emit, *parameters)`; all but the first parameter count as weights."""
    params = [relax.Var(f"p{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", params, attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(make(builder.emit, *params))
        builder.emit_func_output(out)
    return builder.get()


def convolved(emit, data, weight):
    return emit(op.nn.conv2d(data, weight, data_layout="NHWC", kernel_layout="HWIO"))


def excited(emit, image, squeeze, excite, bias):
    """Squeeze and excitation with a residual sum."""
    small = emit(op.nn.relu(convolved(emit, emit(op.mean(image, [1, 2], keepdims=True)), squeeze)))
    gate = emit(op.sigmoid(emit(op.add(convolved(emit, small, excite), bias))))
    return emit(op.nn.relu(emit(op.add(emit(op.multiply(gate, image)), image))))


def kernels(module, target):
    """The TIR functions by name."""
    fused = fusion.fuse(module, target)
    return {str(gvar.name_hint): f for gvar, f in fused.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}


@pytest.fixture
def excitation():
    return module(excited, IMAGE, (1, 1, 32, 8), (1, 1, 8, 32), GATE)


def test_a_gate_is_computed_apart_from_the_image_that_it_multiplies(excitation, cpu):
    found = kernels(excitation, cpu.tvm())

    shapes = {name: [tuple(map(int, param.ty.shape)) for param in f.params] for name, f in found.items()}
    contractions = {name: own for name, own in shapes.items() if "conv2d" in name}
    assert len(found) == 4  # the mean, two convolutions with what follows them, the product with the residual sum
    assert len(contractions) == 2
    assert all(IMAGE not in own for own in contractions.values())


def test_a_product_with_a_gate_takes_what_follows_it_as_an_epilogue(excitation, cpu):
    [product] = [f for f in kernels(excitation, cpu.tvm()).values() if [*f.params[-1].ty.shape] == [*IMAGE]]

    space = table.fitting(as_workload(product), cpu.tvm())
    assert space is not None
    assert space.name == "elementwise"


def test_a_model_with_gates_computes_what_it_did(excitation, cpu):
    random = np.random.default_rng(0)
    image, squeeze, excite, bias = (
        random.normal(size=shape).astype(np.float32) for shape in (IMAGE, (1, 1, 32, 8), (1, 1, 8, 32), GATE)
    )
    small = np.maximum(image.mean((1, 2)) @ squeeze[0, 0], 0)
    gate = 1 / (1 + np.exp(-(small @ excite[0, 0] + bias[0, 0])))

    [found] = results(fusion.fuse(excitation, cpu.tvm()), cpu, image, squeeze, excite, bias)

    np.testing.assert_allclose(found, np.maximum(image * gate + image, 0), rtol=1e-5, atol=1e-5)


def test_a_gate_whose_channels_were_padded_is_apart_as_well(cpu):
    def padded(emit, image, wide):
        gate = emit(
            op.sigmoid(
                widen.cut(relax.BlockBuilder.current(), convolved(emit, emit(op.mean(image, [1, 2], True)), wide), 32)
            )
        )
        return emit(op.multiply(image, gate))

    assert len(kernels(module(padded, IMAGE, (1, 1, 32, 48)), cpu.tvm())) == 3


def test_a_factor_of_each_channel_that_is_known_stays_in_the_convolutions_kernel(cpu):
    def scaled(emit, image, weight, scale):
        return emit(op.multiply(convolved(emit, image, weight), scale))

    assert len(kernels(module(scaled, IMAGE, (1, 1, 32, 32), GATE), cpu.tvm())) == 1


def test_a_factor_of_the_results_own_size_stays_in_the_convolutions_kernel(cpu):
    def squared(emit, image, weight, other):
        return emit(op.multiply(convolved(emit, image, weight), other))

    assert len(kernels(module(squared, IMAGE, (1, 1, 32, 32), IMAGE), cpu.tvm())) == 1


def test_what_an_instance_norm_divides_by_is_computed_once_for_each_channel(cpu):
    def normed(emit, image):
        mean = emit(op.multiply(emit(op.sum(image, [1, 2], True)), relax.const(1 / 64)))
        root = emit(op.sqrt(emit(op.add(mean, relax.const(1e-5)))))
        return emit(op.nn.relu(emit(op.multiply(image, emit(op.divide(relax.const(1.0), root))))))

    found = kernels(module(normed, IMAGE), cpu.tvm())

    assert len(found) == 3  # the sum, the factor, the product with what follows
    with_roots = [f for f in found.values() if "sqrt" in str(f)]
    assert [[*f.params[-1].ty.shape] for f in with_roots] == [[*GATE]]


def test_a_factor_of_rows_stays_in_their_kernel(cpu):
    """A root mean square norm has a space as one."""

    def normed(emit, image):
        mean = emit(op.mean(emit(op.multiply(image, image)), [3], True))
        return emit(op.multiply(image, emit(op.rsqrt(emit(op.add(mean, relax.const(1e-5)))))))

    assert not any("gate" in name for name in kernels(module(normed, IMAGE), cpu.tvm()))
