"""Branches that are chosen, and loops that are counted, when shapes are known: as the operators that are taken.

torch's older exporter writes `If` where a squeeze may find an axis of one element, and `Loop` where a script has one,
both of shapes. With static shapes their conditions and counts are constants (`onnx_folding` ran before), and one branch
is left, or so many copies of a body. TensorFlow's loops, as Keras's ConvLSTM2D has one, compare a number that they
carry with a limit: what the condition is made of is computed turn by turn, until it is false.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lib.models import onnx_folding
from lib.models.onnx_graph import attributes

_MOST_NODES = 1 << 14  # that a loop may become


def expand(proto: onnx.ModelProto) -> bool:
    """Replace such operators, in place; returns whether there were any. Those within are left for the next time."""
    graph = proto.graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    nodes, made, is_changed = list[onnx.NodeProto](), list[onnx.TensorProto](), False
    for n, node in enumerate(graph.node):
        prefix = f"{node.op_type}_{n}"
        while any(name.startswith(f"{prefix}_") for name in names):  # of what one of these was before
            prefix += "_"
        taken = _taken(node, values, prefix, proto)
        if taken is None:
            nodes.append(node)
            continue
        is_changed = True
        nodes += taken[0]
        made += taken[1]
    if is_changed:
        del graph.node[:]
        graph.node.extend(nodes)
        graph.initializer.extend(made)
    return is_changed


Taken = tuple[list[onnx.NodeProto], list[onnx.TensorProto]]  # nodes, and constants that they read


def _taken(
    node: onnx.NodeProto, values: Mapping[str, onnx.TensorProto], prefix: str, proto: onnx.ModelProto
) -> Taken | None:  # fmt: skip
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "If":
        condition = values.get(node.input[0])
        if condition is None:
            return None
        branch = attributes(node)["then_branch" if numpy_helper.to_array(condition).any() else "else_branch"]
        body = _Body(branch, prefix)
        ends = [helper.make_node("Identity", [body.name(value.name)], [output])
                for value, output in zip(branch.output, node.output, strict=True) if output]  # fmt: skip
        return [*body.nodes(), *ends], body.constants()
    return _unrolled(node, values, prefix, proto) if node.op_type == "Loop" else None


def _unrolled(
    node: onnx.NodeProto, values: Mapping[str, onnx.TensorProto], prefix: str, proto: onnx.ModelProto
) -> Taken | None:  # fmt: skip
    """A loop of a known number of turns."""
    body, carried, version = attributes(node)["body"], list(node.input[2:]), onnx_folding.version(proto)
    turns = _turns(node, values, {opset.domain: opset.version for opset in proto.opset_import})
    if not turns:
        return None
    nodes, made = list[onnx.NodeProto](), list[onnx.TensorProto]()
    rows: list[list[str]] = [[] for _ in body.output[1 + len(carried) :]]
    for turn in range(turns):
        own = f"{prefix}_{turn}"
        number, goes_on = numpy_helper.from_array(np.array(turn, np.int64), f"{own}_number"), f"{own}_goes_on"
        made += [number, numpy_helper.from_array(np.array(True), goes_on)]
        given = dict(zip((value.name for value in body.input), (number.name, goes_on, *carried), strict=True))
        copy = _Body(body, own, given)
        nodes += copy.nodes()
        made += copy.constants()
        results = [copy.name(value.name) for value in body.output[1:]]
        carried = results[: len(carried)]
        for row, name in zip(rows, results[len(carried) :], strict=True):
            rows_of_turn = f"{own}_row_{len(nodes)}"
            nodes.append(_unsqueezed(name, rows_of_turn, version, made))
            row.append(rows_of_turn)
    outputs = list(node.output)
    for name, output in zip(carried, outputs, strict=False):
        if output:
            nodes.append(helper.make_node("Identity", [name], [output]))
    for row, output in zip(rows, outputs[len(carried) :], strict=False):
        if output:
            nodes.append(helper.make_node("Concat", row, [output], axis=0))
    return nodes, made


def _unsqueezed(name: str, output: str, version: int, made: list[onnx.TensorProto]) -> onnx.NodeProto:
    """With a first axis of one element; axes became an input in version 13."""
    if version < 13:
        return helper.make_node("Unsqueeze", [name], [output], axes=[0])
    made.append(numpy_helper.from_array(np.array([0], np.int64), f"{output}_axis"))
    return helper.make_node("Unsqueeze", [name, made[-1].name], [output])


def _turns(node: onnx.NodeProto, values: Mapping[str, onnx.TensorProto], opsets: dict[str, int]) -> int:
    """Of a loop that has at least one and becomes no more nodes than may be; else 0, also if that depends on inputs."""
    body = attributes(node)["body"]
    count, before, *_ = node.input
    if any(name and name not in values for name in (count, before)):
        return 0
    if before and not numpy_helper.to_array(values[before]).any():
        return 0
    most = _MOST_NODES // max(len(body.node), 1)
    limit = int(numpy_helper.to_array(values[count]).reshape(())) if count else most + 1
    turns = limit if _always_goes_on(body) else _until_false(node, values, opsets, min(limit, most + 1))
    return turns if 0 < turns <= most else 0


def _until_false(
    node: onnx.NodeProto, values: Mapping[str, onnx.TensorProto], opsets: dict[str, int], most: int
) -> int:  # fmt: skip
    """After how many turns the condition of a body is false, or `most` if that is less; 0 if it depends on inputs."""
    body = attributes(node)["body"]
    ends = {given.name: after.name for given, after in zip(body.input[2:], body.output[1:], strict=False)}
    nodes, read = _of_condition(body, ends)
    after = {name: end for name, end in ends.items() if name in read}
    carried = {given.name: values[name] for given, name in zip(body.input[2:], node.input[2:], strict=True)
               if name in values}  # fmt: skip
    tensors = {**values, **{tensor.name: tensor for tensor in body.initializer}, **carried}
    known = {name: numpy_helper.to_array(tensors[name]) for name in read if name in tensors}
    for turn in range(most):
        known |= {body.input[0].name: np.array(turn, np.int64), body.input[1].name: np.array(True)}
        for each in nodes:
            names = [name for name in each.input if name]
            is_known = all(name in known for name in names)
            found = onnx_folding.evaluate(each, {n: known[n] for n in names}, opsets) if is_known else None
            if found is None:
                return 0
            known |= found
        if not known.keys() >= {body.output[0].name, *after.values()}:
            return 0
        if not known[body.output[0].name].any():
            return turn + 1
        known |= {name: known[end] for name, end in after.items()}
    return most


def _of_condition(body: onnx.GraphProto, ends: Mapping[str, str]) -> tuple[list[onnx.NodeProto], set[str]]:
    """The nodes that the condition of a body is made of, in its turn or in a later one, and the names that they read.

    Args:
        ends: What is carried, by the names that it has before and after a turn.
    """
    wanted, nodes = {body.output[0].name}, list[onnx.NodeProto]()
    n_before = 0
    while n_before < len(wanted):
        n_before, nodes = len(wanted), []
        for node in reversed(body.node):
            if wanted & set(node.output):
                nodes.insert(0, node)
                wanted.update(node.input)
                wanted.update(onnx_folding.read_inside(node))
        wanted.update(end for name, end in ends.items() if name in wanted)
    return nodes, wanted


def _always_goes_on(body: onnx.GraphProto) -> bool:
    """Whether the condition that a body ends with is true in any case: a constant, or the one that it began with."""
    name, began = body.output[0].name, body.input[1].name
    by_output = {output: node for node in body.node for output in node.output}
    while name in by_output and by_output[name].op_type in ("Identity", "Cast"):
        name = by_output[name].input[0]
    if name == began:
        return True
    constants = {tensor.name: tensor for tensor in body.initializer}
    if name in by_output and by_output[name].op_type == "Constant":
        value = attributes(by_output[name]).get("value")
        return value is not None and bool(numpy_helper.to_array(value).all())
    return name in constants and bool(numpy_helper.to_array(constants[name]).all())


class _Body:
    """A copy of the graph within an operator, with names of its own but for what it reads from around it."""

    def __init__(self, graph: onnx.GraphProto, prefix: str, given: Mapping[str, str] | None = None) -> None:
        """Args:
        given: What stands for its inputs.
        """
        own = {name for node in graph.node for name in node.output if name}
        own |= {tensor.name for tensor in graph.initializer}
        self._graph = graph
        self._names = {name: f"{prefix}_{name}" for name in own} | dict(given or {})

    def name(self, name: str) -> str:
        """That of a tensor in the copy."""
        return self._names.get(name, name)

    def nodes(self) -> list[onnx.NodeProto]:
        return _renamed(self._graph.node, self._names)

    def constants(self) -> list[onnx.TensorProto]:
        found = []
        for tensor in self._graph.initializer:
            copy = onnx.TensorProto()
            copy.CopyFrom(tensor)
            copy.name = self.name(tensor.name)
            found.append(copy)
        return found


def _renamed(nodes: Sequence[onnx.NodeProto], names: Mapping[str, str]) -> list[onnx.NodeProto]:
    """Copies of nodes, also of those within them, where nothing of their own has such a name."""
    found = []
    for node in nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = ""
        for field in (copy.input, copy.output):
            field[:] = [names.get(name, name) for name in field]
        for inner in onnx_folding.bodies(copy):
            hidden = {value.name for value in inner.input} | {tensor.name for tensor in inner.initializer}
            hidden |= {name for each in inner.node for name in each.output}
            outside = {name: new for name, new in names.items() if name not in hidden}
            kept = _renamed(inner.node, outside)
            del inner.node[:]
            inner.node.extend(kept)
            for value in inner.output:
                value.name = outside.get(value.name, value.name)
        found.append(copy)
    return found
