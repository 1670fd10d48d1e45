"""What an ONNX file says beside what it computes: names of outputs, and a licence."""

from pathlib import Path

import onnx

_LICENCE_KEYS = ("license", "licence", "license_name", "org.opencontainers.image.licenses")


def output_names(path: Path) -> list[str]:
    """In order."""
    return [value.name for value in _load(path).graph.output]


def open_axes(path: Path) -> dict[str, tuple[str, ...]]:
    """By input: the name of each dimension that is open, and empty text for the others."""
    graph = _load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    return {
        value.name: tuple(dim.dim_param for dim in value.type.tensor_type.shape.dim)
        for value in graph.input if value.name not in weights
    }  # fmt: skip


def licence(path: Path) -> str:
    """What its metadata call its licence; empty if they say nothing of it."""
    said = {entry.key.lower(): entry.value for entry in _load(path).metadata_props}
    return next((said[key] for key in _LICENCE_KEYS if said.get(key)), "")


def _load(path: Path) -> onnx.ModelProto:
    return onnx.load(path, load_external_data=False)
