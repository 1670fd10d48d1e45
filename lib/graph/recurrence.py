"""Recurrent layers as one operator, from the import of a model until its operators become programs in TIR.

Relax has no such operator. A call of a function that nobody has stands for it, which TVM's passes leave alone; its
second argument is the weight of the recurrence, so that `lib.graph.reweight` can narrow it, and the last one says what
kind of layer it is (`lib.tir.recurrence`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from tvm import relax

from lib.graph import patterns
from lib.graph.rewrite import (
    STAND_IN,
    Rewriter,
    constant,
    dtype,
    has_stand_ins,
    is_stand_in,
    rewrite,
    rule,
    static_shape,
    value_of,
)
from lib.tir.recurrence import LANES, Layer, recurrence

FUNCTION = "recurrence"  # name of the functions, for people
_MOST_ROWS = 16  # sequences that go through a step together
_ACCUMULATORS = 30  # registers for sums of 16 units, of AVX-512: of others, a few sequences more or less fit better
_STANDS_FOR = f"lib.{FUNCTION}"


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a layer, with gates in the order of ONNX.

    Attributes:
        inputs: (d, g, k, features).
        recurrent: (d, g, k, k), the last of which is summed over.
        biases: Of the inputs and of the recurrence, (2, d, g, k).
    """

    inputs: np.ndarray
    recurrent: np.ndarray
    biases: np.ndarray


@dataclass(frozen=True, slots=True)
class Results:
    """Of a layer: `steps` (n, d, b, k), and the states after the last one, (d, b, k) each; c if it is kept."""

    steps: relax.Var
    h: relax.Var
    c: relax.Var | None


