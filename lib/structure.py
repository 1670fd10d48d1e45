"""What a workload computes, read from the blocks of its TIR: names lie (dense and depthwise are both `conv2d`).

A block with an initial value reduces: it is a contraction if it sums products of two tensors (then the way
the indices are shared tells convolutions and products apart), else a pooling or a plain reduction. Any other
block is named after the arithmetic in it, or after how it moves data. Shapes do not enter, but for unit
extents and for whether a movement grows or shrinks what it moves.

Where one computation that can be written in several ways lands:

| computation | core operator |
|---|---|
| dense layer of any rank; a product with one batch, or with one weight for all batches | `matmul` |
| 1x1 convolution, with or without a stride | `conv2d_1x1`; as a product of a reshaped image: `matmul` |
| convolution whose kernel is the whole image | `conv2d`; as a dense layer: `matmul` |
| grouped convolution, 1x1 or not | `group_conv2d`; with one input channel a group: `depthwise_conv2d` |
| 3x3 convolution as `lib.winograd` has it | `winograd_conv2d`: a product between transforms |
| transposed convolution | `transposed_conv2d`: TVM flips the kernel and convolves the spread-out input |
| attention in one function | `batch_matmul`, whatever happens to the scores between the two products |
| softmax, log softmax | `softmax`; without the subtraction of the maximum: `reduce` |
| layer norm, RMS norm | `layer_norm` (two sums), `rms_norm` (one sum, of squares) |
| group norm, instance norm | `group_norm` (both moments in one pass) |
| batch norm of one inference | `elementwise` |
| a norm in pieces that are not fused into one function | its pieces: `reduce`, `elementwise` |
| local response norm | its pieces: `avg_pool` (a window over channels), `elementwise` |
| global pooling, as a pooling or as a mean | `reduce`: nothing slides if there is one window |
| erf, tanh, exp as `lib.legalize` writes them | `elementwise`: the operators are `rational` and `exp` |
| cumulative sum, sort, top k, scatter | `other`: loops that TVM writes by hand, with little to schedule |

A 1x1 convolution in NHWC has the loops of a product, with two spatial loops where a product has one. The two keep
their own names all the same: MetaSchedule tiles each loop, so the traces of one do not fit the other, and a convolution
may have a stride. Whether one model for both would learn faster has not been measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.sym import Analyzer

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
RULE = "schedule_rule"  # annotation with which TOPI names how a block is to be scheduled
_BY_CHANNEL = ("depthwise_conv2d", "max_pool", "min_pool", "avg_pool")  # reductions that may leave channels apart
# `place` writes a part of a concatenation to where it belongs; `dilate` puts zeros between elements.
MOVEMENTS = ("concat", "place", "slice", "transpose", "reshape", "reverse", "broadcast", "pad", "dilate")


def operators(module: tvm.IRModule) -> list[str]:
    """What each block computes, in program order; blocks that copy element by element are left out."""
    names = [operator(block) for block in leaf_blocks(module["main"])]
    return [name for name in names if name != "copy"]


def core_operator(names: Sequence[str]) -> str:
    """The operator that decides how a subgraph is best scheduled.

    Args:
        names: What `operators` returned.

    Returns:
        Contractions in order, joined by `+`; else `other`, `softmax`, a norm, a pooling, `reduce`, `gather`,
        `data_movement` or `elementwise`, the first that fits.
    """
    contractions = [name for name in names if "conv" in name or "matmul" in name]
    if contractions and "transform" in names:
        return "winograd_conv2d"
    if contractions:
        flipped = "reverse" in names
        return "+".join(dict.fromkeys(f"transposed_{n}" if flipped and "conv" in n else n for n in contractions))
    if "opaque" in names:
        return "other"
    return _of_reductions(names) or (
        "gather" if "gather" in names else "data_movement" if set(names) <= set(MOVEMENTS) else "elementwise"
    )


def movement(names: Sequence[str]) -> str:
    """How a subgraph that computes nothing moves its data; empty if it computes.

    Args:
        names: What `operators` returned.

    Returns:
        `gather` or names of `MOVEMENTS`, each once, joined by `+`; a `reshape` is named only if nothing else happens,
        since most come with a transposition. `copy` if elements stay where they are.
    """
    if not set(names) <= {*MOVEMENTS, "gather"}:
        return ""
    kinds = list(dict.fromkeys(names))
    return "+".join([kind for kind in kinds if kind != "reshape"] or kinds) or "copy"


def named_rules(function: tirx.PrimFunc) -> dict[str, str]:
    """By block, the rule that TOPI names to schedule it with; `None` is TOPI's own way to ask for no schedule."""
    found = {str(block.name_hint): block.annotations.get(RULE) for block in leaf_blocks(function)}
    return {block: str(rule) for block, rule in found.items() if rule is not None and str(rule) != "None"}


