"""From what `--devices` says to what measures, and to the conditions under which it does."""

from lib.contracts.errors import ConfigError
from lib.machine.targets import AnyTarget, CpuTarget, GpuTarget
from lib.measure import absent, identity
from lib.measure import emulator as emulators
from lib.measure.absent import AbsentDevice
from lib.measure.device_pool import DevicePool
from lib.measure.devices import Devices, Local, Replay, Rpc
from lib.measure.fleet import Fleet, GpuFleet, RpcFleet
from lib.measure.local_pool import LocalPool
from lib.measure.replay import ReplayRunner
from lib.measure.runner import MeasureConfig, Pool, Runner


def open_runner(devices: Devices, target: AnyTarget, config: MeasureConfig, emulator: str = "") -> Pool | ReplayRunner:
    """What measures candidates; starts no process yet. Without a device of the target, what stands in for one.

    Args:
        emulator: Folder of an emulated machine, see `lib.measure.emulator`; empty: none.

    Raises:
        ConfigError: There is nothing to replay, or no such emulator.
    """
    if isinstance(devices, Replay):
        return ReplayRunner(
            devices.folder, identity.conditions(target, "", config.weights if target.kind == "llvm" else "warm")
        )
    if fleet := _fleet(devices, target):
        return DevicePool(target, config, fleet)
    if isinstance(target, CpuTarget) and not target.runs_here:
        return AbsentDevice(target, config, emulators.emulator(emulator, target))
    return LocalPool(target, config)


def require_device(devices: Devices, target: AnyTarget) -> None:
    """Raises: ConfigError: Something is to be measured, and nothing is there that runs the target's programs."""
    if isinstance(devices, Local) and isinstance(target, CpuTarget) and not target.runs_here:
        raise ConfigError(absent.missing(target))


def absence(devices: Devices, target: AnyTarget) -> str:
    """Why there is no device now that measures the target's programs, and what to do; empty where there is one."""
    fleet = _fleet(devices, target)
    return fleet.absent() if fleet else ""


def require_pool(runner: Runner) -> Pool:
    """A runner that has devices.

    Raises:
        ConfigError: It has none.
    """
    if isinstance(runner, (LocalPool, DevicePool, AbsentDevice)):
        return runner
    raise ConfigError("--devices replay: nothing can be compiled, since winners are timed and checked again.")


def _fleet(devices: Devices, target: AnyTarget) -> Fleet | None:
    """Devices that come and go, where they do."""
    if isinstance(devices, Rpc):
        return RpcFleet(devices.tracker, devices.key, target)
    return GpuFleet() if isinstance(devices, Local) and isinstance(target, GpuTarget) else None
