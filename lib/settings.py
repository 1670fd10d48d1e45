"""Frozen configs from the sections of a configuration file: unknown keys and wrong types are named."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, TypeVar

from lib import digests
from lib.errors import ConfigError

Config = TypeVar("Config")


def configured(kind: type[Config], section: str, values: Mapping[str, str], **options: Any) -> Config:
    """Build a config dataclass.

    Args:
        kind: A dataclass whose fields are int, float or str and have defaults.
        section: The section's name, for messages.
        values: What the section says, as text.
        options: Fields that come from the command line; the section must not have them.

    Raises:
        ConfigError: A key is unknown, or a value is not of its field's type.
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
    return kind(**parsed, **options)


def digest(*configs: Any) -> str:
    """Digest of configs: equal settings, equal digest."""
    parts = [asdict(config) if is_dataclass(config) and not isinstance(config, type) else config for config in configs]
    return digests.of_json(json.loads(json.dumps(parts)))