@dataclass(frozen=True, slots=True)
class Roles:
    """What the axes of a contraction do: their positions among the block's axes."""

    batch: tuple[int, ...]  # in the data and in the weights
    rows: tuple[int, ...]  # in the data alone, in the order of the output
    columns: int  # in the weights alone, and last in the output
    reduction: tuple[int, ...]
    groups: int = 1  # of columns, one after the other, each with data of its own


def roles(block: SBlock) -> Roles | None:
    """The axes of a sum of products in float32; None if it is another block, or its columns do not lie together."""
    product = _product(block)
    if product is None or str(_stored(block).buffer.dtype) != "float32":
        return None
    axes = [axis.var for axis in block.iter_vars]
    column = _stored(block).indices[-1]
    weight, data = product if product[0].indices[-1].same_as(column) else product[::-1]
    of_weight, of_data = _vars(weight.indices), _vars(data.indices)
    groups = _groups(data, column, _extents(block).get(column, 0))
    if column not in axes or not groups or not weight.indices[-1].same_as(column):
        return None
    spatial = spatial_axes(block)
    rows = tuple(n for n in spatial if axes[n] not in of_weight)
    batch = tuple(n for n in spatial if axes[n] in of_weight and axes[n] in of_data - {column})
    columns = [n for n in spatial if n not in rows and n not in batch]
    reduction = tuple(summed_axes(block))
    if not rows or not reduction or len(columns) != 1 or not axes[columns[0]].same_as(column):
        return None
    return Roles(batch, rows, columns[0], reduction, groups)


def _groups(data: Any, column: Any, extent: int) -> int:
    """Into how many groups columns fall by the data that they read; 0 if single ones read data of their own."""
    divisions = [div for div in walk(data.indices, tirx.FloorDiv) if div.a.same_as(column)]
    sizes = {int(div.b) for div in divisions if isinstance(div.b, tirx.IntImm)}
    everywhere = sum(var.same_as(column) for index in data.indices for var in walk(index, tirx.Var))
    if everywhere != len(divisions) or len(sizes) > 1:
        return 0
    size = sizes.pop() if sizes else extent
    return extent // size if size and extent % size == 0 else 0


def window_roles(block: SBlock) -> Roles | None:
    """The axes of a window that slides over at least two axes of an image, each of the last axis' channels by itself.

    None if it is another block: one that sums over channels, or does not slide.
    """
    if block.init is None or len(walk(block.body, tirx.BufferStore)) > 2 or operator(block) not in _BY_CHANNEL:
        return None
    store = _stored(block)
    axes = [axis.var for axis in block.iter_vars]
    column = store.indices[-1]
    loads = _read(store)
    extents = _extents(block)
    channels = [{var for var in _vars([load.indices[-1]]) if var.same_as(column) or extents[var] > 1} for load in loads]
    if column not in axes or any(found != {column} for found in channels):
        return None
    place = last_axis(block)
    rows = tuple(n for n in spatial_axes(block) if n != place)
    reduction = tuple(summed_axes(block))
    return Roles((), rows, place, reduction) if len(rows) >= 2 and reduction else None


