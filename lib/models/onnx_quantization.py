"""ONNX files in float32 quantised to bytes by ONNX Runtime, with samples of inputs to find the ranges of tensors.

What comes of it is a file as users bring them (QDQ), and is imported like one. ONNX Runtime is an extra, since nothing
else needs it: `pip install family-tuner[int8]`.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from lib.contracts import digests, tables
from lib.contracts.errors import ConfigError, ModelError
from lib.machine.dots import INT7
from lib.tir import small_weights

_BYTE = 8
_MOST, _WIDER = 64, 1.02  # of seven bits; by how much a scale grows at a time
_OPSET = 13  # the first with scales along an axis
_PRODUCTS = ("Conv", "MatMul", "Gemm")
# Beside convolutions: what would else have to go back to floats between them.
_BETWEEN = ("Add", "MaxPool", "Relu", "Clip", "Concat", "Reshape", "Transpose", "Flatten", "GlobalAveragePool")


def quantized(file: Path, calibration: Path, folder: Path, bits: int = 8) -> Path:
    """The quantised file, in a folder; made if it is not there of the same file and samples.

    Args:
        bits: Of weights: 8; or 7, which CPUs with AVX2 alone multiply faster (`lib.tir.small_weights`), with scales for
            which the products of two words may be added in 16 bits.
        calibration: A folder of `.npz` files, each with a sample: an array for each input, by its name. Or one such
            file, whose arrays have all samples along an axis before the others.

    Raises:
        ConfigError: ONNX Runtime is not installed, or the samples do not fit.
        ModelError: It cannot quantise the file, or there is nothing in it to quantise.
    """
    try:
        from onnxruntime import quantization as ort
    except ImportError:
        raise ConfigError(
            "--precision int8 quantises with ONNX Runtime, which is not installed: pip install 'onnxruntime>=1.23', or "
            "give a file that is quantised already (QDQ)."
        ) from None
    files = sorted(calibration.glob("*.npz")) if calibration.is_dir() else [calibration]
    made_from = digests.of_text(digests.of_state(file), *map(digests.of_state, files))
    out = folder / f"{file.stem}-int{bits}-{made_from[:8]}.onnx"
    if out.exists():
        return out
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=tables.BUILDING) as work:
        try:
            _quantize(file, Path(work), ort, _samples(file, files), bits)
        except ConfigError:
            raise
        except Exception as error:  # whatever its many passes raise for files that nobody tried
            reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            raise ModelError(f"{file}: ONNX Runtime cannot quantise it: {reason}") from error
        made = Path(work) / "quantized.onnx"
        if not is_quantized(made):
            raise ModelError(
                f"--precision int8: {file} has nothing to quantise: no {', '.join(_PRODUCTS)} with weights."
            )
        made.replace(out)
    return out


def is_quantized(file: Path) -> bool:
    """Whether a file has bytes between its operators."""
    nodes = onnx.load(file, load_external_data=False).graph.node
    return any(node.op_type == "QuantizeLinear" or node.op_type.startswith("QLinear") for node in nodes)


def _quantize(file: Path, work: Path, ort: Any, samples: list[dict[str, np.ndarray]], bits: int) -> None:
    proto, prepared = onnx.load(file), work / "prepared.onnx"
    if max(each.version for each in proto.opset_import if each.domain in ("", "ai.onnx")) < _OPSET:
        file = work / "newer.onnx"
        onnx.save(onnx.version_converter.convert_version(proto, _OPSET), file)
    ort.quant_pre_process(str(file), str(prepared), skip_symbolic_shape=True)
    graph = _name_products(prepared).graph
    weights = {tensor.name for tensor in graph.initializer}
    products = [node for node in graph.node if node.op_type == "MatMul"]
    has_images = any(node.op_type == "Conv" for node in graph.node)
    overrides = {} if bits == _BYTE else _with_room(graph)
    ort.quantize_static(
        str(prepared), str(work / "quantized.onnx"), _Reader(samples), quant_format=ort.QuantFormat.QDQ,
        per_channel=True, activation_type=ort.QuantType.QUInt8, weight_type=ort.QuantType.QInt8,
        reduce_range=bits < _BYTE,
        op_types_to_quantize=[*_PRODUCTS, *(_BETWEEN if has_images else ())],
        nodes_to_exclude=[node.name for node in products if node.input[1] not in weights],
        extra_options={"TensorQuantOverrides": overrides},
    )  # fmt: skip


def _name_products(file: Path) -> onnx.ModelProto:
    """A file, in which each product has a name of its own now: by these some are left out, and ONNX needs none."""
    proto = onnx.load(file)
    for n, node in enumerate(each for each in proto.graph.node if each.op_type in _PRODUCTS):
        node.name = f"{node.op_type}_{n}"
    onnx.save(proto, file)
    return proto


def _with_room(graph: onnx.GraphProto) -> dict[str, list[dict[str, Any]]]:
    """The ranges of weights, by name and output channel, so wide that quantised to seven bits two words of them are
    added together; without those that have that room as they are, and without kernels that are Winograd's."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type in _PRODUCTS and node.input[1] in weights and not _is_winograds(node):
            axis, by_columns = _by_columns(node, numpy_helper.to_array(weights[node.input[1]]))
            ends = [_end_with_room(by_columns[..., n : n + 1]) for n in range(by_columns.shape[-1])]
            found[node.input[1]] = [{"axis": axis, "rmin": np.float32(-end), "rmax": np.float32(end)} for end in ends]
    return found


