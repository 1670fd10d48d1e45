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
    """

    def __init__(self, proto: onnx.ModelProto, *, has_loops: bool = True) -> None:
        self.has_loops = has_loops
        self._read = {name for node in proto.graph.node for name in (*node.input, *onnx_folding.read_inside(node))}
        self._read |= {value.name for value in proto.graph.output}
        self._types = onnx_folding.static_types(proto)
        self._values = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._taken = {name for node in proto.graph.node for name in (*node.input, *node.output)}
        self._taken |= set(self._values) | {value.name for value in proto.graph.input}
        self._count = 0
        self.version = onnx_folding.version(proto)
        self.constants: list[onnx.TensorProto] = []  # that were made

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

    def is_read(self, name: str) -> bool:
        """Whether a node reads a tensor, or the model gives it back."""
        return name in self._read

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

    @staticmethod
    def ending(node: onnx.NodeProto, nodes: Sequence[onnx.NodeProto], output: int = 0) -> list[onnx.NodeProto]:
        """Nodes of which the last makes what a node made."""
        nodes[-1].output[0] = node.output[output]
        return list(nodes)


def attributes(node: onnx.NodeProto, **defaults: Any) -> dict[str, Any]:
    """Values of a node's attributes by name, with these defaults."""
    given = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {**defaults, **given}
