"""What can go wrong, by whose turn it is to act.

TunerError
├── ConfigError      an option or a key of luigi.cfg makes no sense: the user changes it
├── ModelError       the model cannot be read or is not supported: the user changes the model
├── TargetError      the target is unknown or does not fit this host: the user changes --target
├── ContractError    a file is damaged, foreign or of another version: the user deletes it, or runs elsewhere
├── MissingInput     a stage was started before the stage it reads from
├── CompilationError the whole model does not compile in the time and memory that it may take: nothing is shipped
├── VerificationError   the compiled model computes something else: nothing is shipped
├── DeviceError      nothing is left to measure on: the user repairs it and runs the same command again
└── ProtocolError    the code changed while worker processes ran: the user runs the same command again

A candidate that fails is none of these: it is a row of MEASUREMENTS with a status.
"""

from pathlib import Path


class TunerError(Exception):
    """Base of every error that the tuner raises on purpose; its text is written for the user."""


class ConfigError(TunerError):
    """An option or a configuration key has a value that cannot work."""


class ModelError(TunerError):
    """The model is unknown, damaged or uses something that is not supported."""


class TargetError(TunerError):
    """The compilation target is unknown or incomplete."""


class ContractError(TunerError):
    """A file is not what its schema promises."""


class MissingInput(TunerError):
    """A file that another stage writes is not there."""


class CompilationError(TunerError):
    """The model as a whole does not compile within its limits."""


class VerificationError(TunerError):
    """The tuned model's outputs differ from the untuned model's."""


class DeviceError(TunerError):
    """No worker is able to measure."""


class ProtocolError(TunerError):
    """What a process sent is no message of `lib.measure.protocol`."""


def require_file(path: str | Path, option: str = "") -> None:
    """Raises: ModelError: A file that the user named is not there."""
    if not Path(path).is_file():
        raise ModelError(f"{option} {path}: there is no such file.".lstrip())
