"""Whether a compiled model computes what it should, on a device of its own, and how fast beside the untuned one."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from lib.contracts import arrays
from lib.contracts.errors import ConfigError, VerificationError
from lib.contracts.files import CompiledFiles, ModelFiles
from lib.contracts.settings import limit
from lib.graph.algorithms import AS_IT_IS, IN_BF16, MULTIPLY_BF16
from lib.measure import file_peer
from lib.measure.emulator import Emulator
from lib.measure.file_peer import FilePeer, Original
from lib.measure.protocol import BuildModel, PackWeights
from lib.measure.runner import ModelFailed, ModelSession, Pool
from lib.models import onnx_float32
from lib.tir.numerics import error_but_rounding, largest_magnitude, random_values, relative_error

PLAIN_LOOPS = "the model in plain loops"
_ORIGINAL_TIMEOUT_S = 60.0  # of what the model came from: to load and run it, or to time it
_GLANCES, _GLANCE_S = 2, 0.2  # turns, where nothing is known that a library could be slower than: it is shipped anyway
_ROUNDINGS = 2.0  # times the error that roundings alone make: of a model in bf16 in plain loops, or of a quantised file
_LAST_BITS = 8  # units in the last place
_OF_ONE = 2.0**-22  # two of those of one
_TURN_S = 0.25  # for which a whole model is timed before the other one has its turn


@dataclass(frozen=True, slots=True)
class CompileConfig:
    """How winners are chosen and the whole model is checked."""

    finalists: int = 4  # candidates of a subgraph that are measured again
    repeats: int = 5  # turns of the finalists
    finalists_share: float = 0.15  # of the time that measuring took, which they may take in all
    tolerance: float = 1e-3  # largest difference to the untuned program, relative to its largest value
    tolerance_narrow: float = 0.05  # the same of a whole model in bf16 or with bytes, to its file
    turns: int = 5  # of the whole models, tuned and untuned in alternation
    once_above_s: float = 1.0  # an untuned inference that should take longer is not run, but estimated
    untuned_timeout_s: float = 10.0  # an untuned inference that takes longer, whatever it should, is estimated, too
    build_timeout_s: float = limit(900.0)  # of the compilation of a whole model
    timeout_s: float = limit(900.0)  # of a check, and of a whole-model inference
    memory_share: float = limit(0.8)  # of this machine's or container's memory, that compilers of whole models may have

    def __post_init__(self) -> None:
        if min(self.finalists, self.repeats, self.turns) < 1 or min(self.tolerance, self.tolerance_narrow) <= 0:
            raise ConfigError(f"[compile] needs counts of at least 1 and positive tolerances, but got {self}.")
        if self.finalists_share < 0:
            raise ConfigError(f"[compile] finalists_share is a share, from 0 on, but got {self.finalists_share}.")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"[compile] memory_share is above 0 and at most 1, but got {self.memory_share}.")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an untuned inference should take, from its subgraphs."""

    seconds: float
    is_complete: bool = True  # else some untuned subgraph failed or took too long
    beyond_s: float = 0.0  # about how much longer it takes, by subgraphs that were not timed since they are hopeless

    @property
    def is_lower_bound(self) -> bool:
        """Whether it takes longer than these seconds."""
        return not self.is_complete or self.beyond_s > 0

    def at_most(self, seconds: float) -> bool:
        """Whether it is foretold to take no longer."""
        return self.is_complete and self.seconds + self.beyond_s <= seconds


def does_not_run(failure: ModelFailed) -> VerificationError:
    """What to say of a library that fails where it is run."""
    return VerificationError(f"The compiled model does not run ({failure.operation}): {failure.reason}")


def is_quantized(core_operators: Iterable[str], model: ModelFiles) -> bool:
    """Whether a model's file has bytes, even where they are multiplied as floats here."""
    if any(name.endswith(("_int8", "_int16")) for name in core_operators):
        return True
    return model.kernels.exists() and np.dtype(np.int8) in arrays.dtypes(model.kernels)


