"""Small real workloads, and programs that fail in every way a candidate can."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax, te
from tvm.s_tir.transform import RemoveWeightLayoutRewriteBlock
from tvm.script import tirx as T

from lib.contracts.conditions import Conditions
from lib.graph import fusion
from lib.graph.fusion import Model
from lib.graph.subgraphs import extract_subgraphs
from lib.machine.targets import CpuTarget
from lib.measure.libraries import flatten
from lib.measure.runner import Job
from lib.tir import lowering, traces
from lib.tir.traces import EMPTY_TRACE
from lib.tir.workload import as_workload, load_module, workload_id

ROOT = Path(__file__).parent.parent
SMALL = ROOT / "tests" / "data" / "small.onnx"

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
run_timeout_s = 60
[train]
min_samples = 2
base = no
num_boost_round = 5
[ranges]
anchors = 2
[compile]
finalists = 1
repeats = 1
turns = 1
"""


PATIENCE = "device_patience_s = 60"

# What made-up measurements were measured under.
CONDITIONS = Conditions('{"kind": "llvm"}', 2, "cold", "plain r0", 1, "a CPU", "apache-tvm 0")


def matmul(n: int = 16, m: int = 32, k: int = 64) -> tvm.IRModule:
    """x[n, k] @ w[k, m] as a workload."""
    x, w = te.placeholder((n, k), name="x"), te.placeholder((k, m), name="w")
    axis = te.reduce_axis((0, k), "axis")
    product = te.compute((n, m), lambda i, j: te.sum(x[i, axis] * w[axis, j], axis=axis), name="product")
    return as_workload(te.create_prim_func([x, w, product]))


def matmul_of_weights(n: int, m: int, k: int) -> tvm.IRModule:
    """The same where w is marked as free to be packed, as weights of a model are."""
    function = matmul(n, m, k)["main"].with_attr("layout_free_buffers", [1])
    return as_workload(function)


def subgraph(cpu: CpuTarget, make: Callable[..., relax.Expr], *shapes: tuple[int, ...]) -> tvm.IRModule:
    """What `fusion.fuse` makes of an expression of tensors of these shapes, which must be one workload."""
    inputs = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", inputs, attrs={"num_input": len(inputs)}):
        with builder.dataflow():
            out = builder.emit_output(make(builder, *inputs))
        builder.emit_func_output(out)
    [found] = extract_subgraphs(fusion.fuse(builder.get(), cpu.tvm()))
    return load_module(found.workload)


def gather(rows: int = 50, width: int = 8, n: int = 6) -> tvm.IRModule:
    """table[ids] with int32 ids: a wild id reads out of bounds."""
    table, ids = te.placeholder((rows, width), name="table"), te.placeholder((n,), "int32", name="ids")
    found = te.compute((n, width), lambda i, j: table[ids[i], j], name="found")
    return as_workload(te.create_prim_func([table, ids, found]))


def running_sum(cpu: CpuTarget) -> tvm.IRModule:
    """What no space of this project has programs of."""
    return subgraph(cpu, lambda _, x: relax.op.cumsum(x, 1), (7, 48))


def power(n: int = 64) -> tvm.IRModule:
    """x ** y in double precision, for which compilers call the C library."""
    x, y = (te.placeholder((n,), "float64", name=name) for name in "xy")
    return as_workload(te.create_prim_func([x, y, te.compute((n,), lambda i: te.power(x[i], y[i]))]))


def reads(n: int) -> tvm.IRModule:
    """Twice x[n], in float32: n decides how much memory it needs."""
    x = te.placeholder((n,), name="x")
    return as_workload(te.create_prim_func([x, te.compute((n,), lambda i: x[i] * 2.0)]))


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


SEGFAULTS = as_workload(_segfaults)
LOOPS_FOR_EVER = as_workload(_loops_for_ever)
DOES_NOT_COMPILE = as_workload(_does_not_compile)
TAKES_LONG_TO_COMPILE = as_workload(_takes_long_to_compile)
NEEDS_TOO_MUCH = as_workload(_needs_too_much)


