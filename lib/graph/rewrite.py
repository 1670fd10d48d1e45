"""Rewriting a Relax function by rules: the pass that applies them, and what a rule may query of the function."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.analysis import free_vars, udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

CONVOLUTIONS = ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")
CONTRACTIONS = (*CONVOLUTIONS, "relax.matmul")  # that may have a weight
OF_BYTES = ("uint8", "int8", "int16")  # element types of bytes, and of what they are widened to, to be multiplied
_SPATIAL = {"conv1d": "W", "conv2d": "HW", "conv3d": "DHW"}
# Layouts of data and weights with channels last, by operator, as ConvertLayout is told them.
CHANNELS_LAST = {f"relax.nn.{name}": (f"N{axes}C", f"{axes}IO") for name, axes in _SPATIAL.items()} | {
    f"relax.nn.{name}_transpose": (f"N{axes}C", f"IO{axes}") for name, axes in _SPATIAL.items()
}
STAND_IN = "relax.call_pure_packed"
_log = logging.getLogger(__name__)
_MAX_PASSES = 50  # rules that undo one another would never end


@dataclass(frozen=True, slots=True)
class Rule:
    """A rewrite of calls of some operators.

    `operators` are names of Relax; `name[i]` stands for the i-th item of what a call of `name` returns. `apply`
    gets the call with its arguments rewritten already, and returns its replacement, or None where it does not apply.
    It must come to return None, or it is left out when rewriting does not end.
    """

    name: str
    operators: tuple[str, ...]
    apply: Callable[["Rewriter", relax.Call], relax.Expr | None]


def rule(*operators: str) -> Callable[[Callable[["Rewriter", relax.Call], relax.Expr | None]], Rule]:
    """Make a rule of a function."""
    return lambda apply: Rule(apply.__name__, operators, apply)


def rewrite(module: tvm.IRModule, rules: Sequence[Rule]) -> tvm.IRModule:
    """Apply rules to every Relax function, in dataflow order, until none applies; then eliminate dead code.

    Rules that undo one another are a fault of theirs, but each of them left the model right: a warning names those that
    still apply after many passes, and they are left out.
    """
    by_operator: dict[str, list[Rule]] = {}
    for each in rules:
        for operator in each.operators:
            by_operator.setdefault(operator, []).append(each)
    applied: set[str] = set()
    for _ in range(_MAX_PASSES):
        before, applied = applied, set()
        for gvar, function in module.functions_items():
            if isinstance(function, relax.Function):
                rewriter = Rewriter(module, function, by_operator)
                rewritten = rewriter.visit_expr(function)
                applied |= rewriter.applied
                made = dict(rewriter.builder_.get().functions_items())  # rules may add functions in TIR
                module = tvm.IRModule({**made, gvar: rewritten}, attrs=module.attrs)
        # Aliases left by the mutator would make ConvertLayout return to NCHW at each of them.
        module = transform.DeadCodeElimination()(transform.CanonicalizeBindings()(module))
        if not applied:
            return module
    endless = before | applied
    _log.warning(
        "Rewriting does not end: %s still apply after %d passes, and are left out. The library is right, but may be "
        "slower than it could be; please report it.", ", ".join(sorted(endless)), _MAX_PASSES,
    )  # fmt: skip
    return rewrite(module, [each for each in rules if each.name not in endless])


@mutator
class Rewriter(PyExprMutator):
    """One pass over a function. Rules query it for what an expression is, and emit through it."""

    def __init__(self, module: tvm.IRModule, function: relax.Function, rules: dict[str, list[Rule]]) -> None:
        super().__init__(module)
        self.applied: set[str] = set()
        self._rules = rules
        blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
        self._uses = Counter({var: len(users) for block in blocks for var, users in udchain(block).items()})
        self._uses.update(free_vars(function.body.body))  # the caller reads the results

    # What rules may query.

    def definition(self, expr: relax.Expr) -> relax.Expr:
        """What a variable is bound to, through aliases; parameters and other expressions are themselves."""
        while isinstance(expr, relax.Var) and (bound := self.lookup_binding(expr)) is not None:
            expr = bound
        return expr

    def calls(self, expr: relax.Expr, *operators: str) -> relax.Call | None:
        """The call that an expression is bound to, if it is of one of these operators, or None."""
        call = self.definition(expr)
        return call if is_call(call, *operators) else None

    def value(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of a constant, not copied; None for all else."""
        expr = self.definition(expr)
        if isinstance(expr, (tvm.tirx.FloatImm, tvm.tirx.IntImm)):  # constants, too, for TVM
            return np.asarray(expr.value, dtype=str(expr.ty))
        if isinstance(expr, tvm.ir.Constant):
            return value_of(expr)
        return None

    def values(self, exprs: Sequence[relax.Expr]) -> list[np.ndarray] | None:
        """The values of all of them, or None."""
        values = [self.value(expr) for expr in exprs]
        known = [value for value in values if value is not None]
        return known if len(known) == len(values) else None

    def fields(self, expr: relax.Expr) -> list[relax.Expr] | None:
        """The fields of a tuple that is built here; None if it comes from elsewhere."""
        definition = self.definition(expr)
        return list(definition.fields) if isinstance(definition, relax.Tuple) else None

    def read_once(self, expr: relax.Expr) -> bool:
        """Whether one operator alone reads it, so that the two may be rewritten as one."""
        return isinstance(expr, relax.Var) and self.readers(expr) == 1

    def readers(self, expr: relax.Expr) -> int:
        """How often operators read a variable; of one that was made in this pass, for all that is known, once."""
        return self._uses.get(expr, 1)

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an intermediate result, so that its shape is known."""
        return self.builder_.emit(expr)

    def shape(self, expr: relax.Expr) -> tuple[int, ...] | None:
        """The static shape of a tensor, or None. Accepts what is not bound yet."""
        if expr.ty is None or isinstance(expr, relax.Call):
            expr = self.builder_.normalize(expr)
        return static_shape(expr)

    # The pass.

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        item = self.visit_expr_post_order(item)
        call = self.definition(item.tuple_value)
        if not (isinstance(call, relax.Call) and isinstance(call.op, tvm.ir.Op)):
            return item
        found = self._apply(f"{call.op.name}[{int(item.index)}]", call)
        return item if found is None else found

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        for before, after in zip(old.args, call.args, strict=True):  # a renamed variable is read as often
            if isinstance(after, relax.Var) and isinstance(before, relax.Var):
                self._uses[after] = max(self._uses.get(before, 1), self._uses.get(after, 1))
        if not isinstance(call.op, tvm.ir.Op):
            return call
        found = self._apply(call.op.name, call)
        return call if found is None else found

    def _apply(self, operator: str, call: relax.Call) -> relax.Expr | None:
        for each in self._rules.get(operator, []):
            found = each.apply(self, call)
            if found is not None:
                self.applied.add(each.name)
                return found
        return None


def mutated(mutator: PyExprMutator, module: tvm.IRModule) -> tvm.IRModule:
    """A module whose Relax functions went through a mutator, which was made for it."""
    for gvar, function in module.functions_items():
        if isinstance(function, relax.Function):
            mutator.builder_.update_func(gvar, mutator.visit_expr(function))
    return mutator.builder_.get()


def with_more_params(
    mutator: PyExprMutator, function: relax.Function, body: relax.Expr, params: Sequence[relax.Var]
) -> tvm.IRModule:
    """The module of a mutator with another body for `main`, which has these parameters after its own."""
    params = [*function.params, *params]
    changed = relax.Function(params, body, function.ret_ty, function.is_pure, function.attrs)
    mutator.builder_.update_func(mutator.builder_.get().get_global_var("main"), changed)
    return transform.DeadCodeElimination()(transform.CanonicalizeBindings()(mutator.builder_.get()))


def is_call(expr: relax.Expr | None, *operators: str) -> bool:
    """Whether an expression is a call of one of these Relax operators."""
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in operators


def is_stand_in(expr: relax.Expr, name: str) -> bool:
    """Whether an expression is a call of a function that nobody has, which stands for what Relax has no operator for;
    see `lib.graph.recurrence`."""
    return is_call(expr, STAND_IN) and str(getattr(expr.args[0], "global_symbol", "")) == name


def has_stand_ins(module: tvm.IRModule, name: str) -> bool:
    """Whether `main` calls such a function."""
    found: list[bool] = []
    relax.analysis.post_order_visit(module["main"], lambda expr: found.append(is_stand_in(expr, name)))
    return any(found)


def arguments(value: relax.Expr) -> Sequence[relax.Expr]:
    """What an expression reads; the fields of a tuple, not the tuple, but for one of its fields."""
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    if isinstance(value, relax.Call):
        return [each for arg in value.args for each in (arg.fields if isinstance(arg, relax.Tuple) else [arg])]
    return list(value.fields) if isinstance(value, relax.Tuple) else [value]


def is_channels_last(convolution: relax.Call) -> bool:
    """Whether a convolution, transposed or not, has images in NHWC (signals in NWC, volumes in NDHWC) before and after
    it, and weights as `CHANNELS_LAST` has them."""
    attrs = convolution.attrs
    data, out = str(attrs.data_layout), str(attrs.out_layout) or str(attrs.data_layout)  # empty: as the data
    return data == out and (data, str(attrs.kernel_layout)) == CHANNELS_LAST[convolution.op.name]


def is_by_pixel(convolution: relax.Call, image: Sequence[int], kernel: Sequence[int], out: Sequence[int]) -> bool:
    """Whether each pixel of what a 2-D convolution of these shapes gives is made of the one at its place alone: a
    product with one matrix, channels last."""
    is_dense = is_channels_last(convolution) and groups_of(convolution) == 1
    return is_dense and tuple(kernel[:2]) == (1, 1) and tuple(image[:3]) == tuple(out[:3])


def to_channels_first(rank: int) -> list[int]:
    """The transpose that makes NCHW of NHWC, by rank: also of signals and volumes."""
    return [0, rank - 1, *range(1, rank - 1)]


def to_last(rank: int, axis: int) -> list[int]:
    """The transpose that brings an axis behind the others."""
    return [*range(axis), *range(axis + 1, rank), axis]


def undoing(order: Sequence[int]) -> list[int]:
    """The transpose that undoes another one."""
    return [order.index(n) for n in range(len(order))]


def in_order(rewriter: Rewriter, tensor: relax.Expr, order: Sequence[int]) -> relax.Expr:
    """A tensor with its axes in another order; the same where that is the order that they have."""
    return tensor if order == sorted(order) else rewriter.emit(op.permute_dims(tensor, order))


def has_columns_last(call: relax.Call, weight: Sequence[int]) -> bool:
    """Whether a product's or convolution's weight, of some shape, has the input channels in its last axis but one, and
    the last axis of the result in its last."""
    return len(weight) == 2 if is_call(call, "relax.matmul") else is_channels_last(call)


def groups_of(call: relax.Call) -> int:
    """The groups of a convolution, each with channels of its own; 1 for a product."""
    return 1 if is_call(call, "relax.matmul") else int(call.attrs.groups)


def alike(
    call: relax.Call, data: relax.Expr, weight: relax.Expr, out_dtype: str, padding: Sequence[int] | None = None,
    groups: int | None = None,
) -> relax.Call:  # fmt: skip
    """The same product (`matmul`) or convolution (`CONVOLUTIONS`) as a call, of other tensors; a convolution with its
    own padding and groups, unless others are given."""
    attrs = call.attrs
    if is_call(call, "relax.matmul"):
        return relax.op.matmul(data, weight, out_dtype=out_dtype)
    convolve = getattr(relax.op.nn, call.op.name.rpartition(".")[2])
    return convolve(
        data, weight, strides=[int(s) for s in attrs.strides], dilation=[int(d) for d in attrs.dilation],
        padding=[int(p) for p in attrs.padding] if padding is None else list(padding),
        groups=groups or int(attrs.groups),
        data_layout=str(attrs.data_layout), kernel_layout=str(attrs.kernel_layout), out_layout=str(attrs.out_layout),
        out_dtype=out_dtype,
    )  # fmt: skip


def static_shape(expr: relax.Expr) -> tuple[int, ...] | None:
    """The shape of a tensor if all extents are known, or None."""
    shape = getattr(expr.ty, "shape", None)
    extents = getattr(shape, "values", None)
    if extents is None or not all(isinstance(extent, tvm.tirx.IntImm) for extent in extents):
        return None
    return tuple(int(extent) for extent in extents)


def dtype(expr: relax.Expr) -> str:
    """The element type of a tensor."""
    return str(expr.ty.dtype)


def value_of(const: tvm.ir.Constant) -> np.ndarray:
    """A constant's value without a copy, read-only."""
    try:
        return np.from_dlpack(const.value)
    except (BufferError, RuntimeError, TypeError):  # types that DLPack does not know
        return np.asarray(const.value.numpy())


def constant(value: np.ndarray) -> relax.Expr:
    """A constant of a graph."""
    array = np.array(value, order="C")  # np.ascontiguousarray would make a vector of a scalar
    return relax.const(array, str(array.dtype))
