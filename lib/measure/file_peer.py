"""A model's file as its own format means it, in a worker process: what it computes, and how fast ONNX Runtime is.

A model that was imported wrongly agrees with itself; only this can tell.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lib.contracts import arrays
from lib.machine.targets import AnyTarget
from lib.measure.model_session import WorkerSession
from lib.measure.process import Worker, WorkerGone
from lib.measure.protocol import FileOpened, OpenFile
from lib.measure.runner import ModelFailed

_NAME, _OTHERWISE = "file", "otherwise"


@dataclass(frozen=True, slots=True)
class Original:
    """The file that a model came from, to compare with: an ONNX file here, or an exported program of torch."""

    path: Path
    target: AnyTarget  # whose threads it gets
    is_timed: bool  # whether its latency beside ours says anything: ours runs on this CPU, too


class FilePeer(WorkerSession):
    """A session with one file; all that fails is a `ModelFailed`."""

    _is_ready = False

    def __init__(self, worker: Worker, timeout_s: float, compared: Path) -> None:
        """The file's outputs are those of `compared`; what is timed is the file itself."""
        super().__init__(worker, timeout_s)
        self._compared = compared

    def outputs(self, file: Original, inputs: Path, out: Path) -> tuple[list[np.ndarray], FileOpened]:
        """What it makes of inputs (.npz, in order), and by what; then it stands still, so that it disturbs nobody."""
        if self._is_ready:
            self._worker.resume()
        else:
            try:
                self._worker.wait_until_ready()
            except WorkerGone as error:
                raise ModelFailed("start", str(error)) from error
            self._is_ready = True
        request = OpenFile(_NAME, file.path.resolve(), self._compared, inputs, file.target.threads)
        opened = self._ask("open_file", request)
        self.infer(_NAME, out)
        self._worker.pause()
        return list(arrays.values(out)), opened

    def outputs_otherwise(self, file: Original, inputs: Path, out: Path, *, as_written: bool) -> list[np.ndarray]:
        """The same of other inputs, or without optimisations of its graph (`as_written`); while this runs, nothing else
        is to be timed."""
        self._worker.resume()
        threads = file.target.threads
        request = OpenFile(_OTHERWISE, file.path.resolve(), self._compared, inputs, threads, as_written)
        self._ask("open_file", request)
        self.infer(_OTHERWISE, out)
        self._worker.pause()
        return list(arrays.values(out))

    def latency_s(self, seconds: float) -> float:
        """See `ModelSession.time`; it stands still before and after."""
        self._worker.resume()
        found = self.time(_NAME, seconds)
        self._worker.pause()
        return found


@contextmanager
def opened(
    file: Original, timeout_s: float, compared_with: Callable[[Path, Path], Path] = lambda path, _: path
) -> Iterator[FilePeer]:
    """The process for as long as a block lasts; each operation may take so long.

    Args:
        compared_with: From an ONNX file and a folder to the file whose outputs stand for its own: in float32, say.
    """
    of_torch = file.path.suffix == ".pt2"
    worker = Worker(
        file.target, module="lib.torch_process" if of_torch else "lib.measure.onnx_process", afresh=of_torch
    )
    try:
        with tempfile.TemporaryDirectory(prefix="peer-") as folder:
            compared = file.path if of_torch else compared_with(file.path, Path(folder))
            yield FilePeer(worker, timeout_s, compared.resolve())
    finally:
        worker.kill()
