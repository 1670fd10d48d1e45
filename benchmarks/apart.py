"""The twin of a bundle: the same programs in a library that calls each kernel by itself, to be looked at one by one."""

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


@contextmanager
def twin(compiled: Path) -> Iterator[Model]:
    """Of a bundle in the folder of its run.

    Raises:
        MissingInput: The run's files are not there.
    """
    run = RunFiles(compiled.parent)
    traces = _traces(run)
    with TemporaryDirectory() as folder:
        out = CompiledFiles(Path(folder))
        facts = manifest.read(run.compiled.manifest)
        inputs, files = facts.pop("inputs"), facts.pop("files")
        for name in files:
            shutil.copyfile(compiled / name, out.folder / name)
        module = load_module(ModelFiles(compiled.parents[2]).module.read_text())
        packing = out.folder / "packing.json"
        deploy.build(module, traces, Target(facts["target"]), out.library, packing, together=False)
        packing.unlink()
        manifest.write(out.manifest, inputs, facts, [out.folder / name for name in files])
        yield Model(out.folder)


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
