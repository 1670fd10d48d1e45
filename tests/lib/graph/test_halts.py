"""Sums of two contractions of bytes: what one kernel hands to the other."""

from tvm import relax

from lib.graph import fusion, halts
from lib.graph.algorithms import AlgorithmConfig, choose_algorithms
from lib.models import onnx_import
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
