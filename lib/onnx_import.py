"""ONNX files as models: checked before anything is converted, with errors that name the operator or the input."""

import warnings
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from tvm.error import OpNotImplemented
from tvm.relax.frontend.onnx import from_onnx

from lib import onnx_folding
from lib.errors import ModelError
from lib.graph import Model, lift_constants
from lib.simplify import channels_last, simplify


def load(path: Path) -> Model:
    """Import an ONNX file with static shapes; convolutions in NHWC, batch norms folded.

    Raises:
        ModelError: The file is missing or damaged, has dynamic shapes, or uses an operator that TVM does not
            import. The message says which.
    """
    proto = _read(path)
    _check_inputs(proto, path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # onnx's checker knows no operators but its own; the importer decides
            onnx_folding.fold(proto)
            module = from_onnx(proto)
    except OpNotImplemented as error:
        operators = str(error).rpartition(": ")[2].strip()
        raise ModelError(f"{path} uses operators that cannot be imported: {operators}.") from error
    except Exception as error:  # the importer raises whatever its converters meet
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{path} cannot be imported: {reason[-1]}") from error
    return lift_constants(channels_last(simplify(module)))


def require(path: Path) -> None:
    """Raise a ModelError unless there is such a file."""
    if not path.is_file():
        raise ModelError(f"--model {path}: there is no such file.")


def _read(path: Path) -> onnx.ModelProto:
    require(path)
    try:
        proto = onnx.load(path)
    except DecodeError as error:
        raise ModelError(f"{path} is damaged or no ONNX file: {error}") from error
    except onnx.checker.ValidationError as error:  # external data that is not there
        raise ModelError(f"{path} is incomplete: {str(error).splitlines()[0]}") from error
    if not proto.graph.node:
        raise ModelError(f"{path} is damaged or empty: it holds no operators.")
    return proto


def _check_inputs(proto: onnx.ModelProto, path: Path) -> None:
    """Leave true inputs only (old files list the weights too), all of a fixed shape."""
    weights = {tensor.name for tensor in proto.graph.initializer}
    true_inputs = [value for value in proto.graph.input if value.name not in weights]
    del proto.graph.input[:]
    proto.graph.input.extend(true_inputs)
    for value in true_inputs:
        tensor = value.type.tensor_type
        if not tensor.HasField("shape"):
            raise ModelError(f"{path}: input {value.name!r} has no shape. Export the model with static shapes.")
        dims = [
            dim.dim_param or "?" if not dim.HasField("dim_value") else str(dim.dim_value) for dim in tensor.shape.dim
        ]
        if not all(dim.isdigit() and int(dim) > 0 for dim in dims):
            raise ModelError(
                f"{path}: input {value.name!r} has the dynamic shape ({', '.join(dims)}). "
                "Export the model with static shapes."
            )
