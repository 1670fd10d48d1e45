"""What of a file depends on values: cut off where that begins, and left to ONNX Runtime.

How many boxes a detector keeps is known when it has seen the image. Operators whose results have such shapes, branches
and loops that values decide, and operators that nobody here can compile have no program of fixed shapes, nor has what
comes after them. What comes before them has one, and takes nearly all of the time: it becomes a file of its own, whose
outputs are what the rest reads; the rest is another one, and comes along with the library.
"""

import json
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, defs, helper
from tvm.relax.frontend.onnx.onnx_frontend import _get_convert_map

from lib.contracts import digests
from lib.models import onnx_decompositions, onnx_folding, onnx_import, onnx_ml, onnx_saving
from lib.models.source import Source, parse_shapes

REST = "rest.onnx"
REVISION = 3  # raised when the same file is cut elsewhere than before
_KEY = "family_tuner.rest"  # in the metadata of what is compiled
_WHOLE = "whole"  # name of a file that says that nothing is cut off
_CHOICES = {"If", "Loop", "Scan"}
_PRODUCT = re.compile("Conv(?!ert)|MatMul|Gemm|Attention|LSTM|GRU|RNN|Einsum")
_PARTS = {"Slice", "Gather", "Split", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Identity"}  # and views
_SHAPED_BY = {"Range": (0, 1, 2), "ConstantOfShape": (0,), "Expand": (1,), "Reshape": (1,), "Tile": (1,), "Pad": (1,),
              "Slice": (1, 2, 3, 4), "TopK": (1,), "OneHot": (1,), "Resize": (2, 3)}  # fmt: skip
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}

