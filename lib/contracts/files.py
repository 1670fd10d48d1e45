"""Where the files of a run lie; see artifacts/README.md for a map."""

from dataclasses import dataclass
from pathlib import Path

RECALLED = -1  # the number of what was known before round 0
FORETOLD = -2  # of what models foretold of it, where nothing is measured


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Of one model on one target."""

    folder: Path

    @property
    def lock(self) -> Path:
        """Held by the stage that writes here."""
        return self.folder / "lock"

    @property
    def subgraphs(self) -> Path:
        return self.folder / "subgraphs.parquet"

    @property
    def models(self) -> Path:
        """Of several models that are tuned together: which they are."""
        return self.folder / "models.parquet"

    @property
    def shared(self) -> Path:
        """Of shapes of one model that are tuned together: which subgraphs read the same weights."""
        return self.folder / "shared.parquet"

    @property
    def probed(self) -> Path:
        """Of the same: what its open dimensions are, and that padding them changes nothing."""
        return self.folder / "range.json"

    @property
    def module(self) -> Path:
        return self.folder / "module.json"

    @property
    def weights(self) -> Path:
        return self.folder / "weights.npz"

    @property
    def reference(self) -> Path:
        """The module before convolutions were replaced by ones that compute the same otherwise; if any were."""
        return self.folder / "reference.json"

    @property
    def kernels(self) -> Path:
        """The weights of `reference` that are others in `weights`."""
        return self.folder / "kernels.npz"

    @property
    def expected(self) -> Path:
        """What the model makes of the inputs on which libraries are checked."""
        return self.folder / "expected.npz"

    @property
    def expected_from(self) -> Path:
        """The manifest of that."""
        return self.folder / "expected.json"

    def families(self, algorithm: str) -> Path:
        return self.folder / f"families-{algorithm}.parquet"

    def run(self, name: str) -> "RunFiles":
        return RunFiles(self.folder / "runs" / name)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Of one run: one choice of search settings."""

    folder: Path

    @property
    def lock(self) -> Path:
        """Held by the stage that writes here: two runs of one command share the work."""
        return self.folder / "lock"

    def round(self, number: int) -> "RoundFiles":
        return RoundFiles(self.folder, number)

    @property
    def foretold(self) -> "RoundFiles":
        """What models foretold without a measurement: read like a round, in place of them."""
        return self.round(FORETOLD)

    def rounds(self, count: int) -> list["RoundFiles"]:
        return [self.round(number) for number in range(count)]

    @property
    def recalled(self) -> "RoundFiles":
        """What was known of its subgraphs when it began: read like a round, and before all of them."""
        return self.round(RECALLED)

    def past(self, count: int) -> list["RoundFiles"]:
        """What was recalled, and the first `count` rounds."""
        return [self.recalled, *self.rounds(count)]

    def trained(self) -> list["RoundFiles"]:
        """What was recalled, and the rounds that have ended, whether or not they are current."""
        count = 0
        while self.round(count).training.exists():
            count += 1
        return self.past(count)

    @property
    def finalists(self) -> Path:
        """What was chosen of each subgraph when its best were timed again."""
        return self.folder / "finalists"

    @property
    def compiled(self) -> "CompiledFiles":
        return CompiledFiles(self.folder / "compiled")

    @property
    def settings(self) -> Path:
        """All settings of the run, in words."""
        return self.folder / "run.json"

    @property
    def summary(self) -> Path:
        """What came of several models that were tuned together."""
        return self.folder / "summary.txt"

    @property
    def night_page(self) -> Path:
        """The same and more, for a browser."""
        return self.folder / "summary.html"

    @property
    def summarized(self) -> Path:
        """The manifest of both, with what a later page needs to know of this one."""
        return self.folder / "summary.json"

    def outcome(self, model: str) -> Path:
        """What came of one of them."""
        return self.folder / "models" / f"{model}.json"

    @property
    def report(self) -> Path:
        return self.folder / "report.txt"

    @property
    def page(self) -> Path:
        """The same and more, for a browser."""
        return self.folder / "report.html"

    @property
    def reported(self) -> Path:
        """The manifest of the report, its page and its pictures."""
        return self.folder / "report.json"

    @property
    def curve(self) -> Path:
        return self.folder / "report.png"

    @property
    def treemap(self) -> Path:
        return self.folder / "families.png"


@dataclass(frozen=True, slots=True)
class RoundFiles:
    """Of one round of a run."""

    run: Path
    number: int

    @property
    def is_recalled(self) -> bool:
        """Whether its measurements are of earlier runs."""
        return self.number == RECALLED

    @property
    def is_foretold(self) -> bool:
        """Whether nothing of it is measured."""
        return self.number == FORETOLD

    @property
    def is_round(self) -> bool:
        """Whether something was, or is, to be measured in it."""
        return self.number >= 0

    @property
    def folder(self) -> Path:
        names = {RECALLED: "recalled", FORETOLD: "foretold"}
        return self.run / names[self.number] if self.number in names else self.run / "rounds" / f"{self.number:04d}"

    @property
    def plan(self) -> Path:
        return self.folder / "plan.parquet"

    @property
    def candidates(self) -> Path:
        return self.folder / "candidates.parquet"

    @property
    def journal(self) -> Path:
        return self.folder / "measurements.jsonl"

    @property
    def measurements(self) -> Path:
        return self.folder / "measurements.parquet"

    @property
    def training(self) -> Path:
        return self.folder / "training.parquet"

    def model(self, family_id: str) -> Path:
        return self.folder / "models" / f"{family_id}.ubj"


@dataclass(frozen=True, slots=True)
class CompiledFiles:
    """What a user deploys, and how it was chosen."""

    folder: Path

    @property
    def library(self) -> Path:
        return self.folder / "model.so"

    def library_of(self, bucket: str) -> Path:
        """Of a range of shapes: the library of one of them."""
        return self.folder / f"model-{bucket}.so"

    @property
    def params(self) -> Path:
        """The weights, packed, in a file that is mapped: see `weights.py`."""
        return self.folder / "weights.safetensors"

    @property
    def reference(self) -> Path:
        """Inputs and what the model should make of them, to check it where it runs; not there if they are large."""
        return self.folder / "reference.safetensors"

    @property
    def rest(self) -> Path:
        """What ONNX Runtime is to compute after the library, of a model with results whose shapes depend on values."""
        return self.folder / "rest.onnx"

    @property
    def manifest(self) -> Path:
        return self.folder / "manifest.json"

    @property
    def results(self) -> Path:
        return self.folder / "results.parquet"
