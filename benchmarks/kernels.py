"""Where an inference's time goes: into which spaces' kernels, and between them.

    python benchmarks/kernels.py artifacts/TARGET/MODEL/runs/RUN ...

Of compiled runs, from their own measurements. Kernels are timed one by one in their libraries, with weights from
memory, the model as a whole: what is between them is the rest. Shares are of all kernels' time. How near the machine's
peaks they come is told by `roofline.py`.
"""

import argparse
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from lib.contracts import manifest, tables
from lib.contracts.files import ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, RESULTS, SUBGRAPHS

_UNTUNED = "untuned"
_STOCK = ("metaschedule", _UNTUNED)  # spaces that are none of this project
_HEAVIEST = 3  # kernels or operators of a model that are listed


@dataclass(frozen=True, slots=True)
class Kernel:
    """One subgraph as it is in a library."""

    operator: str
    space: str
    calls: int
    latency_s: float

    @property
    def time_s(self) -> float:
        """Of an inference."""
        return self.calls * self.latency_s


@dataclass(frozen=True, slots=True)
class Library:
    """A compiled run."""

    name: str
    latency_s: float
    kernels: tuple[Kernel, ...]

    @property
    def kernels_s(self) -> float:
        """Of all kernels."""
        return sum(kernel.time_s for kernel in self.kernels)

    def share(self, space: str) -> float:
        """Of the kernels' time, of those of a space."""
        return sum(kernel.time_s for kernel in self.kernels if kernel.space == space) / self.kernels_s


def read(folder: Path) -> Library:
    """A run's; subgraphs that take no time of their own, as views, are left out."""
    run = RunFiles(folder)
    model = folder.parents[1]
    subgraphs = tables.read(ModelFiles(model).subgraphs, SUBGRAPHS).to_pylist()
    results = tables.read(run.compiled.results, RESULTS).to_pylist()
    spaces: dict[str, str] = {}
    for files in [*run.trained(), run.foretold]:
        if files.candidates.exists():
            rows = tables.read(files.candidates, CANDIDATES).select(["candidate_id", "space"]).to_pylist()
            spaces |= {row["candidate_id"]: row["space"] for row in rows}
    facts = manifest.read(run.compiled.manifest)
    kernels = [
        Kernel(
            subgraph["core_operator"],
            spaces.get(result["candidate_id"], _UNTUNED),
            subgraph["weight"],
            result["tuned_s"],
        )
        for subgraph, result in zip(subgraphs, results, strict=True)
        if result["tuned_s"]
    ]
    latencies = facts["latencies_s"]["untuned" if facts["shipped"] == "untuned" else "tuned"]
    return Library(model.name, sorted(latencies)[len(latencies) // 2], tuple(kernels))


def spaces_table(libraries: list[Library]) -> list[str]:
    """What share of each model's time is in kernels, and of these in each space."""
    own = sorted({kernel.space for library in libraries for kernel in library.kernels} - {*_STOCK})
    names = [*own, *_STOCK]
    lines = [
        f"| model | ms | in kernels | {' | '.join(names)} | what falls to the last two |",
        "|---" * (len(names) + 4) + "|",
    ]
    for library in libraries:
        fallen: defaultdict[str, float] = defaultdict(float)
        for kernel in library.kernels:
            if kernel.space in _STOCK:
                fallen[kernel.operator] += kernel.time_s / library.kernels_s
        heaviest = sorted(fallen.items(), key=lambda each: -each[1])[:_HEAVIEST]
        cells = [f"{library.latency_s * 1e3:.3g}", f"{library.kernels_s / library.latency_s:.1%}"]
        cells += [f"{share:.1%}" if (share := library.share(name)) else "" for name in names]
        told = ", ".join(f"{name} {share:.1%}" for name, share in heaviest if share >= 0.0005)
        lines.append(f"| {library.name} | {' | '.join(cells)} | {told} |")
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a compiled run")
    libraries = [read(folder) for folder in parser.parse_args().runs]
    print("\n".join(spaces_table(libraries)))


if __name__ == "__main__":
    main()
