"""Tensors that an ONNX file keeps in other files: which files, and whether they hold what is asked of them."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from lib.contracts.errors import ModelError


def files(path: Path) -> list[Path]:
    """The files that an ONNX file refers to and that are there, by name; none of what is no ONNX file.

    Every command asks, so a file that cannot refer to any is not parsed: each reference has the key `location`.
    """
    if not _contains(path, b"location"):
        return []
    try:
        proto = onnx.load(path, load_external_data=False)
        named = {ExternalDataInfo(tensor).location for tensor in _tensors(proto.graph)}
    except (DecodeError, ValueError):
        return []  # the import says so
    return [file for name in sorted(named) if (file := path.parent / name).is_file()]


def _contains(path: Path, text: bytes) -> bool:
    if not path.stat().st_size:  # which cannot be mapped
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(text) >= 0


def check(proto: onnx.ModelProto, path: Path) -> None:
    """Look at what is asked of other files before anything is read.

    Args:
        proto: As it was read without external data.

    Raises:
        ModelError: A file is missing or too short.
        ValueError: An offset or a length is negative or no number.
    """
    for tensor in _tensors(proto.graph):
        info = ExternalDataInfo(tensor)
        file = path.parent / info.location
        if not file.is_file():
            raise ModelError(f"{path} is incomplete: {tensor.name} is in {info.location}, which is not there.")
        offset, size = info.offset or 0, file.stat().st_size
        length = size - offset if info.length is None else info.length
        if offset + length > size:
            raise ModelError(
                f"{path}: {tensor.name} should be {length:,} bytes of {info.location} from byte {offset:,} on, but "
                f"that has {size:,}."
            )


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Those with external data, in initializers and in the attributes of operators, at any depth."""
    found = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            found += [attribute.t, *attribute.tensors]
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)
    yield from (tensor for tensor in found if uses_external_data(tensor))
