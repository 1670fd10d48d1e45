"""Products of bytes for CPUs without an instruction that adds those of four to a sum.

With AVX2 they are products of integers of 16 bits: an instruction multiplies two neighbours along a reduction for each
lane and adds them, which another one adds to the sums, in two thirds as many instructions as floats would take (a Zen 3
does half as many again in the same time), with half of their bytes, and as exact as bytes are. Others multiply bytes
there four at a time, in sums of two that do not fit the 16 bits they get (ONNX Runtime's kernels for AVX2). Where a
layer's weights are so small that they do, as in files of seven bits, it stays in bytes here, too
(`lib.tir.small_weights`).

With AVX-512 but without VNNI, integers of 16 bits are no faster than floats, and an ARM without dot products has
nothing for them: there bytes are as they are where weights are small, which on ARM nearly all are, else floats. So are
convolutions that are faster in Winograd's way.

Weights are widened once. Data are widened by who makes them where all that read them cast them in any case, else by who
reads them. What is not multiplied so, as convolutions by channel, is in floats.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import packing, padding, precision, reweight
from lib.graph.fusion import Model, rewritten
from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import CONTRACTIONS, alike, dtype, groups_of, is_call, mutated
from lib.graph.small_weights import noted
from lib.machine.dots import INT8, INT16, Dot
from lib.machine.registers import Registers
from lib.tir import small_weights


def others_in_floats(model: Model, machine: Registers, is_for_floats: Callable[[relax.Call], bool]) -> Model:
    """The model of bytes with what does not stay so in float32, for CPUs that have no pairs of 16 bits either, before
    anything else is chosen; the same model if it has none.

    Args:
        is_for_floats: Which convolutions of bytes are faster in floats.
    """
    dot, small = machine.for_small, _small(model, machine.for_small)

    def stays(call: relax.Call) -> bool:
        if dot is None or not _reads(call, small) or is_for_floats(call):
            return False
        return precision.more_channels(call, dot.depth, None) is not None

    return precision.in_floats(model, stays)


def in_pairs(model: Model, machine: Registers) -> Model:
    """The model with its products and convolutions of bytes as those of pairs, if the machine has these, or of floats,
    but for those of small weights; the same model if it has none. Input channels are padded to an even number, or to a
    multiple of four."""
    small, has_pairs = _small(model, machine.for_small), INT16 in machine.dots
    offers: list[reweight.Choose] = [_of_pairs, precision.of_floats] if has_pairs else [precision.of_floats]
    found = reweight.replaced(model, [partial(_of_small, machine.for_small, small), *offers])
    if has_pairs:
        found = packing.pack(found, INT16, machine.lanes, (INT8.data, INT8.weights))
    found = rewritten(found, [precision.activations_in_floats])
    if found is model:
        return model
    module = _stored_wide(transform.DeadCodeElimination()(found.module))
    kept = {name: words for name, words in small.items() if found.weights[name].dtype == np.int8}
    return Model(noted(module, kept) if kept else module, found.weights)


def _small(model: Model, dot: Dot | None) -> dict[str, int]:
    """Of a model's weights that are small enough for an instruction, how many words are added together."""
    if dot is None:
        return {}
    of_bytes = {name: values for name, values in model.weights.items() if values.dtype == np.int8 and values.ndim > 1}
    return {name: words for name, each in of_bytes.items() if (words := small_weights.words_together(each, dot))}


def _reads(call: relax.Call, names: Collection[str]) -> bool:
    """Whether it is a product or convolution of bytes with weights that have one of these names."""
    is_product = is_call(call, *CONTRACTIONS) and dtype(call.args[1]) == INT8.weights
    return is_product and isinstance(call.args[1], relax.Var) and str(call.args[1].name) in names


def _of_small(dot: Dot | None, names: Collection[str], call: relax.Call) -> Replacement | None:
    """A product or convolution as it is, of small weights with these names, with input channels that fill words."""
    is_taken = dot is not None and _reads(call, names) and dtype(call.args[0]) == dot.data
    return precision.quads(None, call) if is_taken else None


def _of_pairs(call: relax.Call) -> Replacement | None:
    if not is_call(call, *CONTRACTIONS) or dtype(call.args[1]) != INT8.weights:
        return None
    weight, more = shape_of(call.args[1]), precision.more_channels(call, INT16.depth, None)
    if more is None:
        return None

    def emit(builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
        data = reweight.deeper_data(builder, _widened(builder, args[0]), more, groups_of(call))
        return alike(call, data, args[1], INT16.sums)

    return Replacement(
        kind=(INT16.weights, more), value=lambda values: reweight.deeper(more, values).astype(np.int16),
        shape=(*weight[:-2], weight[-2] + more, weight[-1]), emit=emit, dtype=INT16.weights,
    )  # fmt: skip


def _widened(builder: relax.BlockBuilder, data: relax.Expr) -> relax.Expr:
    """Data in 16 bits; of those that were padded, what is padded, so that the padding stays next to its reader; and of
    a view, what it is of."""
    made = builder.lookup_binding(data) if isinstance(data, relax.Var) else None
    if made is not None and is_call(made, "relax.reshape"):
        return builder.emit(op.reshape(_widened(builder, made.args[0]), shape_of(data)))
    if made is not None and padding.is_of_constant(made):
        inner, width = _widened(builder, made.args[0]), [int(n) for n in made.attrs.pad_width]
        return builder.emit(op.nn.pad(inner, width, "constant", float(made.attrs.pad_value)))
    return builder.emit(op.astype(data, INT16.data))


def _stored_wide(module: tvm.IRModule) -> tvm.IRModule:
    """Bytes that all of their readers cast, some of them to 16 bits, as these."""
    function = module["main"]
    casts: dict[relax.Expr, set[str]] = {}
    others: set[relax.Expr] = set(relax.analysis.free_vars(function.body.body))

    def visit(expr: relax.Expr) -> None:
        if is_call(expr, "relax.astype"):
            casts.setdefault(expr.args[0], set()).add(str(expr.attrs.dtype))
        elif isinstance(expr, relax.Call | relax.Tuple):
            others.update(expr.args if isinstance(expr, relax.Call) else expr.fields)

    relax.analysis.post_order_visit(function, visit)
    wide = {data for data, kinds in casts.items() if INT16.data in kinds and isinstance(data, relax.DataflowVar)}
    return mutated(_Storer(module, wide - others), module)


@mutator
class _Storer(PyExprMutator):
    def __init__(self, module: tvm.IRModule, stored: set[relax.Expr]) -> None:
        super().__init__(module)
        self._stored, self._wide = stored, dict[relax.Var, relax.Var]()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if binding.var in self._stored:
            found = self.visit_expr(binding.var)
            self._wide[found] = self.builder_.emit(op.astype(found, INT16.data))

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        wide = self._wide.get(call.args[0]) if is_call(call, "relax.astype") else None
        if wide is None:
            return call
        return wide if str(call.attrs.dtype) == INT16.data else op.astype(wide, str(call.attrs.dtype))
