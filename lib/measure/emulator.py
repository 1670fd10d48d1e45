"""An emulated CPU of another architecture, by qemu-user: it runs whole libraries, so that they can be checked.

    python -m lib.measure.emulator FOLDER

makes such a machine for aarch64, on Debian or Ubuntu and without being root: Debian's arm64 packages of Python,
unpacked into `FOLDER/root`, and the wheels of TVM's runtime and NumPy that this project pins, into `FOLDER/site`. What
needs root stays to the user: `apt-get install qemu-user`. Latencies there say nothing, and none is taken.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lib.contracts.errors import ConfigError
from lib.machine.targets import CpuTarget, architecture
from lib.measure.runner import ModelFailed

_PROGRAM, _ANY = "qemu-aarch64", "max"  # and the CPU that has all instructions
_ROOT = Path(__file__).parents[2]
_PINNED = _ROOT / ".requirements" / "tune.txt"
_WHEELS = ("apache-tvm", "apache-tvm-ffi", "cloudpickle", "ml-dtypes", "numpy", "psutil", "typing-extensions")
_PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64")
_NOT_NEEDED = ("libtvm_compiler.so", "libtvm_runtime_cuda.so")  # most of what the wheel has


@dataclass(frozen=True)
class Emulator:
    """A folder that `make` made."""

    folder: Path
    mcpu: str = ""  # of the target

    @property
    def by(self) -> str:
        """For people and for manifests."""
        found = re.search(r"version (\S+)", _said([_PROGRAM, "--version"]))
        return f"{_PROGRAM} {found[1] if found else ''} -cpu {self.cpu}"

    @cached_property
    def cpu(self) -> str:
        """The target's own, where qemu knows it: it then refuses instructions that this CPU lacks."""
        return self.mcpu if self.mcpu in _said([_PROGRAM, "-cpu", "help"]).split() else _ANY

    def command(self, *arguments: str, environment: Mapping[str, str] | None = None) -> list[str]:
        """What starts its Python, with TVM's runtime and this project's modules that need nothing else."""
        [python] = sorted((self.folder / "root/usr/bin").glob("python3.[0-9]*[0-9]"))
        own = {"TVM_USE_RUNTIME_LIB": "1", "PYTHONPATH": f"{self.folder / 'site'}:{_ROOT}", **(environment or {})}
        given = [part for name, value in own.items() for part in ("-E", f"{name}={value}")]
        return [_PROGRAM, "-L", str(self.folder / "root"), "-cpu", self.cpu, *given, str(python), *arguments]

    def infer(self, library: Path, params: Path, inputs: Path, out: Path, *, threads: int, timeout_s: float) -> None:
        """Run a library once, as `lib.run_library` has it.

        Raises:
            ModelFailed: It cannot be run.
        """
        files = [str(path.resolve()) for path in (library, params, inputs, out)]
        command = self.command("-m", "lib.run_library", *files, environment={"TVM_NUM_THREADS": str(threads)})
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=_ROOT)
        except subprocess.TimeoutExpired:
            raise ModelFailed("emulate", f"it took more than {timeout_s:g} s") from None
        if done.returncode:
            told = [line for line in done.stderr.strip().splitlines() if line.strip()]
            raise ModelFailed("emulate", (told or [f"exit code {done.returncode}"])[-1])


def emulator(folder: str, target: CpuTarget) -> Emulator | None:
    """That of a folder, if it is one for the target; none if no folder is given.

    Raises:
        ConfigError: The folder has none, or qemu is not there.
    """
    if not folder or target.runs_here or architecture(target.triple) != "aarch64":
        return None
    path = Path(folder).expanduser().resolve()
    if not (path / "root").is_dir() or not (path / "site").is_dir():
        raise ConfigError(f"[tuner] emulator = {folder}: make it first, by `python -m lib.measure.emulator {folder}`.")
    if shutil.which(_PROGRAM) is None:
        raise ConfigError(
            f"[tuner] emulator: {_PROGRAM} is not on PATH (Debian and Ubuntu: apt-get install qemu-user)."
        )
    return Emulator(path, str(target.tvm().attrs.get("mcpu", "")))


def make(folder: Path) -> None:
    """See the module; does nothing if it is there.

    Raises:
        ConfigError: Debian's tools are not there.
        subprocess.CalledProcessError: They fail; what they say stands on the terminal.
    """
    if missing := [name for name in ("apt-get", "dpkg") if shutil.which(name) is None]:
        raise ConfigError(
            f"{', '.join(missing)}: an emulated machine is made of Debian's packages, on Debian or Ubuntu."
        )
    root, site = folder / "root", folder / "site"
    if not site.exists():
        shutil.rmtree(root, ignore_errors=True)
        _unpack(folder / "packages", root)
        _install(site, root)


def _unpack(packages: Path, root: Path) -> None:
    """Debian's Python for arm64 and what it needs; apt's own state stays as it is."""
    for part in ("lists/partial", "cache/archives/partial"):
        (packages / part).mkdir(parents=True, exist_ok=True)
    (packages / "status").touch()
    settings = {"APT::Architecture": "arm64", "APT::Architectures": "arm64", "Debug::NoLocking": "1",
                "Dir::State::Lists": packages / "lists", "Dir::State::status": packages / "status",
                "Dir::Cache": packages / "cache", "APT::Sandbox::User": ""}  # fmt: skip
    apt = ["apt-get", "-qq", *(part for name, value in settings.items() for part in ("-o", f"{name}={value}"))]
    subprocess.run([*apt, "update"], check=True)
    wanted = ["python3", "libpython3-stdlib", "libstdc++6", "libgcc-s1", "zlib1g"]
    subprocess.run([*apt, "install", "-y", "--no-install-recommends", "--download-only", *wanted], check=True)
    root.mkdir(parents=True)
    for package in sorted((packages / "cache/archives").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    shutil.rmtree(packages)


def _install(site: Path, root: Path) -> None:
    """The pinned wheels, for the Python that Debian has."""
    [python] = sorted((root / "usr/bin").glob("python3.[0-9]*[0-9]"))
    wanted = site.with_name("requirements.txt")
    wanted.write_text("\n".join(_pinned(_PINNED.read_text(encoding="utf-8"), _WHEELS)))
    platforms = [part for name in _PLATFORMS for part in ("--platform", name)]
    partial = site.with_name("site.partial")
    shutil.rmtree(partial, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--require-hashes", "--only-binary=:all:",
         *platforms, "--implementation", "cp", "--python-version", python.name.removeprefix("python"),
         "--target", str(partial), "-r", str(wanted)],
        check=True,
    )  # fmt: skip
    for name in _NOT_NEEDED:
        (partial / "tvm/lib" / name).unlink(missing_ok=True)
    partial.rename(site)


def _pinned(text: str, names: Sequence[str]) -> list[str]:
    """The requirements of these names, with their hashes."""
    found = re.findall(r"^([a-z0-9_.-]+)==(.*?[^\\])$", text, flags=re.MULTILINE | re.DOTALL)
    return [f"{name}=={rest}" for name, rest in found if name in names]


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout


if __name__ == "__main__":
    make(Path(sys.argv[1]).resolve())