class Built:
    """What is built before one of it is shipped."""

    def __init__(
        self,
        folder: Path,
        model: ModelFiles,
        interface: Sequence[Mapping[str, Any]],
        precision: str = AS_IT_IS,
        is_quantized: bool = False,
    ) -> None:
        """Write the inputs on which the libraries are checked: the same for the same model.

        Args:
            precision: Of its products; see `AlgorithmConfig`.
            is_quantized: They are of bytes in its file; else what it is compared with is in float32.
        """
        self.folder, self.weights, self.is_quantized = folder, model.weights, is_quantized
        self.is_narrow = is_quantized or precision == IN_BF16
        self.is_rounded = not is_quantized and precision in MULTIPLY_BF16  # by this project, not by the file
        self.inputs = folder / "inputs.npz"
        values = [random_values(tuple(i["shape"]), i["dtype"], i["bound"], seed=n) for n, i in enumerate(interface)]
        np.savez(self.inputs, *values)
        self.expected = folder / "expected.npz"  # of the model in plain loops, once needed; may be known from before
        self.module, self.reference = model.module, model.module  # as JSON
        self._kernels = model.kernels if model.reference.exists() else None
        if self._kernels:  # convolutions are computed otherwise than the model has them
            self.reference = model.reference
        self.tuned, self.untuned, self.checked = (folder / f"{name}.so" for name in ("tuned", "untuned", "checked"))
        self.rounded = folder / "rounded.so"  # a rounded model in plain loops
        self.packing = folder / "packing.json"  # what packs the weights of the tuned model
        self.packed = folder / "packed.safetensors"
        self.shared = folder / "shared.json"  # once it takes them of a file that several share
        self.peer_outputs = folder / "outputs-onnx.npz"
        self.agreed = folder / "agreed.npz"  # what the library that is shipped agrees with, by `verify`
        self.delivered = self.tuned  # another one, where there is no device of the target: `tuned` is for this machine

    def tolerance(self, config: CompileConfig) -> float:
        """How far it may be from its file, over the largest value."""
        return config.tolerance_narrow if self.is_narrow else config.tolerance

    @cached_property
    def reference_weights(self) -> Path:
        """Those of `reference`; written when they are first asked for, since that takes as long as to pack them."""
        if not self._kernels:
            return self.weights
        path = self.folder / "reference-weights.npz"
        arrays.write(path, path, {**arrays.load(self.weights), **arrays.load(self._kernels)})
        return path

    def order(self, traces: Path) -> BuildModel:
        """How `tuned` is built, with what packs its weights.

        Args:
            traces: JSON: the trace to apply, by function name.
        """
        return BuildModel(self.module, self.tuned, traces, self.packing)

    def order_to_pack(self) -> PackWeights:
        """How its weights are packed, once it is built."""
        return PackWeights((self.packing,), (self.weights,), self.packed)

    def in_plain_loops(self, library: Path) -> BuildModel:
        """How `checked` or `rounded` is built."""
        module = self.module if library == self.rounded else self.reference
        return BuildModel(module, library, in_plain_loops=True)

    def deliver_another(self) -> Path:
        """A library that is shipped in place of `tuned`, and never run; to be built."""
        self.delivered = self.folder / "delivered.so"
        return self.delivered

    def library(self, name: str) -> tuple[Path, Path]:
        """Library and parameters of the model `tuned`, `untuned`, as it is `checked` against, or `rounded`."""
        if name == "tuned":
            return self.tuned, self.shared if self.shared.exists() else self.packed
        if name == "rounded":
            return self.rounded, self.weights
        return (self.untuned if name == "untuned" else self.checked), self.reference_weights


