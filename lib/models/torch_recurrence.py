"""LSTM, GRU and RNN of torch as whole layers (`lib.graph.recurrence`), which torch would take apart step by step.

Torch has the gates in the order i f c o, r z h; a GRU's reset gate comes after the product, as in ONNX's
`linear_before_reset`. Its weights come layer by layer, direction by direction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from tvm import relax

from lib.graph import recurrence
from lib.graph.rewrite import value_of
from lib.tir.recurrence import CELLS, Layer


@dataclass(frozen=True, slots=True)
class _Kind:
    cell: str
    activations: tuple[str, ...]
    order: tuple[int, ...]  # of ONNX's gates among torch's


_KINDS = {
    "lstm.input": _Kind("lstm", ("sigmoid", "tanh", "tanh"), (0, 3, 1, 2)),
    "gru.input": _Kind("gru", ("sigmoid", "tanh"), (1, 0, 2)),
    "rnn_tanh.input": _Kind("rnn", ("tanh",), (0,)),
    "rnn_relu.input": _Kind("rnn", ("relu",), (0,)),
}


def kept_whole(torch: ModuleType, program: Any) -> list[Any]:
    """The operators of a program that this module has layers for, if it has one for each of their calls."""
    kept = []
    for name in _KINDS:
        operator, _, overload = name.partition(".")
        target = getattr(getattr(torch.ops.aten, operator), overload)
        if all(map(_fits, (node for node in program.graph.nodes if node.target is target))):
            kept.append(target)
    return kept


def with_constants(program: Any) -> None:
    """Have layers that stayed whole read constants of Relax in place of parameters, which their weights are made of
    before the importer knows what the parameters are."""
    graph, signature = program.graph, program.graph_signature
    for node in graph.nodes:
        if _name(node) not in _KINDS:
            continue
        constants: list[Any] = []
        for parameter in node.args[2]:
            name = f"_weight_{len(constants)}_{node.name}"
            value = program.state_dict[signature.inputs_to_parameters[parameter.name]]
            setattr(program.graph_module, name, relax.const(value.numpy(force=True)))
            with graph.inserting_before(node):
                constants.append(graph.create_node("get_attr", name))
            constants[-1].meta = dict(parameter.meta)
        node.args = (*node.args[:2], constants, *node.args[3:])


def _name(node: Any) -> str:
    return str(getattr(node.target, "__name__", ""))


def _fits(node: Any) -> bool:
    """Not with projections, whose weights are one more of each direction."""
    x, _, weights, has_biases, n_layers, *_, is_both_ways, _ = node.args
    each = 4 if has_biases else 2
    return len(weights) == each * n_layers * (2 if is_both_ways else 1) and len(x.meta["val"].shape) == 3


def _converted(kind: _Kind, node: Any, importer: Any) -> relax.Expr:
    """The results as torch has them: steps, and the last states of all layers and directions."""
    x, before, names, has_biases, n_layers, *_, is_both_ways, is_batch_first = node.args
    builder, gates = importer.block_builder, CELLS[kind.cell].gates
    n_directions = 2 if is_both_ways else 1
    states = [importer.env[each] for each in (before if isinstance(before, Sequence) else [before])]
    tensors = [value_of(importer.env[name]) for name in names]
    each = len(tensors) // (n_layers * n_directions)
    keeps_cell = kind.cell == "lstm" and any(user.args[1] == 2 for user in node.users)
    layer = Layer(kind.cell, kind.activations, (False, True)[:n_directions], keeps_cell)
    steps = importer.env[x]
    steps = builder.emit(relax.op.permute_dims(steps, [1, 0, 2])) if is_batch_first else steps
    lasts: list[list[relax.Expr]] = [[], []]
    for n in range(n_layers):
        first = n * n_directions
        of_layer = [tensors[(first + d) * each : (first + d + 1) * each] for d in range(n_directions)]
        weights = _weights(kind, gates, of_layer, has_biases=has_biases)
        before_it = [_rows(builder, state, first, n_directions) for state in states]
        found = recurrence.emit(builder, layer, weights, steps, before_it)
        lasts[0].append(found.h)
        lasts[1] += [] if found.c is None else [found.c]
        n_steps, _, batch, units = (int(extent) for extent in found.steps.ty.shape)
        side_by_side = builder.emit(relax.op.permute_dims(found.steps, [0, 2, 1, 3]))
        steps = builder.emit(relax.op.reshape(side_by_side, (n_steps, batch, n_directions * units)))
    steps = builder.emit(relax.op.permute_dims(steps, [1, 0, 2])) if is_batch_first else steps
    joined = [builder.emit(relax.op.concat(parts, axis=0)) if len(parts) > 1 else parts[0] for parts in lasts if parts]
    if kind.cell == "lstm" and not keeps_cell:
        joined.append(joined[0])  # for a result that nobody reads
    return builder.emit(relax.Tuple([steps, *joined]))


def _weights(
    kind: _Kind, gates: int, of_directions: Sequence[Sequence[np.ndarray]], *, has_biases: bool
) -> recurrence.Weights:
    """Of a layer, from those of its directions: (g * k, features), (g * k, k), and two biases (g * k,)."""

    def by_gates(which: int) -> np.ndarray:
        stacked = np.stack([tensors[which] for tensors in of_directions])
        return stacked.reshape(len(of_directions), gates, -1, *stacked.shape[2:])[:, list(kind.order)]

    of_inputs, recurrent = by_gates(0), by_gates(1)
    shape = (2, *recurrent.shape[:-1])
    biases = np.stack([by_gates(2), by_gates(3)]) if has_biases else np.zeros(shape, np.float32)
    return recurrence.Weights(of_inputs, recurrent, biases)


def _rows(builder: relax.BlockBuilder, state: relax.Expr, first: int, count: int) -> relax.Expr:
    """The states of one layer, of those of all layers and directions."""
    if int(state.ty.shape[0]) == count:
        return state
    return builder.emit(relax.op.strided_slice(state, [0], [first], [first + count]))


CONVERTERS: dict[str, Callable[[Any, Any], relax.Expr]] = {
    name: partial(_converted, kind) for name, kind in _KINDS.items()
}
