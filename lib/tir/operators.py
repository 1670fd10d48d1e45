"""The operators of a workload, read from the blocks of its TIR: names lie (dense and depthwise are both `conv2d`).

A block with an initial value reduces: it is a contraction if it sums products of two tensors (whose shared indices
tell convolutions and matrix products apart), else a pooling or a plain reduction. Any other block is named after its
arithmetic, or after how it moves data. Shapes do not matter, but for unit extents and for whether a movement's result
is larger or smaller than its source.

The core operator of computations that can be written in several ways:

| computation | core operator |
|---|---|
| dense layer of any rank; a product with one batch, or with one weight for all batches | `matmul` |
| 1x1 convolution, with or without a stride | `conv2d_1x1`; as a product of a reshaped image: `matmul` |
| convolution whose kernel is the whole image | `conv2d`; as a dense layer: `matmul` |
| grouped convolution, 1x1 or not | `group_conv2d`; with one input channel a group: `depthwise_conv2d` |
| depthwise convolution of bytes as `lib.graph.words` has it | `depthwise_conv2d_int8` |
| rows times the weights of an expert, which a table chooses (`lib.graph.experts`) | `grouped_matmul` |
| product or 1x1 convolution as `lib.graph.strassen` has it | `strassen_matmul`: products between sums |
| 3x3, 5x5 or 7x7 convolution as `lib.graph.winograd` has it, in groups or not | `winograd_conv2d`: products |
| a convolution, a depthwise one and a 1x1 one as `lib.graph.fused_layers` has them | `fused_layers` |
| convolution along one axis as `lib.graph.winograd_1d` has it | `winograd_conv1d`: a product between two transforms |
| product or convolution in float32 as three in bf16 (`lib.graph.splitting`) | as one in bf16 |
| transposed convolution as `lib.graph.rules.transposed` has it | `matmul` or `conv2d` |
| another transposed convolution | `transposed_conv2d`: TVM flips the kernel and convolves the spread-out input |
| attention in one function (`lib.tir.attention`) | `attention`, whatever lies between the two products |
| the steps of an LSTM, GRU or RNN in one function (`lib.tir.recurrence`) | `recurrence` |
| rows times a matrix of few bits (`lib.tir.few_bits`, in bytes: `few_bits_rows`) | `few_bits`, `few_bits_int8` |
| a few rows times a matrix in halves (`lib.tir.halves`) | `few_halves` |
| softmax, log softmax | `softmax`; without the subtraction of the maximum: `reduce` |
| layer norm, RMS norm | `layer_norm` (two sums), `rms_norm` (one sum, of squares) |
| group norm, instance norm | its pieces: `reduce` (of the squares with what is before them), `elementwise` |
| group norm as TVM has it, where channels are not the second axis | `group_norm` (both moments in one pass) |
| batch norm of one inference | `elementwise` |
| a norm in pieces that are not fused into one function | its pieces: `reduce`, `elementwise` |
| local response norm | its pieces: `avg_pool` (a window over channels), `elementwise` |
| global pooling, as a pooling or as a mean | `reduce`: there is one window |
| erf, tanh, exp as `lib.graph.legalize` writes them | `elementwise`: the operators are `rational` and `exp` |
| cumulative sum, sort, top k, scatter | `other`: loops written by hand, TVM's or ours, with little to schedule |

A 1x1 convolution in NHWC has the loops of a matrix product, but for two spatial loops where a product has one. They are
different operators all the same: MetaSchedule tiles each loop, so the traces of one do not fit the other, and a
convolution may have a stride. Whether one cost model for both would learn faster has not been measured.
"""

import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlock

