"""Functions of a byte as tables of their 256 results, where a CPU looks up a vector of bytes at once.

Quantised files have activations between dequantising and quantising: `q(silu(dq(x)))` of each byte x is one of 256
bytes, which are known when the model is compiled. As arithmetic on floats it is some forty instructions for sixteen
elements, an exponential and a division among them; a table in four registers takes a few (`lib.tir.lookup`). So does
what only changes the scale of bytes, as concatenations have it.

What is rounded and stays a float (`lib.graph.rules.quantization.never_bytes`) is looked up, too: as the byte that it
exceeds the least one by. Where bytes are moved before they become others, as a detector's are, they are moved as they
are. A table is a parameter like a weight, so that kernels that differ in it alone are one subgraph.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.analysis import udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.fusion import Model
from lib.graph.rewrite import dtype, is_call, static_shape, value_of, with_more_params
from lib.graph.rules.constants import ELEMENTWISE, elementwise
from lib.tir.lookup import VALUES

_BYTES, _FLOATS = "uint8", "float32"
_MOVES = ("relax.reshape", "relax.permute_dims", "relax.strided_slice")
_LONGEST = 32  # operators from byte to byte: more than any activation has

_Moves = tuple[relax.Call, ...]


def in_tables(model: Model) -> Model:
    """The model with what is computed of a byte, and becomes one, looked up; the same model if it has nothing such."""
    tabulator = _Tabulator(model)
    module = tabulator.rewritten(model.module["main"])
    return Model(module, {**model.weights, **tabulator.added}) if tabulator.added else model


class _Chain:
    """Operators that compute a tensor of a tensor of bytes and of numbers, each element by itself, and moves of it."""

    def __init__(self, end: relax.Expr, values: Mapping[relax.Var, relax.Expr], weights: Mapping[str, np.ndarray]):
        self._values, self._weights = values, weights
        self._moves: dict[relax.Expr, _Moves | None] = {}  # from bytes to each operand, in order; None: of others
        self.source: relax.Var | None = None
        self.moves = self._followed(end)

    def number(self, expr: relax.Expr) -> np.ndarray | None:
        """The value of a constant of one element."""
        value: np.ndarray | None = None
        if isinstance(expr, tvm.ir.Constant):
            value = value_of(expr)
        elif isinstance(expr, relax.Var):
            value = self._weights.get(str(expr.name))
        return value.reshape(()) if value is not None and value.size == 1 else None

    def results(self, end: relax.Expr) -> np.ndarray:
        """The results for all bytes, in float32, as the operators compute them."""
        known: dict[relax.Var, np.ndarray] = {}
        for var in (each for each, moves in self._moves.items() if moves is not None):
            call = self._values[var]
            if is_call(call, "relax.astype"):
                known[var] = np.arange(VALUES, dtype=np.float32)
            elif is_call(call, *_MOVES):
                known[var] = known[call.args[0]]
            else:
                operands = (known[arg] if arg in known else self.number(arg) for arg in call.args)
                known[var] = elementwise(call, [operand for operand in operands if operand is not None])
        return known[end]

    def _followed(self, var: relax.Expr) -> _Moves | None:
        """How bytes were moved that a tensor is computed of; None if it is computed of anything else."""
        if var not in self._moves:
            call = self._values.get(var) if isinstance(var, relax.Var) else None
            is_near = isinstance(call, relax.Call) and dtype(call) == _FLOATS and len(self._moves) < _LONGEST
            self._moves[var] = self._computed(call) if is_near else None
        return self._moves[var]

    def _computed(self, call: relax.Call) -> _Moves | None:
        if is_call(call, "relax.astype"):
            return () if self._is_source(call.args[0]) else None
        if is_call(call, *_MOVES):
            before = self._followed(call.args[0])
            return (*before, call) if before is not None else None
        if not is_call(call, *ELEMENTWISE):
            return None
        operands = [arg for arg in call.args if self.number(arg) is None]
        if not operands or any(static_shape(operand) != static_shape(call) for operand in operands):
            return None
        moves = self._followed(operands[0])
        return moves if all(_are_same(self._followed(operand), moves) for operand in operands) else None

    def _is_source(self, data: relax.Expr) -> bool:
        if dtype(data) == _BYTES and self.source is None:
            self.source = data
        return data.same_as(self.source)


def _are_same(moves: _Moves | None, others: _Moves | None) -> bool:
    if moves is None or others is None or len(moves) != len(others):
        return False
    return all(a.same_as(b) for a, b in zip(moves, others, strict=True))


@dataclass(frozen=True, slots=True)
class _Lookup:
    """What takes the place of a chain."""

    source: relax.Var
    moves: _Moves
    table: np.ndarray  # bytes
    least: float | None  # what is added to floats that are looked up; None of bytes

    def after(self, before: "_Lookup | None") -> "_Lookup":
        """Both at once, if what is looked up was looked up itself."""
        if before is None or before.least is not None:
            return self
        return _Lookup(before.source, (*before.moves, *self.moves), self.table[before.table], self.least)


def _lookup(
    end: relax.Var, values: Mapping[relax.Var, relax.Expr], weights: Mapping[str, np.ndarray]
) -> _Lookup | None:
    """The table for a tensor of bytes, or of floats that are as few, if it is computed of bytes."""
    value = values[end]
    if not isinstance(end, relax.DataflowVar) or not isinstance(value, relax.Call):
        return None
    if is_call(value, "relax.astype") and dtype(value) == _BYTES:
        end, is_float = value.args[0], False
    elif _is_rounded(value, values):
        is_float = True
    else:
        return None
    chain = _Chain(end, values, weights)
    if chain.source is None or chain.moves is None:
        return None
    results = chain.results(end)
    least = results.min() if is_float else 0.0
    if results.max() - least >= VALUES or np.any(results != np.rint(results)):
        return None
    return _Lookup(chain.source, chain.moves, (results - least).astype(np.uint8), float(least) if is_float else None)


def _is_rounded(value: relax.Expr | None, values: Mapping[relax.Var, relax.Expr]) -> bool:
    """Whether a result is `minimum(maximum(round(x), least), most)`."""
    for operator in ("relax.minimum", "relax.maximum"):
        if value is None or not is_call(value, operator):
            return False
        value = values.get(value.args[0])
    return is_call(value, "relax.round")


@mutator
class _Tabulator(PyExprMutator):
    def __init__(self, model: Model) -> None:
        super().__init__(model.module)
        self._weights = model.weights
        self._found: dict[relax.Var, _Lookup] = {}
        self._params: dict[tuple[bytes, tuple[int, ...]], relax.Var] = {}
        taken = {str(param.name) for param in model.module["main"].params}
        self._names = (name for n in itertools.count() if (name := f"table_{n}") not in taken)
        self.added: dict[str, np.ndarray] = {}

    def rewritten(self, function: relax.Function) -> tvm.IRModule:
        """The module with its `main` rewritten."""
        values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
        found = {var: _lookup(var, values, self._weights) for var in values}
        readers = {var: users for block in function.body.blocks for var, users in udchain(block).items()}
        for var, each in found.items():
            if each is not None:
                is_read_once = len(readers.get(each.source, ())) == 1  # else it is looked up in any case
                self._found[var] = each.after(self._found.get(each.source)) if is_read_once else each
        body = self.visit_with_new_scope(function.body)
        return with_more_params(self, function, body, [*self._params.values()])

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        found = self._found.get(binding.var)
        if found is None:
            super().visit_var_binding_(binding)
            return
        emit, data = self.builder_.emit, self.visit_expr(found.source)
        for move in found.moves:
            data = emit(relax.Call(move.op, [data, *move.args[1:]], move.attrs, move.ty_args))
        data = emit(op.take(self._param(found.table), data, axis=0, mode="fast"))
        if found.least is not None:
            data = emit(op.astype(data, _FLOATS))
        if found.least:
            rank = len(static_shape(binding.var) or ())
            data = emit(op.add(data, self._param(np.full([1] * rank, found.least, np.float32))))
        self.set_var_remap(binding.var, data)

    def _param(self, value: np.ndarray) -> relax.Var:
        """A parameter with a value; one for all that have the same."""
        known = value.tobytes(), value.shape
        if known not in self._params:
            name = next(self._names)
            self._params[known] = relax.Var(name, relax.TensorType(value.shape, str(value.dtype)))
            self.added[name] = value
        return self._params[known]
