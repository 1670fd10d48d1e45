"""Messages of `lib.measure.protocol` as lines of JSON, and back; nothing that is read can run code."""

import json
import math
import os
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from lib.contracts.errors import ProtocolError
from lib.measure.protocol import REPLIES, REQUESTS, Reply, Request


def encode(message: Request[Any] | Reply) -> bytes:
    """A message as a line."""
    found = {"message": type(message).__name__, **_encoded(message)}
    return json.dumps(found, allow_nan=False, default=os.fspath).encode() + b"\n"


def decode_request(line: str | bytes) -> Request[Any]:
    """Read a request.

    Raises:
        ProtocolError: It is none, or not as its type has it.
    """
    return _decode(line, {kind.__name__: kind for kind in REQUESTS})


def decode_reply(line: str | bytes) -> Reply:
    """Read a reply.

    Raises:
        ProtocolError: It is none, or not as its type has it.
    """
    return _decode(line, {kind.__name__: kind for kind in REPLIES})


def _decode(line: str | bytes, kinds: dict[str, type[Any]]) -> Any:
    try:
        found = json.loads(line)
    except ValueError:
        raise ProtocolError(f"not a message: {_short(line)}") from None
    name = found.pop("message", None) if isinstance(found, dict) else None
    if not isinstance(name, str) or name not in kinds:
        raise ProtocolError(f"not one of {', '.join(kinds)}: {_short(line)}")
    return _made(kinds[name], found)


def _made(kind: type[Any], values: dict[str, Any]) -> Any:
    """A dataclass from the JSON of its fields: all of them, and no others."""
    expected = {field.name: field.type for field in fields(kind)}
    if values.keys() != expected.keys():
        raise ProtocolError(f"{kind.__name__} has the fields {', '.join(expected)}, but got {', '.join(values)}")
    try:
        return kind(**{name: _decoded(expected[name], value) for name, value in values.items()})
    except TypeError as error:
        raise ProtocolError(f"{kind.__name__}: {error}") from None


def _encoded(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _encoded(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [_encoded(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has neither infinity nor NaN
    return value


def _decoded(kind: Any, value: Any) -> Any:
    """A value of JSON as the type of a field. Raises: TypeError: It is of another type."""
    if isinstance(kind, UnionType):
        return _first_fitting(get_args(kind), value)
    if get_origin(kind) is tuple and isinstance(value, list):
        kinds = get_args(kind)
        kinds = (kinds[0],) * len(value) if kinds[-1] is ... else kinds
        if len(kinds) == len(value):
            return tuple(_decoded(each, item) for each, item in zip(kinds, value, strict=True))
    elif is_dataclass(kind) and isinstance(value, dict):
        return _made(kind, value)  # type: ignore[arg-type]
    elif kind is float and (type(value) in (int, float) or value in ("inf", "-inf", "nan")):
        return float(value)
    elif kind in (str, int, bool, NoneType) and type(value) is kind:
        return value
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif isinstance(kind, type) and issubclass(kind, Enum) and value in [member.value for member in kind]:
        return kind(value)
    raise TypeError(f"{_short(value)} is no {getattr(kind, '__name__', kind)}")


def _first_fitting(kinds: tuple[Any, ...], value: Any) -> Any:
    for kind in kinds:
        try:
            return _decoded(kind, value)
        except TypeError:
            continue
    raise TypeError(f"{_short(value)} is none of {', '.join(kind.__name__ for kind in kinds)}")


def _short(value: Any) -> str:
    return repr(value)[:200]