from lib.tir import analysis, few_bits, few_bits_rows, halves, lookup

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
WINOGRAD, WINOGRAD_1D, STRASSEN = "winograd_conv2d", "winograd_conv1d", "strassen_matmul"
FUSED_LAYERS = "fused_layers"
WINOGRAD_LINES = 8  # of tiles, from which on a task may have some of them, from data to results
ATTENTION, RECURRENCE = "attention", "recurrence"
CHOSEN_SUM = "chosen_sum"  # of elements; which, the place of the result says
_NARROW = {
    "bfloat16": "bf16",
    "uint8": "int8",
    "int8": "int8",
    "int16": "int16",
}  # element types whose contractions are operators of their own: programs differ
# `place` writes a part of a concatenation to where it belongs; `dilate` puts zeros between elements.
MOVEMENTS = ("concat", "place", "slice", "transpose", "reshape", "reverse", "broadcast", "pad", "dilate")


def operators(module: tvm.IRModule) -> list[str]:
    """What each block computes, in program order; blocks that copy element by element are left out. Of a layer whose
    steps are a loop, only that."""
    if analysis.has_steps(module["main"]):
        kinds = {_NARROW.get(str(param.ty.dtype)) for param in module["main"].params} - {None}
        return ["_".join([RECURRENCE, *map(str, kinds)])]
    blocks = analysis.leaf_blocks(module["main"])
    for name in (few_bits_rows.FUNCTION, few_bits.FUNCTION, halves.FUNCTION):
        if any(block.name_hint.startswith(name) for block in blocks):
            return [name]
    names = [operator(block) for block in blocks]
    return [name for name in names if name != "copy"]


def core_operator(names: Sequence[str]) -> str:
    """The operator that decides how a subgraph is best scheduled.

    Args:
        names: What `operators` returned.

    Returns:
        Contractions in order, joined by `+`; else `other`, `softmax`, a norm, a pooling, `reduce`, `gather`,
        `data_movement` or `elementwise`, the first that fits.
    """
    if names and names[0].startswith((RECURRENCE, few_bits.FUNCTION, halves.FUNCTION)):
        return names[0]
    contractions = [name for name in names if "conv" in name or "matmul" in name]
    if _is_attention(names):
        return ATTENTION + contractions[0].removeprefix("batch_").removeprefix("matmul")
    if contractions and "transform" in names:
        kind = contractions[0].rpartition("_")[2]
        name = WINOGRAD if names.count("transform") > 2 else WINOGRAD_1D  # of data and of results, along each axis
        return f"{name}_{kind}" if kind in _NARROW.values() else name
    if contractions and CHOSEN_SUM in names:
        return STRASSEN
    if len(contractions) > 1 and "depthwise_conv2d" in contractions:
        return FUSED_LAYERS
    if contractions:
        flipped = "reverse" in names
        return "+".join(dict.fromkeys(f"transposed_{n}" if flipped and "conv" in n else n for n in contractions))
    if "opaque" in names:
        return "other"
    return _of_reductions(names) or (
        "gather" if "gather" in names else "data_movement" if set(names) <= set(MOVEMENTS) else "elementwise"
    )


def _is_attention(names: Sequence[str]) -> bool:
    """Whether they are a product, exponentials, and another product, in this order."""
    products = [n for n, name in enumerate(names) if "matmul" in name]
    return len(products) == 2 and "exp" in names[products[0] : products[1]]