def verify(
    built: Built,
    untuned: Estimate,
    config: CompileConfig,
    pool: Pool,
    peer: "Peer | None" = None,
    previous: CompiledFiles | None = None,
    check: Callable[[Path], None] = lambda _library: None,
    *,
    is_timed: bool = True,
) -> dict[str, Any]:
    """Run the tuned model on a device of its own, compare its outputs, and time it in turn with the untuned one; also
    with the file that it came from, if that is ONNX.

    The outputs are compared with what the file itself gives; where there is no file, it does not run, or the outputs
    differ, with the model in plain loops, which tells a wrong kernel from a wrong import.

    Args:
        untuned: Stands for the untuned model where that was not built, or does not end in time.
        peer: The file that the model came from, if it is ONNX.
        previous: What was shipped of the same model before: it stays unless the new one is faster beside it.
        check: Builds the model in plain loops, `Built.checked` or `rounded`; called if that is needed and not there.
        is_timed: Else the pool runs what was compiled for another CPU than the target, whose times say nothing.

    Returns:
        Facts for the manifest. `shipped` is `tuned`, `untuned`, or `previous`: then `latencies_s` has the one that
        stays as `tuned`, and the one that was not faster as `new`.

    Raises:
        VerificationError: The outputs differ by more than the tolerance, or a model does not run.
        CompilationError: `check` failed.
    """
    runs_untuned = is_timed and built.untuned.exists() and _ends_in_time(built, config, pool)
    try:
        with pool.models(config.timeout_s) as session:
            agreed = _agreed(session, built, config, peer, check)
            error_before = _error_of(previous, built, agreed, config, pool) if previous and is_timed else None
            libraries = {"tuned": built.library("tuned")}
            if runs_untuned:
                libraries["untuned"] = built.library("untuned")
            if previous and error_before is not None:
                libraries["previous"] = previous.library, previous.params
            is_alone = len(libraries) == 1 and not untuned.seconds
            turns, seconds = (min(_GLANCES, config.turns), _GLANCE_S) if is_alone else (config.turns, _TURN_S)
            latencies = (
                _latencies(session, libraries, built.inputs, turns, seconds, peer) if is_timed else {"tuned": []}
            )
    except ModelFailed as failure:
        raise does_not_run(failure) from failure
    error = agreed.error
    np.savez(built.agreed, *agreed.expected)
    if not runs_untuned:
        latencies["untuned"] = [untuned.seconds] if untuned.seconds else []  # nothing of it is known
    is_lower_bound = (untuned.is_lower_bound and not runs_untuned) or not is_timed
    is_faster = is_lower_bound or median(latencies["tuned"]) < median(latencies["untuned"])
    shipped = "tuned" if is_faster else "untuned"
    if error_before is not None:
        before = latencies.pop("previous")
        if median(before) <= median(latencies[shipped]):
            shipped, error = "previous", error_before
            latencies |= {"new": latencies["tuned"], "tuned": before}
    return {
        "shipped": shipped,
        "compared_with": agreed.by,
        "max_error": error,
        "tolerance": agreed.tolerance,
        "largest_output": largest_magnitude(agreed.expected),
        "latencies_s": latencies,
        "untuned_estimated": not runs_untuned,
        "untuned_is_lower_bound": is_lower_bound,
        "onnx": peer.facts(agreed.error_to_file) if peer else None,
    }


def emulated(built: Built, emulator: Emulator, threads: int, tolerance: float, config: CompileConfig) -> dict[str, Any]:
    """Run what is shipped by an emulator, after `verify`, and compare its outputs with those of the same programs here.

    Returns:
        Facts for the manifest.

    Raises:
        VerificationError: It does not run there, or they differ by more than the tolerance.
    """
    out = built.folder / "outputs-emulated.npz"
    files = built.delivered, built.packed, built.inputs, out
    try:
        emulator.infer(*files, threads=threads, timeout_s=config.timeout_s)
    except ModelFailed as failure:
        raise VerificationError(f"The compiled library does not run by {emulator.by}: {failure.reason}") from failure
    error = _error(arrays.values(out), arrays.values(built.folder / "outputs-tuned.npz"))
    if not error <= tolerance:
        raise VerificationError(
            f"The library's outputs by {emulator.by} differ from those of the same programs on this machine by "
            f"{error:.1e} of their largest value; {tolerance:.2g} is allowed. Nothing was shipped."
        )
    return {"by": emulator.by, "max_error": error}


@dataclass(frozen=True, slots=True)
class Agreed:
    """What a tuned model's outputs agree with."""

    by: str  # what made them: ONNX Runtime with its version, say, or `PLAIN_LOOPS`
    expected: Sequence[np.ndarray]
    error: float  # the largest difference, over the largest of each output
    error_to_file: float | None  # of the imported model's outputs to those of its file, if they were compared
    tolerance: float


@contextmanager
def peer_of(original: Original | None) -> Iterator["Peer | None"]:
    """The file that a model came from, in a process of its own for as long as a block lasts; none of one of the zoo."""
    if original is None:
        yield None
    else:
        with file_peer.opened(original, _ORIGINAL_TIMEOUT_S, onnx_float32.compared_with) as session:
            yield Peer(original, session)