def emit(
    builder: relax.BlockBuilder, layer: Layer, weights: Weights, x: relax.Expr, before: Sequence[relax.Expr | None]
) -> Results:
    """A layer.

    Args:
        x: (n, b, features).
        before: The states before the first step, (d, b, k) each; None: zeros.
    """
    n_directions, n_gates, units, _ = weights.inputs.shape
    steps, given = (static_shape(x) or ())[:2]
    parts, rows = shared_out(given, n_gates)
    layer, batch = replace(layer, parts=parts), parts * rows
    if batch > given:
        x = builder.emit(relax.op.nn.pad(x, [0, 0, 0, batch - given, 0, 0], "constant", 0.0))
    biases, of_reset = weights.biases.copy(), np.zeros((n_directions, units), np.float32)
    if layer.kind == "gru":
        of_reset, biases[1, :, 2] = weights.biases[1, :, 2], 0
    products = builder.emit(relax.op.matmul(x, constant(_columns(weights.inputs))))
    products = builder.emit(relax.op.add(products, constant(_columns(biases.sum(axis=0)[..., None])[0])))
    n_vectors = -(-units // LANES)
    whole = n_vectors * LANES
    split = builder.emit(relax.op.reshape(products, (steps, batch, n_directions, n_vectors, n_gates, LANES)))
    packed = _in_vectors(weights.recurrent.transpose(0, 3, 1, 2)).transpose(0, 2, 1, 3, 4)[..., None]
    call = relax.op.call_pure_packed(
        _STANDS_FOR, constant(packed), split,
        _states(builder, before, (n_directions, given, units), (batch - given, whole - units)),
        constant(_in_vectors(of_reset[:, None])[:, :, 0]), layer.text,
        ty_args=relax.TensorType((steps + layer.keeps_cell, n_directions, batch, whole), "float32"),
    )  # fmt: skip
    shown = builder.emit(call)
    if whole > units:
        shown = _part(builder, shown, 3, 0, units)
    if batch > given:
        shown = _part(builder, shown, 2, 0, given)
    all_steps = _part(builder, shown, 0, 0, steps) if layer.keeps_cell else shown
    turns = [0 if is_reverse else steps - 1 for is_reverse in layer.is_reverse]
    ends = [_part(builder, _part(builder, shown, 1, d, d + 1), 0, t, t + 1) for d, t in enumerate(turns)]
    h = builder.emit(relax.op.concat(ends, axis=1)) if len(ends) > 1 else ends[0]
    h = builder.emit(relax.op.squeeze(h, [0]))
    if not layer.keeps_cell:
        return Results(all_steps, h, None)
    return Results(all_steps, h, builder.emit(relax.op.squeeze(_part(builder, shown, 0, steps, steps + 1), [0])))


def shared_out(batch: int, gates: int) -> tuple[int, int]:
    """How many parts a batch has, and the sequences of each: together no fewer than it has, and as few as they can be
    where two cores have as many parts each, and sums of several sequences fit into registers with all their gates."""
    if batch <= _MOST_ROWS:
        return 1, batch

    def cost(rows: int) -> float:
        together = max(n for n in range(1, rows + 1) if rows % n == 0 and n * gates <= _ACCUMULATORS)
        return 2 * -(-batch // (2 * rows)) * rows * (1 + 1 / together)

    rows = min(range(_MOST_ROWS, 3, -1), key=cost)
    return -(-batch // rows), rows


def _states(
    builder: relax.BlockBuilder, before: Sequence[relax.Expr | None], shape: tuple[int, ...], more: tuple[int, int]
) -> relax.Expr:
    """The states before the first step, (states, d, b, whole vectors), with so many more sequences and units of zeros:
    a constant if they are."""
    given = [constant(np.zeros(shape, np.float32)) if each is None else each for each in before]
    if all(isinstance(each, tvm.ir.Constant) for each in given):
        return constant(np.pad(np.stack([value_of(each) for each in given]), [(0, 0), (0, 0), *((0, n) for n in more)]))
    parts = [builder.emit(relax.op.expand_dims(each, 0)) for each in given]  # no `stack`: ConvertLayout fails on it
    states = builder.emit(relax.op.concat(parts, axis=0)) if len(parts) > 1 else parts[0]
    if not any(more):
        return states
    return builder.emit(relax.op.nn.pad(states, [0, 0, 0, 0, 0, more[0], 0, more[1]], "constant", 0.0))


def _part(builder: relax.BlockBuilder, tensor: relax.Expr, axis: int, begin: int, end: int) -> relax.Var:
    return builder.emit(relax.op.strided_slice(tensor, [axis], [begin], [end]))


def _columns(weights: np.ndarray) -> np.ndarray:
    """Weights of inputs, or biases, (d, g, k, any), as columns for a product: (any, d * j * g * LANES)."""
    vectors = _in_vectors(weights.transpose(3, 0, 1, 2))  # (any, d, j, g, LANES)
    return vectors.reshape(len(vectors), -1)


def _in_vectors(values: np.ndarray) -> np.ndarray:
    """(..., a, g, k) as (..., a, j, g, LANES), the last units filled up with zeros."""
    *outer, n_gates, units = values.shape
    n_vectors = -(-units // LANES)
    wide = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, n_vectors * LANES - units)])
    return np.moveaxis(wide.reshape(*outer, n_gates, n_vectors, LANES), -3, -2)


def in_pairs(weights: np.ndarray) -> np.ndarray:
    """Weights of a layer (d, j, k, g, LANES, 1) as (d, j, k / 2, g, LANES, 2), for instructions that sum pairs."""
    even = np.pad(weights, [(0, 0), (0, 0), (0, weights.shape[2] % 2), (0, 0), (0, 0), (0, 0)])
    n_directions, n_vectors, units, *lanes = even.shape[:-1]
    return np.moveaxis(even.reshape(n_directions, n_vectors, units // 2, 2, *lanes), 3, -1)


def is_layer(call: relax.Expr) -> bool:
    """Whether it stands for such a layer."""
    return is_stand_in(call, _STANDS_FOR)


@rule(STAND_IN)
def _program(rewriter: Rewriter, call: relax.Call) -> relax.Expr | None:
    if not is_layer(call):
        return None
    weights, x, states, bias, text = call.args[1:]
    layer = Layer.parsed(str(text.value))
    steps, batch = (static_shape(x) or ())[:2]
    _, n_vectors, turns, *_ = static_shape(weights) or ()
    function = recurrence(layer, steps, batch, turns, n_vectors, dtype(weights)).with_attrs(
        patterns.marks(patterns.OPAQUE)
    )
    made = rewriter.builder_.add_func(function, FUNCTION)
    return relax.call_tir(made, [weights, x, states, bias], call.ty_args[0])


def in_programs(module: tvm.IRModule) -> tvm.IRModule:
    """The module with its recurrent layers as functions in TIR; the same module if it has none."""
    return rewrite(module, [_program]) if has_stand_ins(module, _STANDS_FOR) else module
