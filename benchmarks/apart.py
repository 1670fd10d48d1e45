"""The twin of a bundle: the same programs in a library that calls each kernel by itself, to be looked at one by one.

python benchmarks/apart.py COMPILED OUT
python benchmarks/precision.py --onnx FILE --f32 COMPILED --bf16 OUT --turns 4 --out FOLDER   # both in turn
"""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tvm.target import Target

from lib import deploy
from lib.contracts import manifest, tables
from lib.contracts.files import CompiledFiles, ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, RESULTS, SUBGRAPHS
from lib.runtime.family_tuner_runtime import Model
from lib.tir.workload import load_module


def write(compiled: Path, out: Path) -> None:
    """Write the twin of a bundle that lies in the folder of its run.

    Raises:
        MissingInput: The run's files are not there.
    """
    run, files = RunFiles(compiled.parent), CompiledFiles(out)
    facts = manifest.read(run.compiled.manifest)
    inputs, names = facts.pop("inputs"), facts.pop("files")
    for name in names:
        shutil.copyfile(compiled / name, out / name)
    module = load_module(ModelFiles(compiled.parents[2]).module.read_text())
    packing = out / "packing.json"
    deploy.build(module, _traces(run), Target(facts["target"]), files.library, packing, together=False)
    packing.unlink()
    manifest.write(files.manifest, inputs, facts, [out / name for name in names])


@contextmanager
def twin(compiled: Path) -> Iterator[Model]:
    """See `write`."""
    with TemporaryDirectory() as folder:
        write(compiled, Path(folder))
        yield Model(Path(folder))


def _traces(run: RunFiles) -> dict[str, str]:
    """What a compiled run ships, by function."""
    found: dict[str, str] = {}
    for files in [*run.trained(), run.foretold]:
        if files.candidates.exists():
            rows = tables.read(files.candidates, CANDIDATES).select(["candidate_id", "trace"]).to_pylist()
            found |= {row["candidate_id"]: row["trace"] for row in rows}
    subgraphs = tables.read(ModelFiles(run.folder.parents[1]).subgraphs, SUBGRAPHS).to_pylist()
    results = tables.read(run.compiled.results, RESULTS).to_pylist()
    chosen = {row["subgraph_id"]: row["candidate_id"] for row in results if row["candidate_id"]}
    return {
        name: found[chosen[subgraph["subgraph_id"]]]
        for subgraph in subgraphs
        if subgraph["subgraph_id"] in chosen
        for name in subgraph["functions"]
    }


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compiled", type=Path, metavar="COMPILED")
    parser.add_argument("out", type=Path, metavar="OUT")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    write(options.compiled, options.out)


if __name__ == "__main__":
    main()