def operator(block: SBlock) -> str:
    """What a block computes: a name as in `operators`, or `copy`."""
    if analysis.walk(block.body, tirx.For) or not analysis.walk(block.body, tirx.BufferStore):
        return "opaque"  # loops within a block, or a call, neither of which can be scheduled
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
    if len(analysis.walk(block.body, tirx.BufferStore)) > 1:  # several results in one pass
        return "reduce_arg" if analysis.walk(block.body, tirx.Select) else "reduce_moments"
    store = analysis.stored(block)
    axes = {
        kind: {v.var for v in block.iter_vars if int(v.iter_type) == kind}
        for kind in (analysis.SPATIAL, analysis.REDUCTION)
    }
    extents = analysis.extents(block)
    loads = analysis.loaded(store)
    slides = any(
        extents[var] != 1
        for load in loads
        for index in _windows(load, axes)
        for var in analysis.variables([index]) & axes[analysis.SPATIAL]
        if not _is_apart(index, var, extents)
    )
    if isinstance(store.value, tirx.Max):
        return "max_pool" if slides else "reduce_max"
    if isinstance(store.value, tirx.Min):
        return "min_pool" if slides else "reduce_min"
    if not isinstance(store.value, tirx.Add):
        return "reduce_prod" if isinstance(store.value, tirx.Mul) else "reduce"
    if analysis.of_words(block):
        return "depthwise_conv2d_int8"
    product = analysis.factors(block)
    if product is not None:
        narrow = str(product[0].source.dtype)
        return _contraction(*product, axes, extents) + ("" if narrow not in _NARROW else f"_{_NARROW[narrow]}")
    if _is_transform(analysis.summand(block)):
        return "transform"
    if slides:
        return "avg_pool"
    return "reduce_sum_exp" if "exp" in _calls(analysis.summand(block)) else "reduce_sum"


def _is_transform(term: Any) -> bool:
    """Whether a term is a product with a constant matrix, whose entries are literals of the program."""
    return isinstance(term, tirx.Mul) and any(
        analysis.walk(factor, tirx.Select) and not analysis.walk(factor, tvm.ir.TensorLoad)
        for factor in (term.a, term.b)
    )


def _windows(load: Any, axes: dict[int, set[Any]]) -> list[Any]:
    """Indices that mix a spatial and a reduction axis, y * stride + ry: the sliding windows."""
    return [
        i
        for i in load.indices
        if analysis.variables([i]) & axes[analysis.SPATIAL] and analysis.variables([i]) & axes[analysis.REDUCTION]
    ]


def _is_apart(index: Any, var: Any, extents: dict[Any, int]) -> bool:
    """Whether the steps of an index with all other variables go over all that it reaches with one: no window slides
    then, as in a reduction of each lane of the vectors in a row."""
    others = [each for each in analysis.variables([index]) if not each.same_as(var)]
    steps = [analysis.stride([index], [1], each) for each in others]
    return min(steps, default=0) >= extents[var] * analysis.stride([index], [1], var) > 0


def _contraction(data: Any, weight: Any, axes: dict[int, set[Any]], extents: dict[Any, int]) -> str:
    if len(_windows(weight, axes)) > len(_windows(data, axes)):
        data, weight = weight, data
    if analysis.is_chosen(weight) or analysis.is_chosen(data):
        return "grouped_matmul"
    shared = analysis.variables(data.indices) & analysis.variables(weight.indices) & axes[analysis.SPATIAL]
    windows = _windows(data, axes)
    # A grouped convolution computes the input channel from the output channel: a window, but not over space.
    over_space = [
        i for i in windows if not analysis.variables([i]) & axes[analysis.SPATIAL] & analysis.variables(weight.indices)
    ]
    if not over_space:  # as well the products of Winograd's convolutions in groups
        return "batch_matmul" if any(extents[var] != 1 for var in shared) else "matmul"
    kernel = analysis.variables(over_space) & axes[analysis.REDUCTION]
    rank = len(over_space)
    if shared:
        channels = math.prod(extents[var] for var in axes[analysis.REDUCTION] - kernel)
        return f"{'depthwise' if channels == 1 else 'group'}_conv{rank}d"
    return f"conv{rank}d" + ("_1x1" if all(extents[var] == 1 for var in kernel) else "")


def _calls(expr: Any) -> set[str]:
    return {call.op.name.split(".")[-1] for call in analysis.walk(expr, tvm.ir.Call) if hasattr(call.op, "name")}


