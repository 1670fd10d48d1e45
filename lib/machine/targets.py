"""What is compiled for: this CPU or another, or a GPU; as TVM knows it, corrected by what the operating system says."""

import json
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.target import Target, codegen

from lib.contracts.errors import TargetError
from lib.machine import host
from lib.machine.names import NAMES
from lib.machine.registers import FLOAT_BITS, registers

# What CUDA guarantees of every GPU since sm_30; of shared memory, without opting in to more.
_GPU_LIMITS = {"max_threads_per_block": 1024, "max_shared_memory_per_block": 49152}

_MANY = 1024  # cores: more than any CPU has

# Instruction sets, as LLVM names them; its other CPU features are tuning hints, or of no use to kernels.
_INSTRUCTION_SETS = ("avx", "amx", "fma", "f16c", "gfni", "vaes", "vpclmulqdq")
# Of those, what programs have in them and Linux calls by LLVM's names, but for its underscores; beside AVX-512 and AMX.
_TOLD = frozenset({"avx", "avx2", "fma", "f16c", "avxvnni"})

# CPUs with AVX-512 that multiply and add one vector of 512 bits a cycle, as LLVM names them: Zen 4 (in halves) and
# Intel's for clients. Intel's for servers and Zen 5 do two.
_ONE_VECTOR = ("znver4", "cannonlake", "icelake-client", "tigerlake", "rocketlake")


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A CPU: with the threads, it decides which measurements can be compared."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of TVM's pool, measured and deployed alike
    vector_bits: int  # that LLVM may use; see `registers`

    kind = "llvm"

    @property
    def name(self) -> str:
        """Folder name, e.g. `llvm-znver4-2t-512b`."""
        parts, unnamed = json.loads(self.text), architecture(self.triple)
        cpu = parts.get("mcpu", "generic" if unnamed == "x86_64" else unnamed)
        return f"{parts['kind']}-{cpu}-{self.threads}t-{self.vector_bits}b"

    @property
    def triple(self) -> str:
        """Architecture and system, as LLVM names them."""
        return str(json.loads(self.text).get("mtriple", codegen.llvm_get_system_triple()))

    @property
    def instructions(self) -> str:
        """Class of targets for which the same programs are fast: `amx`, `avx512x2` (two vectors of 512 bits multiplied
        and added a cycle), `avx512` (one), `avx2`, `neon`, or empty for any other."""
        if architecture(self.triple) == "aarch64":
            return "neon"
        if registers(self.tvm()).matrices:
            return "amx"
        is_x86 = architecture(self.triple) in ("x86_64", "i386")
        avx512 = "avx512" if json.loads(self.text).get("mcpu") in _ONE_VECTOR else "avx512x2"
        return {512: avx512, 256: "avx2"}.get(self.vector_bits, "") if is_x86 else ""

    @property
    def runs_here(self) -> bool:
        """Whether this machine can run what is compiled for it: another architecture or system needs a device, and so
        do instructions that this CPU lacks."""
        is_here = platform_of(self.triple) == platform_of(str(codegen.llvm_get_system_triple()))
        return is_here and not self.lacking

    @property
    def lacking(self) -> list[str]:
        """Instruction sets that this machine's CPU has not, as far as its operating system tells which it has."""
        here, wanted = _instruction_sets(), {str(each) for each in codegen.llvm_get_cpu_features(self.tvm())}
        told = {each for each in wanted if each in _TOLD or each.startswith(("avx512", "amx"))}
        return sorted(told - here) if here else []

    def tvm(self) -> Target:
        """The TVM object."""
        return Target(self.text)


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """An NVIDIA GPU."""

    text: str  # JSON of tvm.target.Target
    threads: int  # of the CPU beside it, for compilers

    kind = "cuda"
    instructions = ""  # see `CpuTarget.instructions`

    @property
    def name(self) -> str:
        """Folder name, e.g. `cuda-sm_90a`."""
        return f"cuda-{json.loads(self.text)['arch']}"

    def tvm(self) -> Target:
        """The TVM object."""
        return Target(self.text)


