"""Where compiled programs run: a device of this machine, or one behind a TVM RPC tracker. Used in worker processes."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tvm
from tvm import rpc
from tvm.target import Target

from lib.contracts.statuses import Status
from lib.machine import host
from lib.measure.protocol import DeviceFault, Failed
from lib.measure.tracker import Tracker
from lib.rpc_server import CRASHED

_TIMED_OUT = "RPCSessionTimeoutError"  # TVM's servers begin so what they say of a session that was too long
# What CUDA says where it is the device that failed, not the program on it: a GPU that fell off its bus, say.
_GPU_LOST = (
    "CUDA_ERROR_NO_DEVICE",
    "no CUDA-capable device is detected",
    "CUDA_ERROR_INVALID_DEVICE",
    "invalid device ordinal",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA-capable device(s) is/are busy or unavailable",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
    "uncorrectable ECC error encountered",
    "CUDA_ERROR_NOT_INITIALIZED",
    "initialization error",
    "CUDA_ERROR_UNKNOWN",
    "unknown error",
)
_NO_RUNTIME = (
    "TVM cannot use this machine's GPUs: its libtvm_runtime_cuda.so needs libcuda.so.1, which comes with NVIDIA's "
    "driver, and libcudart.so.13 of CUDA 13. Put their folders into LD_LIBRARY_PATH."
)
_LOST = (
    "kShutdown",
    "RPCCode::kReturn",
    "Connection reset",
    "Broken pipe",
    "Connect to",
    "Cannot connect",
    "socket",
    "Socket",
)


class Device(Protocol):
    """A device while it is ours."""

    @property
    def device(self) -> Any:
        """Its `tvm.runtime.Device`."""
        ...

    @property
    def name(self) -> str:
        """For people, and for MEASUREMENTS."""
        ...

    def load(self, library: Path) -> Any:
        """Load a shared library that was compiled for it."""
        ...

    def tensor(self, array: np.ndarray) -> tvm.runtime.Tensor:
        """Copy an array to it."""
        return tvm.runtime.tensor(array, self.device)

    def placed(self, tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        """A tensor of this machine's memory, on the device: a copy."""
        return tensor.copyto(self.device)


class DeviceSource(Protocol):
    """What lends a process devices, one at a time."""

    def session(self, limit_s: float) -> Any:
        """A context in which the device is ours, for so long at most; waits for it before."""
        ...


class Unfit(Exception):
    """A device is not what the target says."""


class LocalDevice(Device):
    """The CPU of this machine, or the first GPU that CUDA shows to this process."""

    def __init__(self, kind: str, on_grant: Callable[[], None] = lambda: None) -> None:
        self._kind, self._on_grant = kind, on_grant

    @cached_property
    def device(self) -> Any:
        """Looked up when it is needed: a process that only compiles for a GPU may have none."""
        return tvm.cpu() if self._kind == "llvm" else tvm.device(self._kind, 0)

    @property
    def name(self) -> str:
        if self._kind == "llvm":
            return host.cpu_name()
        which = os.environ.get("CUDA_VISIBLE_DEVICES", "")  # one of several alike: see `fleet.GpuFleet`
        return f"{self.device.device_name} {which}".strip()

    def load(self, library: Path) -> Any:
        return tvm.runtime.load_module(str(library))

    def placed(self, tensor: tvm.runtime.Tensor) -> tvm.runtime.Tensor:
        return tensor if self._kind == "llvm" else super().placed(tensor)

    @contextmanager
    def session(self, limit_s: float) -> Iterator[Device]:
        """The limit is kept by whoever started this process.

        Raises:
            Unfit: TVM was loaded without what it needs for such a device.
        """
        if self._kind != "llvm" and not tvm.runtime.enabled(self._kind):
            raise Unfit(_NO_RUNTIME)
        self._on_grant()
        yield self


class RpcDevices:
    """Servers behind a tracker; which of them is ours is the tracker's choice, anew for each session."""

    def __init__(self, tracker: Tracker, key: str, target: Target, on_grant: Callable[[], None]) -> None:
        self._tracker, self._key, self._on_grant = tracker, key, on_grant
        self._kind = str(target.kind.name)
        self._threads = int(target.attrs.get("num-cores", 0))  # of a CPU

    @contextmanager
    def session(self, limit_s: float) -> Iterator[Device]:
        """Its server ends a session that takes longer.

        Raises:
            Unfit: What is measured there is not what is deployed.
        """
        grant = self._tracker.request(self._key)
        self._on_grant()
        session = rpc.connect(grant.host, grant.port, grant.match_key, limit_s)
        name = f"{self._key} at {grant.host}:{grant.port}"
        found = int(session.get_function("runtime.NumThreads")()) if self._threads else 0
        if found != self._threads:
            raise Unfit(
                f"The server {name} runs kernels on {found} threads, but the target has {self._threads}. Start it with "
                f"`--threads {self._threads}`, or tune with `--threads {found}`."
            )
        yield _RpcDevice(session, self._kind, name)


class _RpcDevice(Device):
    def __init__(self, session: Any, kind: str, name: str) -> None:
        self._session, self._name = session, name
        self._device = session.cpu() if kind == "llvm" else session.device(kind, 0)

    @property
    def device(self) -> Any:
        return self._device

    @property
    def name(self) -> str:
        return self._name

    def load(self, library: Path) -> Any:
        self._session.upload(str(library))
        return self._session.load_module(library.name)


def explain(error: Exception) -> Failed | None:
    """What an error of a session says of a candidate, or of the device; None if nothing but that it failed."""
    if isinstance(error, Unfit):
        return Failed(DeviceFault.UNFIT, str(error))
    text = str(error)
    for sign, status in ((_TIMED_OUT, Status.TIMEOUT), (CRASHED, Status.CRASH)):
        said = next((line[line.index(sign) :].strip() for line in text.splitlines() if sign in line), "")
        if said:
            return Failed(DeviceFault.LOST if "SIGKILL" in said else status, said)  # SIGKILL comes from outside
    if "CUDA" in text and (sign := next((sign for sign in _GPU_LOST if sign in text), "")):
        return Failed(DeviceFault.LOST, f"the GPU failed: {sign}")
    if any(sign in text for sign in _LOST):
        return Failed(DeviceFault.LOST, f"the connection to the device broke: {text.strip().splitlines()[-1]}")
    return None
