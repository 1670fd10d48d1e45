"""What a model takes: the values that its inputs of integers and booleans stand for, by how the graph uses them."""

from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from lib.graph import concatenation, fusion
from lib.tir import parameters


@dataclass(frozen=True, slots=True)
class Values:
    """What an input holds.

    `ids` are indices below `bound`; a `mask` is ones and zeros; `small` are positive integers that are neither, lengths
    or time steps; `real` are floats.
    """

    kind: str
    bound: int  # exclusive, of ids and masks; 0 for the others


def values(module: tvm.IRModule) -> dict[str, Values]:
    """What each input of `main` holds, by name; `module` must be fused.

    The graph tells ids from masks; where it does not (a mask that only multiplies), a mask is told by its name.
    """
    bounds, masks = _uses(module)
    found = {}
    for param in fusion.inputs(module):
        name, dtype = str(param.name), str(param.ty.dtype)
        if dtype.startswith(("float", "bfloat")):
            found[name] = Values("real", 0)
        elif name in bounds:
            found[name] = Values("ids", bounds[name])
        elif dtype == "bool" or name in masks or "mask" in name.lower():
            found[name] = Values("mask", 2)
        else:
            found[name] = Values("small", 0)
    return found


def _uses(module: tvm.IRModule) -> tuple[dict[str, int], set[str]]:
    """By input that indexes a table: the smallest extent it indexes; and which inputs are used as masks.

    Follows an input into the functions that read it, and through those that only move or cast it, or count negative
    ids from the end (ONNX).
    """
    names = {param: str(param.name) for param in fusion.inputs(module)}
    bounds: dict[str, int] = {}
    masks: set[str] = set()
    for block in module[fusion.ENTRY].body.blocks:
        for binding in block.bindings:
            called = concatenation.called(binding.value)
            if called is None or not any(argument in names for argument in called[1]):
                continue
            function = module[called[0]]
            if not isinstance(function, tirx.PrimFunc):
                continue
            indexed, masking = parameters.index_bounds(function), parameters.masks(function)
            for position, argument in enumerate(called[1]):
                if argument not in names:
                    continue
                name = names[argument]
                if position in indexed:
                    bounds[name] = min(indexed[position], bounds.get(name, indexed[position]))
                if position in masking:
                    masks.add(name)
                if isinstance(binding, relax.VarBinding) and parameters.is_held(function, position):
                    names[binding.var] = name
    return bounds, masks
