"""TVM's runtime without TVM: its shared libraries, and the functions that they register.

`import tvm` loads a compiler of 260 MB and takes about a second. A compiled model needs `libtvm_runtime` and the
package `tvm_ffi`, which is what this imports. Who imports TVM as well, before or after, gets the same library.
"""

import ctypes
import re
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tvm_ffi

from .errors import BundleError

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


@lru_cache(maxsize=1)
def _package() -> Path:
    spec = find_spec("tvm")  # finds it, and does not run it
    if spec is None or spec.origin is None:
        raise BundleError("TVM's runtime is not installed here: `pip install apache-tvm`.")
    return Path(spec.origin).parent


@lru_cache(maxsize=1)
def version() -> str:
    """Of TVM, e.g. `0.27.0.post1`."""
    text = (_package() / "_version.py").read_text()
    found = re.search(r"version\s*=\s*[\"']([^\"']+)", text)
    return found.group(1) if found else ""


@lru_cache(maxsize=1)
def load() -> None:
    """Load the runtime, once."""
    folder = _package() / "lib"
    library = folder / f"libtvm_runtime{_SUFFIX}"
    if not library.exists():
        raise BundleError(f"{library} does not exist: TVM is installed, but without its runtime.")
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    extra = folder / f"libtvm_runtime_extra{_SUFFIX}"  # sorting, which some models need
    if extra.exists():
        ctypes.CDLL(str(extra))


def function(name: str) -> Any:
    """A function that TVM registers, by its name."""
    load()
    return tvm_ffi.get_global_func(name)


def machine(executable: Any) -> Any:
    """A virtual machine for a library's executable, with the CPU as its device and TVM's pooled allocator, which all
    machines of a process share."""
    made = executable["vm_load_executable"]()
    cpu, pooled = 1, 2
    made["vm_initialization"](cpu, 0, pooled)
    return made
