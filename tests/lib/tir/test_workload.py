import pytest
import tvm
import tvm_ffi
from tvm import te, tirx

from lib.graph import fusion
from lib.models.zoo import catalogue
from lib.tir.workload import as_workload, load_module, workload_id


@pytest.mark.parametrize("version", [tvm.__version__, "0.26.0"])  # another's is brought up to date by TVM
def test_a_module_is_what_tvm_loads(cpu, version):
    module = fusion.fuse(catalogue.load("tiny_cnn").module, cpu.tvm())
    text = tvm.ir.save_json(module).replace(tvm.__version__, version)

    found = load_module(text)

    assert tvm_ffi.structural_equal(found, tvm.ir.load_json(text), map_free_vars=True)
    assert tvm_ffi.structural_equal(found, module, map_free_vars=True)


def moved(name, first, wide=48):
    """A block that takes 16 channels of an image, from the first one on."""
    n, c = tirx.IntImm("int64", 4), tirx.IntImm("int64", 16)
    image = te.placeholder((n, tirx.IntImm("int64", wide)), name="image")
    made = te.compute((n, c), lambda y, x: image[y, x + first], name=name)
    return as_workload(te.create_prim_func([image, made]))


@pytest.mark.parametrize("name", ["part", "place"])
def test_which_channels_of_a_wider_image_are_moved_is_left_out_of_an_id(name):
    found = {workload_id(moved(name, first)) for first in (0, 16, 32)}

    assert len(found) == 1
    assert found != {workload_id(moved(name, 0, wide=64))}


def test_an_offset_elsewhere_is_another_workload():
    assert workload_id(moved("shifted", 0)) != workload_id(moved("shifted", 16))


def joined(extent, prefix=""):
    """So many parts that a program for them has more parentheses within one another than Python reads."""
    parts = [te.placeholder((extent,), name=f"{prefix}part{n}") for n in range(250)]

    def part(i):
        found = parts[-1][0]
        for n, each in enumerate(parts[:-1]):
            found = tirx.if_then_else(i < n, each[i], found)
        return found

    return as_workload(te.create_prim_func([*parts, te.compute((extent,), part, name="joined")]))


def test_a_join_of_very_many_parts_has_an_id_whatever_its_parts_are_called():
    assert workload_id(joined(8)) == workload_id(joined(8, "other_"))
    assert workload_id(joined(8)) != workload_id(joined(16))
