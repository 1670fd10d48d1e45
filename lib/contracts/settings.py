"""Frozen configs from the sections of a configuration file: unknown keys and wrong types are named."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, field, fields, is_dataclass
from typing import Any, TypeVar

from lib.contracts import digests
from lib.contracts.errors import ConfigError

Config = TypeVar("Config")
_LIMIT = "limit"


def limit(default: Any) -> Any:
    """A field that limits the work but decides no result: with another value the same run goes on."""
    return field(default=default, metadata={_LIMIT: True})


def deciding(config: Any) -> dict[str, Any]:
    """The fields of a config that decide results: equal ones, equal candidates and comparable latencies."""
    return {f.name: getattr(config, f.name) for f in fields(config) if not f.metadata.get(_LIMIT)}


def limits(config: Any) -> dict[str, Any]:
    """The other fields."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.metadata.get(_LIMIT)}


def configured(kind: type[Config], section: str, values: Mapping[str, str], **options: Any) -> Config:
    """Build a config dataclass.

    Args:
        kind: A dataclass whose fields are int, float or str and have defaults.
        section: The section's name, for messages.
        values: What the section says, as text.
        options: Fields that come from the command line; the section must not have them.

    Raises:
        ConfigError: A key is unknown, a value is not of its field's type, or a number is negative or not finite.
    """
    assert is_dataclass(kind)
    types: dict[str, Any] = {f.name: type(f.default) for f in fields(kind) if f.name not in options}
    unknown = sorted(set(values) - set(types))
    if unknown:
        raise ConfigError(f"[{section}] has unknown keys: {', '.join(unknown)}. It may have: {', '.join(types)}.")
    parsed = {}
    for key, text in values.items():
        try:
            parsed[key] = types[key](text)
        except ValueError:
            raise ConfigError(f"[{section}] {key} must be {types[key].__name__}, but got {text!r}.") from None
        if types[key] is not str and not 0 <= parsed[key] < math.inf:  # false for NaN
            raise ConfigError(f"[{section}] {key} must be a number from 0 on, but got {text!r}.")
    return kind(**parsed, **options)


def digest(*configs: Any) -> str:
    """Digest of configs: equal settings, equal digest."""
    parts = [asdict(config) if is_dataclass(config) and not isinstance(config, type) else config for config in configs]
    return digests.of_json(json.loads(json.dumps(parts)))
