"""Small real workloads, and programs that fail in every way a candidate can."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm import te
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.script import tirx as T

from lib import backends, search, workloads
from lib.runner import Job
from lib.search import EMPTY_TRACE

ROOT = Path(__file__).parent.parent

# Settings that make a whole run take seconds; what they leave out is covered by the tests of each stage.
QUICK = """
[tuner]
artifacts = {artifacts}
[plan]
num_trials_per_round = 8
num_trials_warmup = 3
[generate]
population = 32
generations = 1
[measure]
min_repeat_s = 0.001
device_patience_s = 5
[train]
min_samples = 4
[compile]
finalists = 2
repeats = 2
turns = 2
"""


def matmul(n: int = 16, m: int = 32, k: int = 64) -> tvm.IRModule:
    """x[n, k] @ w[k, m] as a workload."""
    x, w = te.placeholder((n, k), name="x"), te.placeholder((k, m), name="w")
    axis = te.reduce_axis((0, k), "axis")
    product = te.compute((n, m), lambda i, j: te.sum(x[i, axis] * w[axis, j], axis=axis), name="product")
    return workloads.as_workload(te.create_prim_func([x, w, product]))


def gather(rows: int = 50, width: int = 8, n: int = 6) -> tvm.IRModule:
    """table[ids] with int32 ids: a wild id reads out of bounds."""
    table, ids = te.placeholder((rows, width), name="table"), te.placeholder((n,), "int32", name="ids")
    found = te.compute((n, width), lambda i, j: table[ids[i], j], name="found")
    return workloads.as_workload(te.create_prim_func([table, ids, found]))


def power(n: int = 64) -> tvm.IRModule:
    """x ** y in double precision, for which compilers call the C library."""
    x, y = (te.placeholder((n,), "float64", name=name) for name in "xy")
    return workloads.as_workload(te.create_prim_func([x, y, te.compute((n,), lambda i: te.power(x[i], y[i]))]))


@T.prim_func(s_tir=True)
def _segfaults(a: T.Buffer((1,), "float32")) -> None:
    with T.sblock("root"):
        T.evaluate(T.call_extern("int32", "raise", 11))


@T.prim_func(s_tir=True)
def _loops_for_ever(a: T.Buffer((1,), "float32")) -> None:
    with T.sblock("root"):
        while a[0] < T.float32(3e38):
            a[0] = T.float32(0)


@T.prim_func(s_tir=True)
def _does_not_compile(a: T.Buffer((1,), "float32")) -> None:
    with T.sblock("root"):
        T.evaluate(T.tvm_storage_sync("shared"))  # what only a GPU has


@T.prim_func(s_tir=True)
def _takes_long_to_compile(a: T.Buffer((200000,), "float32")) -> None:
    with T.sblock("root"):
        for i in T.unroll(200000):
            a[i] = a[i] * a[i] + T.float32(1)


@T.prim_func(s_tir=True)
def _needs_too_much(a: T.Buffer((1 << 50,), "float32")) -> None:
    with T.sblock("root"):
        a[0] = T.float32(0)


SEGFAULTS = workloads.as_workload(_segfaults)
LOOPS_FOR_EVER = workloads.as_workload(_loops_for_ever)
DOES_NOT_COMPILE = workloads.as_workload(_does_not_compile)
TAKES_LONG_TO_COMPILE = workloads.as_workload(_takes_long_to_compile)
NEEDS_TOO_MUCH = workloads.as_workload(_needs_too_much)


def job(name: str, workload: tvm.IRModule, trace: str = EMPTY_TRACE) -> Job:
    """A candidate; jobs with the same workload name must have the same workload."""
    return Job(name, workloads.workload_id(workload), tvm.ir.save_json(workload), trace)


def packed(workload: tvm.IRModule, trace: str, target: tvm.target.Target) -> tvm.IRModule:
    """A program as candidates are built: the weights count as packed."""
    return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(search.program(workload, trace, target))


def run_on(
    workload: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[np.ndarray], out: np.ndarray
) -> np.ndarray:
    """Compile a workload or a scheduled module and run it in this process."""
    arguments = [tvm.runtime.tensor(array) for array in (*inputs, out)]
    backends.build(workload, target)["main"](*arguments)
    return np.asarray(arguments[-1].numpy())


def luigi_command(*arguments: str) -> list[str]:
    """The command a user types, with this interpreter's luigi."""
    return [sys.executable, "-m", "luigi", "--module", "pipeline", *arguments]


def luigi(tmp_path: Path, *arguments: str, timeout_s: float = 300) -> "subprocess.CompletedProcess[str]":
    """Type a luigi command in the repository's root, with quick settings and artifacts below `tmp_path`."""
    return subprocess.run(
        luigi_command(*arguments),
        cwd=ROOT,
        env=environment(tmp_path),
        text=True,
        capture_output=True,
        timeout=timeout_s,
    )


def environment(tmp_path: Path) -> dict[str, str]:
    """Environment of such a command."""
    config = tmp_path / "quick.cfg"
    config.write_text(QUICK.format(artifacts=tmp_path / "artifacts"))
    return {**os.environ, "LUIGI_CONFIG_PATH": str(config), "PYTHONPATH": str(ROOT)}
