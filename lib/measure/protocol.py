"""What the tuner and its worker processes say to each other: messages of the types below, and no others.

A request names the type of its answer, so that `worker.ask(Build(...), timeout_s)` is `Built | Failed` for the type
checker too. Fields are strings, numbers, paths, tuples of these, and `Param`; `lib.measure.wire` makes lines of JSON
of them. `lib.measure.worker` answers what is below "Candidates on this CPU", `lib.measure.driver` what is below
"Candidates on devices", and both what is below "Whole models"; `lib.measure.onnx_process` answers `OpenFile` there,
`lib.building_process` answers `BuildModel`.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, get_args

from lib.contracts.statuses import Status


class Reply:
    """What a worker process says."""

    __slots__ = ()


R = TypeVar("R", bound=Reply)


class Request(Generic[R]):
    """Asks for an R; a `Failed` may come instead."""

    __slots__ = ()
    failure: ClassVar[Status] = Status.RUN_ERROR  # of the candidate, if serving the request raises


class DeviceFault(str, Enum):
    """What a failure says of the device rather than of the candidate on it; never in a table."""

    LOST = "lost"  # it, its server or its process went away: the candidate gets another chance
    UNFIT = "unfit"  # it is not what the target says

    def __str__(self) -> str:
        return self.value


# Whatever was asked.


@dataclass(frozen=True, slots=True)
class Ready(Reply):
    """The process has loaded what it needs; comes once, unasked."""


@dataclass(frozen=True, slots=True)
class Begun(Reply):
    """The device is ours; comes from a driver before the answer to a request that needs the device."""


@dataclass(frozen=True, slots=True)
class Done(Reply):
    """There is nothing to tell."""


@dataclass(frozen=True, slots=True)
class Failed(Reply):
    """Serving the request raised an error."""

    status: Status | DeviceFault
    error: str


@dataclass(frozen=True, slots=True)
class Refused(Reply):
    """The message was no request, or none that this process serves."""

    error: str


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a compiled program."""

    shape: tuple[int, ...]
    dtype: str
    bound: int  # of values, 0 if not known; see `tir.parameters.value_bounds`


# Candidates on this CPU.


@dataclass(frozen=True, slots=True)
class Define(Request[Done]):
    """Make a workload known, to which the traces of later requests apply; the one before is forgotten."""

    failure: ClassVar[Status] = Status.BUILD_ERROR
    workload: str  # JSON of its IRModule


@dataclass(frozen=True, slots=True)
class Built(Reply):
    build_s: float


@dataclass(frozen=True, slots=True)
class Build(Request[Built]):
    """Replay a trace and compile the program, to be timed in the same process."""

    failure: ClassVar[Status] = Status.BUILD_ERROR
    candidate_id: str
    trace: str
    as_shipped: bool = False  # an untuned program, too: else it is compiled as `lowering.for_untuned` says


@dataclass(frozen=True, slots=True)
class Timed(Reply):
    latencies: tuple[float, ...]  # s, one mean for each repeat
    number: int  # runs in a repeat
    run_s: float  # filling arguments and timing
    device: str = ""  # what ran it, if the driver was free to choose
    waited_s: float = 0.0  # of it, the thread that begins each run had no core


@dataclass(frozen=True, slots=True)
class Time(Request[Timed]):
    """Time a program that was built; see `timing.time_kernel`."""

    candidate_id: str
    repeats: int
    min_repeat_s: float
    slow_above_s: float | None = None
    number: int = 0
    cold_weights: bool = False  # each run reads its weights from memory, not from a cache


@dataclass(frozen=True, slots=True)
class Drop(Request[Done]):
    """Forget what was built."""


@dataclass(frozen=True, slots=True)
class Checked(Reply):
    max_error: float  # largest difference over the largest output of the untuned program; may be infinite


@dataclass(frozen=True, slots=True)
class Check(Request[Checked]):
    """Compare a program's results with those of the untuned one."""

    trace: str


@dataclass(frozen=True, slots=True)
class Compiled(Reply):
    build_s: float
    params: tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Compile(Request[Compiled]):
    """Replay a trace and compile the program to a shared library, for another process to load."""

    failure: ClassVar[Status] = Status.BUILD_ERROR
    trace: str
    library: Path
    pack: bool = False  # leave the packing of weights in; else they count as packed before, as in `Build`


