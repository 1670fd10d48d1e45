"""Recurrent layers whose sequences end early, as torch exports its packed sequences.

After the end of a sequence a layer shows zeros, and its states stay what they were; backwards, it begins there. Here
all sequences go through all steps, with one input more, which is 1 after the end: its weights close the gates that
would change a state. What an LSTM shows changes all the same, so that its last step is looked up.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from lib.models.onnx_graph import Graph, Made, Nodes, attributes

_CLOSED = 1e4  # of which a sigmoid is 1, and of its negative 0
_KEEPS = {"LSTM": (-_CLOSED, 0.0, _CLOSED, 0.0), "GRU": (_CLOSED, 0.0, 0.0)}  # gates i o f c, z r h


def within(graph: Graph, lengths: str, seq: int) -> list[onnx.NodeProto]:
    """Nodes of which the last says which steps are within each sequence: booleans, [seq, batch]."""
    return _compared(graph, "Less", np.arange(seq), lengths)


def keeping(node: onnx.NodeProto, graph: Graph, lengths: str, seq: int) -> Nodes:
    """A layer as one for which all sequences have their full length; None if its gates do not keep its states: an RNN
    has none, and where an LSTM begins backwards with states of its own, it would show something else.

    Args:
        node: Steps first, with weights that are constants, and sigmoids for gates.
    """
    direction = attributes(node, direction=b"forward")["direction"]
    x, w, r, b, _, *states = [*node.input, "", "", ""][:7]
    begins = graph.value(states[0]) if states[0] else np.zeros(1)
    is_zero = begins is not None and not begins.any()
    is_lstm = node.op_type == "LSTM"
    if node.op_type not in _KEEPS or (is_lstm and direction != b"forward" and not is_zero):
        return None
    made, outputs = Made(graph), [*node.output, "", ""][:3]
    made.nodes += within(graph, lengths, seq)
    is_within = str(made.nodes[-1].output[0])
    ended = made.op("Cast", made.op("Not", is_within), to=onnx.TensorProto.FLOAT)
    data = made.op("Concat", x, made.unsqueezed(ended, 2), axis=2)
    layer = graph.like(node, data, _wider(graph, w, _KEEPS[node.op_type]), r, b, "", *states)
    last = max(n for n, name in enumerate(outputs) if n == 0 or graph.is_read(name))
    layer.output.extend(graph.fresh() for _ in range(last))
    made.nodes.append(layer)
    shown = made.op("Where", _by_direction(made, is_within), layer.output[0], made.number(0))
    made.rename(shown, outputs[0])
    if is_lstm and graph.is_read(outputs[1]):
        made.rename(_last(made, shown, lengths, seq, direction), outputs[1])
    elif last > 0 and not is_lstm:
        made.rename(layer.output[1], outputs[1])
    if last > 1:
        made.rename(layer.output[2], outputs[2])
    return made.nodes


def _compared(graph: Graph, operator: str, steps: np.ndarray, lengths: str) -> list[onnx.NodeProto]:
    """Nodes of which the last compares each number with the length of each sequence, [steps, batch]."""
    by_batch = graph.unsqueezed(lengths, 0)
    numbers = graph.constant(steps[:, None].astype(graph.dtype(lengths)))
    return [by_batch, graph.node(operator, numbers, by_batch.output[0])]


def _wider(graph: Graph, weights: str, gates: Sequence[float]) -> str:
    """Weights of inputs, [directions, gates * hidden, inputs], with those of one input more, a number for each gate."""
    own = graph.value(weights)
    assert own is not None
    each = np.repeat(np.array(gates, own.dtype), own.shape[1] // len(gates))[None, :, None]
    return graph.constant(np.concatenate([own, np.broadcast_to(each, (*own.shape[:2], 1))], axis=2))


def _by_direction(made: Made, steps: str) -> str:
    """[seq, batch] as [seq, 1, batch, 1]."""
    return made.unsqueezed(made.unsqueezed(steps, 1), 3)


def _last(made: Made, shown: str, lengths: str, seq: int, direction: bytes) -> str:
    """What the last step of each sequence shows, [directions, batch, hidden]: forward at its end, else at the first."""
    made.nodes += _compared(made.graph, "Equal", np.arange(1, seq + 1), lengths)
    is_end = made.op("Cast", str(made.nodes[-1].output[0]), to=onnx.TensorProto.FLOAT)
    made.nodes.append(made.graph.reduce("ReduceSum", made.op("Mul", shown, _by_direction(made, is_end)), 0))
    forward = made.op("Squeeze", str(made.nodes[-1].output[0]), made.axes(0))
    first = made.op("Gather", shown, made.integer(0), axis=0)
    if direction != b"bidirectional":
        return forward if direction == b"forward" else first
    return made.op("Concat", made.part(forward, 0, 0, 1), made.part(first, 0, 1, 2), axis=0)
