"""Whole models compiled side by side, and their weights packed, each in a process of its own that has a deadline and
its share of the memory.

A compiler that hangs, crashes or asks for all there is costs its library, and nothing else.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lib.contracts.errors import CompilationError
from lib.machine import host, targets
from lib.machine.targets import AnyTarget
from lib.measure.process import Worker, WorkerGone
from lib.measure.protocol import BuildModel, Failed, PackWeights


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
        return _asked(order, target, order.library.parent, memory_bytes, timeout_s)

    with ThreadPoolExecutor(width) as executor:
        reasons = executor.map(built, orders)
        return {order.library: reason for order, reason in zip(orders, reasons, strict=True) if reason}


def pack(request: PackWeights, *, memory_share: float, timeout_s: float) -> None:
    """Pack the weights of libraries.

    Raises:
        CompilationError: They cannot be packed within these limits.
    """
    reason = _asked(request, targets.cpu_target(), request.out.parent, host.memory_of_each(memory_share, 1), timeout_s)
    if reason:
        raise failure("The weights could not be packed", reason)


def failure(what: str, reason: str) -> CompilationError:
    """What is said where something that is shipped could not be made."""
    return CompilationError(
        f"{what}: {reason}. Nothing was shipped; the measurements are kept. [compile] build_timeout_s and memory_share "
        "limit the time and the memory of that."
    )


def _asked(
    request: BuildModel | PackWeights, target: AnyTarget, folder: Path, memory_bytes: int, timeout_s: float
) -> str:
    """Why not, if not; what its compilers leave when they are killed stands in the folder."""
    environment = {"TMPDIR": str(folder.resolve())}
    worker = Worker(target, module="lib.building_process", environment=environment, memory_bytes=memory_bytes)
    try:
        worker.wait_until_ready()
        reply = worker.ask(request, timeout_s)
    except WorkerGone as error:
        return str(error)
    finally:
        worker.kill()
    return reply.error if isinstance(reply, Failed) else ""
