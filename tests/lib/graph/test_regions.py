"""Kernels that are called together: which, and that they compute what they did."""

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, tirx
from tvm.relax import transform
from tvm.script import ir as I
from tvm.script import relax as R

from lib.graph.regions import Regions
from lib.tir import regions
from lib.tir.analysis import walk
from tests.lib.graph import test_storage
from tests.lib.graph.test_storage import built


@I.ir_module
class Chain:
    """Kernels one after the other, the first and the third of which are the same."""

    @R.function
    def main(x: R.Tensor((8, 8), "float32")) -> R.Tensor((8, 8), "float32"):
        with R.dataflow():
            a = R.nn.relu(x)
            b = R.add(a, a)
            c = R.nn.relu(b)
            d = R.tanh(R.reshape(R.subtract(c, R.sum(b, axis=[1], keepdims=True)), (64,)))
            e = R.reshape(d, (8, 8))
            R.output(e)
        return e


@I.ir_module
class Viewed:
    """Two kernels that read views of what is given, by turns with others."""

    @R.function
    def main(x: R.Tensor((8, 8), "float32"), y: R.Tensor((8, 8), "float32")) -> R.Tensor((64,), "float32"):
        with R.dataflow():
            a = R.add(R.reshape(x, (64,)), R.const(1.0))
            b = R.tanh(R.exp(R.negative(a)))
            c = R.multiply(b, R.reshape(y, (64,)))
            d = R.add(R.sqrt(R.abs(c)), R.reshape(x, (64,)))
            R.output(d)
        return d


@I.ir_module
class Branches:
    """A chain of kernels, and then one of two."""

    @R.function
    def main(which: R.Tensor((), "bool"), x: R.Tensor((8, 8), "float32"), y: R.Tensor((8, 8), "float32")) -> R.Tensor(
        (8, 8), "float32"
    ):
        a = R.tanh(R.add(R.nn.relu(x), R.exp(y)))
        if which:  # noqa: SIM108
            z = R.exp(R.negative(a))
        else:
            z = R.multiply(R.add(a, a), a)
        return z


def planned(module):
    """With views, as `lib.deploy` has them."""
    return test_storage.planned(module, transform.RewriteDataflowReshape())


def called(module):
    """What `main` calls, in order: the names of kernels, and lists of those of regions."""
    found = []
    for call in walk(module["main"].body, relax.Call):
        if isinstance(call.op, tvm.ir.GlobalVar):
            function = module[call.op]
            names = [str(each.args[0].value) for each in walk(function.body, tvm.ir.Call)
                     if str(each.op.name).endswith("call_extern")]  # fmt: skip
            found.append(names if regions.REGION in function.attrs else call.op.name_hint)
    return found


def sorted_between():
    """A kernel among others that calls a function of TVM's runtime, which sorts."""

    def ascending(x):
        def sort(ins, outs):
            return tirx.call_packed("tvm.contrib.sort.sort", ins[0], outs[0], 1, True)

        return te.extern((8, 8), [x], sort, dtype="float32")

    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((8, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            before = builder.emit(R.exp(R.negative(R.tanh(x))))
            between = builder.emit_te(ascending, before)
            output = builder.emit_output(R.sqrt(R.add(between, between)))
        builder.emit_func_output(output)
    return builder.get()


def normal(seed):
    return np.random.default_rng(seed).normal(size=(8, 8), scale=0.5).astype(np.float32)


def test_kernels_that_follow_each_other_are_called_together_but_for_the_first_which_checks_what_is_given():
    module = planned(Chain)
    one_by_one = called(module)
    changed = Regions()(module)

    first, together = called(changed)
    assert [first, *together] == one_by_one
    assert len(together) == 6
    assert first in together  # relu, which reads what is given, and then another tensor

    x = normal(0)
    b = 2 * np.maximum(x, 0)
    expected = np.tanh(b - b.sum(1, keepdims=True))
    np.testing.assert_allclose(built(changed)["main"](tvm.runtime.tensor(x)).numpy(), expected, rtol=1e-5, atol=1e-6)


def test_kernels_that_read_views_of_what_is_given_stay_apart_once():
    changed = Regions()(planned(Viewed))

    assert [len(each) if isinstance(each, list) else "apart" for each in called(changed)] == ["apart", 3, "apart", 3]
    x, y = normal(0), normal(1)
    found = built(changed)["main"](tvm.runtime.tensor(x), tvm.runtime.tensor(y)).numpy()
    expected = np.sqrt(np.abs(np.tanh(np.exp(-(x + 1))) * y)) + x
    np.testing.assert_allclose(found, expected.ravel(), rtol=1e-5, atol=1e-6)


def test_what_is_given_is_still_checked():
    memory = np.zeros(80, np.float32)
    begin = -memory.ctypes.data % 64 // 4
    by_columns = memory[begin : begin + 64].reshape(8, 8).T

    with pytest.raises(ValueError, match="stride"):
        built(Regions()(planned(Chain)))["main"](tvm_ffi.from_dlpack(by_columns, require_contiguous=False))


def test_kernels_that_may_raise_errors_stay_apart():
    changed = Regions()(planned(sorted_between()))

    assert [len(each) if isinstance(each, list) else "apart" for each in called(changed)] == ["apart", 2, "apart", 2]


@pytest.mark.parametrize("which", [True, False])
def test_a_choice_ends_a_region(which):
    changed = Regions()(planned(Branches))

    assert [len(each) for each in called(changed) if isinstance(each, list)] == [2]
    x, y = normal(0), normal(1)
    a = np.tanh(np.maximum(x, 0) + np.exp(y))
    expected = np.exp(-a) if which else 2 * a * a
    given = [tvm.runtime.tensor(np.array(which)), tvm.runtime.tensor(x), tvm.runtime.tensor(y)]
    np.testing.assert_allclose(built(changed)["main"](*given).numpy(), expected, rtol=1e-5)