Types = Mapping[str, tuple[int, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Rest:
    """What ONNX Runtime is to compute after the library."""

    file: Path
    outputs: list[dict[str, Any]]  # of the whole model, in order: name, shape (names for what is open) and dtype
    told: str  # to the user


def split(path: Path, shape: str, folder: Path) -> Path:
    """The part of a file that is compiled, in a folder, or the file itself if that is all of it.

    Args:
        shape: What `--shape` says of it.
        folder: Of such parts; what was found of a file before is there.

    Raises:
        ModelError: The file cannot be read, or leaves shapes open.
    """
    if not path.is_file() or not _may_depend_on_values(path, digests.of_state(path)):
        return path
    known = folder / f"{Source(str(path), shape=shape).name}-{REVISION}"
    if not known.exists():
        proto = onnx_import.settled(path, parse_shapes(shape))
        onnx_import.decide(proto)
        parts = _parts(proto)
        if parts:
            onnx_saving.save_all({path.name: parts[0], REST: parts[1]}, known)
        else:
            known.mkdir(parents=True, exist_ok=True)
            (known / _WHOLE).touch()
    return path if (known / _WHOLE).exists() else known / path.name


def of(path: Path) -> Rest | None:
    """The rest of a file that `split` made; None of any other."""
    if not path.with_name(REST).is_file():
        return None
    metadata = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    if _KEY not in metadata:
        return None
    said = json.loads(metadata[_KEY])
    return Rest(path.with_name(REST), said["outputs"], said["told"])


@cache
def _may_depend_on_values(path: Path, _digest: str) -> bool:
    """Whether a file names an operator that could; most do not, and need not be parsed."""
    if not path.stat().st_size:
        return False
    names = {*onnx_import.OF_UNKNOWN_SHAPE, *_CHOICES, *_unknown_operators()}
    wanted = [b"\x22" + bytes([len(name)]) + name.encode() for name in names]  # as protobuf writes `op_type`
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return any(data.find(each) >= 0 for each in wanted) or data.find(b"ai.onnx.ml") >= 0


def _unknown_operators() -> set[str]:
    """Those of ONNX that nobody here imports or takes apart."""
    known = _get_convert_map().keys() | onnx_decompositions.RULES.keys() | onnx_import.CONVERTERS.keys()
    of_onnx = [schema for schema in defs.get_all_schemas() if schema.domain == ""]
    return {each.name for each in of_onnx if not (each.name in known or _has_definition(each))} - {"Constant"}


def _has_definition(schema: defs.OpSchema) -> bool:
    return bool(schema.has_function or schema.has_context_dependent_function)


def _parts(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, onnx.ModelProto] | None:
    """What is compiled, and the rest; None if there is no rest, or too little before it."""
    graph, types = proto.graph, onnx_folding.static_types(proto)
    left, kinds = _left(graph, types)
    first = [node for n, node in enumerate(graph.node) if n not in left]
    after = [node for n, node in enumerate(graph.node) if n in left]
    products = [sum(bool(_PRODUCT.search(node.op_type)) for node in nodes) for nodes in (first, after)]
    if not after or not products[0]:
        return None
    made = {name for node in first for name in node.output if name}
    read = {name for node in after for name in _read(node)}
    own = [value.name for value in graph.output if value.name in made]
    between = [name for node in first for name in node.output if name in read and name not in own]
    if any(name not in types for name in between):
        return None
    given = [value for value in graph.input if value.name in read]
    outputs = {value.name: value for value in graph.output}
    ends = [outputs[name] if name in outputs else _value(name, types) for name in (*own, *between)]
    crossing = [_value(name, types) for name in (*own, *between) if name in read]
    rest = _model(proto, after, [*given, *crossing], [value for value in graph.output if value.name not in made])
    head = _model(proto, first, list(graph.input), ends)
    said = {
        "told": f"{len(after)} of its {len(graph.node)} operators ({products[1]} of {sum(products)} products and "
        f"convolutions) depend on values, from {', '.join(kinds)} on, and are left to ONNX Runtime",
        "outputs": [_described(value) for value in graph.output],
        "digest": digests.of_bytes([rest.SerializeToString(deterministic=True)]),
    }
    head.metadata_props.add(key=_KEY, value=json.dumps(said))
    return head, rest


def _left(graph: onnx.GraphProto, types: Types) -> tuple[set[int], list[str]]:
    """The places of nodes that are not compiled; and the kinds of operators that this begins with."""
    constants = {tensor.name for tensor in graph.initializer}
    unknown = onnx_import.OF_UNKNOWN_SHAPE | _CHOICES | _unknown_operators()
    begin = {n for n, node in enumerate(graph.node) if _depends_on_values(node, types, constants, unknown)}
    after = _after(graph, begin)
    made = {name for n in after for name in graph.node[n].output}
    kinds = {graph.node[n].op_type for n in begin if not made & _read(graph.node[n])}
    needed = _read_by_products(graph, after)
    sorts = {n for n, node in enumerate(graph.node) if node.op_type == "TopK" and not needed & set(node.output)}
    left = _after(graph, begin | sorts) if begin else set()
    return left | _small_before(graph, types, left), sorted(kinds)


def _depends_on_values(node: onnx.NodeProto, types: Types, constants: set[str], unknown: set[str]) -> bool:
    """Whether a node, by itself, makes what cannot be compiled."""
    if node.domain not in ("", "ai.onnx"):
        return bool(node.domain == onnx_ml.DOMAIN)
    if node.op_type == "Compress":
        return node.input[1] not in constants
    shaping = [name for place in _SHAPED_BY.get(node.op_type, ()) for name in node.input[place : place + 1] if name]
    return node.op_type in unknown or (node.output[0] not in types and not constants.issuperset(shaping))


def _after(graph: onnx.GraphProto, begin: set[int]) -> set[int]:
    """The places of some nodes, and of all that read what these make, be it by others."""
    found, names = set[int](), set[str]()
    for n, node in enumerate(graph.node):
        if n in begin or names & _read(node):
            found.add(n)
            names.update(node.output)
    return found


def _small_before(graph: onnx.GraphProto, types: Types, left: set[int]) -> set[int]:
    """What only the rest reads, and belongs to it: comparisons, indices and the like, since a rounding may turn them;
    and parts of a tensor that can cross over as one, as the scores of each class are."""
    outputs = {value.name for value in graph.output}
    readers: dict[str, set[int]] = {}
    for n, node in enumerate(graph.node):
        for name in _read(node):
            readers.setdefault(name, set()).add(n)
    found = set[int]()
    for n in reversed(range(len(graph.node))):
        node = graph.node[n]
        names = [name for name in node.output if name]
        is_for_the_rest = not outputs & set(names) and all(readers.get(name, set()) <= left | found for name in names)
        is_choice = all(name in types and types[name][0] not in _FLOATS for name in names)
        is_small = node.op_type in _PARTS or (is_choice and not _PRODUCT.search(node.op_type))
        if n not in left and is_for_the_rest and is_small:
            found.add(n)
    return found


def _read_by_products(graph: onnx.GraphProto, left: set[int]) -> set[str]:
    """Names of tensors that a product or a convolution that is not left needs, be it by others."""
    needed = set[str]()
    for n in reversed(range(len(graph.node))):
        node = graph.node[n]
        if (n not in left and _PRODUCT.search(node.op_type)) or needed & set(node.output):
            needed |= _read(node)
    return needed


def _read(node: onnx.NodeProto) -> set[str]:
    return ({*node.input} | onnx_folding.read_inside(node)) - {""}


def _model(
    proto: onnx.ModelProto,
    nodes: Iterable[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
) -> onnx.ModelProto:
    """Some operators of a model, with the weights that they read."""
    made = onnx.ModelProto(ir_version=max(proto.ir_version, 4), opset_import=proto.opset_import)
    made.graph.name = proto.graph.name or "graph"
    made.graph.node.extend(nodes)
    made.graph.input.extend(inputs)
    made.graph.output.extend(outputs)
    read = {name for node in made.graph.node for name in _read(node)}
    made.graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name in read)
    made.graph.sparse_initializer.extend(each for each in proto.graph.sparse_initializer if each.values.name in read)
    onnx_folding.drop_unread(made.graph)
    return made


def _value(name: str, types: Types) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, *types[name])


def _described(value: onnx.ValueInfoProto) -> dict[str, Any]:
    tensor = value.type.tensor_type
    return {
        "name": value.name,
        "shape": list(_extents(tensor.shape)) if tensor.HasField("shape") else ["?"],
        "dtype": helper.tensor_dtype_to_np_dtype(tensor.elem_type).name if tensor.elem_type else "?",
    }


def _extents(shape: onnx.TensorShapeProto) -> Iterator[int | str]:
    for dim in shape.dim:
        yield int(dim.dim_value) if dim.HasField("dim_value") else str(dim.dim_param or "?")
