"""LSTM, GRU and RNN of ONNX: the products of all inputs at once, then the steps, in one program or in operators.

As ONNX's operators of these names have it (LSTM-22, GRU-22, RNN-22): gates in the order i o f c, z r h; both values of
`layout`; forward, reverse and bidirectional. Layers that `lib.graph.recurrence` has programs for stay as they are until
the importer comes to them, and then asks `CONVERTERS`. Others are taken apart, step by step: all steps have equal
shapes, so they are a handful of distinct subgraphs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.error import OpNotImplemented

from lib.graph import recurrence
from lib.graph.rewrite import value_of
from lib.models.onnx_graph import Graph, Nodes, attributes
from lib.tir.recurrence import ACTIVATIONS, CELLS, Layer

_MOST_STEPS = 256  # more make graphs of many thousand nodes
_MOST_ROWS = 16  # sequences of a batch in one program; the products of more are faster as operators
_WHOLE = "is_whole"  # attribute of nodes that `CONVERTERS` takes
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
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
    return _whole(node, graph) or _recurrence(node, graph, 4, _lstm_step, _USUAL["LSTM"])


def gru(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """See `onnx_decompositions`."""
    if attributes(node, linear_before_reset=0)["linear_before_reset"]:
        return _whole(node, graph) or _recurrence(node, graph, 3, _gru_after, _USUAL["GRU"])
    return _recurrence(node, graph, 3, _gru_before, _USUAL["GRU"])


def rnn(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """See `onnx_decompositions`."""
    return _whole(node, graph) or _recurrence(node, graph, 1, _rnn_step, _USUAL["RNN"])


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


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a node asks for."""

    seq: int
    batch: int
    n_directions: int
    hidden: int
    activations: list[str]  # of all directions, in small letters
    is_batch_first: bool

    @classmethod
    def of(cls, node: onnx.NodeProto, graph: Graph) -> "_Asked | None":
        """None if that is not here: sequences that end early, limits, coupled gates, peepholes."""
        given = attributes(node, layout=0, activations=[], clip=None, input_forget=0)
        x, _, r, _, lengths, _, _, peepholes = [*node.input, *[""] * 8][:8]
        shape, weights = graph.shape(x), graph.shape(r)
        if shape is None or weights is None or given["clip"] is not None or given["input_forget"] or peepholes:
            return None
        seq, batch = (shape[1], shape[0]) if given["layout"] else shape[:2]
        ends = graph.value(lengths) if lengths else np.array(seq)
        if ends is None or not bool((ends == seq).all()):
            return None
        named = _activations(given, node.op_type, weights[0])
        return cls(seq, batch, weights[0], weights[2], named, bool(given["layout"]))


def _activations(given: Mapping[str, Any], operator: str, n_directions: int) -> list[str]:
    """Of all directions, in small letters."""
    named = [name.decode() if isinstance(name, bytes) else str(name) for name in given.get("activations", ())]
    return [name.lower() for name in named or _USUAL[operator] * n_directions]


