"""Small functions to rewrite: built from Relax expressions, run before and after on the same inputs."""

from collections.abc import Callable, Sequence

import numpy as np
import tvm
import tvm_ffi
from tvm import relax

from lib.graph.rewrite import Rule, rewrite
from lib.tir import lowering

Shape = Sequence[int | str]  # an extent with a name is not known until the function is called
_TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})  # these run once
_UNKNOWN = 3  # what such an extent is in these tests


def module(build: Callable[..., relax.Expr | list[relax.Expr]], *inputs: Shape | np.ndarray) -> tvm.IRModule:
    """`main` of what `build` makes of its parameters; an array stands for a parameter of its shape and type."""
    names: dict[str, tvm.tirx.Var] = {}
    params = []
    for n, given in enumerate(inputs):
        shape, kind = (given.shape, str(given.dtype)) if isinstance(given, np.ndarray) else (given, "float32")
        extents = [names.setdefault(d, tvm.tirx.Var(d, "int64")) if isinstance(d, str) else d for d in shape]
        params.append(relax.Var(f"x{n}", relax.TensorType(extents, kind)))
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            results = build(*params)
            emitted = builder.emit(relax.Tuple(results) if isinstance(results, list) else results)
            output = builder.emit_output(emitted)
        builder.emit_func_output(output)
    return relax.transform.CanonicalizeBindings()(builder.get())


def operators(made: tvm.IRModule) -> list[str]:
    """What `main` calls, in order; functions of TIR by their names, others without `relax.`."""
    calls = [binding.value for block in made["main"].body.blocks for binding in block.bindings]
    calls = [call for call in calls if isinstance(call, relax.Call)]
    return [
        call.args[0].name_hint if "call_tir" in call.op.name else call.op.name.removeprefix("relax.") for call in calls
    ]


def run(made: tvm.IRModule, *arrays: np.ndarray) -> list[np.ndarray]:
    """The results of `main`."""
    pipeline = lowering.pipeline(lowering.standard("llvm"))
    machine = relax.VirtualMachine(relax.build(made, target=_TARGET, tir_pipeline=pipeline), tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(array) for array in arrays))
    return [tensor.numpy() for tensor in ([found] if isinstance(found, tvm.runtime.Tensor) else found)]


def random(shape: Shape, seed: int = 0) -> np.ndarray:
    """Normal values in float32."""
    extents = [_UNKNOWN if isinstance(extent, str) else extent for extent in shape]
    return np.random.default_rng(seed).normal(size=extents).astype(np.float32)


def const(value: float | np.ndarray, kind: str = "float32") -> relax.Expr:
    """A constant of a graph; arrays keep their type."""
    return relax.const(value, str(value.dtype) if isinstance(value, np.ndarray) else kind)


Rewriting = Sequence[Rule] | Callable[[tvm.IRModule], tvm.IRModule]


def rewritten(rewriting: Rewriting, before: tvm.IRModule) -> tvm.IRModule:
    """The module after rules, or after a pass."""
    return rewriting(before) if callable(rewriting) else rewrite(before, rewriting)


def becomes(
    rules: Rewriting, build: Callable[..., relax.Expr | list[relax.Expr]], *inputs: Shape | np.ndarray
) -> tuple[list[str], list[str]]:
    """The operators before and after rewriting, which compute the same: that much is checked here.

    Raises:
        ValueError: Variables are read where they are not defined, as those of a dataflow block behind it.
    """
    before = module(build, *inputs)
    after = rewritten(rules, before)
    relax.analysis.well_formed(after)
    arrays = [given if isinstance(given, np.ndarray) else random(given, n) for n, given in enumerate(inputs)]
    for found, expected in zip(run(after, *arrays), run(before, *arrays), strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        rtol = 1e-2 if found.dtype == np.float16 else 1e-5
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
    return operators(before), operators(after)


def stays(rules: Rewriting, build: Callable[..., relax.Expr | list[relax.Expr]], *inputs: Shape | np.ndarray) -> bool:
    """Whether rewriting leaves a function as it is."""
    before = module(build, *inputs)
    return bool(tvm_ffi.structural_equal(rewritten(rules, before), rewrite(before, [])))
