"""Files in float16 or bfloat16 as files that compute in float32: what CPUs compute in, whatever a file says.

Weights are widened, which is exact; inputs and outputs keep their types, with a cast behind and before. ONNX Runtime
does the same around each operator on CPUs that know no halves, and rounds after each, so that its results depend on
which operators it fuses; those of the widened file do not.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from lib.models import onnx_folding, onnx_functions

_NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WIDE = TensorProto.FLOAT
_TYPES = {"to", "dtype", "output_dtype", "output_datatype"}  # attributes that name an element type
ACCURACY, ROUNDED_TO_BYTES = "accuracy_level", 4  # of ONNX Runtime's products with weights of few bits
_MOST_BYTES = 1 << 30  # of weights within a file; protobuf takes no more than two


def widen(proto: onnx.ModelProto) -> bool:
    """Have a model compute in float32, in place; returns whether anything changed."""
    if not _has_narrow(proto.graph):
        return False
    _widen(proto.graph)
    _cast_outside(proto.graph)
    return True


def make_exact(proto: onnx.ModelProto) -> bool:
    """Take away, in place, what allows ONNX Runtime to round what weights of few bits are multiplied with; returns
    whether there was anything."""
    found = [
        attribute
        for each in _graphs(proto.graph)
        for node in each.node
        for attribute in node.attribute
        if attribute.name == ACCURACY and attribute.i == ROUNDED_TO_BYTES
    ]
    for attribute in found:
        attribute.i = 0
    return bool(found)


def compared_with(path: Path, folder: Path) -> Path:
    """A file that computes exactly what another one says, in float32: itself if it does, else one in a folder.

    A damaged one is itself: who runs it says what is wrong.
    """
    try:
        proto = onnx.load(path, load_external_data=False)
    except DecodeError:
        return path
    onnx_functions.put_in_place(proto)
    if not any([widen(proto), make_exact(proto)]):
        return path
    proto = onnx.load(path)
    onnx_functions.put_in_place(proto)
    widen(proto)
    make_exact(proto)
    made = folder / "float32.onnx"
    n_bytes = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    onnx.save(proto, made, save_as_external_data=n_bytes > _MOST_BYTES)
    return made


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph, and those in bodies of its operators."""
    yield graph
    for node in graph.node:
        for inner in onnx_folding.bodies(node):
            yield from _graphs(inner)


def _has_narrow(graph: onnx.GraphProto) -> bool:
    for each in _graphs(graph):
        if any(tensor.data_type in _NARROW for tensor in each.initializer):
            return True
        if any(value.type.tensor_type.elem_type in _NARROW for value in (*each.input, *each.output)):
            return True
        if any(_names_narrow(attribute) for node in each.node for attribute in node.attribute):
            return True
    return False


def _names_narrow(attribute: onnx.AttributeProto) -> bool:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type in _NARROW
    return attribute.name in _TYPES and attribute.type == AttributeProto.INT and attribute.i in _NARROW


def _widen(graph: onnx.GraphProto) -> None:
    for each in _graphs(graph):
        for tensor in each.initializer:
            _widen_tensor(tensor)
        for node in each.node:
            for attribute in node.attribute:
                if not _names_narrow(attribute):
                    continue
                if attribute.type == AttributeProto.TENSOR:
                    _widen_tensor(attribute.t)
                else:
                    attribute.i = _WIDE
        del each.value_info[:]  # which name the types of before
        if each is not graph:
            for value in (*each.input, *each.output):
                if value.type.tensor_type.elem_type in _NARROW:
                    value.type.tensor_type.elem_type = _WIDE


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type not in _NARROW:
        return
    if tensor.data_location == TensorProto.EXTERNAL:  # that was not read: only its type is asked for
        tensor.data_type = _WIDE
        return
    tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))


def _cast_outside(graph: onnx.GraphProto) -> None:
    """Casts behind inputs and before outputs that are not in float32."""
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]
    renamed = {value.name: f"{value.name}_wide" for value in inputs if value.type.tensor_type.elem_type in _NARROW}
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    renamed |= {name: f"{name}_wide" for name, kind in kinds.items() if kind in _NARROW and name not in renamed}
    for value in graph.input:  # old files list the weights among the inputs
        if value.name in weights and value.type.tensor_type.elem_type in _NARROW:
            value.type.tensor_type.elem_type = _WIDE
    for each in _graphs(graph):
        for node in each.node:
            for names in (node.input, node.output):
                for n, name in enumerate(names):
                    names[n] = renamed.get(name, name)
    given = {value.name for value in inputs}
    before = [helper.make_node("Cast", [name], [wide], to=_WIDE) for name, wide in renamed.items() if name in given]
    after = [
        helper.make_node("Cast", [wide], [name], to=kinds[name]) for name, wide in renamed.items() if name not in given
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
