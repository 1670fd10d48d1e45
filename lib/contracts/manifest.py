"""What was delivered, as JSON: facts, and size and digest of each file; it is written last and decides what is done."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.contracts import digests
from lib.contracts.errors import ContractError, MissingInput
from lib.contracts.tables import written_whole

Facts = Mapping[str, Any]


def write(path: Path, inputs: str, facts: Facts, files: Sequence[Path]) -> Path:
    """Write it.

    Args:
        inputs: Digest of what all of it was made from.
        facts: JSON values; must have every key that readers ask `read` for.
        files: What is delivered, in the manifest's folder.
    """
    with written_whole(path) as partial:
        partial.write_text(text(inputs, facts, files))
    return path


def text(inputs: str, facts: Facts, files: Sequence[Path]) -> str:
    """What `write` writes."""
    described = {file.name: {"bytes": file.stat().st_size, "digest": digests.of_file(file)} for file in files}
    body = {"inputs": inputs, **facts, "files": described}
    return json.dumps({**body, "seal": digests.of_json(body)}, indent=2) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The facts, as they were written.

    Raises:
        MissingInput: It is not there.
        ContractError: It is damaged, or other code wrote it.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise MissingInput(f"{path} does not exist. Run the stage that writes it first.") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"expected JSON, found: {error}") from error
    if not isinstance(found, dict) or "seal" not in found:
        raise _damaged(path, "expected an object with a seal, found none")
    seal = found.pop("seal")
    if seal != digests.of_json(found):
        raise _damaged(path, "its values do not fit its seal")
    return found


def damaged_files(path: Path) -> list[str]:
    """What was delivered and is not there any more, or is other than it was.

    Raises:
        MissingInput, ContractError: See `read`.
    """
    return _damaged_files(path, read(path))


def is_current(path: Path, inputs: str) -> bool:
    """Whether everything is there, whole, and made from these inputs.

    Raises:
        ContractError: The manifest is damaged: what to do is for the user to decide.
    """
    if not path.exists():
        return False
    facts = read(path)
    return bool(facts["inputs"] == inputs) and not _damaged_files(path, facts)


def _damaged_files(path: Path, facts: Facts) -> list[str]:
    return [name for name, said in facts["files"].items() if not _is_whole(path.with_name(name), said)]


def _is_whole(path: Path, said: Mapping[str, Any]) -> bool:
    return path.is_file() and path.stat().st_size == said["bytes"] and digests.of_state(path) == said["digest"]


def _damaged(path: Path, reason: str) -> ContractError:
    return ContractError(f"{path} is damaged: {reason}\nDelete it to have it made again; what was measured is kept.")
