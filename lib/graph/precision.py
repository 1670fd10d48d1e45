"""Products and convolutions in bf16: they read bf16 and sum in float32; all else stays in float32.

A CPU with instructions for bf16 multiplies twice as many of them as floats, and reads half the bytes. Weights are
converted once. Of the data, a tensor that a product reads is stored in bf16 by whoever computes it, once, for all that
read it: were it kept in float32 for the others, as for the addition at the end of a residual block, it would be written
twice. But what a norm makes is kept for them: where sums go from norm to norm, as in BERT, its rounding made two thirds
of all error. So norms, softmax and sums have float32 within them, and are rounded only where a product reads them. And
what a model chooses by, neighbours or experts, stays in float32 (`lib.graph.choices`).

Products of bytes, which quantised files have, are as `lib.graph.rules.quantization` makes them; what is added here are
the channels that their instructions need.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax import op, transform
from tvm.relax.expr_functor import PyExprMutator, mutator

from lib.graph import choices, grouping, lines, packing, recurrence, reweight, words
from lib.graph.fusion import Model, rewritten
from lib.graph.reweight import Replacement, shape_of
from lib.graph.rewrite import CONTRACTIONS, Rewriter, alike, dtype, groups_of, has_columns_last, is_call, rewrite, rule
from lib.machine.dots import BF16, INT8, Matrix

_WIDE, _NARROW, _SUMS = "float32", "bfloat16", "int32"
_NORMS = ("relax.nn.layer_norm", "relax.nn.rms_norm", "relax.nn.group_norm", "relax.nn.instance_norm")
_SQUARES = ("relax.multiply", "relax.square")
_MOVES = ("relax.reshape", "relax.permute_dims", "relax.squeeze", "relax.expand_dims", "relax.strided_slice",
          "relax.flatten", "relax.broadcast_to")  # fmt: skip
_FEW = 8  # channels in a group; with fewer, as in depthwise convolutions, most of them would be zeros
_MOVING = 0.1  # cycles that it takes to write an element of the data again, in whole vectors from caches
_LEAST_SHARE = 4  # a slice of less than one in so many elements is rounded by itself


def in_bf16(model: Model, lanes: int, matrix: Matrix | None = None) -> Model:
    """The model with its products, and its convolutions in NHWC, in bf16; the same model if it has none. Input channels
    are padded to what an instruction takes at once (`more_channels`).

    Args:
        lanes: Of the machine's vectors.
        matrix: The instruction for matrices in bf16, if it has one.
    """
    model = choices.kept(model)
    by_lines = [partial(lines.replacement, matrix, _WIDE)] if matrix else []
    offers: list[reweight.Choose] = [*by_lines, partial(_replacement, matrix), _narrow_recurrence]
    found = reweight.replaced(_with_merged_groups(model, matrix, _WIDE), offers)
    found = packing.pack(found, BF16, lanes, (_WIDE, _WIDE))
    if found is model:
        return model
    return Model(_rounded_early(found.module), found.weights)


def in_quads(model: Model, lanes: int, matrix: Matrix | None = None, *, packs: bool = True) -> Model:
    """The model with its products of bytes as instructions take them, padded to a multiple of input channels.

    Args:
        lanes: Of the machine's vectors.
        matrix: The instruction for matrices of bytes, if it has one.
        packs: Whether there is one that multiplies unsigned bytes by signed ones, as activations are packed for.
    """
    otherwise: list[reweight.Choose] = [partial(lines.replacement, matrix, INT8.weights)] if matrix else []
    otherwise += [partial(words.replacement, lanes)] if packs else []
    merged = _with_merged_groups(model, matrix, INT8.weights)
    found = reweight.replaced(merged, [*otherwise, partial(_wider_quads, matrix)])
    return rewritten(packing.pack(found, INT8, lanes) if packs else found, [activations_in_floats])


def _with_merged_groups(model: Model, matrix: Matrix | None, given: str) -> Model:
    return reweight.replaced(model, [partial(grouping.replacement, matrix, given)]) if matrix else model


@rule("relax.astype")
def rounded_parts(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Parts of a concatenation that is rounded are rounded by who computes them."""
    joined = rewriter.calls(call.args[0], "relax.concat")
    parts = rewriter.fields(joined.args[0]) if joined is not None else None
    if joined is None or parts is None or not _is_rounding(call) or not rewriter.read_once(call.args[0]):
        return None
    narrow = [rewriter.emit(op.astype(part, _NARROW)) for part in parts]
    return op.concat(narrow, None if joined.attrs.axis is None else int(joined.attrs.axis))