def _is_winograds(node: onnx.NodeProto) -> bool:
    """Whether a convolution has a window without strides: its products are others (`lib.graph.winograd`)."""
    attributes = {each.name: list(each.ints) for each in node.attribute}
    return max(attributes.get("kernel_shape", [1])) > 1 and max(attributes.get("strides", [1])) == 1


def _by_columns(node: onnx.NodeProto, weight: np.ndarray) -> tuple[int, np.ndarray]:
    """The axis of a weight's output channels, and the weight with these last, after the input channels."""
    if node.op_type == "Conv":
        return 0, np.moveaxis(weight, (1, 0), (-2, -1))
    is_turned = any(each.name == "transB" and each.i for each in node.attribute)
    return (0, weight.T) if is_turned else (weight.ndim - 1, weight)


def _end_with_room(column: np.ndarray) -> float:
    """The largest magnitude that a column's scale is made for; its own, or as much more as it takes."""
    end = float(np.abs(column).max()) or 1.0
    while small_weights.words_together(np.rint(column / end * _MOST).astype(np.int8)) < INT7.words:
        end *= _WIDER
    return end


class _Reader:
    """What ONNX Runtime takes the samples from."""

    def __init__(self, samples: list[dict[str, np.ndarray]]) -> None:
        self._left: Iterator[dict[str, np.ndarray]] = iter(samples)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._left, None)


def _samples(file: Path, files: list[Path]) -> list[dict[str, np.ndarray]]:
    """Arrays by the names of the inputs, checked against them.

    Raises:
        ConfigError: There are none, or they do not fit.
    """
    graph = onnx.load(file, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in graph.input if v.name not in weights}
    found: list[dict[str, np.ndarray]] = []
    for path in files:
        with np.load(path) as arrays:
            sample = {name: arrays[name] for name in arrays.files}
        if set(sample) != set(ranks):
            raise ConfigError(f"--calibration {path} has {', '.join(sorted(sample)) or 'no arrays'}; expected one for "
                              f"each input of {file}: {', '.join(sorted(ranks))}.")  # fmt: skip
        more = {array.ndim - ranks[name] for name, array in sample.items()}
        if more == {0}:
            found.append(sample)
        elif more == {1}:
            found += [dict(zip(sample, rows, strict=True)) for rows in zip(*sample.values(), strict=True)]
        else:
            raise ConfigError(f"--calibration {path}: the inputs of {file} have the ranks {ranks}, its arrays "
                              f"{ {name: array.ndim for name, array in sample.items()} }; expected the same, or one "
                              "axis more, before the others, for several samples.")  # fmt: skip
    if not found:
        raise ConfigError("--calibration names no samples: expected a .npz file, or a folder of them.")
    return found