class Peer:
    """The file that a model came from, run by ONNX Runtime, ONNX's reference evaluator or torch; it may fail."""

    def __init__(self, file: Original, session: FilePeer) -> None:
        self._file, self._session = file, session
        self.outputs: Sequence[np.ndarray] = []
        self.by = ""  # what ran it; empty if nothing did
        self._failure, self._is_timed = "", False

    def infer(self, inputs: Path, out: Path) -> None:
        """Compute what it says, once."""
        if self.by or self._failure:
            return
        try:
            self.outputs, opened = self._session.outputs(self._file, inputs, out)
        except ModelFailed as failure:
            self._failure = failure.reason
        else:
            self.by, self._is_timed = opened.by, opened.is_timed and self._file.is_timed

    def error(self, found: Sequence[np.ndarray]) -> float:
        """Of outputs to its own, as `_error` has it; infinity if it did not run."""
        return _error(found, self.outputs) if self.by else math.inf

    def roundings(self, inputs: Path, out: Path) -> float:
        """The error that its outputs have by optimisations of its graph alone, or by inputs that differ in their last
        bits; 0 if that cannot be told. Of a quantised file, values fall to the other side of a half then, in units that
        may depend on other values."""
        if not self.by:
            return 0.0
        shaken = out.with_name(f"{out.stem}-inputs.npz")
        np.savez(shaken, *map(_shaken, arrays.values(inputs)))
        error = 0.0
        for other, as_written in ((inputs, True), (shaken, False)):
            try:
                found = self._session.outputs_otherwise(self._file, other, out, as_written=as_written)
            except ModelFailed:
                continue
            error = max(error, _error(found, self.outputs))
        return error

    def allowed(self, found: Sequence[np.ndarray], tolerance: float, inputs: Path, out: Path) -> float:
        """How far outputs may be from its own: as far as roundings bring these, where those that are farther vanish.

        ONNX Runtime's logistic function is as exact as the last bits of one are: a detector that sees nothing has
        probabilities of 1e-7 for all pixels, which it makes 0 or 1.2e-7."""
        if not tolerance < self.error(found) < math.inf:
            return tolerance
        pairs = zip(found, self.outputs, strict=True)
        apart = [np.abs(one.astype(np.float64) - other).max() for one, other in pairs
                 if relative_error(one, other) > tolerance]  # fmt: skip
        return tolerance if max(apart) > _OF_ONE else max(tolerance, _ROUNDINGS * self.roundings(inputs, out))

    def error_as_written(
        self, found: Sequence[np.ndarray], tolerance: float, inputs: Path, out: Path
    ) -> float:  # fmt: skip
        """The error of outputs to what the file's operators make one by one, if that is within a tolerance; this stands
        for what the file says then. Else as before.

        ONNX Runtime's optimisations change what some files mean: 1.23 and 1.31 make one pooling of a padding with zeros
        and a pooling for the largest, which pads with less than any number, and so let negative borders through.
        """
        try:
            outputs = self._session.outputs_otherwise(self._file, inputs, out, as_written=True)
        except ModelFailed:
            return self.error(found)
        if _error(found, outputs) <= tolerance:
            self.outputs, self.by = outputs, f"{self.by} without its optimisations"
        return self.error(found)

    def compare(self, found: Sequence[np.ndarray], tolerance: float) -> float | None:
        """The imported model's outputs with its own: see `error`; none if it did not run.

        Raises:
            VerificationError: They differ by more than the tolerance.
        """
        if self._failure:
            return None
        error = self.error(found)
        if not error <= tolerance:
            shapes = [[array.shape for array in arrays] for arrays in (found, self.outputs)]
            raise VerificationError(
                f"The imported model's outputs, of shapes {shapes[0]}, differ from what {self.by} makes of the file, "
                f"of shapes {shapes[1]}, by {error:.1e} of their largest value; {tolerance:g} is allowed. Nothing was "
                "shipped; the measurements are kept."
            )
        return error

    def time(self, seconds: float) -> float | None:
        """Seconds of an inference, as `ModelSession.time` has it; none if it fails, or says nothing."""
        if not self._is_timed:
            return None
        try:
            return self._session.latency_s(seconds)
        except ModelFailed as failure:
            self._failure, self._is_timed = failure.reason, False
            return None

    def facts(self, max_error: float | None) -> dict[str, Any]:
        """For the manifest."""
        return {"by": self.by, "max_error": max_error, "failure": self._failure}


def _shaken(array: np.ndarray) -> np.ndarray:
    """Floats that are a little larger: about as much as sums in another order are."""
    is_float = array.dtype.kind == "f"
    return np.asarray(array * array.dtype.type(1 + _LAST_BITS * np.finfo(array.dtype).eps)) if is_float else array


def _ends_in_time(built: Built, config: CompileConfig, pool: Pool) -> bool:
    """Whether an untuned inference does, in a process of its own: what goes wrong there costs nothing but the time."""
    try:
        with pool.models(config.untuned_timeout_s) as session:
            session.open_library("untuned", *built.library("untuned"), built.inputs)
            session.infer("untuned", built.folder / "outputs-untuned.npz")
    except ModelFailed:
        return False
    return True