# First parts of triples that LLVM takes beside its own names.
_ALIASES = {"amd64": "x86_64", "arm64": "aarch64", "i486": "i386", "i586": "i386", "i686": "i386"}
_SYSTEMS = ("linux", "darwin", "macos", "windows")
_OF_CPUS = (
    "kind",
    "mtriple",
    "mcpu",
    "mattr",
    "mabi",
    "mfloat-abi",
    "num-cores",
)  # attributes of TVM's tags that say it

AnyTarget = CpuTarget | GpuTarget


def architecture(triple: str) -> str:
    """LLVM's name of it."""
    name = triple.partition("-")[0]
    return "arm" if name.startswith("armv") else _ALIASES.get(name, name)


def platform_of(triple: str) -> tuple[str, str]:
    """What a library must fit: architecture and system."""
    system = next((name for name in _SYSTEMS if f"-{name}" in triple), "")
    return architecture(triple), "darwin" if system == "macos" else system


def target(text: str = "host", threads: int = 0) -> AnyTarget:
    """The target of a run.

    Args:
        text: As `cpu_target` has it; or `cuda` for the GPU of this machine, the tag of one that TVM knows, e.g.
            `nvidia/nvidia-h100`, or JSON of kind `cuda`.
        threads: See `cpu_target`; not for GPUs.

    Raises:
        TargetError: Unknown or incomplete, or there is no GPU.
    """
    if not (text == "cuda" or text.startswith("nvidia/") or (text.startswith("{") and _parse(text)["kind"] == "cuda")):
        return cpu_target(text, threads)
    if threads:
        raise TargetError(f"--threads is for CPUs, but --target is {text}.")
    parts: Any = _this_gpu() if text == "cuda" else text if text.startswith("nvidia/") else _parse(text)
    try:
        found = Target(parts)
    except Exception as error:
        raise TargetError(f"TVM refuses --target {text}: {str(error).splitlines()[-1]}") from error
    missing = [name for name in _GPU_LIMITS if name not in found.attrs]
    if missing:
        raise TargetError(
            f"--target {text} lacks {', '.join(missing)}, which the search needs. Name a GPU that TVM knows, e.g. "
            "nvidia/nvidia-h100, or add them."
        )
    return GpuTarget(str(found), host.physical_cores())


def cpu_target(text: str = "host", threads: int = 0) -> CpuTarget:
    """The target of a run.

    Args:
        text: `host`; a name of `NAMES`, e.g. `raspberry-pi/5`; a tag of TVM for a CPU; or JSON, e.g.
            `{"kind": "llvm", "mcpu": "skylake-avx512"}`.
        threads: Threads of one inference; 0 for all physical cores: of this process, or what the target says of
            another architecture's (`num-cores`).

    Raises:
        TargetError: Not a CPU target of this LLVM, or more threads than cores; or none, for a CPU elsewhere of which
            nobody knows how many cores it has.
    """
    parts = _host_target() if text == "host" else _check_cpu(_parse(text), text)
    known = _known_cores(parts, text)
    if not 0 <= threads <= known:
        raise TargetError(
            f"--threads must be between 1 and the {known} cores "
            + (f"of {text}" if _is_elsewhere(parts) else "this process may use")
            + f" (0: all of them), but got {threads}."
        )
    cores = threads or known
    if cores == _MANY:
        raise TargetError(
            f"--target {text} is not this machine, and nobody knows how many cores it has: give --threads."
        )
    parts["num-cores"] = cores
    target = Target(parts)
    return CpuTarget(str(target), cores, registers(target).lanes * FLOAT_BITS)


def stand_in(target: CpuTarget) -> CpuTarget:
    """This machine, in place of another one: the same programs, compiled for it, compute the same."""
    return cpu_target("host", min(target.threads, host.physical_cores()))


def _is_elsewhere(parts: dict[str, object]) -> bool:
    return platform_of(str(parts["mtriple"])) != platform_of(str(codegen.llvm_get_system_triple()))


def _known_cores(parts: dict[str, object], text: str) -> int:
    if not _is_elsewhere(parts):
        return host.physical_cores()
    given = parts.get("num-cores", _MANY)
    if not isinstance(given, int) or not 0 < given <= _MANY:
        raise TargetError(f"--target {text}: num-cores must be a whole number from 1 to {_MANY}, but got {given!r}.")
    return given