@rule("relax.astype")
def rounded_before_it_is_moved(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """So that who computes a tensor stores it in bf16, and half as many bytes are moved."""
    moved = rewriter.calls(call.args[0], *_MOVES)
    if moved is None or not _is_rounding(call) or not rewriter.read_once(call.args[0]):
        return None
    if math.prod(shape_of(call.args[0])) * _LEAST_SHARE < math.prod(shape_of(moved.args[0])):
        return None
    narrow = rewriter.emit(op.astype(moved.args[0], _NARROW))
    return relax.Call(moved.op, [narrow, *moved.args[1:]], moved.attrs, moved.ty_args)


def in_floats(model: Model, stays: Callable[[relax.Call], bool] = lambda _call: False) -> Model:
    """The model with its contractions of bytes in float32, between casts, for CPUs that multiply vectors of integers
    slower than those of floats. Sums below 2**24 are exact; larger ones are rounded like any float.

    Args:
        stays: Which of them are as they are.
    """

    def chosen(call: relax.Call) -> Replacement | None:
        return None if stays(call) else of_floats(call)

    return rewritten(reweight.replaced(model, [chosen]), [activations_in_floats])


@rule("relax.matmul")
def activations_in_floats(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    """Products of two activations in bytes that no instruction takes."""
    if dtype(call) != _SUMS or packing.of_activations(rewriter, call) is None:
        return None
    factors = [rewriter.emit(op.astype(each, _WIDE)) for each in call.args]
    return op.astype(rewriter.emit(op.matmul(*factors)), _SUMS)


def of_floats(call: relax.Call) -> Replacement | None:
    """A contraction of bytes as one of floats."""
    if not is_call(call, *CONTRACTIONS) or dtype(call.args[1]) != "int8":
        return None
    shape = shape_of(call.args[1])
    return Replacement("floats", lambda weight: weight.astype(np.float32), shape, _emit_of_floats, _WIDE)


def _emit_of_floats(builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]) -> relax.Expr:
    data = builder.emit(op.astype(args[0], _WIDE))
    return op.astype(builder.emit(alike(call, data, args[1], _WIDE)), _SUMS)


def quads(matrix: Matrix | None, call: relax.Call) -> Replacement | None:
    """A contraction of bytes as an instruction takes it that adds four products to a sum, or those of matrices: with
    as many input channels as it sums; None if it does not fit it."""
    if not is_call(call, *CONTRACTIONS) or dtype(call.args[1]) != "int8":
        return None
    weight = shape_of(call.args[1])
    more = more_channels(call, INT8.depth, matrix)
    if more is None:
        return None
    return Replacement(
        kind=("int8", more), value=partial(reweight.deeper, more), shape=(*weight[:-2], weight[-2] + more, weight[-1]),
        emit=partial(_emit, more, _SUMS), dtype="int8",
    )  # fmt: skip


def _wider_quads(matrix: Matrix | None, call: relax.Call) -> Replacement | None:
    """The same where channels are added; the others stay as they are."""
    found = quads(matrix, call)
    return found if found and found.shape != shape_of(call.args[1]) else None


def _replacement(matrix: Matrix | None, call: relax.Call) -> Replacement | None:
    if not is_call(call, *CONTRACTIONS) or dtype(call) != _WIDE or dtype(call.args[0]) != _WIDE:
        return None
    weight, more = shape_of(call.args[1]), more_channels(call, BF16.depth, matrix)
    if more is None:
        return None
    return Replacement(
        kind=(_NARROW, more), value=partial(_narrowed, more), shape=(*weight[:-2], weight[-2] + more, weight[-1]),
        emit=partial(_emit, more, _WIDE), dtype=_NARROW,
    )  # fmt: skip


def _narrow_recurrence(call: relax.Call) -> Replacement | None:
    """Weights of a recurrent layer in bf16: what takes the time is to read them anew in each step. What its products
    read of its states is rounded, too; states and sums stay in float32."""
    if not recurrence.is_layer(call) or dtype(call.args[1]) == _NARROW:
        return None
    *outer, units, gates, lanes, _ = shape_of(call.args[1])
    return Replacement(
        kind=recurrence.FUNCTION, shape=(*outer, -(-units // 2), gates, lanes, 2), dtype=_NARROW,
        value=lambda weight: recurrence.in_pairs(weight).astype(ml_dtypes.bfloat16),
        emit=lambda _builder, call, args: relax.Call(call.op, list(args), call.attrs, call.ty_args),
    )  # fmt: skip


def more_channels(call: relax.Call, depth: int, matrix: Matrix | None) -> int | None:
    """How many input channels, of each group, a product or convolution gets, which are zeros; None if an instruction
    that sums so many does not fit it.

    To a multiple of the depth; and to as many as an instruction for matrices takes at once, which is what divides them,
    where that spares more than it takes to move the data: 2 of 34 steps in each of 17 products, or 12 of 36 in three.
    """
    weight, out = shape_of(call.args[1]), shape_of(call)
    if not out or not has_columns_last(call, weight):
        return None
    groups, channels = groups_of(call), weight[-2]
    least, columns = -channels % depth, weight[-1] // groups
    has_room = groups == 1 or channels >= _FEW
    if matrix and has_room and columns % matrix.LANES == 0 and math.prod(out[:-1]) >= matrix.ROWS:

        def cycles(more: int) -> float:  # of a row
            steps = (channels + more) // depth
            products = steps // matrix.at_once(steps) * columns // matrix.LANES
            return products + _MOVING * (channels + more) * (more > 0)

        return min(range(least, depth * matrix.STEPS, depth), key=cycles)
    return least if sums_input_channels(call, weight, depth) else None


def sums_input_channels(call: relax.Call, weight: tuple[int, ...], depth: int) -> bool:
    """Whether a product or convolution sums over input channels, which are the weight's last axis but one, so many at
    once: all of them, or those of a group, which are not padded for that."""
    return has_columns_last(call, weight) and (groups_of(call) == 1 or weight[-2] % depth == 0)


def _narrowed(more: int, weight: np.ndarray) -> np.ndarray:
    """A weight in bf16, with so many input channels of zeros after its own."""
    return reweight.deeper(more, weight).astype(ml_dtypes.bfloat16)


def _emit(
    more: int, sums: str, builder: relax.BlockBuilder, call: relax.Call, args: Sequence[relax.Expr]
) -> relax.Expr:
    data, weight = args
    if sums == _WIDE:
        data = builder.emit(op.astype(data, _NARROW))
    return alike(call, reweight.deeper_data(builder, data, more, groups_of(call)), weight, sums)


def _rounded_early(module: tvm.IRModule) -> tvm.IRModule:
    """What products read, in bf16 as soon as it is computed: before it is moved, and once."""
    before = None
    while before is None or not tvm_ffi.structural_equal(module, before):  # what is rounded once is moved once
        before, module = module, _stored_once(rewrite(module, [rounded_before_it_is_moved, rounded_parts]))
    return module


def _stored_once(module: tvm.IRModule) -> tvm.IRModule:
    """Whatever is rounded for one reader is rounded for all of them; results of the model, and of norms, are not, nor
    is what choices depend on, nor what is squared: a factorization machine's sums of squares almost cancel."""
    function = module["main"]
    values = {binding.var: binding.value for block in function.body.blocks for binding in block.bindings}
    squared = {
        call.args[0] for call in values.values() if is_call(call, *_SQUARES) and call.args[0].same_as(call.args[-1])
    }
    exact = choices.tensors(function) | squared
    rounded = {call.args[0] for call in values.values()
               if _is_rounding(call) and isinstance(call.args[0], relax.DataflowVar) and call.args[0] not in exact
               and not is_call(values.get(call.args[0]), *_NORMS)}  # fmt: skip
    changed = _Rounder(module, rounded).visit_expr(function)
    functions = {gvar: changed if gvar.name_hint == "main" else f for gvar, f in module.functions_items()}
    return transform.CanonicalizeBindings()(tvm.IRModule(functions, attrs=module.attrs))


def _is_rounding(expr: relax.Expr) -> bool:
    return is_call(expr, "relax.astype") and (dtype(expr.args[0]), str(expr.attrs.dtype)) == (_WIDE, _NARROW)


@mutator
class _Rounder(PyExprMutator):
    def __init__(self, module: tvm.IRModule, rounded: set[relax.Var]) -> None:
        super().__init__(module)
        self._rounded, self._narrow = rounded, dict[relax.Var, relax.Var]()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        super().visit_var_binding_(binding)
        if binding.var in self._rounded:
            narrow = self.builder_.emit(op.astype(self.visit_expr(binding.var), _NARROW))
            wide = self.builder_.emit(op.astype(narrow, _WIDE))
            self.set_var_remap(binding.var, wide)
            self._narrow[wide] = narrow

    def visit_call_(self, old: relax.Call) -> relax.Expr:
        call = self.visit_expr_post_order(old)
        return self._narrow.get(call.args[0], call) if _is_rounding(call) else call
