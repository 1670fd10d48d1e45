"""Recurrent layers as one operator, from the import of a model until its operators become programs in TIR.

Relax has no such operator. A call of a function that nobody has stands for it, which TVM's passes leave alone; its
second argument is the weight of the recurrence, so that `lib.graph.reweight` can narrow it, and the last one says what
kind of layer it is (`lib.tir.recurrence`).
"""

import numpy as np
import tvm
from tvm import relax

from lib.graph import patterns
from lib.graph.rewrite import Rewriter, dtype, is_call, rewrite, rule, static_shape, value_of
from lib.tir.recurrence import LANES, Layer, recurrence

FUNCTION = "recurrence"  # name of the functions, for people
_CALL = "relax.call_pure_packed"
_STANDS_FOR = f"lib.{FUNCTION}"


def emit(
    builder: relax.BlockBuilder,
    layer: Layer,
    weights: np.ndarray,
    x: relax.Expr,
    states: relax.Expr,
    bias: np.ndarray,
) -> relax.Var:  # fmt: skip
    """The states h that a layer shows, (n, d, b, k); with `keeps_cell` those of c after the last step, as one more.

    Args:
        weights: Of the recurrence, (d, g, k units, k they are summed over), as ONNX has them.
        x: What the inputs contribute to each gate, as `input_columns` orders them: (n, b, d * j * g * LANES).
        states: Before the first step, (states, d, b, k).
        bias: Of what a GRU's reset gate multiplies, (d, k).
    """
    n_directions, n_gates, units, _ = weights.shape
    steps, batch = (static_shape(x) or ())[:2]
    n_vectors = -(-units // LANES)
    split = builder.emit(relax.op.reshape(x, (steps, batch, n_directions, n_vectors, n_gates, LANES)))
    whole = n_vectors * LANES
    if whole > units and isinstance(states, tvm.ir.Constant):
        states = relax.const(np.pad(value_of(states), [(0, 0), (0, 0), (0, 0), (0, whole - units)]))
    elif whole > units:
        states = builder.emit(relax.op.nn.pad(states, [0, 0, 0, 0, 0, 0, 0, whole - units], "constant", 0.0))
    packed = in_vectors(weights.transpose(0, 3, 1, 2)).transpose(0, 2, 1, 3, 4)[..., None]  # as the program has it
    of_reset = in_vectors(bias[:, None])[:, :, 0]
    shape = (steps + layer.keeps_cell, n_directions, batch, whole)
    call = relax.op.call_pure_packed(
        _STANDS_FOR, relax.const(np.ascontiguousarray(packed)), split, states,
        relax.const(np.ascontiguousarray(of_reset)), layer.text,
        ty_args=relax.TensorType(shape, "float32"),
    )  # fmt: skip
    shown = builder.emit(call)
    return builder.emit(relax.op.strided_slice(shown, [3], [0], [units])) if whole > units else shown


def input_columns(weights: np.ndarray) -> np.ndarray:
    """Weights of inputs, or biases, (d, g, k, any), as columns for a product: (any, d * j * g * LANES)."""
    vectors = in_vectors(weights.transpose(3, 0, 1, 2))  # (any, d, j, g, LANES)
    return np.ascontiguousarray(vectors.reshape(len(vectors), -1))


def in_vectors(values: np.ndarray) -> np.ndarray:
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
    return is_call(call, _CALL) and str(getattr(call.args[0], "global_symbol", "")) == _STANDS_FOR


@rule(_CALL)
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
    """The module with its recurrent layers as functions in TIR."""
    return rewrite(module, [_program])
