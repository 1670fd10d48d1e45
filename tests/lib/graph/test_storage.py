"""Where tensors lie in memory that several of them use."""

import numpy as np
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R

from lib.graph.storage import Centre
from lib.tir import lowering


@I.ir_module
class Chain:
    """Tensors of 256, 64, 256, 64 and 256 bytes, of which TVM puts those of 64 where those of 256 were."""

    @R.function
    def main(x: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.sum(a, axis=[1])
            c = R.add(a, R.expand_dims(b, 1))
            d = R.astype(R.multiply(c, c), "int8")
            e = R.astype(R.add(d, d), "float32")
            f = R.subtract(R.multiply(e, e), c)
            g = R.tanh(R.add(f, f))
            R.output(g)
        return g


def planned(module, *first):
    """A module whose memory is planned, after some passes of Relax on its dataflow."""
    target = tvm.target.Target("llvm")
    with target:
        passes = (transform.LegalizeOps(), *first, transform.ToNonDataflow(), transform.RemovePurityChecking(),
                  transform.CallTIRRewrite(), transform.StaticPlanBlockMemory())  # fmt: skip
        return tvm.transform.Sequential(passes)(module)


def built(module):
    """What runs such a module."""
    finish = tvm.transform.Sequential([
        transform.LowerAllocTensor(), transform.KillAfterLastUse(), transform.LowerRuntimeBuiltin(),
        transform.VMShapeLower(), transform.AttachGlobalSymbol(),
    ])  # fmt: skip
    pipeline = lowering.pipeline(lowering.standard("llvm"), is_delivered=True)
    return relax.VirtualMachine(relax.build(module, "llvm", relax_pipeline=finish, tir_pipeline=pipeline), tvm.cpu())


def places(module):
    """For each storage its bytes, and of the tensors in it where they begin and how many bytes they have."""
    found = {}
    for block in module["main"].body.blocks:
        for binding in block.bindings:
            name = getattr(getattr(binding.value, "op", None), "name", "")
            if name == "relax.memory.alloc_storage":
                found[binding.var] = (int(binding.value.args[0].values[0]), [])
            elif name == "relax.memory.alloc_tensor":
                storage, begin, *_ = binding.value.args
                shape = [int(extent) for extent in binding.var.ty.shape.values]
                itemsize = np.dtype(str(binding.var.ty.dtype)).itemsize
                found[storage][1].append((int(begin), int(np.prod(shape)) * itemsize))
    return list(found.values())


def test_all_tensors_of_a_storage_have_its_middle_in_theirs():
    before, after = places(planned(Chain)), places(Centre()(planned(Chain)))

    assert {begin for _, tensors in before for begin, _ in tensors} == {0}
    assert any(len({n_bytes for _, n_bytes in tensors}) > 1 for _, tensors in before)
    assert [size for size, _ in after] == [size for size, _ in before]
    for size, tensors in after:
        for begin, n_bytes in tensors:
            assert begin % 64 == 0
            assert 0 <= begin <= size - n_bytes
            assert abs(begin + n_bytes / 2 - size / 2) < 64


def test_what_is_computed_stays():
    x = np.random.default_rng(0).normal(size=(8, 8), scale=0.5).astype(np.float32)
    found = built(Centre()(planned(Chain)))["main"](tvm.runtime.tensor(x)).numpy()

    a = np.maximum(x, 0)
    c = a + a.sum(1, keepdims=True)
    e = 2.0 * np.trunc(c * c)
    np.testing.assert_allclose(found, np.tanh(2 * (e * e - c)), rtol=1e-5)
