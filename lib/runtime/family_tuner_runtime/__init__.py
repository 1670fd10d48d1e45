"""Runs models that the tuner compiled.

    from family_tuner_runtime import Model
    y = Model("compiled/")(x)

`model` has what is called; below it `session` (threads), `bundle` (the files and what they say), `weights` (the mapped
file), `native` (TVM's runtime), `cpu`. It needs TVM's runtime and NumPy, and starts neither TVM's compiler nor anything
of the tuner. For C++ there is `include/family_tuner_runtime.hpp`.
"""

from pathlib import Path

from .bundle import Bundle, Value
from .errors import BundleError, InputError
from .model import Model

__all__ = ["Bundle", "BundleError", "InputError", "Model", "Value", "include_dir"]


def include_dir() -> Path:
    """Where the C++ header lies."""
    return Path(__file__).parent / "include"