def _elementwise(block: SBlock) -> str:
    store = analysis.stored(block)
    loads = analysis.walk(store.value, tvm.ir.TensorLoad)
    if any(map(analysis.is_chosen, loads)):
        return "lookup" if any(map(lookup.is_lookup, loads)) else "gather"
    value = analysis.without_casts(store.value)
    if isinstance(value, tvm.ir.TensorLoad):
        moved = _moved(value, store, analysis.extents(block))
        return "cast" if moved == "copy" and isinstance(store.value, tirx.Cast) else moved
    if _is_chosen_sum(value):
        return CHOSEN_SUM
    calls = _calls(value)
    for function in _FUNCTIONS:
        if function in calls:
            return function
    if "reinterpret" in calls and not analysis.is_choice(value):
        return "exp"  # two to a power, put together from its bits, as `lib.graph.legalize` has it
    if "if_then_else" in calls:
        return _chosen(value, loads)
    if isinstance(value, tirx.Div) and analysis.walk(value.a, tirx.Mul) and analysis.walk(value.b, tirx.Mul):
        return "rational"  # what `lib.graph.legalize` makes of erf and tanh
    return _ARITHMETIC.get(type(value), "elementwise")


def _is_chosen_sum(value: Any) -> bool:
    """Whether it is one of several sums of a tensor's elements: which, the place of the result says."""
    conditions, choices = [], []
    while isinstance(value, tirx.Select):
        conditions.append(value.condition)
        choices.append(value.true_value)
        value = value.false_value
    choices.append(value)
    if not conditions or not all(isinstance(each, tirx.EQ) for each in conditions):
        return False
    loads = analysis.walk(choices, tvm.ir.TensorLoad)
    are_sums = all(map(_is_sum, choices)) and any(isinstance(each, tirx.Add | tirx.Sub) for each in choices)
    is_by_place = not analysis.walk(conditions, tvm.ir.TensorLoad)
    return are_sums and is_by_place and all(load.source.same_as(loads[0].source) for load in loads)


def _is_sum(value: Any) -> bool:
    """Whether it is made of elements by additions and subtractions alone."""
    if isinstance(value, tirx.Add | tirx.Sub):
        return _is_sum(value.a) and _is_sum(value.b)
    return isinstance(value, tvm.ir.TensorLoad)


def _chosen(value: Any, loads: Sequence[Any]) -> str:
    """The movement whose elements come from one of several places, depending on their indices."""
    if any(not load.source.same_as(loads[0].source) for load in loads):
        return "concat"
    # Zeros between the elements, not around them: every n-th index holds one.
    return "dilate" if analysis.walk(value.args[0], tirx.FloorMod) else "pad"


def _moved(load: Any, store: Any, extents: dict[Any, int]) -> str:
    """The movement that stores elements as they were loaded, over axes of these extents."""
    if analysis.walk(load.indices, tirx.Select):
        return "pad"  # mirrored at the border
    if any(isinstance(index, tirx.Sub) and isinstance(index.a, tirx.IntImm) for index in load.indices):
        return "reverse"
    same_rank = len(load.indices) == len(store.indices)
    wider = math.prod(int(extent) for extent in store.buffer.shape) > math.prod(extents.values())
    if wider and same_rank and all(map(_is_before, load.indices, store.indices)):
        return "place"
    grown = math.prod(extents.values()) - math.prod(int(extent) for extent in load.source.ty.shape)
    if grown:
        return "broadcast" if grown > 0 else "slice"
    if not all(isinstance(index, (tirx.Var, tirx.IntImm)) for index in load.indices):
        return "reshape"  # possibly with a transposition
    read, written = ([i for i in x.indices if extents.get(i, 1) > 1] for x in (load, store))
    if not all(a.same_as(b) for a, b in zip(read, written, strict=True)):
        return "transpose"
    return "copy" if same_rank and all(map(_is_before, load.indices, store.indices)) else "reshape"


def _is_before(index: Any, place: Any) -> bool:
    """Whether an index is equal to that of a place, or to it but for a constant that the place has added."""
    if isinstance(place, tirx.Add) and isinstance(place.b, tirx.IntImm):
        place = place.a
    both = isinstance(index, tirx.IntImm) and isinstance(place, tirx.IntImm)
    return int(index) == int(place) if both else bool(index.same_as(place))
