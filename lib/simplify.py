"""Clean up an imported graph before it is cut into subgraphs: what a vendor's graph optimiser would remove.

Batch norms, and other scales and shifts by constants, move into the convolution before them; constants are
computed with NumPy (TVM's FoldConstant compiles a function for each); ONNX's `Sum` and `Clip` become plain
operators again; dropouts go.
"""

from collections.abc import Callable, Sequence

import numpy as np
import tvm
from tvm import relax
from tvm.relax import transform
from tvm.relax.analysis import udchain
from tvm.relax.expr_functor import PyExprMutator, mutator

_ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.divide,
    "relax.sqrt": np.sqrt,
    "relax.isnan": np.isnan,
    "relax.where": np.where,
}
_CLIP = {"maximum": relax.op.maximum, "minimum": relax.op.minimum}


def simplify(module: tvm.IRModule) -> tvm.IRModule:
    """A module that computes the same with fewer operators; weights must be constants of `main`."""
    functions = {}
    for gvar, function in module.functions_items():
        if isinstance(function, relax.Function):
            function = _Simplifier(module, _count_uses(function)).visit_expr(function)
        functions[gvar] = function
    module = tvm.IRModule(functions, attrs=module.attrs)
    # Aliases left by the mutator would make ConvertLayout return to NCHW at each of them.
    return transform.DeadCodeElimination()(transform.CanonicalizeBindings()(module))


def channels_last(module: tvm.IRModule) -> tvm.IRModule:
    """Convolutions in NHWC with HWIO weights; the transposed weights are folded.

    Simplify before: TVM 0.27's ConvertLayout crashes on what an unfolded batch norm leaves (`var + eps`).
    """
    return simplify(transform.ConvertLayout({"relax.nn.conv2d": ["NHWC", "HWIO"]})(module))


def _count_uses(function: relax.Function) -> dict[relax.Var, int]:
    blocks = [block for block in function.body.blocks if isinstance(block, relax.DataflowBlock)]
    return {var: len(users) for block in blocks for var, users in udchain(block).items()}


def _constant(value: np.ndarray) -> relax.Expr:
    return relax.const(np.array(value, order="C"))  # np.ascontiguousarray would make a vector of a scalar


def _shape(expr: relax.Expr) -> list[int]:
    return [int(extent) for extent in expr.ty.shape.values]


def _calls(expr: relax.Expr | None, *names: str) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in names


