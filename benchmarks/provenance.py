"""Where rows come from: which code, on which CPU, when."""

import datetime
import subprocess
from pathlib import Path

from lib.machine import host

ROOT = Path(__file__).parent.parent


def revision() -> str:
    """Of this clone."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def columns(threads: int, code: str = "") -> dict[str, str | int]:
    """Columns for every table of measurements.

    Args:
        threads: Of an inference.
        code: Revision of what was measured; default: this clone's.
    """
    date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return {"cpu": host.cpu_name(), "threads": threads, "revision": code or revision(), "date": date}
