"""An ONNX file as ONNX itself means it, in a worker process: what it computes, and how fast ONNX Runtime is.

A model that was imported wrongly agrees with itself; only this can tell.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.machine.targets import AnyTarget
from lib.measure.model_session import WorkerSession
from lib.measure.process import Worker, WorkerGone
from lib.measure.protocol import OnnxOpened, OpenOnnx
from lib.measure.runner import ModelFailed

_NAME, _AS_WRITTEN = "onnx", "as written"


@dataclass(frozen=True, slots=True)
class OnnxFile:
    """A file to compare with."""

    path: Path
    target: AnyTarget  # whose threads it gets
    is_timed: bool  # whether its latency beside ours says anything: ours runs on this CPU, too


class OnnxPeer(WorkerSession):
    """A session with one file; all that fails is a `ModelFailed`."""

    _is_ready = False

    def outputs(self, file: OnnxFile, inputs: Path, out: Path) -> tuple[list[np.ndarray], OnnxOpened]:
        """What it makes of inputs (.npz, in order), and by what; then it stands still, so that it disturbs nobody."""
        if self._is_ready:
            self._worker.resume()
        else:
            try:
                self._worker.wait_until_ready()
            except WorkerGone as error:
                raise ModelFailed("start", str(error)) from error
            self._is_ready = True
        request = OpenOnnx(_NAME, file.path.resolve(), inputs, file.target.threads)
        opened = self._ask("open_onnx", request)
        self.infer(_NAME, out)
        self._worker.pause()
        return list(np.load(out).values()), opened

    def outputs_as_written(self, file: OnnxFile, inputs: Path, out: Path) -> list[np.ndarray]:
        """The same without optimisations of its graph; while this runs, nothing else is to be timed."""
        self._worker.resume()
        request = OpenOnnx(_AS_WRITTEN, file.path.resolve(), inputs, file.target.threads, as_written=True)
        self._ask("open_onnx", request)
        self.infer(_AS_WRITTEN, out)
        self._worker.pause()
        return list(np.load(out).values())

    def latency_s(self, seconds: float) -> float:
        """See `ModelSession.time`; it stands still before and after."""
        self._worker.resume()
        found = self.time(_NAME, seconds)
        self._worker.pause()
        return found


@contextmanager
def opened(file: OnnxFile, timeout_s: float) -> Iterator[OnnxPeer]:
    """The process for as long as a block lasts; each operation may take so long."""
    worker = Worker(file.target, module="lib.measure.onnx_process")
    try:
        yield OnnxPeer(worker, timeout_s)
    finally:
        worker.kill()
