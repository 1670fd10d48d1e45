"""Short content digests: ids that are equal on every platform, unlike TVM's structural hash."""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_LENGTH = 16  # hex digits: 64 bits, so that a billion ids meet with a probability of 3 %


def of_text(*texts: str) -> str:
    """Digest of texts in order; ("ab", "c") and ("a", "bc") differ."""
    state = hashlib.sha256()
    for text in texts:
        data = text.encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[:_LENGTH]


def of_trace(trace: str) -> str:
    """Digest of a trace in JSON, but for what postprocessors added: known before a program is made."""
    try:
        instructions, decisions = json.loads(trace)
    except (ValueError, TypeError):  # no trace: equal texts are equal all the same
        return of_text(trace)
    return of_decided(before_postprocessors(instructions), sorted(decisions))


def before_postprocessors(instructions: Sequence[Any]) -> Sequence[Any]:
    """Those of a trace, as JSON has them, that a space's sketch made; all of them if no postprocessor came after it."""
    end = next((n for n, instruction in enumerate(instructions) if instruction[0] == "EnterPostproc"), None)
    return instructions[:end]


def of_decided(instructions: Sequence[Any], decisions: Sequence[Any]) -> str:
    """`of_trace` of a trace without postprocessors, with decisions in the order of their instructions."""
    return of_text(json.dumps([instructions, decisions]))


def seed(*parts: object) -> int:
    """A seed for TVM, in [1, 2**31 - 1), from anything with a stable text."""
    return int(of_text(*map(str, parts)), 16) % (2**31 - 2) + 1


def file_name(label: str) -> str:
    """A readable file name: equal for equal labels, the label itself if that can be one."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", label) or "none"
    return name if name == label and len(name) <= 60 else f"{name[:60]}-{of_text(label)[:8]}"


def of_bytes(chunks: Iterable[bytes | memoryview]) -> str:
    """Digest of a stream of bytes."""
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()[:_LENGTH]


def of_json(value: object) -> str:
    """Digest of a JSON value, whatever the order of its keys."""
    return of_text(json.dumps(value, sort_keys=True, separators=(",", ":")))


def of_file(path: Path) -> str:
    """Digest of a file's bytes."""
    with path.open("rb") as file:
        return of_bytes(iter(lambda: file.read(1 << 20), b""))


def of_state(path: Path) -> str:
    """`of_file`, which reads a file anew only when its date, size or inode are others than before."""
    state = path.stat()
    return _of_state(path, state.st_mtime_ns, state.st_size, state.st_ino)


@lru_cache(maxsize=100_000)
def _of_state(path: Path, *_state: int) -> str:
    return of_file(path)
