"""Products of unsigned bytes as those of signed ones, for CPUs whose instruction takes no others (`sdot` of ARM).

    sum x * w  =  sum (x - 128) * w  +  128 * sum w

The first factor on the right are signed bytes, made where x is quantised or where it is read; the last sum is a vector
of integers, one for each output channel, known when the model is compiled. All of it is exact in int32.
"""

from collections.abc import Mapping

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph.fusion import Model
from lib.graph.precision import sums_input_channels
from lib.graph.reweight import shape_of
from lib.graph.rewrite import CONTRACTIONS, alike, dtype, is_call, with_more_params
from lib.graph.rules.quantization import SIGN
from lib.machine.dots import Dot


def in_signed(model: Model, dot: Dot) -> Model:
    """The model with its contractions of unsigned bytes and weights as an instruction for signed ones takes them; the
    same model if it has none."""
    found = _Signer(model, dot)
    module = found.rewritten(model.module["main"])
    return Model(module, {**model.weights, **found.added}) if found.added else model


@mutator
class _Signer(PyExprMutator):
    def __init__(self, model: Model, dot: Dot) -> None:
        super().__init__(model.module)
        self._weights: Mapping[str, np.ndarray] = model.weights
        self._depth = dot.depth
        self._params: list[relax.Var] = []  # that are new
        self._by_weight: dict[str, relax.Var] = {}
        self._signed: dict[relax.Var, relax.Var] = {}  # tensors that several read are changed once
        self.added: dict[str, np.ndarray] = {}

    def rewritten(self, function: relax.Function) -> tvm.IRModule:
        """The module with its `main` rewritten."""
        body = self.visit_with_new_scope(function.body)
        return with_more_params(self, function, body, self._params)

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        if not is_call(call, *CONTRACTIONS) or dtype(call) != "int32" or dtype(call.args[0]) != "uint8":
            return call
        weight = call.args[1]
        if not isinstance(weight, relax.Var) or str(weight.name) not in self._weights or dtype(weight) != "int8":
            return call
        if not sums_input_channels(call, shape_of(weight), self._depth):
            return call
        padding = [] if is_call(call, "relax.matmul") else [int(n) for n in call.attrs.padding]
        data = self._in_signed(call.args[0])
        if any(padding):  # of zeros, which are others now
            rank = len(padding) // 2
            width = [0, 0, *(padding[n + side * rank] for n in range(rank) for side in (0, 1)), 0, 0]
            data = self.builder_.emit(op.nn.pad(data, width, "constant", float(-SIGN)))
        sums = self.builder_.emit(alike(call, data, weight, "int32", [0] * len(padding)))
        return op.add(sums, self._shift(weight))

    def _in_signed(self, data: relax.Expr) -> relax.Expr:
        """A tensor less 128; of one that was padded, what is padded, so that the padding stays next to its reader."""
        if data in self._signed:
            return self._signed[data]
        pad = self.lookup_binding(data) if isinstance(data, relax.Var) else None
        if pad is not None and is_call(pad, "relax.nn.pad") and str(pad.attrs.pad_mode) == "constant":
            inner, value = self._in_signed(pad.args[0]), float(pad.attrs.pad_value) - SIGN
            found = self.builder_.emit(op.nn.pad(inner, [int(n) for n in pad.attrs.pad_width], "constant", value))
        else:
            wide = self.builder_.emit(op.astype(data, "int16"))
            less = self.builder_.emit(op.subtract(wide, relax.const(SIGN, "int16")))
            found = self.builder_.emit(op.astype(less, "int8"))
        if isinstance(data, relax.Var):
            self._signed[data] = found
        return found

    def _shift(self, weight: relax.Var) -> relax.Var:
        """128 times the sums of a weight over all but its output channels, as a new parameter."""
        name = str(weight.name)
        if name not in self._by_weight:
            value = self._weights[name]
            sums = SIGN * value.sum(tuple(range(value.ndim - 1)), dtype=np.int32)
            self.added[f"{name}_shift"] = sums.astype(np.int32)
            param = relax.Var(f"{name}_shift", relax.TensorType(sums.shape, "int32"))
            self._by_weight[name] = param
            self._params.append(param)
        return self._by_weight[name]
