"""The blocks, loops and axes of TIR programs, and the strides of their accesses."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.s_tir import SBlock
from tvm.sym import Analyzer

SPATIAL, REDUCTION, OPAQUE = 0, 2, 4  # tirx.IterVar.iter_type


def leaf_blocks(function: tirx.PrimFunc) -> list[SBlock]:
    """The blocks that hold no other block."""
    return [block for block in walk(function.body, SBlock) if not walk(block.body, SBlock)]


def has_steps(function: tirx.PrimFunc) -> bool:
    """Whether blocks are computed again and again, each time from what they computed before."""
    return any(
        any(int(axis.iter_type) == OPAQUE for axis in block.iter_vars) and walk(block.body, SBlock)
        for block in walk(function.body, SBlock)
    )


def reductions(function: tirx.PrimFunc) -> list[SBlock]:
    """The blocks that reduce."""
    return [block for block in leaf_blocks(function) if block.init is not None]


def only_reduction(function: tirx.PrimFunc) -> SBlock | None:
    """The block that reduces; None if there is none, or more than one."""
    found = reductions(function)
    return found[0] if len(found) == 1 else None


def nests(root: Any) -> list[tuple[tirx.For, ...]]:
    """For each loop, the loops around it, the outermost first, and itself."""
    loops = walk(root, tirx.For)
    within = {loop: walk(loop.body, tirx.For) for loop in loops}
    return [(*(other for other in reversed(loops) if loop in within[other]), loop) for loop in loops]


def walk(root: Any, kind: type) -> list[Any]:
    """All nodes of a kind, in post-order."""
    found: list[Any] = []
    tvm_ffi.structural_walk(root, [(kind, found.append)], order="post")
    return found


def has_mark(function: tirx.PrimFunc, mark: str) -> bool:
    """Whether a loop has an annotation."""
    return any(mark in loop.annotations for loop in walk(function.body, tirx.For))


def with_body(loop: tirx.For, body: tirx.Stmt) -> tirx.For:
    """A loop with something else in it."""
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, body, annotations=loop.annotations)


_OF_BLOCKS = (
    "iter_vars", "reads", "writes", "name_hint", "body", "init", "alloc_buffers", "match_buffers", "annotations",
)  # fmt: skip


def block_with(block: SBlock, **changes: Any) -> SBlock:
    """The same block but for some of its fields."""
    return SBlock(*(changes[name] if name in changes else getattr(block, name) for name in _OF_BLOCKS))


def replaced(expr: Any, values: Mapping[Any, Any]) -> Any:
    """An expression with variables replaced by values."""
    return tvm_ffi.structural_map(expr, (tirx.Var, lambda var: values.get(var, var)))


def stride(indices: Sequence[Any], shape: Sequence[Any], var: Any, far: int = 1) -> int:
    """The stride of an access with one variable, in elements: the distance in memory between the element where all
    variables are zero and the one where this one is `far`; 0 if it is not constant, or depends on what tensors hold."""
    if walk(indices, tvm.ir.TensorLoad):
        return 0
    ends = []
    for value in (0, far):
        at = {other: tirx.IntImm(other.ty.dtype, value if other.same_as(var) else 0) for other in variables(indices)}
        address: Any = 0
        for index, extent in zip(indices, shape, strict=True):
            address = address * extent + replaced(index, at)
        ends.append(Analyzer().simplify(address))
    return int(ends[1]) - int(ends[0]) if all(isinstance(end, tirx.IntImm) for end in ends) else 0


def is_linear(indices: Sequence[Any], shape: Sequence[Any], var: Any, extent: int) -> bool:
    """Whether all steps of an access along an axis of some extent, which begins at zero, are equally long."""
    return stride(indices, shape, var, extent - 1) == (extent - 1) * stride(indices, shape, var)


def at(index: Any, var: Any, value: int) -> int | None:
    """An index where a variable has a value; None if it depends on others."""
    found = Analyzer().simplify(replaced(index, {var: tirx.IntImm(var.ty.dtype, value)}))
    return int(found) if isinstance(found, tirx.IntImm) else None


def column_written(block: SBlock) -> Any:
    """The last index of what a block writes, counted from the first one that it writes: parts of concatenations have an
    offset (`lib.graph.concatenation`)."""
    last = stored(block).indices[-1]
    return last.a if isinstance(last, tirx.Add) and isinstance(last.b, tirx.IntImm) else last


def last_axis(block: SBlock) -> int:
    """The position of the axis along which the results of a block are contiguous."""
    last = column_written(block)
    return next(n for n, axis in enumerate(block.iter_vars) if axis.var.same_as(last))


def spatial_axes(block: SBlock) -> list[int]:
    """The positions of the spatial axes among the block's axes."""
    return [n for n, axis in enumerate(block.iter_vars) if int(axis.iter_type) == SPATIAL]


def reduction_axes(block: SBlock) -> list[int]:
    """The positions of the reduction axes among the block's axes."""
    return [n for n, axis in enumerate(block.iter_vars) if int(axis.iter_type) == REDUCTION]


def is_contiguous(block: SBlock, axis: int) -> bool:
    """Whether a block writes, and reads from some tensor, contiguous elements along an axis."""
    store, var = stored(block), block.iter_vars[axis].var
    loads = loaded(store)
    return all(any(x.indices[-1].same_as(var) for x in side) for side in ([store], loads))


def extents(block: SBlock) -> dict[Any, int]:
    """The extent of each axis by its variable; 0 if it is not constant, as with windows of several sizes."""
    extents = {axis.var: axis.dom.extent for axis in block.iter_vars}
    return {var: int(extent) if isinstance(extent, tirx.IntImm) else 0 for var, extent in extents.items()}


