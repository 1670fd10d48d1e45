"""The process that runs an exported program as torch itself means it, started by `lib.measure.file_peer`.

It begins afresh: torch's libraries and threads do not mix with those of TVM.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np

from lib.contracts import arrays
from lib.contracts.errors import ModelError
from lib.measure.connection import Connection
from lib.measure.protocol import FileOpened, Infer, Inferred, OpenFile
from lib.models import torch_archive, torch_outputs


class Programs:
    """The inputs of one program that were opened, by name."""

    def __init__(self) -> None:
        self._read: tuple[Path, Any] | None = None
        self._inputs: dict[str, list[np.ndarray]] = {}

    def open(self, request: OpenFile) -> FileOpened:
        """See `OpenFile`. The file that was opened last is not read again for other inputs."""
        import torch

        if request.as_written:
            raise ModelError("torch runs each operator by itself anyway")
        if self._read is None or self._read[0] != request.file:
            torch.set_num_threads(request.threads)
            self._read = request.file, torch_archive.read(torch, request.file)
        self._inputs[request.name] = list(arrays.values(request.inputs))
        return FileOpened(f"torch {torch.__version__}", is_timed=False)

    def infer(self, request: Infer) -> Inferred:
        """See `Infer`."""
        assert self._read is not None
        started = time.perf_counter()
        outputs = torch_outputs.computed(self._read[1], self._inputs[request.name])
        latency_s = time.perf_counter() - started
        np.savez(request.out, *outputs)
        return Inferred(latency_s)


def main(descriptor: int, _target_text: str) -> None:
    """Answer requests until the parent closes the socket."""
    connection, programs = Connection(descriptor), Programs()
    connection.serve({OpenFile: programs.open, Infer: programs.infer})
