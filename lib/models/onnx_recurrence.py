"""LSTM, GRU and RNN of ONNX, step by step: the products of all inputs at once, then one small product a step.

As ONNX's operators of these names have it (LSTM-22, GRU-22, RNN-22): gates in the order i o f c, z r h; both values of
`layout`; forward, reverse and bidirectional. All steps have equal shapes, so they are a handful of distinct subgraphs.
Layers that stay whole (`lib.models.onnx_layers`) are not taken apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from lib.models.onnx_graph import Graph, Nodes, attributes
from lib.models.onnx_layers import Asked, whole
from lib.models.onnx_lengths import within

_MOST_STEPS = 256  # more make graphs of many thousand nodes
_ACTIVATIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu", "softsign": "Softsign", "softplus": "Softplus"}


class Steps:
    """The nodes of one direction."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes: list[onnx.NodeProto] = []

    def __call__(self, operator: str, *inputs: str, **given: object) -> str:
        self.nodes.append(self.graph.node(operator, *inputs, **given))
        return str(self.nodes[-1].output[0])

    def gather(self, name: str, index: int, axis: int) -> str:
        """One slice of a tensor, without its axis."""
        return self("Gather", name, self.graph.constant(np.array(index)), axis=axis)

    def rows(self, name: str, begin: int, end: int, axis: int = 0) -> str:
        """A part of an axis."""
        return self("Gather", name, self.graph.constant(np.arange(begin, end)), axis=axis)

    def stacked(self, names: Sequence[str], axis: int) -> str:
        """Tensors side by side on an axis of their own."""
        wide = []
        for name in names:
            self.nodes.append(self.graph.unsqueezed(name, axis))
            wide.append(str(self.nodes[-1].output[0]))
        return self("Concat", *wide, axis=axis) if len(wide) > 1 else wide[0]


@dataclass(frozen=True, slots=True)
class _Cell:
    """What a step needs."""

    at: Steps
    hidden: int
    recurrent: str  # R, transposed: [hidden, gates * hidden]
    bias: str  # of the recurrence, [gates * hidden], or empty
    activations: list[str]

    def gate(self, both: str, n: int) -> str:
        """One gate's columns."""
        return self.at.rows(both, n * self.hidden, (n + 1) * self.hidden, axis=1)


Step = Callable[[_Cell, str, str, str], tuple[str, str]]  # x, h, c -> h, c


