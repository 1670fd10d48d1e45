"""What a rule that replaces nodes of an ONNX graph knows and needs: types, constants, new nodes with new names."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from lib.models import onnx_folding

Nodes = list[onnx.NodeProto] | None


class Graph:
    """A graph in which nodes are being replaced.

    Attributes:
        has_loops: Whether the target takes a program with a loop over steps: no GPU, whose threads would wait for one
            another.
        instruction: Of the target, for rows times matrices of few bits (`lib.tir.few_bits_rows`); empty if it has none.
        lanes: Of a vector of the target, for weights that are laid out here (`lib.graph.experts`).
    """

    def __init__(
        self, proto: onnx.ModelProto, *, has_loops: bool = True, instruction: str = "", lanes: int = 8
    ) -> None:
        self.has_loops, self.instruction, self.lanes = has_loops, instruction, lanes
        self._read = {name for node in proto.graph.node for name in (*node.input, *onnx_folding.read_inside(node))}
        self._read |= {value.name for value in proto.graph.output}
        self._types = onnx_folding.static_types(proto)
        self._values = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._taken = {name for node in proto.graph.node for name in (*node.input, *node.output)}
        self._taken |= set(self._values) | {value.name for value in proto.graph.input}
        self._count = 0
        self.version = onnx_folding.version(proto)
        self.constants: list[onnx.TensorProto] = []  # that were made
        self.told: list[onnx.ValueInfoProto] = []  # types of what ONNX cannot infer

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor, if it is static."""
        return self._types[name][1] if name in self._types else None

    def elem_type(self, name: str) -> int:
        """Of a tensor, as `TensorProto` numbers them; 0 if it is not known."""
        return self._types[name][0] if name in self._types else 0

    def dtype(self, name: str) -> Any:
        """The same for NumPy; float32 if it is not known."""
        found = self.elem_type(name)
        return helper.tensor_dtype_to_np_dtype(found) if found else np.dtype(np.float32)

    def value(self, name: str) -> np.ndarray | None:
        """Of a constant."""
        return numpy_helper.to_array(self._values[name]) if name in self._values else None

    def values(self, names: Sequence[str]) -> list[np.ndarray] | None:
        """Of constants, or None if one is none."""
        found = [value for name in names if (value := self.value(name)) is not None]
        return found if len(found) == len(names) else None

    def is_read(self, name: str) -> bool:
        """Whether a node reads a tensor, or the model gives it back; what is left out has no name."""
        return bool(name) and name in self._read

    def fresh(self) -> str:
        """A name that nothing has."""
        while (name := f"simpler_{self._count}") in self._taken:
            self._count += 1
        self._count += 1
        return name

    def constant(self, value: np.ndarray) -> str:
        """Its name."""
        self.constants.append(
            numpy_helper.from_array(np.ascontiguousarray(value) if value.ndim else value, self.fresh())
        )
        return str(self.constants[-1].name)

    def tell(self, name: str, kind: int, shape: Sequence[int]) -> None:
        """The type of a tensor that an operator makes which ONNX does not know."""
        self.told.append(helper.make_tensor_value_info(name, kind, shape))

    def node(self, operator: str, *inputs: str, **given: Any) -> onnx.NodeProto:
        """One with a single output of a new name."""
        return helper.make_node(operator, list(inputs), [self.fresh()], **given)

    def like(self, node: onnx.NodeProto, *inputs: str) -> onnx.NodeProto:
        """The same operator and attributes on other inputs, with an output of a new name."""
        made = onnx.NodeProto()
        made.CopyFrom(node)
        del made.input[:], made.output[:]
        made.input.extend(inputs)
        made.output.append(self.fresh())
        return made

    def changed(self, node: onnx.NodeProto, given: dict[str, Any], without: Iterable[str] = ()) -> onnx.NodeProto:
        """The same node with other attributes."""
        made = onnx.NodeProto()
        made.CopyFrom(node)
        kept = [attribute for attribute in node.attribute if attribute.name not in {*given, *without}]
        del made.attribute[:]
        made.attribute.extend([*kept, *(helper.make_attribute(name, value) for name, value in given.items())])
        return made

    def reduce(self, operator: str, name: str, axis: int) -> onnx.NodeProto:
        """Over one axis, which stays; axes became an input in version 18 (13 for sums)."""
        if self.version >= (13 if operator == "ReduceSum" else 18):
            return self.node(operator, name, self.constant(np.array([axis])), keepdims=1)
        return self.node(operator, name, axes=[axis], keepdims=1)

    def unsqueezed(self, name: str, axis: int) -> onnx.NodeProto:
        """With an axis of extent 1 more; axes became an input in version 13."""
        if self.version >= 13:
            return self.node("Unsqueeze", name, self.constant(np.array([axis])))
        return self.node("Unsqueeze", name, axes=[axis])

    def put(self, proto: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> None:
        """Give a model these nodes in place of its own, with the constants and types that were made for them."""
        del proto.graph.node[:]
        proto.graph.node.extend(nodes)
        proto.graph.initializer.extend(self.constants)
        proto.graph.value_info.extend(self.told)

    @staticmethod
    def ending(node: onnx.NodeProto, nodes: Sequence[onnx.NodeProto], output: int = 0) -> list[onnx.NodeProto]:
        """Nodes of which the last makes what a node made."""
        nodes[-1].output[0] = node.output[output]
        return list(nodes)


def attributes(node: onnx.NodeProto, **defaults: Any) -> dict[str, Any]:
    """Values of a node's attributes by name, with these defaults."""
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {**defaults, **given}


class Made:
    """Nodes that take the place of one, in the order in which they are made; each method gives the name of a tensor."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.nodes = graph, list[onnx.NodeProto]()

    def add(self, node: onnx.NodeProto) -> str:
        """A node, with an output of a new name."""
        del node.output[:]
        node.output.append(self.graph.fresh())
        self.nodes.append(node)
        return str(node.output[0])

    def op(self, operator: str, *inputs: str, **given: Any) -> str:
        """An operator of ONNX, and its first result."""
        return self.add(helper.make_node(operator, list(inputs), [""], **given))

    def number(self, value: float) -> str:
        """A constant in float32, a scalar."""
        return self.graph.constant(np.array(value, np.float32))

    def integer(self, value: int) -> str:
        """A constant in int64, a scalar."""
        return self.graph.constant(np.array(value, np.int64))

    def axes(self, *values: int) -> str:
        """A constant list in int64."""
        return self.graph.constant(np.array(values, np.int64))

    def mean(self, name: str) -> str:
        """Over the last axis, which stays."""
        return self._take(self.graph.reduce("ReduceMean", name, -1))

    def sum(self, name: str) -> str:
        """Over the last axis, which stays."""
        return self._take(self.graph.reduce("ReduceSum", name, -1))

    def largest(self, name: str) -> str:
        """Over the last axis, which stays."""
        return self._take(self.graph.reduce("ReduceMax", name, -1))

    def unsqueezed(self, name: str, axis: int) -> str:
        """See `Graph.unsqueezed`."""
        return self._take(self.graph.unsqueezed(name, axis))

    def part(self, name: str, axis: int, begin: int, end: int = np.iinfo(np.int64).max) -> str:
        """A slice along one axis."""
        return self.op("Slice", name, self.axes(begin), self.axes(end), self.axes(axis))

    def extent(self, name: str, axis: int) -> str:
        """Of a tensor along an axis, a list of one in int64."""
        return self.part(self.op("Shape", name), 0, axis, axis + 1)

    def within(self, name: str, count: int) -> str:
        """Places among so many, in int64: the nearest that there is."""
        return self.op("Min", self.op("Max", name, self.integer(0)), self.integer(count - 1))

    def from_start(self, name: str, *extents: int) -> str:
        """Places in int64 of which those below zero count from the end of axes of these extents."""
        return self.op("Where", self.op("Less", name, self.integer(0)), self.op("Add", name, self.axes(*extents)), name)

    def rename(self, name: str, output: str) -> None:
        """Have a result that was made also go by the name of an output, if that has one."""
        if output:
            self.nodes.append(helper.make_node("Identity", [name], [output]))

    def ending(self, node: onnx.NodeProto, name: str, output: int = 0) -> list[onnx.NodeProto]:
        """All nodes; the last gives a result the name of an output of the node that they replace."""
        self.rename(name, node.output[output])
        return self.nodes

    def _take(self, node: onnx.NodeProto) -> str:
        self.nodes.append(node)
        return str(node.output[0])