@mutator
class _Simplifier(PyExprMutator):
    """One pass in dataflow order: each call is rewritten after its arguments were."""

    def __init__(self, module: tvm.IRModule, uses: dict[relax.Var, int]) -> None:
        super().__init__(module)
        self.uses = uses  # a producer may absorb an operator only if nobody else reads it

    # What an expression is.

    def _definition(self, expr: relax.Expr) -> relax.Expr:
        while isinstance(expr, relax.Var) and (bound := self.lookup_binding(expr)) is not None:
            expr = bound
        return expr

    def _value(self, expr: relax.Expr) -> np.ndarray | None:
        expr = self._definition(expr)
        if isinstance(expr, tvm.ir.Constant):
            return np.asarray(expr.value.numpy())
        if isinstance(expr, (tvm.tirx.FloatImm, tvm.tirx.IntImm)):
            return np.asarray(expr.value, dtype=str(expr.ty))
        return None

    def _values(self, exprs: Sequence[relax.Expr]) -> list[np.ndarray] | None:
        """The values of all of them, or None."""
        values = [self._value(expr) for expr in exprs]
        known = [value for value in values if value is not None]
        return known if len(known) == len(values) else None

    def _read_once(self, expr: relax.Expr) -> bool:
        return isinstance(expr, relax.Var) and self.uses.get(expr, 1) == 1

    # What calls become.

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        item = self.visit_expr_post_order(item)
        made_by = self._definition(item.tuple_value)
        if item.index == 0 and _calls(made_by, "relax.nn.dropout"):
            return made_by.args[0]
        if item.index == 0 and _calls(made_by, "relax.nn.batch_norm") and not made_by.attrs.training:
            folded = self._fold_batch_norm(made_by)
            return item if folded is None else folded
        return item

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        for before, after in zip(old.args, call.args, strict=True):  # a renamed variable is read as often
            if isinstance(after, relax.Var):
                self.uses[after] = self.uses.get(before, 1)
        if not isinstance(call.op, tvm.ir.Op):
            return call
        name = call.op.name
        if name in _ELEMENTWISE:
            return self._fold_elementwise(call)
        if name in ("relax.reshape", "relax.expand_dims", "relax.squeeze", "relax.permute_dims"):
            return self._fold_movement(call)
        if name == "relax.sum":
            return self._unstack_sum(call)
        if name == "relax.call_tir":
            return self._plain_clip(call)
        return call

    def _fold_batch_norm(self, norm: relax.Call) -> relax.Expr | None:
        values = self._values(norm.args[1:])
        if values is None:
            return None
        gamma, beta, mean, variance = values
        scale = (gamma if norm.attrs.scale else 1) / np.sqrt(variance + float(norm.attrs.epsilon))
        shift = (beta if norm.attrs.center else 0) - mean * scale
        shape = [1] * len(_shape(norm.args[0]))
        shape[int(norm.attrs.axis)] = -1
        scaled = self._scale(norm.args[0], scale.reshape(shape).astype("float32"))
        return self._shift(scaled, shift.reshape(shape).astype("float32"))

    def _fold_elementwise(self, call: relax.Call) -> relax.Expr:
        name = call.op.name
        values = self._values(call.args)
        if values is not None:
            return _constant(_ELEMENTWISE[name](*values))
        if name not in ("relax.add", "relax.multiply"):
            return call
        variable, constant = call.args[0], self._value(call.args[1])
        if constant is None:
            variable, constant = call.args[1], self._value(call.args[0])
        rank = len(_shape(variable))
        if constant is None or constant.dtype != np.float32 or constant.ndim == 0 or rank != 4:
            return call
        constant = constant.reshape([1] * (rank - constant.ndim) + list(constant.shape))  # for ConvertLayout
        return (self._scale if name == "relax.multiply" else self._shift)(variable, constant)

    def _fold_movement(self, call: relax.Call) -> relax.Expr:
        value = self._value(call.args[0])
        if value is None:
            return call
        if call.op.name == "relax.permute_dims":
            axes = call.attrs.axes
            return _constant(np.transpose(value, None if axes is None else [int(axis) for axis in axes]))
        return _constant(value.reshape(_shape(self.builder_.normalize(call))))

    def _unstack_sum(self, call: relax.Call) -> relax.Expr:
        """sum(stack(a, b), axis=0) is how the importer spells ONNX's Sum: a + b."""
        stack = self._definition(call.args[0])
        first_axis = [int(axis) for axis in call.attrs.axis or []] == [0] and not call.attrs.keepdims
        if not (first_axis and _calls(stack, "relax.stack") and int(stack.attrs.axis or 0) == 0):
            return call
        total = None
        for term in self._definition(stack.args[0]).fields:
            made_by = self._definition(term)
            if _calls(made_by, "relax.broadcast_to") and _shape(made_by.args[0]) == _shape(term):
                term = made_by.args[0]
            total = term if total is None else self.builder_.emit(relax.op.add(total, term))
        return total

    def _plain_clip(self, call: relax.Call) -> relax.Expr:
        """The importer writes each bound of ONNX's Clip as raw TIR, which ConvertLayout does not look into."""
        operator = _CLIP.get(call.args[0].name_hint.rstrip("0123456789"))
        if operator is None or len(call.args[1].fields) != 2:
            return call
        variable, bound = call.args[1].fields
        value = self._value(bound)
        return call if value is None or value.ndim else operator(variable, _constant(value))

    # Moving scales and shifts into what comes before.

    def _scale(self, x: relax.Expr, factor: np.ndarray) -> relax.Expr:
        """x * factor, in the convolution, product or sum that makes x if only this reads it."""
        made_by = self._definition(x)
        if self._read_once(x):
            if self._is_plain_conv(made_by) and factor.size == factor.shape[1]:
                weight = self._value(made_by.args[1])
                assert weight is not None  # of a plain convolution
                args = [made_by.args[0], _constant(weight * factor.reshape(-1, 1, 1, 1))]
                return self.builder_.emit(relax.Call(made_by.op, args, made_by.attrs, made_by.ty_args))
            if _calls(made_by, "relax.add", "relax.multiply"):
                constant = self._value(made_by.args[1])
                if constant is not None and constant.shape == factor.shape:
                    if made_by.op.name == "relax.multiply":
                        return self._scale(made_by.args[0], constant * factor)
                    return self._shift(self._scale(made_by.args[0], factor), constant * factor)
        return self.builder_.emit(relax.op.multiply(x, _constant(factor)))

    def _shift(self, x: relax.Expr, term: np.ndarray) -> relax.Expr:
        """x + term, joined with a constant that was added before if only this reads it."""
        made_by = self._definition(x)
        if self._read_once(x) and _calls(made_by, "relax.add"):
            constant = self._value(made_by.args[1])
            if constant is not None and constant.shape == term.shape:
                return self.builder_.emit(relax.op.add(made_by.args[0], _constant(constant + term)))
        return self.builder_.emit(relax.op.add(x, _constant(term)))

    def _is_plain_conv(self, expr: relax.Expr) -> bool:
        return (
            _calls(expr, "relax.nn.conv2d")
            and expr.attrs.data_layout == "NCHW"
            and expr.attrs.kernel_layout == "OIHW"
            and self._value(expr.args[1]) is not None
        )
