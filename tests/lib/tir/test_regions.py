"""Functions of kernels that threads do together: what is computed, by any number of threads, again and again."""

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from lib.tir import lowering, regions

N = 96


@T.prim_func(private=True, s_tir=True)
def with_a_tensor_between(a: T.Buffer((N, N), "float32"), b: T.Buffer((N, N), "float32")):
    """Each row less its mean over the columns, by way of the means."""
    means = T.alloc_buffer((N,))
    for i in T.parallel(N):
        for k in range(N):
            with T.sblock("mean"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    means[vi] = T.float32(0)
                means[vi] = means[vi] + a[vi, vk] / T.float32(N)
    for k in T.parallel(N):
        for i in range(N):
            with T.sblock("less"):
                vi, vk = T.axis.remap("SS", [i, k])
                b[vi, vk] = a[vi, vk] - means[vi]


@T.prim_func(private=True, s_tir=True)
def of_one_thread(a: T.Buffer((N, N), "float32"), b: T.Buffer((N, N), "float32")):
    """Sums of each row so far, by one thread."""
    for i, k in T.grid(N, N):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SS", [i, k])
            b[vi, vk] = a[vi, vk] * T.float32(0.5) + T.if_then_else(vk > 0, b[vi, vk - 1], T.float32(0))


@T.prim_func(private=True, s_tir=True)
def in_steps(a: T.Buffer((N, N), "float32"), b: T.Buffer((N, N), "float32")):
    """Products of each column's elements so far, row after row, the columns in parallel."""
    for i in range(N):
        for k in T.parallel(N):
            with T.sblock("product"):
                vi, vk = T.axis.remap("SS", [i, k])
                b[vi, vk] = T.tanh(a[vi, vk] + T.if_then_else(vi > 0, b[vi - 1, vk], T.float32(1)))


def computed(name, x):
    """What a kernel makes of an array."""
    if name == "with_a_tensor_between":
        return x - x.mean(1, keepdims=True)
    if name == "of_one_thread":
        return np.cumsum(0.5 * x, 1, dtype=np.float32)
    rows = [np.tanh(x[0] + 1)]
    for row in x[1:]:
        rows.append(np.tanh(row + rows[-1]))
    return np.array(rows)


KERNELS = {
    "with_a_tensor_between": with_a_tensor_between,
    "of_one_thread": of_one_thread,
    "in_steps": in_steps,
}


def region(names):
    """A function that calls kernels, each with what the one before it made."""
    tensors = [tirx.decl_buffer((N, N), "float32", f"t{n}") for n in range(len(names) + 1)]
    statements = [regions.call(name, tensors[n : n + 2]) for n, name in enumerate(names)]
    function = tirx.PrimFunc(tensors, tirx.SeqStmt(statements))
    together = function.with_attrs({regions.REGION: True, "s_tir": True, "global_symbol": "main"})
    kernels = {name: KERNELS[name].with_attr("global_symbol", name) for name in set(names)}
    return tvm.IRModule({"main": together, **kernels})


def built(names):
    pipeline = lowering.pipeline(lowering.standard("llvm"), is_delivered=True)
    return tvm.tirx.build(region(names), tvm.target.Target("llvm"), pipeline=pipeline)


@pytest.fixture
def threads():
    """Sets how many threads TVM has; afterwards as before."""
    configure = tvm.get_global_func("runtime.config_threadpool")
    before = tvm.get_global_func("runtime.NumThreads")()
    yield lambda n: configure(1, n)
    configure(1, before)


@pytest.mark.parametrize(
    "names",
    [
        ["with_a_tensor_between", "with_a_tensor_between"],
        ["of_one_thread", "of_one_thread"],
        ["with_a_tensor_between", "of_one_thread", "with_a_tensor_between"],
        ["with_a_tensor_between", "in_steps", "of_one_thread", "with_a_tensor_between"],
        ["in_steps", "in_steps"],
    ],
)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_a_region_computes_what_its_kernels_do_one_after_the_other(names, n_threads, threads):
    function = built(names)["main"]
    threads(n_threads)
    arrays = [np.random.default_rng(0).normal(size=(N, N), scale=0.2).astype(np.float32)]
    for name in names:
        arrays.append(computed(name, arrays[-1]))
    for _ in range(50):
        unknown = [np.full((N, N), np.nan, np.float32) for _ in names]
        tensors = [tvm.runtime.tensor(array) for array in (arrays[0], *unknown)]
        function(*tensors)
        for found, expected in zip(tensors, arrays, strict=True):
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def defined(names):
    """The functions of the library of a region."""
    lines = built(names).inspect_source("ll").splitlines()
    return sorted(line.split("@")[1].split("(")[0] for line in lines if line.startswith("define"))


def test_kernels_are_compiled_once_and_only_as_parts_of_regions():
    found = defined(["with_a_tensor_between", "in_steps", "with_a_tensor_between"])

    own = [name for name in found if not name.endswith("_compute_")]
    assert [name for name in own if name.startswith("__tvm_ffi_")] == ["__tvm_ffi_main"]
    assert [name for name in own if "_work" in name] == [
        "in_steps_work", "with_a_tensor_between_work0", "with_a_tensor_between_work1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "n_launches"),
    [
        (["with_a_tensor_between", "of_one_thread", "with_a_tensor_between"], 1),
        (["of_one_thread", "of_one_thread"], 0),
        (["with_a_tensor_between", "in_steps", "with_a_tensor_between"], 3),
    ],
)
def test_threads_are_launched_once_for_kernels_in_a_row(names, n_launches):
    assert sum("parallel_lambda" in name for name in defined(names)) == n_launches
