"""What a workload computes, read from the blocks of its TIR: names lie (dense and depthwise are both `conv2d`).

A block with an initial value reduces: it is a contraction if it sums products of two tensors (then the way
the indices are shared tells convolutions and products apart), else a pooling or a plain reduction. Any other
block is named after the arithmetic in it, or after the way in which it moves data. Shapes do not enter, but for
unit extents.

Where the same can be written in several ways, the loops decide, since they are what is scheduled:

- a 1x1 convolution is `conv2d_1x1` (it keeps its unit kernel axes, and reads with a stride), a dense layer `matmul`,
  though at stride 1 both run through the same loops;
- a product whose result or input is split into heads is a `matmul` if one side is read by all of the batch,
  else a `batch_matmul`;
- a transposed convolution is the dense convolution over a spread-out image that TVM makes of it: `conv2d`;
- a mean over the image is `reduce`, as its loops are; a pooling has windows;
- a layer norm, group norm, RMS norm: `normalization`; a local response norm is a pooling and what is around it;
- functions that `lib.legalize` writes as polynomials are `exp` or `rational` (erf and tanh).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock

_SPATIAL, _REDUCTION = 0, 2  # tirx.IterVar.iter_type
_FUNCTIONS = ("exp", "erf", "tanh", "sqrt", "rsqrt", "pow", "sigmoid", "log")
_ARITHMETIC = {
    tirx.Add: "add",
    tirx.Sub: "sub",
    tirx.Mul: "mul",
    tirx.Div: "div",
    tirx.Max: "max",
    tirx.Min: "min",
    tirx.Select: "select",
}


MOVEMENTS = ("broadcast", "concat", "copy", "pad", "place", "reshape", "slice", "transpose")


def operators(module: tvm.IRModule) -> list[str]:
    """What each block computes, in program order; copies in place are left out, as a padding by nothing is one."""
    names = [_operator(block) for block in _blocks(module["main"])]
    return [name for name in names if name != "copy"]


def _operator(block: SBlock) -> str:
    if not _walk(block.body, tirx.BufferStore):
        return "opaque"  # a call of a library
    return _reduction(block) if block.init is not None else _elementwise(block)


def core_operator(names: Sequence[str]) -> str:
    """The operator that decides how a subgraph is best scheduled.

    Args:
        names: What `operators` returned.

    Returns:
        Contractions in order, joined by `+`; else `softmax`, `normalization`, a pooling, `reduce`, `gather`,
        `data_movement`, `elementwise` or, of what no block tells, `other`: the first that fits.
    """
    contractions = [name for name in names if "conv" in name or "matmul" in name]
    pools = [name for name in names if name.endswith("_pool")]
    if contractions:
        return "+".join(dict.fromkeys(contractions))
    reductions = [name for name in names if name.startswith(("reduce", "moments"))]
    if {"reduce_max", "reduce_sum"} <= set(names):
        return "softmax"
    if reductions and {"rsqrt", "sqrt"} & set(names):
        return "normalization"
    if pools:
        return pools[0]
    if reductions:
        return "reduce"
    if "gather" in names:
        return "gather"
    if "opaque" in names:
        return "other"
    return "data_movement" if set(names) <= set(MOVEMENTS) else "elementwise"


def index_bounds(function: tirx.PrimFunc) -> dict[int, int]:
    """For each integer parameter that is used as an index: the smallest extent of what it indexes.

    Values in [0, bound) are safe to run the function with; TVM's random fill is not (it writes float bits).
    """
    bounds: dict[int, int] = {}
    for load in _walk(function.body, tvm.ir.TensorLoad):
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            for inner in _walk(index, tvm.ir.TensorLoad):
                for number, param in enumerate(function.params):
                    if param.same_as(inner.source):
                        bounds[number] = min(int(extent), bounds.get(number, int(extent)))
    return bounds


def padding(function: tirx.PrimFunc) -> tuple[list[int] | None, float]:
    """Of a function that puts a border around a tensor, as TVM's `topi.nn.pad` writes it: how much comes before
    the tensor in each axis, and what is put there. (None, 0) if it is another function."""
    blocks = _blocks(function)
    if len(blocks) != 1:
        return None, 0.0
    store = _stored(blocks[0])
    value, filled = store.value, 0.0
    if isinstance(value, tvm.ir.Call) and value.op.name.endswith("if_then_else"):
        if not isinstance(value.args[2], tirx.FloatImm):
            return None, 0.0
        value, filled = value.args[1], float(value.args[2].value)
    if not isinstance(value, tvm.ir.TensorLoad):
        return None, 0.0
    before = []
    for index, at in zip(value.indices, store.indices, strict=True):
        if isinstance(index, tirx.Sub) and index.a.same_as(at) and isinstance(index.b, tirx.IntImm):
            before.append(int(index.b))
        elif index.same_as(at):
            before.append(0)
        else:
            return None, 0.0
    return before, filled


def _walk(root: Any, kind: type) -> list[Any]:
    found: list[Any] = []
    tvm_ffi.structural_walk(root, [(kind, found.append)], order="post")
    return found


def _blocks(function: tirx.PrimFunc) -> list[SBlock]:
    return [block for block in _walk(function.body, SBlock) if block.name_hint != "root"]


def _vars(exprs: Iterable[Any]) -> set[Any]:
    return {var for expr in exprs for var in _walk(expr, tirx.Var)}


def _stored(block: SBlock) -> Any:
    return _walk(block.body, tirx.BufferStore)[-1]


def _without_casts(expr: Any) -> Any:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def _reduction(block: SBlock) -> str:
    stores = {store.buffer for store in _walk(block.body, tirx.BufferStore)}
    if len(stores) > 1:  # several results in one pass: a sum with a sum of squares, or a maximum with its place
        sums = all(isinstance(store.value, tirx.Add) for store in _walk(block.body, tirx.BufferStore))
        return "moments" if sums else "reduce"
    store = _stored(block)
    axes = {kind: {v.var for v in block.iter_vars if int(v.iter_type) == kind} for kind in (_SPATIAL, _REDUCTION)}
    extents = {v.var: int(v.dom.extent) for v in block.iter_vars}
    loads = [load for load in _walk(store.value, tvm.ir.TensorLoad) if not load.source.same_as(store.buffer)]
    windowed = any(_windows(load, axes) for load in loads)
    if isinstance(store.value, tirx.Max):
        return "max_pool" if windowed else "reduce_max"
    if isinstance(store.value, tirx.Min):
        return "reduce_min"
    if not isinstance(store.value, tirx.Add):
        return "reduce"
    left, right = store.value.a, store.value.b
    term = _without_casts(right if isinstance(left, tvm.ir.TensorLoad) and left.source.same_as(store.buffer) else left)
    if isinstance(term, tirx.Mul):
        a, b = _without_casts(term.a), _without_casts(term.b)
        if all(isinstance(x, tvm.ir.TensorLoad) for x in (a, b)) and not a.source.same_as(b.source):
            return _contraction(a, b, axes, extents)
    return "avg_pool" if windowed else "reduce_sum"


def _windows(load: Any, axes: dict[int, set[Any]]) -> list[Any]:
    """Indices that mix a spatial and a reduction axis, y * stride + ry: the sliding windows."""
    return [i for i in load.indices if _vars([i]) & axes[_SPATIAL] and _vars([i]) & axes[_REDUCTION]]


def _contraction(data: Any, weight: Any, axes: dict[int, set[Any]], extents: dict[Any, int]) -> str:
    if len(_windows(weight, axes)) > len(_windows(data, axes)):
        data, weight = weight, data
    shared = _vars(data.indices) & _vars(weight.indices) & axes[_SPATIAL]
    windows = _windows(data, axes)
    if not windows:
        return "batch_matmul" if any(extents[var] > 1 for var in shared) else "matmul"
    # A grouped convolution computes the input channel from the output channel: a window, but not over space.
    over_space = [i for i in windows if not _vars([i]) & axes[_SPATIAL] & _vars(weight.indices)]
    kernel = _vars(over_space) & axes[_REDUCTION]
    rank = len(over_space)
    if shared:
        channels = math.prod(extents[var] for var in axes[_REDUCTION] - kernel)
        return f"{'depthwise' if channels == 1 else 'group'}_conv{rank}d"
    return f"conv{rank}d" + ("_1x1" if all(extents[var] == 1 for var in kernel) else "")


def _elementwise(block: SBlock) -> str:
    store = _stored(block)
    loads = _walk(store.value, tvm.ir.TensorLoad)
    if any(_walk(index, tvm.ir.TensorLoad) for load in loads for index in load.indices):
        return "gather"
    calls = {call.op.name.split(".")[-1] for call in _walk(store.value, tvm.ir.Call) if hasattr(call.op, "name")}
    for function in _FUNCTIONS:
        if function in calls:
            return function
    if "reinterpret" in calls:
        return "exp"  # two to a power, put together from its bits
    if "if_then_else" in calls:
        return "concat" if len({load.source for load in loads}) > 1 else "pad"
    value = _without_casts(store.value)
    if isinstance(value, tvm.ir.TensorLoad):
        return _movement(value, store)
    if isinstance(value, tirx.Div) and _walk(value.a, tirx.Mul) and _walk(value.b, tirx.Mul):
        return "rational"
    return _ARITHMETIC.get(type(value), "elementwise")


def _movement(load: Any, store: Any) -> str:
    """How `store` places what it reads."""
    axes = [axis for axis in store.indices if isinstance(axis, tirx.Var)]
    own = [number for index in load.indices for number, axis in enumerate(axes) if index.same_as(axis)]
    shifted = [index for index in load.indices if isinstance(index, (tirx.Add, tirx.Sub))]
    sizes = [[int(extent) for extent in tensor.ty.shape] for tensor in (load.source, store.buffer)]
    if own != sorted(own):
        return "transpose"
    if len(own) + len(shifted) == len(load.indices) == len(axes):
        if math.prod(sizes[0]) == math.prod(sizes[1]):
            return "reshape" if shifted else "copy"
        return "slice" if math.prod(sizes[0]) > math.prod(sizes[1]) else "place"
    smaller = math.prod(sizes[0]) < math.prod(sizes[1])
    return "broadcast" if smaller else "slice" if math.prod(sizes[0]) > math.prod(sizes[1]) else "reshape"
