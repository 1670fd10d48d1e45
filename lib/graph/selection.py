"""The largest or smallest elements along an axis by a kernel of our own (`lib.tir.topk`); TVM's would sort all."""

import math
from collections.abc import Sequence

import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import patterns
from lib.graph.rewrite import dtype, is_call, mutated, static_shape
from lib.tir import topk

_FEW = 40  # times the logarithm of a row's length: of more elements, to sort the row takes no longer
_LONGEST = 1 << 14  # elements of a row, which are on a thread's stack
_KINDS = ("int32", "int64")


def in_vectors(module: tvm.IRModule) -> tvm.IRModule:
    """A few of many elements as calls of functions in TIR; on CPUs, before TVM dispatches sorts."""
    return mutated(_Selector(module), module)


@mutator
class _Selector(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        shape = static_shape(call.args[0]) if is_call(call, "relax.topk") else None
        if not shape or not _is_taken(call, shape):
            return call
        axis = int(call.attrs.axis) % len(shape)
        order = [*range(axis), *range(axis + 1, len(shape)), axis]
        is_last = axis == len(shape) - 1
        data = call.args[0] if is_last else self.builder_.emit(op.permute_dims(call.args[0], order))
        rows, columns = math.prod(shape) // shape[axis], shape[axis]
        places = str(call.attrs.dtype)
        function = topk.of_rows(rows, columns, int(call.attrs.k), places, is_largest=bool(call.attrs.largest))
        gvar = self.builder_.add_func(function.with_attrs(patterns.marks(patterns.OPAQUE)), topk.FUNCTION)
        kinds = [relax.TensorType((rows, int(call.attrs.k)), kind) for kind in ("float32", places)]
        data = self.builder_.emit(op.reshape(data, (rows, columns)))
        both = self.builder_.emit(relax.call_tir(gvar, [data], kinds))
        found = [self._as_before(both[n], [shape[n] for n in order[:-1]], order) for n in (0, 1)]
        wanted = str(call.attrs.ret_type)
        return relax.Tuple(found) if wanted == "both" else found[wanted == "indices"]

    def _as_before(self, part: relax.Expr, outer: Sequence[int], order: Sequence[int]) -> relax.Expr:
        """What was found in rows along the axis that it was looked for along."""
        found = self.builder_.emit(op.reshape(self.builder_.emit(part), (*outer, -1)))
        back = [order.index(n) for n in range(len(order))]
        return found if back == [*range(len(order))] else self.builder_.emit(op.permute_dims(found, back))


def _is_taken(call: relax.Call, shape: Sequence[int]) -> bool:
    columns, k = shape[int(call.attrs.axis)], int(call.attrs.k)
    is_known = dtype(call.args[0]) == "float32" and str(call.attrs.dtype) in _KINDS
    return is_known and 0 < k <= columns <= _LONGEST and k <= _FEW * math.log2(columns + 1)