def _error(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """Largest difference of any output, over the largest of that output; infinity if they are not of equal shapes."""
    if [array.shape for array in found] != [array.shape for array in expected]:
        return math.inf
    return max(map(error_but_rounding, found, expected), default=0.0)


def _error_of(previous: CompiledFiles, built: Built, agreed: Agreed, config: CompileConfig, pool: Pool) -> float | None:
    """Largest difference of a library's outputs to what a new one's agree with; none if it does not run, or differs by
    more than the tolerance. In a process of its own, so that it costs nothing if it crashes.
    """
    out = built.folder / "outputs-previous.npz"
    try:
        with pool.models(config.timeout_s) as session:
            session.open_library("previous", previous.library, previous.params, built.inputs)
            session.infer("previous", out)
    except ModelFailed:
        return None
    error = _error(arrays.values(out), agreed.expected)
    return error if error <= agreed.tolerance else None


def _agreed(
    session: ModelSession, built: Built, config: CompileConfig, peer: Peer | None, check: Callable[[Path], None]
) -> Agreed:
    """What the tuned model's outputs agree with: those of its file, else those of the model in plain loops.

    Raises:
        VerificationError: They agree with neither, or an output has no finite element to compare.
    """
    tolerance = built.tolerance(config)
    found = _outputs(session, built, "tuned", built.folder / "outputs-tuned.npz")
    otherwise = built.inputs, built.folder / "outputs-otherwise.npz"
    if peer:
        error = peer.error(found)
        if built.is_quantized and tolerance < error < math.inf:
            tolerance = max(tolerance, _ROUNDINGS * peer.roundings(*otherwise))
        elif tolerance < error < math.inf:
            error = peer.error_as_written(found, tolerance, *otherwise)
        if error <= tolerance:
            return Agreed(peer.by, peer.outputs, error, error, tolerance)
    if not built.expected.exists():
        check(built.checked)
        _outputs(session, built, "checked", built.expected)
    expected = arrays.values(built.expected)
    for n, output in enumerate(expected):
        if output.size and not np.isfinite(output.astype(np.float64)).any():
            raise VerificationError(
                f"Output {n} of the model has not one finite element, untuned and on small inputs: are there NaN among "
                "its weights, or inputs (limits, rates) that random values are no sense for? Such can be fixed: --fix "
                "NAME=VALUE. Nothing can be compared, so nothing was shipped; the measurements are kept."
            )
    error = _error(found, expected)
    if built.is_rounded and tolerance < error < math.inf:
        check(built.rounded)
        rounded = _outputs(session, built, "rounded", built.folder / "outputs-rounded.npz")
        tolerance = max(tolerance, _ROUNDINGS * _error(rounded, expected))
    if not error <= tolerance:
        raise VerificationError(
            f"The tuned model's outputs differ from the untuned model's by {error:.1e} of their largest value; "
            f"{tolerance:.2g} is allowed. Nothing was shipped; the measurements are kept."
        )
    error_to_file = None
    if peer:
        allowed = tolerance if built.is_quantized else peer.allowed(expected, config.tolerance, *otherwise)
        error_to_file = peer.compare(expected, allowed)
    return Agreed(PLAIN_LOOPS, expected, error, error_to_file, tolerance)


def _outputs(session: ModelSession, built: Built, name: str, out: Path) -> Sequence[np.ndarray]:
    session.open_library(name, *built.library(name), built.inputs)
    session.infer(name, out)
    return arrays.values(out)


def _latencies(
    session: ModelSession,
    libraries: Mapping[str, tuple[Path, Path]],
    inputs: Path,
    turns: int,
    seconds: float,
    peer: Peer | None,
) -> dict[str, list[float]]:
    """Seconds of an inference, in alternation: of each library, and of `onnxruntime` if it runs.

    Args:
        libraries: With their parameters; `tuned` is open already.
        seconds: Of a turn of each.
    """
    for name in [name for name in libraries if name != "tuned"]:
        session.open_library(name, *libraries[name], inputs)
    latencies: dict[str, list[float]] = {name: [] for name in libraries}
    for _ in range(turns):  # A B A B ...
        for name in libraries:
            latencies[name].append(session.time(name, seconds))
        if peer and (latency_s := peer.time(seconds)) is not None:
            latencies.setdefault("onnxruntime", []).append(latency_s)
    return latencies