def lstm(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """See `onnx_decompositions`."""
    return whole(node, graph) or _recurrence(node, graph, 4, _lstm_step)


def gru(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """See `onnx_decompositions`."""
    if attributes(node, linear_before_reset=0)["linear_before_reset"]:
        return whole(node, graph) or _recurrence(node, graph, 3, _gru_after)
    return _recurrence(node, graph, 3, _gru_before)


def rnn(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """See `onnx_decompositions`."""
    return whole(node, graph) or _recurrence(node, graph, 1, _rnn_step)


def _lstm_step(cell: _Cell, x: str, h: str, c: str) -> tuple[str, str]:
    at, (f, g, last) = cell.at, cell.activations
    both = _plus(cell, x, h)
    i, o, keep = (at(f, cell.gate(both, n)) for n in range(3))
    new = at(g, cell.gate(both, 3))
    c = at("Add", at("Mul", keep, c), at("Mul", i, new))
    return at("Mul", o, at(last, c)), c


def _gru_after(cell: _Cell, x: str, h: str, c: str) -> tuple[str, str]:
    """The reset gate after the product: one product a step."""
    at, (f, g) = cell.at, cell.activations
    seen = at("MatMul", h, cell.recurrent)
    seen = at("Add", seen, cell.bias) if cell.bias else seen
    z, r = (at(f, at("Add", cell.gate(x, n), cell.gate(seen, n))) for n in range(2))
    new = at(g, at("Add", cell.gate(x, 2), at("Mul", r, cell.gate(seen, 2))))
    return _mixed(cell, z, new, h), c


def _gru_before(cell: _Cell, x: str, h: str, c: str) -> tuple[str, str]:
    """The reset gate before the product."""
    at, (f, g), n = cell.at, cell.activations, cell.hidden
    both = at("MatMul", h, at.rows(cell.recurrent, 0, 2 * n, axis=1))
    both = at("Add", both, at.rows(cell.bias, 0, 2 * n)) if cell.bias else both
    z, r = (at(f, at("Add", cell.gate(x, k), cell.gate(both, k))) for k in range(2))
    seen = at("MatMul", at("Mul", r, h), at.rows(cell.recurrent, 2 * n, 3 * n, axis=1))
    seen = at("Add", seen, at.rows(cell.bias, 2 * n, 3 * n)) if cell.bias else seen
    return _mixed(cell, z, at(g, at("Add", cell.gate(x, 2), seen)), h), c


def _rnn_step(cell: _Cell, x: str, h: str, c: str) -> tuple[str, str]:
    return cell.at(cell.activations[0], _plus(cell, x, h)), c


def _plus(cell: _Cell, x: str, h: str) -> str:
    seen = cell.at("Add", x, cell.at("MatMul", h, cell.recurrent))
    return cell.at("Add", seen, cell.bias) if cell.bias else seen


def _mixed(cell: _Cell, z: str, new: str, h: str) -> str:
    """(1 - z) * new + z * h."""
    return cell.at("Add", new, cell.at("Mul", z, cell.at("Sub", h, new)))


def _recurrence(node: onnx.NodeProto, graph: Graph, gates: int, step: Step) -> Nodes:
    """All directions and steps; None if the node asks for what is not here."""
    asked = Asked.of(node, graph)
    if asked is None or asked.seq > _MOST_STEPS or not set(asked.activations) <= set(_ACTIVATIONS):
        return None
    direction = attributes(node, direction=b"forward")["direction"]
    x, w, r, b, _, h0, c0, _ = [*node.input, *[""] * 8][:8]
    seq, hidden, n_each = asked.seq, asked.hidden, len(asked.activations) // asked.n_directions
    at = Steps(graph)
    if asked.is_batch_first:
        x, h0, c0 = (at("Transpose", name, perm=[1, 0, 2]) if name else "" for name in (x, h0, c0))
    zeros = graph.constant(np.zeros((asked.batch, hidden), graph.dtype(node.input[0])))
    is_within = _within(at, asked)
    found = []
    for d in range(asked.n_directions):
        is_reverse = direction == b"reverse" or d == 1
        products = at("MatMul", x, at("Transpose", at.gather(w, d, 0), perm=[1, 0]))  # [seq, batch, gates * hidden]
        bias = ""
        if b:
            own = at.gather(b, d, 0)
            products = at("Add", products, at.rows(own, 0, gates * hidden))
            bias = at.rows(own, gates * hidden, 2 * gates * hidden)
        names = [_ACTIVATIONS[name] for name in asked.activations[d * n_each : (d + 1) * n_each]]
        cell = _Cell(at, hidden, at("Transpose", at.gather(r, d, 0), perm=[1, 0]), bias, names)
        h, c = (at.gather(name, d, 0) if name else zeros for name in (h0, c0))
        outputs: list[str] = []
        for t in reversed(range(seq)) if is_reverse else range(seq):
            before, (h, c) = (h, c), step(cell, at.gather(products, t, 0), h, c)
            shown = h
            if is_within:
                h, c, shown = _until_it_ends(at, at.gather(is_within, t, 0), before, (h, c), zeros)
            outputs.append(shown)
        found.append((outputs[::-1] if is_reverse else outputs, h, c))
    return _with_outputs(node, at, found, is_batch_first=asked.is_batch_first)


def _within(at: Steps, asked: Asked) -> str:
    """Which steps are within each sequence, [seq, batch, 1]; empty if all are."""
    if not asked.lengths:
        return ""
    at.nodes += within(at.graph, asked.lengths, asked.seq)
    at.nodes.append(at.graph.unsqueezed(str(at.nodes[-1].output[0]), 2))
    return str(at.nodes[-1].output[0])


def _until_it_ends(
    at: Steps, is_within: str, before: tuple[str, str], after: tuple[str, str], zeros: str
) -> tuple[str, str, str]:
    """The states after a step, those of before where a sequence has ended, and what is shown of it: zeros there."""
    h, c = (at("Where", is_within, new, old) if new != old else old for new, old in zip(after, before, strict=True))
    return h, c, at("Where", is_within, after[0], zeros)


def _with_outputs(
    node: onnx.NodeProto, at: Steps, found: Sequence[tuple[list[str], str, str]], *, is_batch_first: bool
) -> Nodes:
    """Y [seq, directions, batch, hidden], Y_h and Y_c [directions, batch, hidden]; batch first in layout 1."""
    wanted = [*node.output, "", ""][:3]
    axis = 1 if is_batch_first else 0
    if wanted[0]:
        directions = [at.stacked(outputs, axis) for outputs, _, _ in found]  # [seq, batch, hidden], or batch first
        at.stacked(directions, 2 if is_batch_first else 1)
        at.nodes[-1].output[0] = wanted[0]
    for name, last in ((wanted[1], [h for _, h, _ in found]), (wanted[2], [c for _, _, c in found])):
        if name:
            at.stacked(last, axis)
            at.nodes[-1].output[0] = name
    return at.nodes