def row_extents(block: SBlock) -> tuple[int, ...] | None:
    """The extents of a sum (or maximum, or minimum) in float32 over the last axis of what it reads: those of its result
    and that of the sum. None if it is another block, or a product of two tensors."""
    *spatial, last = block.iter_vars
    store = _stored(block)
    if block.init is None or len(walk(block.body, tirx.BufferStore)) > 1 or str(store.buffer.dtype) != "float32":
        return None
    if int(last.iter_type) != _REDUCTION or any(int(axis.iter_type) != _SPATIAL for axis in spatial):
        return None
    if not isinstance(store.value, (tirx.Add, tirx.Max, tirx.Min)) or _product(block) is not None:
        return None
    loads = _read(store)
    rows = [load for load in loads if last.var in _vars(load.indices)]
    if not rows or not all(load.indices[-1].same_as(last.var) for load in rows):
        return None
    return tuple(_extents(block).values())


def last_axis(block: SBlock) -> int:
    """The position of the axis along which the results of a block lie together."""
    last = _stored(block).indices[-1]
    return next(n for n, axis in enumerate(block.iter_vars) if axis.var.same_as(last))


def spatial_axes(block: SBlock) -> list[int]:
    """The positions of the axes along which a block has a result for each place."""
    return [n for n, axis in enumerate(block.iter_vars) if int(axis.iter_type) == _SPATIAL]


def summed_axes(block: SBlock) -> list[int]:
    """The positions of the axes that a block sums over."""
    return [n for n, axis in enumerate(block.iter_vars) if int(axis.iter_type) == _REDUCTION]


def lie_together(block: SBlock, axis: int) -> bool:
    """Whether neighbours along an axis are neighbours in what a block writes and in a tensor that it reads."""
    store, var = _stored(block), block.iter_vars[axis].var
    loads = _read(store)
    return all(any(x.indices[-1].same_as(var) for x in side) for side in ([store], loads))


def period(block: SBlock) -> int:
    """The length of the stretches into which a block cuts the last axis of what it writes to find what it reads, as
    reshapes and channel shuffles do; 0 if it does not, or in several ways."""
    stores = walk(block.body, tirx.BufferStore)
    last = block.iter_vars[-1].var if block.iter_vars else None
    if len(stores) != 1 or last not in _vars([stores[0].indices[-1]]):
        return 0
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    loads = walk(stores[0].value, tvm.ir.TensorLoad)
    indices = [analyzer.simplify(index) for load in loads for index in load.indices]
    cuts = [cut for kind in (tirx.FloorDiv, tirx.FloorMod) for cut in walk(indices, kind)]
    lengths = {int(cut.b) for cut in cuts if cut.a.same_as(last) and isinstance(cut.b, tirx.IntImm)}
    length = lengths.pop() if len(lengths) == 1 else 0
    return length if length > 1 and _extents(block)[last] % length == 0 else 0


def transposed(block: SBlock) -> int | None:
    """Which axis of an element-wise block lies together in a tensor that it reads, where another one does in what it
    writes: its position, or that after the last where stretches of the last axis lie apart (see `period`) and so do
    their elements. None if there is none, or it is not the only one."""
    stores = walk(block.body, tirx.BufferStore)
    if block.init is not None or len(stores) != 1 or walk(block.body, tirx.For):
        return None
    axes = [axis.var for axis in block.iter_vars]
    extents = _extents(block)
    last = stores[0].indices[-1]
    if not axes or not last.same_as(axes[-1]) or extents[axes[-1]] == 1:
        return None
    found: set[int] = set()
    length = period(block)
    for load in walk(stores[0].value, tvm.ir.TensorLoad):
        steps = [step(load.indices, load.source.ty.shape, axis) if extents[axis] > 1 else 0 for axis in axes]
        if steps[-1] > 1:
            steps += [step(load.indices, load.source.ty.shape, last, length)] if length else []
            found |= {n for n, apart in enumerate(steps) if apart == 1}
    return found.pop() if len(found) == 1 else None