def variables(exprs: Iterable[Any]) -> set[Any]:
    return {var for expr in exprs for var in walk(expr, tirx.Var)}


def stored(block: SBlock) -> Any:
    return walk(block.body, tirx.BufferStore)[-1]


def loaded(store: Any) -> list[Any]:
    """The loads of a block, but for that of its accumulator."""
    return [load for load in walk(store.value, tvm.ir.TensorLoad) if not load.source.same_as(store.buffer)]


def summand(block: SBlock) -> Any:
    """The term that a sum accumulates, without casts."""
    store = stored(block)
    left, right = store.value.a, store.value.b
    return without_casts(right if isinstance(left, tvm.ir.TensorLoad) and left.source.same_as(store.buffer) else left)


def factors(block: SBlock) -> tuple[Any, Any] | None:
    """The two loads of a sum of products; None if the block does something else."""
    return None if block.init is None else added_factors(block)


def added_factors(block: SBlock) -> tuple[Any, Any] | None:
    """The same of a block that adds to sums which another one has set to zero."""
    if not isinstance(stored(block).value, tirx.Add):
        return None
    term = summand(block)
    if not isinstance(term, tirx.Mul):
        return None
    a, b = map(_factor, (term.a, term.b))
    if not all(isinstance(x, tvm.ir.TensorLoad) for x in (a, b)) or a.source.same_as(b.source):
        return None
    return a, b


def _factor(expr: Any) -> Any:
    words = words_of(expr)
    return without_casts(expr) if words is None else words


def words_of(expr: Any) -> Any | None:
    """The load of the word that an expression takes a byte of (`lib.graph.words`); None if it is another one."""
    for operator in (tirx.BitwiseAnd, tirx.RShift):
        expr = without_casts(expr)
        if not isinstance(expr, operator):
            return None
        expr = expr.a
    return expr if isinstance(expr, tvm.ir.TensorLoad) else None


def of_words(block: SBlock) -> bool:
    """Whether a block adds products of bytes, four of which are in each word of what it reads."""
    term = summand(block) if isinstance(stored(block).value, tirx.Add) else None
    return isinstance(term, tirx.Mul) and any(words_of(factor) is not None for factor in (term.a, term.b))


def weight_and_data(block: SBlock) -> tuple[Any, Any] | None:
    """The factors of a sum of products, that one first whose columns are the result's, if one is; None as there."""
    product = factors(block)
    if product is None or column(product[0]).same_as(stored(block).indices[-1]):
        return product
    return product[1], product[0]


def column(load: Any) -> Any:
    """The index of a load along the columns of a weight: the last one, or, of packed weights, the last but one, which
    may be the place in a vector of columns (`lib.graph.splitting`)."""
    last = load.indices[-2 if is_packed(load) else -1]
    return last.a if is_in_vectors(load) else last


def is_in_vectors(load: Any) -> bool:
    """Whether packed weights have their columns in vectors, so that nothing is gained by another order."""
    return is_packed(load) and isinstance(load.indices[-2], tirx.FloorMod)


def is_packed(load: Any) -> bool:
    """Whether several neighbours along the reduction lie beside each other for each column (`lib.graph.packing`)."""
    return len(load.indices) > 1 and isinstance(load.indices[-1], tirx.FloorMod)


def is_chosen(load: Any) -> bool:
    """Whether another tensor says which part of a tensor is read, as the weights of an expert (`lib.graph.experts`)."""
    return any(walk(index, tvm.ir.TensorLoad) for index in load.indices)


def own_variables(load: Any) -> set[Any]:
    """The variables of the indices of a load that no other tensor chooses."""
    return variables(index for index in load.indices if not walk(index, tvm.ir.TensorLoad))


def itemsize(dtype: object) -> int:
    """Bytes of an element of a type."""
    return max(1, tvm.DataType(str(dtype)).bits // 8)


def is_choice(expr: Any) -> bool:
    """Whether an expression is the one or the other of two, of which only that one is computed."""
    return isinstance(expr, tvm.ir.Call) and str(expr.op.name).endswith("if_then_else")


def without_casts(expr: Any) -> Any:
    while isinstance(expr, tirx.Cast):
        expr = expr.value
    return expr


def padding(function: tirx.PrimFunc) -> tuple[list[int] | None, float]:
    """The padding of a function as TVM's `topi.nn.pad` writes it: elements before the tensor in each axis, and their
    value. (None, 0) if it is another function."""
    blocks = leaf_blocks(function)
    return padding_of(blocks[0]) if len(blocks) == 1 else (None, 0.0)


def padding_of(block: SBlock) -> tuple[list[int] | None, float]:
    """The padding of a block; see `padding`."""
    store = stored(block)
    value, filled = store.value, 0.0
    if is_choice(value):
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


def rounds_to_bytes(function: tirx.PrimFunc) -> bool:
    """Whether it makes bytes of floats, for others or to go on with them, if only with the floats that they equal."""
    casts = walk(function.body, tirx.Cast)
    if any(cast.ty.dtype in ("int8", "uint8") and "float" in str(cast.value.ty.dtype) for cast in casts):
        return True
    return any(is_rounded(call) for call in walk(function.body, tvm.ir.Call))


def is_rounded(expr: Any) -> bool:
    """Whether it is a number rounded to the nearest integer, ties to even: LLVM has both alike."""
    return isinstance(expr, tvm.ir.Call) and getattr(expr.op, "name", "") in ("tirx.round", "tirx.nearbyint")
