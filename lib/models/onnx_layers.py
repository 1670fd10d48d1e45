"""LSTM, GRU and RNN of ONNX as whole layers: which stay as they are until the importer comes to them, and what it makes
of them then (`lib.graph.recurrence`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from tvm import relax
from tvm.error import OpNotImplemented

from lib.graph import recurrence
from lib.graph.rewrite import value_of
from lib.models import onnx_lengths
from lib.models.onnx_converter import Converter
from lib.models.onnx_graph import Graph, Nodes, attributes
from lib.tir.recurrence import ACTIVATIONS, CELLS, Layer

_WHOLE = "is_whole"  # attribute of nodes that `CONVERTERS` takes
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}  # activations


@dataclass(frozen=True, slots=True)
class Asked:
    """What a node asks for."""

    seq: int
    batch: int
    n_directions: int
    hidden: int
    activations: list[str]  # of all directions, in small letters
    is_batch_first: bool
    lengths: str  # of the sequences, if some may end early; else empty

    @classmethod
    def of(cls, node: onnx.NodeProto, graph: Graph) -> "Asked | None":
        """None if that is not here: limits, coupled gates, peepholes."""
        given = attributes(node, layout=0, activations=[], clip=None, input_forget=0)
        x, _, r, _, lengths, _, _, peepholes = [*node.input, *[""] * 8][:8]
        shape, weights = graph.shape(x), graph.shape(r)
        if shape is None or weights is None or given["clip"] is not None or given["input_forget"] or peepholes:
            return None
        seq, batch = (shape[1], shape[0]) if given["layout"] else shape[:2]
        ends = graph.value(lengths) if lengths else np.array(seq)
        may_end = lengths if ends is None or not bool((ends == seq).all()) else ""
        named = _activations(given, node.op_type, weights[0])
        return cls(seq, batch, weights[0], weights[2], named, bool(given["layout"]), may_end)


def _activations(given: Mapping[str, Any], operator: str, n_directions: int) -> list[str]:
    """Of all directions, in small letters."""
    named = [_text(name) for name in given.get("activations", ())]
    return [name.lower() for name in named or _USUAL[operator] * n_directions]


def whole(node: onnx.NodeProto, graph: Graph) -> Nodes:
    """The node itself, without results that nobody reads, if its layer can be one program; else None."""
    asked, weights = Asked.of(node, graph), [name for name in node.input[1:4] if name]
    if asked is None or not graph.has_loops or graph.dtype(node.input[0]) != np.float32:
        return None
    n_each = len(asked.activations) // asked.n_directions
    is_alike = asked.activations == asked.activations[:n_each] * asked.n_directions
    if not is_alike or not set(asked.activations) <= set(ACTIVATIONS) or any(graph.value(w) is None for w in weights):
        return None
    kept = graph.changed(node, {_WHOLE: 1})
    if asked.lengths:
        has_gates = asked.activations[0] == "sigmoid" and not asked.is_batch_first
        return onnx_lengths.keeping(kept, graph, asked.lengths, asked.seq) if has_gates else None
    while kept.output and not graph.is_read(kept.output[-1]):
        del kept.output[-1]
    return [kept]


class _Converter(Converter):
    """Of one operator, as TVM's importer calls it."""

    operator = ""

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
