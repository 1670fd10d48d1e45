"""Places where the kernel of a contraction is to end, though FuseOps would go on.

**Sums of what two kernels make: one hands its part over as bytes, if it has rounded it to bytes.** FuseOps makes a sum
the epilogue of the contraction that comes first, and ends the other's kernel where the sum begins: after its bytes were
dequantised (`lib.graph.rules.quantization`), in four times the memory. The projection at the first block of a ResNet
writes 3.2 MB then, and a program that no search finds fault with, since it writes them to a cache again and again, took
five times as long as where it read and wrote bytes. So a halt stands between quantising and dequantising.

**A single column that is spread over several.** The force between two atoms, a number, times the three coordinates of
what lies between them: such an epilogue has more columns than the contraction, and no space has programs of it.

**Concatenations of which several parts are taken.** The corners of boxes that a detector has at several scales: were
all of it one kernel, it would look for the scale of each element once for each of its corners, in expressions that grow
with every operator behind, and searches of them took minutes.

A halt, while operators are fused, is a function that FuseOps leaves alone, and that computes nothing.
"""

from collections.abc import Mapping

import tvm
from tvm import relax, te
from tvm.relax import transform
from tvm.relax.analysis import udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.concatenation import called
from lib.graph.rewrite import CONTRACTIONS, arguments, dtype, is_call, mutated, static_shape
from lib.graph.rules.constants import ELEMENTWISE

_FUNCTION, _MARK = "halt", "is_halt"
_BYTES = ("uint8", "int8")
_VIEWS = ("relax.reshape", "relax.squeeze", "relax.expand_dims")
_TAKE = ("relax.strided_slice", "relax.take", "relax.split")
_FEW = 2  # parts of a concatenation that cost one choice
_EPILOGUE = ("add", "subtract", "multiply", "astype", "clip", "round", "maximum", "minimum", "nn.relu")

_Values = Mapping[relax.Var, relax.Expr]


def placed(module: tvm.IRModule) -> tvm.IRModule:
    """The module with halts; before LegalizeOps."""
    placer = _Placer(module)
    for gvar, function in module.functions_items():
        if isinstance(function, relax.Function):
            placer.builder_.update_func(gvar, placer.with_halts(function))
    return placer.builder_.get()


def taken_away(module: tvm.IRModule) -> tvm.IRModule:
    """The module without them; after FuseTIR."""
    return transform.DeadCodeElimination()(transform.CanonicalizeBindings()(mutated(_Remover(module), module)))


@mutator
class _Placer(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self._module = module
        self._ends: set[relax.Var] = set()

    def with_halts(self, function: relax.Function) -> relax.Expr:
        self._ends = _handed_over(self._module, function) | _spread(self._module, function) | _taken_apart(function)
        return self.visit_expr(function)

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if binding.var in self._ends:
            attrs = {**patterns.marks(patterns.OPAQUE), _MARK: tvm.tirx.IntImm("int32", 1)}
            halt = self.builder_.call_te(
                _same, self.visit_expr(binding.var), primfunc_name_hint=_FUNCTION, primfunc_attrs=attrs
            )
            self.set_var_remap(binding.var, self.builder_.emit(halt))


@mutator
class _Remover(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self._module = module

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        found = called(call)
        is_halt = found is not None and _MARK in (self._module[found[0]].attrs or {})
        return found[1][0] if found is not None and is_halt else call


def _same(tensor: te.Tensor) -> te.Tensor:
    return te.compute(tensor.shape, lambda *at: tensor(*at), name=_FUNCTION)


def _handed_over(module: tvm.IRModule, function: relax.Function) -> set[relax.Var]:
    """The bytes that the later one of two contractions makes for a sum of both, and for it alone."""
    blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
    values = {binding.var: binding.value for block in blocks for binding in block.bindings}
    order = {var: n for n, var in enumerate(values)}
    uses = {var: len(users) for block in blocks for var, users in udchain(block).items()}
    found = set()
    for value in values.values():
        if not is_call(value, "relax.add"):
            continue
        parts = [part for arg in value.args if (part := _bytes_of(arg, values, uses)) is not None]
        made = [(order[by], part) for part in parts if (by := _contraction(module, part, values)) is not None]
        if len(made) == 2 and made[0][0] != made[1][0]:
            found.add(max(made, key=lambda each: each[0])[1])
    return found


def _spread(module: tvm.IRModule, function: relax.Function) -> set[relax.Var]:
    """The single columns of contractions that an operator spreads over several."""
    values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
    contracted: set[relax.Var] = set()  # what contractions, or epilogues of theirs, make
    found: set[relax.Var] = set()
    for var, value in values.items():
        if _is_contracted(module, value, contracted):
            contracted.add(var)
        if is_call(value, *ELEMENTWISE) and (static_shape(value) or (0,))[-1] > 1:
            found.update(arg for arg in value.args if arg in contracted and (static_shape(arg) or (0,))[-1] == 1)
    return found


def _taken_apart(function: relax.Function) -> set[relax.Var]:
    """Concatenations of more than a few tensors that more than one operator takes a part of."""
    blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
    values = {binding.var: binding.value for block in blocks for binding in block.bindings}
    users = {var: users for block in blocks for var, users in udchain(block).items()}

    def takers(var: relax.Var) -> int:
        own = [(user, values.get(user)) for user in users.get(var, ())]
        return sum(takers(user) if is_call(value, *_VIEWS) else is_call(value, *_TAKE) for user, value in own)

    def parts(value: relax.Expr) -> int:
        joined = value.args[0] if is_call(value, "relax.concat") else None
        joined = values.get(joined, joined) if isinstance(joined, relax.Var) else joined
        return len(joined.fields) if isinstance(joined, relax.Tuple) else 0

    return {var for var, value in values.items() if parts(value) > _FEW and takers(var) > 1}


def _is_contracted(module: tvm.IRModule, value: relax.Expr, contracted: set[relax.Var]) -> bool:
    """Whether a contraction computes something, or element by element of what one computed."""
    if isinstance(value, relax.Var) or is_call(value, *ELEMENTWISE):
        return any(arg in contracted for arg in arguments(value))
    made = called(value)
    if made is None:
        return is_call(value, *CONTRACTIONS)
    pattern = patterns.marked(module[made[0]])
    return pattern == patterns.OUT_ELEMENTWISE or (pattern == patterns.ELEMENTWISE and made[1][0] in contracted)


def _bytes_of(expr: relax.Expr, values: _Values, uses: Mapping[relax.Var, int]) -> relax.Var | None:
    """What an expression dequantises, if nobody else reads it, or what comes of it."""
    while isinstance(expr, relax.Var) and uses.get(expr) == 1:
        call = values.get(expr)
        if dtype(expr) in _BYTES:
            return expr if is_call(call, "relax.astype") else None
        if call is None or not is_call(call, "relax.multiply", "relax.subtract", "relax.astype"):
            return None
        expr = call.args[0]
    return None


def _contraction(module: tvm.IRModule, expr: relax.Expr, values: _Values) -> relax.Var | None:
    """The contraction whose epilogue an expression is; None if it is none's."""
    while isinstance(expr, relax.Var) and (call := values.get(expr)) is not None:
        made = called(call)
        is_ours = made is not None and patterns.marked(module[made[0]]) == patterns.OUT_ELEMENTWISE
        if is_call(call, *CONTRACTIONS) or is_ours:
            return expr
        if isinstance(call, relax.Var):
            expr = call
        elif is_call(call, *(f"relax.{name}" for name in _EPILOGUE)):
            expr = call.args[0]
        else:
            return None
    return None