def step(indices: Sequence[Any], shape: Sequence[Any], var: Any, far: int = 1) -> int:
    """How far apart in memory two elements of a tensor are, by their indices: where all variables are zero, and where
    one of them is so far from it; 0 if that is not known before."""
    ends = []
    for place in (0, far):
        at = {other: tirx.IntImm(other.ty.dtype, place if other.same_as(var) else 0) for other in _vars(indices)}
        address: Any = 0
        for index, extent in zip(indices, shape, strict=True):
            address = address * extent + replaced(index, at)
        ends.append(Analyzer().simplify(address))
    return int(ends[1]) - int(ends[0]) if all(isinstance(end, tirx.IntImm) for end in ends) else 0


def replaced(expr: Any, values: Mapping[Any, Any]) -> Any:
    """An expression with values in the place of variables."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def weights(function: tirx.PrimFunc) -> list[int]:
    """Which parameters of a workload are a model's, rather than computed: those that `graph.fuse` has marked."""
    return [int(position) for position in (function.attrs or {}).get("layout_free_buffers", [])]


def index_bounds(function: tirx.PrimFunc) -> dict[int, int]:
    """For each integer parameter that is used as an index: the smallest extent of what it indexes.

    Values in [0, bound) are safe to run the function with; TVM's random fill is not (it writes float bits).
    """
    bounds: dict[int, int] = {}
    for load in walk(function.body, tvm.ir.TensorLoad):
        for index, extent in zip(load.indices, load.source.ty.shape, strict=True):
            for inner in walk(index, tvm.ir.TensorLoad):
                for number, param in enumerate(function.params):
                    if param.same_as(inner.source):
                        bounds[number] = min(int(extent), bounds.get(number, int(extent)))
    return bounds


def padding(function: tirx.PrimFunc) -> tuple[list[int] | None, float]:
    """Of a function that puts a border around a tensor, as TVM's `topi.nn.pad` writes it: how much comes before
    the tensor in each axis, and what is put there. (None, 0) if it is another function."""
    blocks = leaf_blocks(function)
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


def nests(root: Any) -> list[tuple[tirx.For, ...]]:
    """Each loop behind those that it lies in, the outermost first."""
    loops = walk(root, tirx.For)
    within = {loop: walk(loop.body, tirx.For) for loop in loops}
    return [(*(other for other in reversed(loops) if loop in within[other]), loop) for loop in loops]


def walk(root: Any, kind: type) -> list[Any]:
    """All nodes of a kind, what lies within a node before the node."""
    found: list[Any] = []
    tvm_ffi.structural_walk(root, [(kind, found.append)], order="post")
    return found


def leaf_blocks(function: tirx.PrimFunc) -> list[SBlock]:
    """The blocks that hold no other block."""
    return [block for block in walk(function.body, SBlock) if not walk(block.body, SBlock)]


def only_reduction(function: tirx.PrimFunc) -> SBlock | None:
    """The block that reduces; None if there is none, or more than one."""
    reductions = [block for block in leaf_blocks(function) if block.init is not None]
    return reductions[0] if len(reductions) == 1 else None


def _vars(exprs: Iterable[Any]) -> set[Any]:
    return {var for expr in exprs for var in walk(expr, tirx.Var)}


def _stored(block: SBlock) -> Any:
    return walk(block.body, tirx.BufferStore)[-1]


def _read(store: Any) -> list[Any]:
    """What a block loads, but for the result so far."""
    return [load for load in walk(store.value, tvm.ir.TensorLoad) if not load.source.same_as(store.buffer)]


def _without_casts(expr: Any) -> Any:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def _extents(block: SBlock) -> dict[Any, int]:
    """Of each axis; 0 if it is not constant, as with windows of several sizes."""
    extents = {axis.var: axis.dom.extent for axis in block.iter_vars}
    return {var: int(extent) if isinstance(extent, tirx.IntImm) else 0 for var, extent in extents.items()}


