"""Weights brought into the orders in which kernels read them, on this machine, whatever the kernels are for.

`lib.deploy.build` takes apart what packs a library's weights: a function of Relax, `PACKER`, with programs of its own.
Those of a model in several shapes are made one function here, in which what is equal is done once.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GlobalVar, Op
from tvm.relax import transform
from tvm.target import Target

from lib import deploy, sharing
from lib.contracts import arrays, weights
from lib.graph import fusion
from lib.tir.workload import load_module

Packed = list[list[np.ndarray]]  # by library: what its `main` takes after the inputs, in order


def write(out: Path, packings: Sequence[Path], given: Sequence[Path], target: Target, listed: Path | None) -> None:
    """Pack the weights of libraries into one file.

    Args:
        packings: What `deploy.build` wrote of each; `given`: weights of each (.npz, in parameter order).
        target: This machine.
        listed: See `sharing.Together.write`, for a file in which equal weights stand once; None: of one library, as it
            takes them.
    """
    packed = pack([load_module(path.read_text()) for path in packings], arrays.load_all(given), target)
    if listed:
        sharing.write(out, packed).write(listed)
    else:
        [own] = packed
        weights.write(out, weights.numbered(own))


def pack(packings: Sequence[tvm.IRModule], given: Sequence[Mapping[str, np.ndarray]], target: Target) -> Packed:
    """Pack weights.

    Args:
        packings: Modules with `deploy.PACKER`.
        given: The weights of each, in parameter order.
        target: This machine.

    Returns:
        What is equal in several libraries, since the same was done with the same array, is one array.
    """
    distinct = {id(array): array for own in given for array in own.values()}
    place = {key: n for n, key in enumerate(distinct)}
    taken = [[place[id(array)] for array in own.values()] for own in given]
    module = joined(packings, taken)
    machine = relax.VirtualMachine(deploy.lowered(module, target), tvm.cpu())
    found: dict[tuple[int, tuple[int, ...], str], np.ndarray] = {}

    def array_of(tensor: tvm.runtime.Tensor) -> np.ndarray:
        key = tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype)
        return found[key] if key in found else found.setdefault(key, tensor.numpy())

    results = machine[fusion.ENTRY]([tvm.runtime.tensor(array) for array in distinct.values()])
    return [[array_of(tensor) for tensor in own] for own in results]


def joined(packings: Sequence[tvm.IRModule], taken: Sequence[Sequence[int]]) -> tvm.IRModule:
    """A module whose `main` takes a tuple of weights and returns, for each packing, a tuple of what it makes of some.

    Args:
        packings: Modules with `deploy.PACKER`.
        taken: For each of them, the places of its weights among all.
    """
    types: dict[int, relax.TensorType] = {}
    for packing, places in zip(packings, taken, strict=True):
        [params] = packing[deploy.PACKER].params
        types |= zip(places, params.ty.fields, strict=True)
    builder = relax.BlockBuilder()
    weights_of_all = relax.Var("weights", tvm.ir.TupleType([types[n] for n in range(len(types))]))
    with builder.function(fusion.ENTRY, [weights_of_all]):
        with builder.dataflow():
            each = [builder.emit(relax.TupleGetItem(weights_of_all, n)) for n in range(len(types))]
            made = [
                _Inlined(builder, packing).result([each[n] for n in places])
                for packing, places in zip(packings, taken, strict=True)
            ]
            output = builder.emit_output(relax.Tuple(made))
        builder.emit_func_output(output)
    return transform.EliminateCommonSubexpr()(builder.get())


class _Inlined:
    """One packing's bindings, emitted into a function with those of others."""

    def __init__(self, builder: relax.BlockBuilder, packing: tvm.IRModule) -> None:
        self._builder, self._packing = builder, packing
        self._known: dict[relax.Var, relax.Expr] = {}
        self._functions: dict[GlobalVar, GlobalVar] = {}

    def result(self, given: Sequence[relax.Expr]) -> relax.Expr:
        """What it returns of weights."""
        function = self._packing[deploy.PACKER]
        [params] = function.params
        self._known[params] = relax.Tuple(given)
        for block in function.body.blocks:
            for binding in block.bindings:
                value = self._value(binding.value)
                is_plain = isinstance(value, relax.Var | relax.Tuple)
                self._known[binding.var] = value if is_plain else self._builder.emit(value)
        return self._value(function.body.body)

    def _value(self, value: relax.Expr) -> relax.Expr:
        if isinstance(value, relax.Var):
            return self._known[value]
        if isinstance(value, GlobalVar):
            return self._function(value)
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._value(each) for each in value.fields])
        if isinstance(value, relax.TupleGetItem):
            whole, index = self._value(value.tuple_value), value.index
            return whole.fields[index] if isinstance(whole, relax.Tuple) else relax.TupleGetItem(whole, index)
        if isinstance(value, relax.Call) and isinstance(value.op, Op):
            given = [self._value(each) for each in value.args]
            return relax.Call(value.op, given, value.attrs, value.ty_args)
        return value  # a constant, a shape

    def _function(self, called: GlobalVar) -> GlobalVar:
        """The one of all that is equal."""
        if called not in self._functions:
            function = self._packing[called].without_attr("global_symbol")
            self._functions[called] = self._builder.add_func(function, called.name_hint)
        return self._functions[called]