def _host_target() -> dict[str, object]:
    """LLVM's idea of this CPU, corrected where the operating system reports other features (masked CPUs in VMs)."""
    mcpu = str(codegen.llvm_get_system_cpu())
    parts: dict[str, object] = {
        "kind": "llvm",
        "mtriple": str(codegen.llvm_get_system_triple()),
        "mcpu": mcpu,
    }
    believed = {str(feature) for feature in codegen.llvm_get_cpu_features(Target(parts))}
    mattr = []
    present = _instruction_sets()
    if present:
        known = {feature for feature in believed if feature.startswith(_INSTRUCTION_SETS)}
        mattr = [f"-{name}" for name in sorted(known - present)]
        mattr += [f"+{name}" for name in sorted(present - known) if name.startswith(("avx512", "amx"))]
    if "avx512f" in present and "prefer-256-bit" in believed:
        mattr.append("-prefer-256-bit")  # of some CPUs; dense kernels are slower with half the width
    if mattr:
        parts["mattr"] = mattr
    return parts


def _instruction_sets() -> set[str]:
    """The instruction sets that the operating system reports, in LLVM's spelling; empty if it does not tell."""
    for line in host.cpuinfo():
        if line.startswith("flags"):
            flags = {flag.replace("avx512_", "avx512").replace("avx_", "avx") for flag in line.split()[2:]}
            found = {flag.replace("_", "-") for flag in flags if flag.startswith(_INSTRUCTION_SETS)}
            return found if host.may_use_amx() else {name for name in found if not name.startswith("amx")}
    return set()


def _this_gpu() -> dict[str, object]:
    """The first GPU that the driver shows."""
    found = host.gpu_facts("compute_cap")
    if not found:
        raise TargetError(
            "--target cuda is the GPU of this machine, but nvidia-smi lists none. Name the GPU to compile "
            "for, e.g. --target nvidia/nvidia-h100."
        )
    return {"kind": "cuda", "arch": f"sm_{found[0][0].replace('.', '')}", **_GPU_LIMITS}


def _parse(text: str) -> dict[str, object]:
    if text in NAMES:
        return dict(NAMES[text])
    if (tagged := _of_tag(text)) is not None:
        return tagged
    try:
        parts = json.loads(text)
    except json.JSONDecodeError:
        raise TargetError(
            f"--target is neither `host`, nor a name, nor JSON: {text!r}. "
            'Write it as \'{"kind": "llvm", "mcpu": "skylake-avx512"}\'; names of CPUs are '
            f"{', '.join(NAMES)}, and those of TVM's tags."
        ) from None
    if not isinstance(parts, dict) or parts.get("kind") not in ("llvm", "cuda"):
        raise TargetError(f'--target must have "kind": "llvm" or "cuda", but got {text}.')
    return parts


def _of_tag(text: str) -> dict[str, object] | None:
    """What a tag of TVM says of a CPU; its other attributes are for TVM's own schedules."""
    tag = None if text.startswith("{") else tvm.target.list_tags().get(text)
    if tag is None or tag.kind.name != "llvm":
        return None
    parts = json.loads(str(tag))
    return {name: parts[name] for name in _OF_CPUS if name in parts}


def _check_cpu(parts: dict[str, object], text: str) -> dict[str, object]:
    """Complete a CPU target; TVM would log what it does not know, and build generic code."""
    if parts["kind"] != "llvm":
        raise TargetError(f'a CPU target must have "kind": "llvm", but got {text}.')
    parts.setdefault("mtriple", str(codegen.llvm_get_system_triple()))
    name = str(parts["mtriple"]).partition("-")[0]
    known = [str(each) for each in codegen.llvm_get_targets()]
    if architecture(name) not in known:  # LLVM would crash on it
        raise TargetError(
            f"--target: LLVM {codegen.llvm_version_major()} knows no architecture {name!r} (of the mtriple "
            f"{parts['mtriple']!r}); it knows {', '.join(known)}."
        )
    mcpu = str(parts.get("mcpu", ""))
    if mcpu and not codegen.llvm_is_valid_cpu(mcpu, str(parts["mtriple"])):
        raise TargetError(f"LLVM {codegen.llvm_version_major()} knows no CPU {mcpu!r} for {parts['mtriple']}.")
    try:
        tvm.target.Target(parts)
    except Exception as error:
        raise TargetError(f"TVM refuses --target {text}: {str(error).splitlines()[-1]}") from error
    return parts