def operator(block: SBlock) -> str:
    """What a block computes: a name as in `operators`, or `copy`."""
    if walk(block.body, tirx.For) or not walk(block.body, tirx.BufferStore):
        return "opaque"  # loops within a block, or a call: no schedule reaches into it
    return _reduction(block) if block.init is not None else _elementwise(block)


def _of_reductions(names: Sequence[str]) -> str:
    """The core operator of a subgraph without contractions that reduces; empty if it does not."""
    reductions = [name for name in names if name.startswith("reduce")]
    sums = [name for name in reductions if name.startswith("reduce_sum")]
    if "reduce_max" in names and sums and ("exp" in names or "reduce_sum_exp" in names):
        return "softmax"
    if "rsqrt" in names and "reduce_moments" in names:
        return "group_norm"
    if "rsqrt" in names and len(sums) >= 2:
        return "layer_norm"
    if "rsqrt" in names and sums and "mul" in names[: names.index("reduce_sum")]:
        return "rms_norm"
    pools = [name for name in names if name.endswith("_pool")]
    return pools[0] if pools else "reduce" if reductions else ""


def _reduction(block: SBlock) -> str:
    if len(walk(block.body, tirx.BufferStore)) > 1:  # several results in one pass
        return "reduce_arg" if walk(block.body, tirx.Select) else "reduce_moments"
    store = _stored(block)
    axes = {kind: {v.var for v in block.iter_vars if int(v.iter_type) == kind} for kind in (_SPATIAL, _REDUCTION)}
    extents = _extents(block)
    loads = _read(store)
    slides = any(extents[var] != 1 for load in loads for var in _vars(_windows(load, axes)) & axes[_SPATIAL])
    if isinstance(store.value, tirx.Max):
        return "max_pool" if slides else "reduce_max"
    if isinstance(store.value, tirx.Min):
        return "min_pool" if slides else "reduce_min"
    if not isinstance(store.value, tirx.Add):
        return "reduce_prod" if isinstance(store.value, tirx.Mul) else "reduce"
    product = _product(block)
    if product is not None:
        return _contraction(*product, axes, extents)
    if _is_transform(_summand(block)):
        return "transform"
    if slides:
        return "avg_pool"
    return "reduce_sum_exp" if "exp" in _calls(_summand(block)) else "reduce_sum"


def _summand(block: SBlock) -> Any:
    """What a block that sums adds, without casts."""
    store = _stored(block)
    left, right = store.value.a, store.value.b
    return _without_casts(right if isinstance(left, tvm.ir.TensorLoad) and left.source.same_as(store.buffer) else left)


def _product(block: SBlock) -> tuple[Any, Any] | None:
    """The two loads whose products a block sums; None if it does something else."""
    if block.init is None or not isinstance(_stored(block).value, tirx.Add):
        return None
    term = _summand(block)
    if not isinstance(term, tirx.Mul):
        return None
    a, b = _without_casts(term.a), _without_casts(term.b)
    if not all(isinstance(x, tvm.ir.TensorLoad) for x in (a, b)) or a.source.same_as(b.source):
        return None
    return a, b


def _is_transform(term: Any) -> bool:
    """Whether it is a tensor times numbers that stand in the program: a product with a constant matrix."""
    return isinstance(term, tirx.Mul) and any(
        walk(factor, tirx.Select) and not walk(factor, tvm.ir.TensorLoad) for factor in (term.a, term.b)
    )


def _windows(load: Any, axes: dict[int, set[Any]]) -> list[Any]:
    """Indices that mix a spatial and a reduction axis, y * stride + ry: the sliding windows."""
    return [i for i in load.indices if _vars([i]) & axes[_SPATIAL] and _vars([i]) & axes[_REDUCTION]]


