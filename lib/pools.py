"""From what `--devices` says to what measures."""

from lib.device_pool import DevicePool
from lib.devices import Devices, Replay, Rpc
from lib.fleet import GpuFleet, RpcFleet
from lib.replay import ReplayRunner
from lib.runner import MeasureConfig, Pool
from lib.targets import AnyTarget, GpuTarget
from lib.workers import LocalPool


def open_runner(devices: Devices, target: AnyTarget, config: MeasureConfig) -> Pool | ReplayRunner:
    """What measures candidates; starts nothing yet.

    Raises:
        ConfigError: There is nothing to replay.
    """
    if isinstance(devices, Replay):
        return ReplayRunner(devices.folder)
    if isinstance(devices, Rpc):
        return DevicePool(target, config, RpcFleet(devices.tracker, devices.key, target))
    if isinstance(target, GpuTarget):
        return DevicePool(target, config, GpuFleet())
    return LocalPool(target, config)
