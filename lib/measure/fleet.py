"""Devices that compiled files can be sent to: which there are now, and how one of them is used."""

import socket
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import psutil

from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.measure.devices import Local, Rpc
from lib.measure.tracker import Tracker

_MOST = 64  # devices of one key that are used


@dataclass(frozen=True, slots=True)
class Slot:
    """What a driver process is started with to use one device."""

    devices: Local | Rpc  # of which it uses one at a time
    environment: tuple[tuple[str, str], ...] = ()


class Fleet(Protocol):
    """The devices of a run."""

    keeps_limits: bool  # whether a device ends by itself what takes too long

    @property
    def kind(self) -> str:
        """Of its devices: equal for equally fast ones."""
        ...

    def slots(self) -> list[Slot]:
        """One for each device that there is now; at least one if others may come."""
        ...

    def missing(self) -> str:
        """Why there is none, and what to do."""
        ...

    def shares_cpu(self) -> bool:
        """Whether compiling here would disturb the measuring."""
        ...


@dataclass(frozen=True, slots=True)
class RpcFleet:
    """Servers behind a tracker; they come and go."""

    tracker: Tracker
    key: str
    target: AnyTarget

    keeps_limits = True

    @property
    def kind(self) -> str:
        return f"rpc {self.key}"

    def slots(self) -> list[Slot]:
        """One for each registered server. The tracker decides which of them a driver gets."""
        return [Slot(Rpc(self.tracker, self.key))] * min(max(len(self._servers()), 1), _MOST)

    def missing(self) -> str:
        try:
            found = self.tracker.servers(self.key)
        except OSError as error:
            return (
                f"The tracker {self.tracker} does not answer ({error}). Start it with `python -m tvm.exec.rpc_tracker "
                f"--host {self.tracker.host} --port {self.tracker.port}`, then its servers."
            )
        if not found:
            return (
                f"No server is registered under {self.key!r} at the tracker {self.tracker}. Start one on the device: "
                f"`python -m lib.rpc_server --tracker {self.tracker} --key {self.key}`."
            )
        addresses = ", ".join(f"{name}:{port}" for name, port in found)
        return f"None of the servers under {self.key!r} becomes free: {addresses}. Restart those that hang."

    def shares_cpu(self) -> bool:
        """Servers on this host, whose CPU is measured; or behind a tunnel, which looks like it."""
        return self.target.kind == "llvm" and any(name in _own_addresses() for name, _ in self._servers())

    def _servers(self) -> list[tuple[str, int]]:
        try:
            return self.tracker.servers(self.key)
        except OSError:  # it may come back
            return []


@dataclass(frozen=True, slots=True)
class GpuFleet:
    """The GPUs of this machine, one process each."""

    keeps_limits = False

    @property
    def kind(self) -> str:
        return ", ".join(sorted({name for [name] in host.gpu_facts("name")})) or "no GPU"

    def slots(self) -> list[Slot]:
        return [Slot(Local(), (("CUDA_VISIBLE_DEVICES", name),)) for name in _gpus()]

    def missing(self) -> str:
        return "No GPU is there: `nvidia-smi -L` lists none. Measure elsewhere: --devices rpc://HOST:PORT/KEY."

    def shares_cpu(self) -> bool:
        return False


@cache
def _gpus() -> list[str]:
    """Asked once: a pool looks at its fleet every few seconds, and GPUs do not come and go."""
    return host.gpus()


def _own_addresses() -> set[str]:
    """Numbers and names under which this machine reaches itself."""
    numbers = {address.address for found in psutil.net_if_addrs().values() for address in found}
    return {*numbers, "localhost", socket.gethostname()}
