"""Digest of what a table says: equal for equal rows, however Arrow holds them, in any release of it."""

import hashlib
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from lib.contracts import digests


def digest(table: pa.Table) -> str:
    """Digest of the columns' names and values; types, metadata, chunks and the bytes below a null do not count."""
    return digests.of_bytes(_of_table(table))


def _of_table(table: pa.Table) -> Iterator[bytes | memoryview]:
    for name, column in zip(table.column_names, table.columns, strict=True):
        yield f"{name} {len(column)};".encode()
        yield from _of_array(column.combine_chunks())


def _of_array(array: pa.Array) -> Iterator[bytes | memoryview]:
    """Which values there are, and their bytes; of nested ones level by level."""
    if array.null_count:
        yield np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes()
    yield b"|"
    kind = array.type
    if pa.types.is_struct(kind):
        for child in array.flatten():  # nulls of the struct are nulls of its fields
            yield from _of_array(child)
    elif pa.types.is_fixed_size_list(kind) and not array.null_count:
        yield from _of_array(array.flatten())
    elif pa.types.is_nested(kind):
        yield from _of_array(pc.fill_null(pc.list_value_length(array), 0))
        yield from _of_array(array.flatten())
    elif pa.types.is_string(kind) or pa.types.is_binary(kind):
        whole = pc.fill_null(array.cast(pa.large_binary()), b"")
        yield pc.binary_length(whole).to_numpy(zero_copy_only=False).tobytes()
        yield _data(whole)
    else:
        filled = pc.fill_null(array, pa.scalar(0).cast(kind)) if array.null_count else array
        yield np.ascontiguousarray(filled.to_numpy(zero_copy_only=False)).tobytes()


def _data(array: pa.Array) -> bytes:
    """The texts of a large_binary array one after the other."""
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return b""
    ends = np.frombuffer(offsets, np.int64, len(array) + 1, offset=8 * array.offset)
    return hashlib.sha256(memoryview(data)[int(ends[0]) : int(ends[-1])]).digest()
