"""Whole models compiled side by side, each in a process of its own that has a deadline and its share of the memory.

A compiler that hangs, crashes or asks for all there is costs its library, and nothing else.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.machine import host
from lib.machine.targets import AnyTarget
from lib.measure.process import Worker, WorkerGone
from lib.measure.protocol import BuildModel, Failed


def build_all(
    orders: Sequence[BuildModel], target: AnyTarget, *, memory_share: float, timeout_s: float
) -> dict[Path, str]:
    """Compile libraries, as many at a time as there are cores.

    Args:
        memory_share: Of this machine's memory, that all of them together may have.
        timeout_s: For each, from when its process is ready.

    Returns:
        Why a library could not be made, by its path.
    """
    width = min(len(orders), host.physical_cores())
    memory_bytes = host.memory_of_each(memory_share, width)

    def built(order: BuildModel) -> str:
        return _built(order, target, memory_bytes, timeout_s)

    with ThreadPoolExecutor(width) as executor:
        reasons = executor.map(built, orders)
        return {order.library: reason for order, reason in zip(orders, reasons, strict=True) if reason}


def _built(order: BuildModel, target: AnyTarget, memory_bytes: int, timeout_s: float) -> str:
    """Why not, if not; what its compilers leave when they are killed stands beside the library."""
    environment = {"TMPDIR": str(order.library.parent.resolve())}
    worker = Worker(target, module="lib.building_process", environment=environment, memory_bytes=memory_bytes)
    try:
        worker.wait_until_ready()
        reply = worker.ask(order, timeout_s)
    except WorkerGone as error:
        return str(error)
    finally:
        worker.kill()
    return reply.error if isinstance(reply, Failed) else ""
