"""Where candidates are measured: what `--devices` says, which is also what a driver process is started with."""

import re
from dataclasses import dataclass
from pathlib import Path

from lib.contracts import digests
from lib.contracts.errors import ConfigError
from lib.measure.tracker import Tracker

_RPC = re.compile(r"rpc://(?P<host>[^/]+):(?P<port>[0-9]{1,5})/(?P<key>[^/]+)")
_FORMS = "`local`, `rpc://HOST:PORT/KEY` or `replay:FOLDER`"


@dataclass(frozen=True, slots=True)
class Local:
    """This CPU, or every GPU that CUDA shows here."""

    identity = ""
    is_here = True  # measuring takes this machine for itself
    can_compile = True  # there are devices to time and check winners on

    def __str__(self) -> str:
        return "local"


@dataclass(frozen=True, slots=True)
class Rpc:
    """All servers of a key behind a TVM RPC tracker, on whatever hosts."""

    tracker: Tracker
    key: str

    is_here = False
    can_compile = True

    @property
    def identity(self) -> str:
        """Part of the identity of a run."""
        return f"rpc {self.key}"

    def __str__(self) -> str:
        return f"rpc://{self.tracker}/{self.key}"


@dataclass(frozen=True, slots=True)
class Replay:
    """No device: what was measured before."""

    folder: Path

    is_here = False
    can_compile = False

    @property
    def identity(self) -> str:
        return f"replay {digests.of_text(str(self.folder.resolve()))}"

    def __str__(self) -> str:
        return f"replay:{self.folder}"


Devices = Local | Rpc | Replay


def parse(text: str) -> Devices:
    """Read what the user wrote, or what `str` made of one of these.

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
    found = _RPC.fullmatch(text)
    if not found:
        raise ConfigError(f"--devices must be {_FORMS}, but got {text!r}.")
    return Rpc(Tracker(found["host"], int(found["port"])), found["key"])