# Candidates on devices.


@dataclass(frozen=True, slots=True)
class Measure(Request[Timed]):
    """Time a compiled program."""

    library: Path
    params: tuple[Param, ...]
    repeats: int
    min_repeat_s: float
    slow_above_s: float | None
    limit_s: float  # for which the device is asked for


@dataclass(frozen=True, slots=True)
class Compared(Reply):
    latencies: tuple[tuple[float, ...], ...]  # s, of each program


@dataclass(frozen=True, slots=True)
class Compare(Request[Compared]):
    """Time programs with equal parameters in the given order: indices of `libraries`, each as often as wanted."""

    libraries: tuple[Path, ...]
    order: tuple[int, ...]
    params: tuple[Param, ...]
    min_repeat_s: float
    limit_s: float


@dataclass(frozen=True, slots=True)
class CheckLibraries(Request[Checked]):
    """Compare the second program's results with the first one's."""

    libraries: tuple[Path, Path]
    params: tuple[Param, ...]
    limit_s: float


@dataclass(frozen=True, slots=True)
class BeginSession(Request[Done]):
    """Take a device for whole models; it is given back when the process ends, or after so long."""

    limit_s: float


# Whole models.


@dataclass(frozen=True, slots=True)
class BuildModel(Request[Done]):
    """Compile a fused module, given as the JSON of its IRModule, to a library."""

    failure: ClassVar[Status] = Status.BUILD_ERROR
    module: Path
    library: Path
    traces: Path | None = None  # JSON: the trace to apply, by function name
    packing: Path | None = None  # of weights: see `deploy.build`
    in_plain_loops: bool = False  # to check another library against


@dataclass(frozen=True, slots=True)
class PackWeights(Request[Done]):
    """Bring weights into the orders that kernels read: see `packing.write`."""

    failure: ClassVar[Status] = Status.BUILD_ERROR
    packings: tuple[Path, ...]
    weights: tuple[Path, ...]
    out: Path
    listed: Path | None = None


@dataclass(frozen=True, slots=True)
class OpenLibrary(Request[Done]):
    """Load a library under a name, with its parameters and the inputs it will be run on (.npz)."""

    name: str
    library: Path
    params: Path  # .npz, as they were packed (.safetensors), or which of a file with those of several it takes (.json)
    inputs: Path


@dataclass(frozen=True, slots=True)
class FileOpened(Reply):
    by: str  # what runs it, with its version
    is_timed: bool  # whether that is made to be fast


@dataclass(frozen=True, slots=True)
class OpenFile(Request[FileOpened]):
    """Load a model's file under a name, with the inputs it will be run on (.npz, in order)."""

    name: str
    file: Path  # that is timed
    compared: Path  # that is run where others are compared with it
    inputs: Path
    threads: int
    as_written: bool = False  # each operator by itself, as the file has it


@dataclass(frozen=True, slots=True)
class Inferred(Reply):
    latency_s: float  # of one inference


@dataclass(frozen=True, slots=True)
class Infer(Request[Inferred]):
    """Run one inference and write its outputs, in order, to an .npz file."""

    name: str
    out: Path


@dataclass(frozen=True, slots=True)
class TimeLibrary(Request[Inferred]):
    """Median latency of an inference over about so many seconds, after a warm-up of a share of that: another model may
    have run before, and weights and threads are to come back."""

    WARM_UP: ClassVar[float] = 0.25

    name: str
    seconds: float


REQUESTS: tuple[type[Request[Any]], ...] = (
    Define, Build, Time, Drop, Check, Compile, Measure, Compare, CheckLibraries, BeginSession, PackWeights, OpenLibrary,
    BuildModel, OpenFile, Infer, TimeLibrary,
)  # fmt: skip
REPLIES: tuple[type[Reply], ...] = (
    Ready, Begun, Done, Failed, Refused, Built, Timed, Checked, Compiled, Compared, FileOpened, Inferred,
)  # fmt: skip


def answer_type(request: Request[R]) -> type[R]:
    """What a request asks for: R of the `Request[R]` that its class is made from."""
    [base] = type(request).__orig_bases__  # type: ignore[attr-defined]
    [answer] = get_args(base)
    return answer