def job(name: str, workload: tvm.IRModule, trace: str = EMPTY_TRACE) -> Job:
    """A candidate; jobs with the same workload name must have the same workload."""
    return Job(name, workload_id(workload), tvm.ir.save_json(workload), trace)


def packed(workload: tvm.IRModule, trace: str, target: tvm.target.Target) -> tvm.IRModule:
    """A program as candidates are built: the weights count as packed."""
    return RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(traces.program(workload, trace, target))


def run_on(
    workload: tvm.IRModule, target: tvm.target.Target, inputs: Sequence[np.ndarray], out: np.ndarray
) -> np.ndarray:
    """Compile a workload or a scheduled module and run it in this process."""
    arguments = [tvm.runtime.tensor(array) for array in (*inputs, out)]
    lowering.build(workload, target)["main"](*arguments)
    return np.asarray(arguments[-1].numpy())


def computed(model: Model, cpu: CpuTarget, *inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs of an imported model, whose kernels have no schedules, for arrays of NumPy or of torch."""
    return results(fusion.fuse(model.module, cpu.tvm()), cpu, *inputs, *model.weights.values())


def results(module: tvm.IRModule, cpu: CpuTarget, *arrays: np.ndarray) -> list[np.ndarray]:
    """The outputs of a fused module's `main`, compiled as libraries compile what has no schedule."""
    target = lowering.for_untuned(cpu.tvm())
    with target:
        machine = relax.VirtualMachine(relax.build(module, target=target), tvm.cpu())
    return flatten(machine["main"](*(tvm.runtime.tensor(np.asarray(array)) for array in arrays)))


def small_network(path: Path, seed: int = 0) -> Path:
    """An ONNX file of few kernels, a convolution, a product, a softmax: for tests that start the command many times.

    `SMALL` is such a file.
    """
    rng = np.random.default_rng(seed)
    weights = {"k": (16, 8, 3, 3), "w": (256, 10), "b": (10,)}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
            helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("Flatten", ["r"], ["f"]),
            helper.make_node("Gemm", ["f", "w", "b"], ["g"]),
            helper.make_node("Softmax", ["g"], ["y"], axis=1),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [
            numpy_helper.from_array((0.1 * rng.normal(size=shape)).astype(np.float32), name)
            for name, shape in weights.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def luigi_command(*arguments: str) -> list[str]:
    """The command a user types, with this interpreter's luigi."""
    return [sys.executable, "-m", "luigi", "--module", "pipeline", *arguments]


def luigi(
    tmp_path: Path, *arguments: str, timeout_s: float = 300, measure: str = PATIENCE, memory: str = ""
) -> "subprocess.CompletedProcess[str]":
    """Type a luigi command in the repository's root, with quick settings and artifacts below `tmp_path`.

    Args:
        measure, memory: A line more for these sections of the configuration.
    """
    return subprocess.run(
        luigi_command(*arguments),
        cwd=ROOT,
        env=environment(tmp_path, measure, memory),
        text=True,
        capture_output=True,
        timeout=timeout_s,
    )


def with_runtime() -> dict[str, str]:
    """An environment in which `family_tuner_runtime` is found as if it were installed, and nothing else of this
    project unless it is."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "lib" / "runtime")}


def environment(tmp_path: Path, measure: str = PATIENCE, memory: str = "") -> dict[str, str]:
    """Environment of such a command."""
    config = tmp_path / "quick.cfg"
    text = QUICK.format(artifacts=tmp_path / "artifacts").replace("[measure]\n", f"[measure]\n{measure}\n")
    config.write_text(f"{text}[memory]\n{memory}\n")
    return {**os.environ, "LUIGI_CONFIG_PATH": str(config), "PYTHONPATH": str(ROOT)}
