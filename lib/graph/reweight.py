"""Replaces operators by others that compute the same from transformed weights, which are made at compile time."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax import op, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.fusion import Model
from lib.graph.rewrite import OF_BYTES, dtype, is_call, static_shape
from lib.tir import gaps

_NARROW = "bfloat16"

_Change = tuple[tuple[int, int], ...] | str  # zeros before and after each axis; or an element type
Emit = Callable[[relax.BlockBuilder, relax.Call, Sequence[relax.Expr]], relax.Expr]


@dataclass(frozen=True, slots=True)
class Replacement:
    """Another algorithm for a call whose second argument is a weight."""

    kind: Hashable  # equal for calls that can share the transformed weight
    value: Callable[[np.ndarray], np.ndarray]  # transforms the weight
    shape: tuple[int, ...]  # of the transformed weight
    emit: Emit  # the new expression, from the call as it was and its new arguments, with the transformed weight
    dtype: str = "float32"  # of the transformed weight


Choose = Callable[[relax.Call], Replacement | None]


def rewrite(
    module: tvm.IRModule, weights: Mapping[str, np.ndarray], choices: Sequence[Choose]
) -> tuple[tvm.IRModule, dict[str, np.ndarray]]:
    """Replace calls of `main`, each by the first replacement that one of `choices` offers; before operators are fused.

    A weight that is read in several places is transformed if replacements of one kind are offered for all of them.

    Args:
        weights: Values of the parameters that are no inputs, by name.

    Returns:
        The module, and the values of the weights that were transformed, by name.
    """
    function = module["main"]
    found: dict[relax.Var, Replacement] = {}
    for param, readers in _readers(function).items():
        offers = [_first_offer(reader, param, choices) for reader in readers]
        agreed = offers[0] if offers else None
        if str(param.name) in weights and agreed and all(offer and offer.kind == agreed.kind for offer in offers):
            found[param] = agreed
    if not found:
        return module, {}
    rewritten = _Replacer(module, found, choices).rewritten(function)
    return rewritten, {str(param.name): offer.value(weights[str(param.name)]) for param, offer in found.items()}


def replaced(model: Model, choices: Sequence[Choose]) -> Model:
    """See `rewrite`; the same model if nothing is replaced."""
    module, changed = rewrite(model.module, model.weights, choices)
    return Model(module, {**model.weights, **changed}) if changed else model


def made_once(model: Model) -> Model:
    """The model with weights that all their readers pad alike, or round, as weights that are so when it is compiled."""
    found = {param: changes[0] for param, readers in _readers(model.module["main"]).items()
             if str(param.name) in model.weights and (changes := list(map(_change, readers)))
             and changes[0] is not None and all(change == changes[0] for change in changes)}  # fmt: skip
    if not found:
        return model
    made = {(name := str(param.name)): _changed(model.weights[name], change) for param, change in found.items()}
    return Model(_Made(model.module, made).rewritten(model.module["main"], found), {**model.weights, **made})


def _change(reader: relax.Expr) -> _Change | None:
    """What a call makes of its argument alone, if that is zeros around it, or rounding; None of other calls."""
    if is_call(reader, "relax.astype") and str(reader.attrs.dtype) == _NARROW:
        return _NARROW
    if not is_call(reader, "relax.nn.pad") or str(reader.attrs.pad_mode) != "constant" or reader.attrs.pad_value:
        return None
    ends = [int(n) for n in reader.attrs.pad_width]
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def _changed(weight: np.ndarray, change: _Change) -> np.ndarray:
    return weight.astype(ml_dtypes.bfloat16) if isinstance(change, str) else np.pad(weight, change)


@mutator
class _Made(PyExprMutator):
    def __init__(self, module: tvm.IRModule, made: Mapping[str, np.ndarray]) -> None:
        super().__init__(module)
        self._values = made
        self._made: set[relax.Var] = set()

    def rewritten(self, function: relax.Function, found: Collection[relax.Var]) -> tvm.IRModule:
        """The module with its `main` without what was done to these weights."""
        params = []
        for param in function.params:
            if param in found:
                value = self._values[str(param.name)]
                new = relax.Var(str(param.name), relax.TensorType(value.shape, str(value.dtype)))
                self.set_var_remap(param, new)
                self._made.add(new)
                param = new
            params.append(param)
        body = self.visit_with_new_scope(function.body)
        changed = relax.Function(params, body, function.ret_ty, function.is_pure, function.attrs)
        self.builder_.update_func(self.builder_.get().get_global_var("main"), changed)
        return transform.CanonicalizeBindings()(self.builder_.get())

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        return call.args[0] if is_call(call, "relax.nn.pad", "relax.astype") and call.args[0] in self._made else call


def _readers(function: relax.Function) -> dict[relax.Var, list[relax.Expr]]:
    """The expressions that read each parameter."""
    found: dict[relax.Var, list[relax.Expr]] = {param: [] for param in function.params}

    def visit(expr: relax.Expr) -> None:
        arguments = expr.args if isinstance(expr, relax.Call) else expr.fields if isinstance(expr, relax.Tuple) else []
        for argument in arguments:
            if isinstance(argument, relax.Var) and argument in found:
                found[argument].append(expr)

    relax.analysis.post_order_visit(function, visit)
    return found


def _first_offer(reader: relax.Expr, param: relax.Var, choices: Sequence[Choose]) -> Replacement | None:
    if not isinstance(reader, relax.Call) or len(reader.args) < 2 or not reader.args[1].same_as(param):
        return None
    return next((offer for choose in choices if (offer := choose(reader)) is not None), None)


@mutator
class _Replacer(PyExprMutator):
    def __init__(
        self, module: tvm.IRModule, replaced: Mapping[relax.Var, Replacement], choices: Sequence[Choose]
    ) -> None:
        super().__init__(module)
        self._replaced, self._choices = replaced, choices

    def rewritten(self, function: relax.Function) -> tvm.IRModule:
        """The module with its `main` rewritten."""
        params = []
        for param in function.params:
            offer = self._replaced.get(param)
            if offer is not None:
                new = relax.Var(str(param.name), relax.TensorType(offer.shape, offer.dtype))
                self.set_var_remap(param, new)
            params.append(param if offer is None else new)
        body = self.visit_with_new_scope(function.body)
        changed = relax.Function(params, body, function.ret_ty, function.is_pure, function.attrs)
        self.builder_.update_func(self.builder_.get().get_global_var("main"), changed)
        return self.builder_.get()

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        weight = old.args[1] if len(old.args) > 1 else None
        if not isinstance(weight, relax.Var) or weight not in self._replaced:
            return self.visit_expr_post_order(old)
        offer = _first_offer(old, weight, self._choices)
        assert offer is not None
        return offer.emit(self.builder_, old, [self.visit_expr(arg) for arg in old.args])


def deeper(more: int, weight: np.ndarray) -> np.ndarray:
    """A weight with so many input channels of zeros after its own, which are its last axis but one."""
    return np.pad(weight, [(0, 0)] * (weight.ndim - 2) + [(0, more), (0, 0)])


def deeper_data(builder: relax.BlockBuilder, data: relax.Expr, more: int, groups: int = 1) -> relax.Expr:
    """Data with as many channels of zeros after its own, its last axis; after those of each group."""
    if not more:
        return data
    if groups == 1 and dtype(data) in OF_BYTES:  # may become a part of the convolution (`lib.graph.padding`)
        return builder.emit(op.nn.pad(data, [0] * (2 * len(shape_of(data)) - 1) + [more], "constant", 0.0))
    spread, marks = partial(_spread, groups, more), patterns.marks(patterns.INJECTIVE)
    return builder.emit(builder.call_te(spread, data, primfunc_name_hint=gaps.DEEPER, primfunc_attrs=marks))


def _spread(groups: int, more: int, data: te.Tensor) -> te.Tensor:
    own = int(data.shape[-1]) // groups
    wide = own + more

    def value(*at: tirx.Var) -> tirx.Expr:
        *outer, channel = at
        group, n = channel // wide, channel % wide
        return tirx.if_then_else(n < own, data(*outer, group * own + n), tirx.const(0, data.dtype))

    shape = [*data.shape[:-1], tirx.IntImm("int64", groups * wide)]
    return te.compute(shape, value, name=gaps.DEEPER, attrs={gaps.DEEPER: [own, wide]})


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """The shape of a tensor; empty if it is not static."""
    return static_shape(expr) or ()