def _whole(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The node itself, without results that nobody reads, if its layer can be one program; else None."""
    asked, weights = _Asked.of(node, graph), [name for name in node.input[1:4] if name]
    if asked is None or not graph.has_loops or graph.dtype(node.input[0]) != np.float32:
        return None
    n_each = len(asked.activations) // asked.n_directions
    is_alike = asked.activations == asked.activations[:n_each] * asked.n_directions
    if asked.batch > _MOST_ROWS and asked.seq <= _MOST_STEPS:
        return None
    if not is_alike or not set(asked.activations) <= set(ACTIVATIONS) or any(graph.value(w) is None for w in weights):
        return None
    kept = graph.changed(node, {_WHOLE: 1})
    while kept.output and not graph.is_read(kept.output[-1]):
        del kept.output[-1]
    return [kept]


def _recurrence(node: onnx.NodeProto, graph: Graph, gates: int, step: Step, usual: list[str]) -> Nodes:
    """All directions and steps; None if the node asks for what is not here."""
    asked = _Asked.of(node, graph)
    if asked is None or asked.seq > _MOST_STEPS or not set(asked.activations) <= set(_ACTIVATIONS):
        return None
    given = attributes(node, direction=b"forward", layout=0)
    x, w, r, b, _, h0, c0, _ = [*node.input, *[""] * 8][:8]
    n_directions, hidden, seq, batch, named = (
        asked.n_directions, asked.hidden, asked.seq, asked.batch, asked.activations,
    )  # fmt: skip
    at = Steps(graph)
    if given["layout"]:
        x, h0, c0 = (at("Transpose", name, perm=[1, 0, 2]) if name else "" for name in (x, h0, c0))
    zeros = graph.constant(np.zeros((batch, hidden), graph.dtype(node.input[0])))
    found = []
    for d in range(n_directions):
        is_reverse = given["direction"] == b"reverse" or d == 1
        products = at("MatMul", x, at("Transpose", at.gather(w, d, 0), perm=[1, 0]))  # [seq, batch, gates * hidden]
        bias = ""
        if b:
            own = at.gather(b, d, 0)
            products = at("Add", products, at.rows(own, 0, gates * hidden))
            bias = at.rows(own, gates * hidden, 2 * gates * hidden)
        names = [_ACTIVATIONS[name] for name in named[d * len(usual) : (d + 1) * len(usual)]]
        cell = _Cell(at, hidden, at("Transpose", at.gather(r, d, 0), perm=[1, 0]), bias, names)
        h, c = (at.gather(name, d, 0) if name else zeros for name in (h0, c0))
        outputs: list[str] = []
        for t in reversed(range(seq)) if is_reverse else range(seq):
            h, c = step(cell, at.gather(products, t, 0), h, c)
            outputs.append(h)
        found.append((outputs[::-1] if is_reverse else outputs, h, c))
    return _with_outputs(node, at, found, is_batch_first=bool(given["layout"]))


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


# Whole layers, when the importer comes to them.


class _Converter:
    """Of one operator, as TVM's importer calls it."""

    operator = ""

    @classmethod
    def get_converter(cls, _opset: int) -> Callable[..., relax.Expr]:
        """See TVM's `OnnxOpConverter`."""
        return cls._convert

    @classmethod
    def _convert(
        cls, builder: relax.BlockBuilder, inputs: Sequence[Any], given: Mapping[str, Any], _params: object
    ) -> relax.Expr:
        if not given.get(_WHOLE):
            raise OpNotImplemented(f"The following operators are not supported: {cls.operator}")
        x, w, r, b, _, *before = [inputs[n] if n < len(inputs) else None for n in range(7)]
        kind, is_batch_first = cls.operator.lower(), bool(given.get("layout", 0))
        gates, n_states = CELLS[kind].gates, CELLS[kind].states
        of_inputs, recurrent = (_by_gates(value_of(each), gates) for each in (w, r))
        n_directions, _, units, _ = recurrent.shape
        shape = (n_directions, 2, gates, units)
        biases = (np.zeros(shape, np.float32) if b is None else value_of(b).reshape(shape)).swapaxes(0, 1)
        named = _activations(given, cls.operator, n_directions)
        is_reverse = (True,) if _text(given.get("direction", "")) == "reverse" else (False, True)[:n_directions]
        n_outputs = int(given["tvm_custom"]["num_outputs"])
        layer = Layer(kind, tuple(named[: len(named) // n_directions]), is_reverse, keeps_cell=n_outputs > n_states)

        def moved(tensor: relax.Expr | None, axes: Sequence[int]) -> relax.Expr | None:
            """Between the batch first, as a node may have it, and the steps or directions first."""
            if tensor is None or not is_batch_first:
                return tensor
            return builder.emit(relax.op.permute_dims(tensor, list(axes)))

        states = [moved(each, [1, 0, 2]) for each in before[:n_states]]
        weights = recurrence.Weights(of_inputs, recurrent, biases)
        found = recurrence.emit(builder, layer, weights, moved(x, [1, 0, 2]), states)
        lasts = [moved(each, [1, 0, 2]) for each in (found.h, found.c)]
        outputs = [moved(found.steps, [2, 0, 1, 3]), *lasts][:n_outputs]
        return relax.Tuple(outputs) if n_outputs > 1 else outputs[0]


def _by_gates(weights: np.ndarray, gates: int) -> np.ndarray:
    """(d, g * k, any) as (d, g, k, any)."""
    n_directions, rows, columns = weights.shape
    return weights.reshape(n_directions, gates, rows // gates, columns)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


CONVERTERS = {name: type(name, (_Converter,), {"operator": name}) for name in _USUAL}
