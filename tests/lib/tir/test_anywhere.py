"""Kernels whose tensors begin anywhere in their memory."""

import numpy as np
import pytest
import tvm
from tvm import te, tirx, topi

from lib.search import evolution
from lib.tir import anywhere, lowering, traces
from lib.tir.workload import as_workload


def product():
    a, b = te.placeholder((24, 40), name="a"), te.placeholder((40, 64), name="b")
    k = te.reduce_axis((0, 40), name="k")
    return te.create_prim_func([a, b, te.compute((24, 64), lambda i, j: te.sum(a[i, k] * b[k, j], axis=k), "c")])


def at(values, begin):
    """A tensor that begins so many bytes behind the beginning of its memory."""
    memory = tvm.runtime.tensor(np.full(values.nbytes // 4 + begin // 4 + 16, np.nan, np.float32))
    view = memory._create_view(values.shape, "float32", begin)
    view.copyfrom(values)
    return view


@pytest.mark.parametrize("seed", range(3))
def test_a_tuned_kernel_computes_the_same_wherever_its_tensors_begin(cpu, seed):
    workload = as_workload(product())
    [found] = evolution.sample(workload, cpu.tvm(), 1, known=set(), seed=seed)
    program = traces.program(workload, found.trace, cpu.tvm())
    pipeline = lowering.pipeline(lowering.standard("llvm"), is_delivered=True)
    kernel = tvm.tirx.build(program, cpu.tvm(), pipeline=pipeline)
    random = np.random.default_rng(seed)
    a, b = (random.normal(size=shape).astype(np.float32) for shape in ((24, 40), (40, 64)))

    for begins in ((0, 0, 0), (64, 0, 192), (128, 4096, 64)):
        tensors = [
            at(values, begin) for values, begin in zip((a, b, np.zeros((24, 64), np.float32)), begins, strict=True)
        ]
        kernel["main"](*tensors)
        np.testing.assert_allclose(tensors[2].numpy(), a @ b, rtol=1e-4, atol=1e-4)


def test_one_that_begins_within_a_cache_line_is_refused():
    pipeline = lowering.pipeline(lowering.standard("llvm"), is_delivered=True)
    kernel = tvm.tirx.build(
        tvm.IRModule({"main": product().with_attr("global_symbol", "main")}), "llvm", pipeline=pipeline
    )
    a, b, c = (at(np.ones(shape, np.float32), 0) for shape in ((24, 40), (40, 64), (24, 64)))

    with pytest.raises(ValueError, match="Misaligned"):
        kernel["main"](at(np.ones((24, 40), np.float32), 4), b, c)
    kernel["main"](a, b, c)
    assert (c.numpy() == 40).all()


def test_scalars_stay_what_they_are():
    n = tirx.Var("n", "int32")
    function = tirx.PrimFunc([n], tirx.Evaluate(n))

    assert list(anywhere.insert(function).params) == [n]


@pytest.mark.parametrize("begin", [0, 64, 4096])
def test_what_the_runtime_sorts_begins_anywhere_too(begin):
    values = te.placeholder((8, 100), name="values")
    function = te.create_prim_func([values, *topi.topk(values, 20, ret_type="both", dtype="int64")])
    pipeline = lowering.pipeline(lowering.standard("llvm"), is_delivered=True)
    kernel = tvm.tirx.build(as_workload(function), "llvm", pipeline=pipeline)
    drawn = np.random.default_rng(0).permuted(np.arange(800, dtype=np.float32)).reshape(8, 100)
    found = at(np.zeros((8, 20), np.float32), begin)
    places = tvm.runtime.tensor(np.zeros((8, 20), np.int64))

    kernel["main"](at(drawn, begin), found, places)

    expected = np.argsort(-drawn)[:, :20]
    np.testing.assert_array_equal(places.numpy(), expected)
    np.testing.assert_array_equal(found.numpy(), np.take_along_axis(drawn, expected, 1))