def _contraction(data: Any, weight: Any, axes: dict[int, set[Any]], extents: dict[Any, int]) -> str:
    if len(_windows(weight, axes)) > len(_windows(data, axes)):
        data, weight = weight, data
    shared = _vars(data.indices) & _vars(weight.indices) & axes[_SPATIAL]
    windows = _windows(data, axes)
    if not windows:
        return "batch_matmul" if any(extents[var] != 1 for var in shared) else "matmul"
    # A grouped convolution computes the input channel from the output channel: a window, but not over space.
    over_space = [i for i in windows if not _vars([i]) & axes[_SPATIAL] & _vars(weight.indices)]
    kernel = _vars(over_space) & axes[_REDUCTION]
    rank = len(over_space)
    if shared:
        channels = math.prod(extents[var] for var in axes[_REDUCTION] - kernel)
        return f"{'depthwise' if channels == 1 else 'group'}_conv{rank}d"
    return f"conv{rank}d" + ("_1x1" if all(extents[var] == 1 for var in kernel) else "")


def _calls(expr: Any) -> set[str]:
    return {call.op.name.split(".")[-1] for call in walk(expr, tvm.ir.Call) if hasattr(call.op, "name")}


def _elementwise(block: SBlock) -> str:
    store = _stored(block)
    loads = walk(store.value, tvm.ir.TensorLoad)
    if any(walk(index, tvm.ir.TensorLoad) for load in loads for index in load.indices):
        return "gather"
    value = _without_casts(store.value)
    if isinstance(value, tvm.ir.TensorLoad):
        moved = _moved(value, store, _extents(block))
        return "cast" if moved == "copy" and isinstance(store.value, tirx.Cast) else moved
    calls = _calls(value)
    for function in _FUNCTIONS:
        if function in calls:
            return function
    if "reinterpret" in calls:
        return "exp"  # two to a power, put together from its bits, as `lib.legalize` has it
    if "if_then_else" in calls:
        return _chosen(value, loads)
    if isinstance(value, tirx.Div) and walk(value.a, tirx.Mul) and walk(value.b, tirx.Mul):
        return "rational"  # what `lib.legalize` makes of erf and tanh
    return _ARITHMETIC.get(type(value), "elementwise")


def _chosen(value: Any, loads: Sequence[Any]) -> str:
    """Which movement it is to take an element from one place or another, depending on its own place."""
    if any(not load.source.same_as(loads[0].source) for load in loads):
        return "concat"
    # Zeros between the elements, rather than around them: every n-th place holds one.
    return "dilate" if walk(value.args[0], tirx.FloorMod) else "pad"


def _moved(load: Any, store: Any, extents: dict[Any, int]) -> str:
    """Which movement it is to store elements as they were loaded, over axes of these extents."""
    if walk(load.indices, tirx.Select):
        return "pad"  # mirrored at the border
    if any(isinstance(index, tirx.Sub) and isinstance(index.a, tirx.IntImm) for index in load.indices):
        return "reverse"
    grown = math.prod(extents.values()) - math.prod(int(extent) for extent in load.source.ty.shape)
    same_rank = len(load.indices) == len(store.indices)
    if grown > 0 and same_rank and all(map(_is_before, load.indices, store.indices)):
        return "place"
    if grown:
        return "broadcast" if grown > 0 else "slice"
    if not all(isinstance(index, (tirx.Var, tirx.IntImm)) for index in load.indices):
        return "reshape"  # possibly with a transposition
    read, written = ([i for i in x.indices if extents.get(i, 1) > 1] for x in (load, store))
    if not all(a.same_as(b) for a, b in zip(read, written, strict=True)):
        return "transpose"
    return "copy" if same_rank and all(map(_is_before, load.indices, store.indices)) else "reshape"


def _is_before(index: Any, place: Any) -> bool:
    """Whether an index is a place, or lies a constant before it."""
    if isinstance(index, tirx.Sub) and isinstance(index.b, tirx.IntImm):
        index = index.a
    both = isinstance(index, tirx.IntImm) and isinstance(place, tirx.IntImm)
    return int(index) == int(place) if both else bool(index.same_as(place))
