"""What comes after a library: operators whose results have shapes that depend on values, computed by ONNX Runtime."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .errors import BundleError


class Rest:
    """A session of ONNX Runtime with the rest of a model."""

    def __init__(self, file: Path, threads: int) -> None:
        """Args:
            threads: That compute. Those of ONNX Runtime sleep when they have nothing to do: they would take the
                library's cores.

        Raises:
            BundleError: ONNX Runtime is not installed, or cannot run it.
        """
        try:
            import onnxruntime
        except ImportError:
            raise BundleError(
                f"{file} is the end of the model, which ONNX Runtime computes, and that is not installed: "
                "pip install onnxruntime. Without: Model(folder, rest=False) has the library's own outputs."
            ) from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # it raises classes of its own, without a common base
            raise BundleError(f"ONNX Runtime {onnxruntime.__version__} cannot run {file}: {error}") from error
        self._reads = [value.name for value in self._session.get_inputs()]
        self._makes = [value.name for value in self._session.get_outputs()]

    def __call__(self, known: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Its results by name.

        Args:
            known: What it may read, by name: inputs of the model, and what the library computed.
        """
        results = self._session.run(self._makes, {name: known[name] for name in self._reads})
        return dict(zip(self._makes, results, strict=True))
