"""Devices that compiled files can be sent to: which there are now, and how one of them is used."""

import os
import shutil
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import psutil

from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.measure.devices import Local, Rpc
from lib.measure.tracker import Tracker

_MOST = 64  # devices of one key that are used
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LOSSES = 3  # of a GPU one after the other, before it is left alone: it would fail all that it is given


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

    def absent(self) -> str:
        """Why there is none now, and what to do; empty if there is one, free or not."""
        ...

    def missing(self) -> str:
        """Why there is none, and what to do."""
        ...

    def shares_cpu(self) -> bool:
        """Whether compiling here would disturb the measuring."""
        ...

    def report(self, slot: Slot, lost: str) -> None:
        """Tell what became of a device that was used: how it was lost under its candidate; empty if it did its part."""
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

    def absent(self) -> str:
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
        return ""

    def missing(self) -> str:
        if absent := self.absent():
            return absent
        addresses = ", ".join(f"{name}:{port}" for name, port in self._servers())
        return f"None of the servers under {self.key!r} becomes free: {addresses}. Restart those that hang."

    def shares_cpu(self) -> bool:
        """Servers on this host, whose CPU is measured; or behind a tunnel, which looks like it."""
        return self.target.kind == "llvm" and any(name in _own_addresses() for name, _ in self._servers())

    def report(self, slot: Slot, lost: str) -> None:
        """The tracker knows which are left."""

    def _servers(self) -> list[tuple[str, int]]:
        try:
            return self.tracker.servers(self.key)
        except OSError:  # it may come back
            return []


class GpuFleet:
    """The GPUs of this machine, one process each.

    Which there are is asked at first, and when one was lost: a pool looks every few seconds, and GPUs do not come.
    """

    keeps_limits = False

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._losses: Counter[str] = Counter()  # one after the other
        self._last_loss = ""

    @property
    def kind(self) -> str:
        return ", ".join(sorted({name for [name] in host.gpu_facts("name")})) or "no GPU"

    def slots(self) -> list[Slot]:
        if self._names is None:
            self._names = host.gpus() or []
        names = [name for name in self._names if self._losses[name] < _LOSSES]
        return [Slot(Local(), ((_VISIBLE, name),)) for name in names] if _compiles() else []

    def absent(self) -> str:
        return "" if self.slots() else self.missing()

    def missing(self) -> str:
        elsewhere = "Measure elsewhere: --devices rpc://HOST:PORT/KEY."
        if broken := [name for name in self._names or [] if self._losses[name] >= _LOSSES]:
            return (
                f"Each GPU that is left was lost {_LOSSES} times one after the other: {', '.join(broken)}. The last "
                f"time: {self._last_loss}. {elsewhere}"
            )
        if self._names and not _compiles():
            return f"There is a GPU, but no nvcc on PATH that compiles for it: install CUDA's toolkit. {elsewhere}"
        if self._names:
            return (
                f"None of the GPUs here takes a candidate, though nvidia-smi lists them: {', '.join(self._names)}. "
                f"Look with `nvidia-smi` at what occupies them, or raise [measure] device_patience_s. {elsewhere}"
            )
        return f"No GPU is there: `nvidia-smi -L` lists none. {elsewhere}"

    def shares_cpu(self) -> bool:
        return False

    def report(self, slot: Slot, lost: str) -> None:
        name = dict(slot.environment)[_VISIBLE]
        self._losses[name] = self._losses[name] + 1 if lost else 0
        self._last_loss = lost or self._last_loss
        # Where one fell off its bus, or the machine stands still, nvidia-smi may fail: that says nothing of the others,
        # and one that is gone will be lost again.
        if lost and (found := host.gpus()) is not None:
            self._names = found


def _compiles() -> bool:
    """Whether candidates can be compiled; see `process.Worker` for the compiler."""
    return os.environ.get("TVM_CUDA_COMPILE_MODE", "nvcc") != "nvcc" or shutil.which("nvcc") is not None


def _own_addresses() -> set[str]:
    """Numbers and names under which this machine reaches itself."""
    numbers = {address.address for found in psutil.net_if_addrs().values() for address in found}
    return {*numbers, "localhost", socket.gethostname()}
