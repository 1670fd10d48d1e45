"""ONNX files as models: checked before anything is converted, with errors that name the operator or the input."""

import contextlib
import io
import warnings
from collections.abc import Mapping
from pathlib import Path

import onnx
import tvm
from google.protobuf.message import DecodeError
from tvm.error import OpNotImplemented
from tvm.relax.frontend.onnx import from_onnx

from lib import onnx_folding
from lib.errors import ModelError, require_file
from lib.graph import Model, lift_constants
from lib.simplify import channels_last, simplify


def load(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Model:
    """Import an ONNX file; convolutions in NHWC, batch norms folded.

    Args:
        shapes: Of inputs, by name, where the file leaves dimensions open; or extents (one number) of dimensions,
            by their name in the file.

    Raises:
        ModelError: The file is missing or damaged, has dynamic shapes that `shapes` does not settle, or uses an
            operator that TVM does not import. The message says which.
    """
    module = _import(path, dict(shapes or {}))  # the file's own copy of the weights is gone with it
    return lift_constants(channels_last(simplify(module)))


def _import(path: Path, shapes: dict[str, tuple[int, ...]]) -> tvm.IRModule:
    proto = _read(path)
    _leave_true_inputs(proto.graph)
    _settle_shapes(proto.graph, shapes, path)
    onnx_folding.fold(proto)
    return _convert(proto, path)


def _read(path: Path) -> onnx.ModelProto:
    require_file(path)
    try:
        proto = onnx.load(path)
    except DecodeError as error:
        raise ModelError(f"{path} is damaged or no ONNX file: {error}") from error
    except (onnx.checker.ValidationError, FileNotFoundError) as error:  # external data that is not there
        raise ModelError(f"{path} is incomplete: {str(error).splitlines()[0]}") from error
    if not proto.graph.node:
        raise ModelError(f"{path} is damaged or empty: it holds no operators.")
    return proto


def _leave_true_inputs(graph: onnx.GraphProto) -> None:
    """Old files list the weights among the inputs."""
    weights = {tensor.name for tensor in graph.initializer}
    true_inputs = [value for value in graph.input if value.name not in weights]
    del graph.input[:]
    graph.input.extend(true_inputs)


def _settle_shapes(graph: onnx.GraphProto, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    """Give every input a static shape."""
    names = {value.name for value in graph.input}
    open_dims = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    for name, shape in shapes.items():
        if name not in names | open_dims or (name not in names and len(shape) != 1):
            raise ModelError(
                f"--shape {name}={','.join(map(str, shape))}: {path} has the inputs {', '.join(sorted(names))}"
                + (f" and the open dimensions {', '.join(sorted(open_dims))} (one extent each)." if open_dims else ".")
            )
    for value in graph.input:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape") and value.name not in shapes:
            raise ModelError(
                f"{path}: input {value.name!r} has no shape. Give it one: --shape {value.name}=EXTENT,EXTENT,..."
            )
        _settle(value, shapes, path)


def _settle(value: onnx.ValueInfoProto, shapes: dict[str, tuple[int, ...]], path: Path) -> None:
    tensor = value.type.tensor_type
    found = [dim.dim_param or "?" if not dim.HasField("dim_value") else str(dim.dim_value) for dim in tensor.shape.dim]
    given = shapes.get(value.name)
    if given is None:
        given = tuple(shapes.get(dim, (int(dim) if dim.isdigit() else 0,))[0] for dim in found)
    elif tensor.HasField("shape") and (
        len(given) != len(found) or any(d.isdigit() and int(d) not in (0, n) for d, n in zip(found, given, strict=True))
    ):
        raise ModelError(
            f"--shape {value.name}={','.join(map(str, given))}: the file {path} has ({', '.join(found)}) there."
        )
    if not all(given):
        raise ModelError(
            f"{path}: input {value.name!r} has the dynamic shape ({', '.join(found)}). Say which to tune for: "
            f"--shape {value.name}={','.join(str(n or dim) for n, dim in zip(given, found, strict=True))} with numbers."
        )
    del tensor.shape.dim[:]
    tensor.shape.dim.extend(onnx.TensorShapeProto.Dimension(dim_value=extent) for extent in given)


def _convert(proto: onnx.ModelProto, path: Path) -> tvm.IRModule:
    told = io.StringIO()  # the importer prints what it raises next
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(told):
            warnings.simplefilter("ignore")  # onnx's checker knows no operators but its own; the importer decides
            return from_onnx(proto)
    except OpNotImplemented as error:
        operators = str(error).rpartition(": ")[2].strip()
        raise ModelError(f"{path} uses operators that cannot be imported: {operators}.") from error
    except Exception as error:  # the importer raises whatever its converters meet
        reason = str(error).strip().splitlines() or [type(error).__name__]
        operator = told.getvalue().partition("Error converting operator ")[2].partition(",")[0]
        where = f" (operator {operator})" if operator else ""
        raise ModelError(f"{path} cannot be imported{where}: {reason[-1]}") from error
