import pytest
import tvm
import tvm_ffi

from lib.graph import fusion
from lib.models.zoo import catalogue
from lib.tir.workload import load_module


@pytest.mark.parametrize("version", [tvm.__version__, "0.26.0"])  # another's is brought up to date by TVM
def test_a_module_is_what_tvm_loads(cpu, version):
    module = fusion.fuse(catalogue.load("tiny_cnn").module, cpu.tvm())
    text = tvm.ir.save_json(module).replace(tvm.__version__, version)

    found = load_module(text)

    assert tvm_ffi.structural_equal(found, tvm.ir.load_json(text), map_free_vars=True)
    assert tvm_ffi.structural_equal(found, module, map_free_vars=True)
