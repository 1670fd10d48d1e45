"""Which model is meant: what a user says of it on the command line."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lib.contracts import digests
from lib.contracts.errors import ModelError, require_file

_SUFFIXES = (".onnx", ".pt2")
_EXTENT = re.compile(r"[1-9][0-9]{0,9}")  # `isdigit` takes superscripts, too
_LONGEST = 120  # characters of a name; file systems take 255 bytes, and others add to it
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_.+-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """A model of the zoo, or a file, and the shapes it is tuned for."""

    model: str  # name of the zoo, or path of an .onnx or .pt2 file
    batch_size: int = 0  # images or texts of one inference, of a zoo model; 0: 1
    sequence: int = 0  # tokens of a text, of a zoo model; 0: its own
    shape: str = ""  # of a file's inputs or named dimensions: `ids=1,128 mask=1,128`, `batch=1 sequence=128`
    weights: str = ""  # path of a .safetensors file for a zoo model; empty: random ones
    fix: str = ""  # inputs of an ONNX file that are constants: `use_cache_branch=true`

    @property
    def is_file(self) -> bool:
        """Whether it is named by a path, rather than as one of the zoo."""
        return self.model.endswith(_SUFFIXES) or "/" in self.model

    def check(self) -> None:
        """Whether the options fit together and the files are there.

        Raises:
            ModelError: They do not, or are not.
        """
        if self.is_file:
            if not self.model.endswith(_SUFFIXES):
                raise ModelError(f"--model {self.model}: expected a file that ends in {' or '.join(_SUFFIXES)}.")
            require_file(self.model, "--model")
            if self.batch_size or self.sequence or self.weights:
                raise ModelError(
                    "--batch-size, --sequence and --weights are for models of the zoo. A file's dynamic dimensions are "
                    "given by --shape, its weights are in the file."
                )
            if self.fix and self.model.endswith(".pt2"):
                raise ModelError(
                    f"--fix is for ONNX files; export {self.model} of a module that has these values within it."
                )
        elif self.fix:
            raise ModelError(f"--fix is for ONNX files; the zoo's {self.model} has no such inputs.")
        elif self.shape:
            raise ModelError(f"--shape is for files; the zoo's {self.model} takes --batch-size and --sequence.")
        if self.batch_size < 0 or self.sequence < 0:
            raise ModelError(
                f"--batch-size and --sequence count from 1, but got {self.batch_size} and {self.sequence}."
            )
        if self.weights:
            require_file(self.weights, "--weights")
        parse_shapes(self.shape)

    @property
    def name(self) -> str:
        """Folder name: equal for equal models, different for different content or shapes."""
        parts = [Path(self.model).stem if self.is_file else self.model]
        if self.is_file:
            parts.append(_digest(Path(self.model))[:8])
        if self.batch_size > 1:
            parts.append(f"batch{self.batch_size}")
        if self.sequence:
            parts.append(f"sequence{self.sequence}")
        if self.shape:
            parts.append("+".join(f"{key}={'x'.join(map(str, of))}" for key, of in parse_shapes(self.shape).items()))
        if self.weights:
            parts.append(_digest(Path(self.weights))[:8])
        name = _UNNAMEABLE.sub("_", "-".join(parts).replace("=", "_"))
        return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}-{digests.of_text(name)[:8]}"


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """`ids=1,128 batch=4` as {"ids": (1, 128), "batch": (4,)}.

    Raises:
        ModelError: It is written in another way.
    """
    shapes = {}
    for word in text.split():
        name, _, numbers = word.rpartition("=")
        extents = numbers.split(",")
        if not name or not all(_EXTENT.fullmatch(extent) for extent in extents):
            raise ModelError(
                f"--shape {word!r}: expected NAME=EXTENT,EXTENT,... as in `ids=1,128` (several in quotes, "
                "separated by spaces), with extents of at least 1."
            )
        shapes[name] = tuple(int(extent) for extent in extents)
    return shapes


def _digest(path: Path) -> str:
    """Digest of a file, with those in which an ONNX file keeps its weights."""
    own = digests.of_state(path)
    if path.suffix != ".onnx":
        return own
    others = [digests.of_state(file) for file in _external_files(path, own)]
    return digests.of_text(own, *others) if others else own


@cache
def _external_files(path: Path, _digest: str) -> list[Path]:
    from lib.models import onnx_external  # onnx takes a while to load, and models of the zoo do not need it

    return onnx_external.files(path)
