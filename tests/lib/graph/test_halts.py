"""Where kernels end: what one of two contractions of bytes hands to the other, and columns that are spread."""

import numpy as np
import pytest
from tvm import relax
from tvm.relax import op

from lib.graph import fusion, halts
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.graph.subgraphs import extract_subgraphs
from lib.models import onnx_import
from lib.search.spaces.table import fitting
from lib.tir.workload import load_module
from tests.helpers import results
from tests.lib.graph.test_precision import model, run
from tests.lib.models.test_onnx_quantized import CASES, file, kernels_of


def contractions(path, cpu):
    """The kernels that have one, with the element types of their results."""
    return [(names, kind) for names, kind in kernels_of(path, cpu) if any("conv2d" in name for name in names)]


def test_one_of_two_contractions_hands_over_bytes_and_the_other_adds(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["two contractions"]
    path = file(tmp_path / "q.onnx", nodes, shape, weights)

    found = {kind: names for names, kind in contractions(path, cpu)}

    assert set(found) == {"uint8", "float32"}  # the second one is what the file returns
    assert "conv2d_1x1_int8" in found["uint8"]  # comes later in the file
    assert [found[kind].count("elementwise") for kind in ("uint8", "float32")] == [1, 2]  # roundings


def test_where_there_is_no_other_contraction_everything_stays_in_one_kernel(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["residual"]
    path = file(tmp_path / "q.onnx", nodes, shape, weights)

    [(_, result)] = contractions(path, cpu)

    assert result == "float32"


def test_no_halt_is_left(tmp_path, cpu):
    nodes, shape, weights, _ = CASES["two contractions"]
    model = choose_algorithms(
        onnx_import.load(file(tmp_path / "q.onnx", nodes, shape, weights)), cpu, AlgorithmConfig()
    )

    module = fusion.fuse(model.module, cpu.tvm())

    called = [str(b.value.args[0].name_hint) for block in module["main"].body.blocks for b in block.bindings
              if isinstance(b.value, relax.Call)]  # fmt: skip
    assert called
    assert not [name for name in called if halts._FUNCTION in name]
    assert not [gvar for gvar, f in module.functions_items() if halts._MARK in (f.attrs or {})]


def forces(builder, x, between, w):
    """A number for each pair of atoms, which says how strongly they attract, along what lies between them."""
    strength = builder.emit(op.tanh(op.add(op.matmul(x, w), relax.const(0.5))))
    return op.multiply(between, strength)


def product(builder, x, between, w):
    return op.multiply(op.add(op.matmul(x, w), relax.const(0.5)), between)


@pytest.mark.parametrize(
    ("make", "columns", "kernels"), [(forces, 1, 2), (product, 3, 1)], ids=["one column", "as many columns"]
)
def test_a_column_that_is_spread_is_written_first(cpu, make, columns, kernels):
    plain = model([(9, 9, 32), (9, 9, 3), (32, columns)], make, n_inputs=2)
    chosen = choose_algorithms(plain, cpu, AlgorithmConfig())
    rng = np.random.default_rng(1)
    x, between = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 9, 32), (9, 9, 3)))
    score = x @ plain.weights["p2"] + 0.5
    expected = between * (np.tanh(score) if make is forces else score)

    found = extract_subgraphs(fusion.fuse(chosen.module, cpu.tvm()))

    assert len(found) == kernels
    [contraction] = [each for each in found if each.core_operator == "matmul"]
    space = fitting(load_module(contraction.workload), cpu.tvm())
    assert space is not None
    assert space.name == "contraction"
    np.testing.assert_allclose(run(chosen, [x, between], cpu), expected, rtol=1e-5, atol=1e-5)


def corners(builder, *scales):
    """Boxes of several scales, and two of what they say."""
    rows = [builder.emit(op.reshape(x, (1, -1, 4))) for x in scales]
    boxes = builder.emit(op.squeeze(builder.emit(op.concat(rows, axis=1)), [0]))
    first, last = (builder.emit(op.strided_slice(boxes, [1], [n], [n + 1])) for n in (0, 3))
    return op.multiply(builder.emit(op.exp(first)), builder.emit(op.tanh(last)))


@pytest.mark.parametrize(("n_scales", "n_kernels"), [(3, 2), (2, 1)])
def test_a_concatenation_of_which_parts_are_taken_is_written_first(cpu, n_scales, n_kernels):
    shapes = [(1, 3 + n, 4, 8) for n in range(n_scales)]
    inputs = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs, attrs={"num_input": len(inputs)}):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(corners(builder, *inputs)))
        builder.emit_func_output(out)
    arrays = [np.random.default_rng(n).normal(size=shape).astype(np.float32) for n, shape in enumerate(shapes)]
    rows = np.concatenate([array.reshape(-1, 4) for array in arrays])

    module = fusion.fuse(builder.get(), cpu.tvm())

    kernels = [each for each in extract_subgraphs(module) if each.tunable]
    assert len(kernels) == n_kernels
    assert all(fitting(load_module(each.workload), cpu.tvm()) for each in kernels)
    [found] = results(module, cpu, *arrays)
    np.testing.assert_allclose(found, np.exp(rows[:, :1]) * np.tanh(rows[:, 3:]), rtol=1e-5, atol=1e-6)
