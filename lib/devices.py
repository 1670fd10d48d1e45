"""Where candidates are measured: what `--devices` says."""

from dataclasses import dataclass
from pathlib import Path

from lib import digests
from lib.errors import ConfigError
from lib.tracker import Tracker

_FORMS = "`local`, `rpc://HOST:PORT/KEY` or `replay:FOLDER`"


@dataclass(frozen=True, slots=True)
class Local:
    """This CPU, or every GPU that CUDA shows here."""

    identity = ""


@dataclass(frozen=True, slots=True)
class Rpc:
    """All servers of a key behind a TVM RPC tracker, on whatever hosts."""

    tracker: Tracker
    key: str

    @property
    def identity(self) -> str:
        """What tells measurements of one kind of device from those of others."""
        return f"rpc {self.key}"


@dataclass(frozen=True, slots=True)
class Replay:
    """No device: what was measured before."""

    folder: Path

    @property
    def identity(self) -> str:
        return f"replay {digests.of_text(str(self.folder.resolve()))}"


Devices = Local | Rpc | Replay


def parse(text: str) -> Devices:
    """Read what the user wrote.

    Raises:
        ConfigError: It is none of the forms, or the folder to replay is not there.
    """
    if text == "local":
        return Local()
    if text.startswith("replay:"):
        folder = Path(text.removeprefix("replay:")).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"--devices {text}: there is no folder {folder}.")
        return Replay(folder)
    address, slash, key = text.removeprefix("rpc://").partition("/")
    host, _, port = address.rpartition(":")
    if not text.startswith("rpc://") or not (host and slash and key) or "/" in key or not port.isdigit():
        raise ConfigError(f"--devices must be {_FORMS}, but got {text!r}.")
    return Rpc(Tracker(host, int(port)), key)
