"""A bundle: the folder with a library, its weights and a manifest, and whether this machine can run it."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cpu, native, weights
from .errors import BundleError
from .ranges import Ranges

MANIFEST = "manifest.json"
FORMAT = 1  # of bundles of one shape
OF_RANGES = 3  # of bundles of ranges of shapes; this code reads all up to it (in 2, no weight was part of another)
_DIGITS = 16  # hex digits of a digest
_AGAIN = "Copy the bundle again, or have the tuner make it again."


@dataclass(frozen=True, slots=True)
class Value:
    """An input or an output."""

    name: str
    shape: tuple[int | str, ...]  # names stand for dimensions that are open within a range
    dtype: str  # as NumPy calls it; `bfloat16` as ml_dtypes does
    fill: int = 0  # what an input is padded with

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What the manifest of a folder says, once it was found to be whole."""

    folder: Path
    facts: dict[str, Any]

    @staticmethod
    def read(folder: Path | str) -> "Bundle":
        """Read the manifest of a folder.

        Raises:
            BundleError: It is not there, is damaged, or other code wrote it.
        """
        folder = Path(folder)
        path = folder / MANIFEST
        try:
            facts = json.loads(path.read_bytes())
            seal = facts.pop("seal")
        except FileNotFoundError:
            raise BundleError(f"{folder} is no bundle: it has no {MANIFEST}.") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{path} is damaged: it is no manifest ({error}). {_AGAIN}") from error
        if seal != _seal(facts):
            raise BundleError(f"{path} is damaged: its values do not fit its seal. {_AGAIN}")
        found = facts.get("format", 0)
        if found < FORMAT:
            raise BundleError(
                f"{folder} was compiled before there were bundles: its weights are in no file that can be mapped. The "
                "command that tuned it compiles it again; what was measured is kept."
            )
        if found > OF_RANGES:
            raise BundleError(
                f"{folder} is a bundle of format {found}, and this runtime reads {OF_RANGES}: install its own."
            )
        return Bundle(folder, facts)

    @property
    def ranges(self) -> Ranges:
        """The open dimensions, and the shapes that were compiled."""
        return Ranges.of(self.facts)

    @property
    def libraries(self) -> list[Path]:
        """One for each bucket, in their order."""
        return [self.folder / bucket.library for bucket in self.ranges.buckets]

    @property
    def weights(self) -> Path:
        return self.folder / str(self.facts["params"])

    @property
    def reference(self) -> Path | None:
        """Inputs, and what the model makes of them; none if they were too large to come along."""
        name = self.facts.get("reference")
        return self.folder / str(name) if name else None

    @property
    def rest(self) -> Path | None:
        """What ONNX Runtime computes after the library, if there is something."""
        return self.folder / str(self.facts["rest"]["file"]) if "rest" in self.facts else None

    @property
    def threads(self) -> int:
        """Those that it was tuned for."""
        return int(self.facts["threads"])

    @property
    def inputs(self) -> list[Value]:
        return _values(self.facts["model_inputs"])

    @property
    def outputs(self) -> list[Value]:
        """Of the library."""
        return _values(self.facts["model_outputs"])

    @property
    def whole_outputs(self) -> list[Value]:
        """Of the model: with its rest, if it has one."""
        return _values(self.facts["rest"]["outputs"]) if "rest" in self.facts else self.outputs

    def require_fit(self) -> None:
        """See `misfits`; raises BundleError with all of them."""
        if found := list(self.misfits()):
            raise BundleError(f"{self.folder} cannot run here: " + "; ".join(found))

    def misfits(self) -> Iterator[str]:
        """What is wrong with it on this machine, as far as can be told without reading its files: a file that is
        missing or has another size; another kind of device or CPU; instructions that this CPU lacks; another TVM."""
        for name, said in self.facts["files"].items():
            path = self.folder / name
            if not path.is_file():
                yield f"{name} is missing. {_AGAIN}"
            elif path.stat().st_size != said["bytes"]:
                yield f"{name} has {path.stat().st_size} bytes, and should have {said['bytes']}. {_AGAIN}"
        target = self.facts["target"]
        if target["kind"] != "llvm":
            yield f"it was compiled for {target['kind']}, and this runtime is for CPUs"
            return
        built_for = str(target.get("mtriple", "")).partition("-")[0]
        if built_for and cpu.architecture(built_for) != cpu.architecture():
            yield f"it was compiled for {built_for}, and this machine is {cpu.architecture()}"
        elif lacks := cpu.missing(self.facts["instructions"]):
            yield (
                f"this CPU lacks {', '.join(lacks)}, which it was compiled with: compile the model on this machine, or "
                f"with --target (it was made for {target.get('mcpu', 'another CPU')})"
            )
        made_with = _version_of(self.facts["versions"], "apache-tvm")
        if _minor(made_with) != _minor(native.version()):
            yield f"it was compiled with TVM {made_with}, and TVM {native.version()} is installed here"

    def damages(self) -> Iterator[str]:
        """What is not as it was made; reads all files."""
        for name, said in self.facts["files"].items():
            path = self.folder / name
            if not path.is_file():
                yield f"{name} is missing. {_AGAIN}"
            elif (found := _digest(path)) != said["digest"]:
                yield f"{name} is damaged: its digest is {found}, and should be {said['digest']}. {_AGAIN}"
        for path in (self.weights, self.reference):
            if path is not None and path.is_file():
                try:
                    weights.entries(path)
                except BundleError as error:
                    yield str(error)


def _values(described: list[dict[str, Any]]) -> list[Value]:
    return [
        Value(
            str(each["name"]),
            tuple(extent if isinstance(extent, str) else int(extent) for extent in each["shape"]),
            str(each["dtype"]),
            int(each.get("fill", 0)),
        )
        for each in described
    ]


def _version_of(versions: str, name: str) -> str:
    """Of text such as `apache-tvm 0.27.0, numpy 2.2.6`."""
    return next((part.split()[1] for part in versions.split(", ") if part.split()[0] == name), "")


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _seal(facts: dict[str, Any]) -> str:
    """As `lib/contracts/digests.py` has it: of the length and the text of JSON with sorted keys."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(len(text).to_bytes(8, "little") + text).hexdigest()[:_DIGITS]


def _digest(path: Path) -> str:
    state = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            state.update(chunk)
    return state.hexdigest()[:_DIGITS]
