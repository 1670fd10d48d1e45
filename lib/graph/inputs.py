"""What a model takes: the values that its inputs of integers and booleans stand for, by how the graph uses them."""

from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from lib.graph import concatenation, fusion
from lib.tir import parameters
from lib.tir.numerics import ONES


@dataclass(frozen=True, slots=True)
class Values:
    """What an input holds.

    `ids` are indices below `bound`; a `mask` is ones and zeros; `ones` are what a mask is that only tells a length;
    `small` are positive integers that are none of these, lengths or time steps; `real` are floats.
    """

    kind: str
    bound: int  # exclusive, of ids and masks; -1 (`numerics.ONES`) of ones; 0 for the others


def values(module: tvm.IRModule) -> dict[str, Values]:
    """What each input of `main` holds, by name; `module` must be fused.

    The graph tells ids from masks; where it does not (a mask that only multiplies), a mask is told by its name. One
    that is at most counted is all ones: what ONNX Runtime's attention makes of tokens beyond a length is not defined.
    """
    bounds, masks, used = _uses(module)
    found = {}
    for param in fusion.inputs(module):
        name, dtype = str(param.name), str(param.ty.dtype)
        if dtype.startswith(("float", "bfloat")):
            found[name] = Values("real", 0)
        elif name in bounds:
            found[name] = Values("ids", bounds[name])
        elif name not in masks | used and "mask" in name.lower() and dtype != "bool":
            found[name] = Values("ones", ONES)
        elif dtype == "bool" or name in masks or "mask" in name.lower():
            found[name] = Values("mask", 2)
        else:
            found[name] = Values("small", 0)
    return found


def _uses(module: tvm.IRModule) -> tuple[dict[str, int], set[str], set[str]]:
    """By input that indexes a table: the smallest extent it indexes; which inputs are used as masks; and which are used
    for more than to be counted.

    Follows an input into the functions that read it, and through those that only move or cast it, or count negative
    ids from the end (ONNX).
    """
    names = {param: str(param.name) for param in fusion.inputs(module)}
    bounds: dict[str, int] = {}
    masks, used = set[str](), set[str]()
    for block in module[fusion.ENTRY].body.blocks:
        for binding in block.bindings:
            called = concatenation.called(binding.value)
            if called is None or not any(argument in names for argument in called[1]):
                continue
            function = module[called[0]]
            if not isinstance(function, tirx.PrimFunc):
                continue
            indexed, masking = parameters.index_bounds(function), parameters.masks(function)
            counting = parameters.counted(function)
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
                elif position not in counting:
                    used.add(name)
    return bounds, masks, used
