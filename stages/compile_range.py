"""The best of each subgraph of a model in several shapes, in one bundle: a library a shape, and weights that stand
once.

Programs that read the same weights are to pack them alike (`lib.tuning.agreement`); the manifest says what that costs.
Each library is verified as one of a single shape is, and the bundle with lengths between them, padded.
"""

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import tvm

from lib import building, bundle, deploy, probing, sharing
from lib.contracts import arrays, digests, manifest, settings, tables
from lib.contracts.clock import Clock
from lib.contracts.errors import CompilationError, VerificationError
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import FAMILIES, MODELS, RESULTS, SHARED, SUBGRAPHS, TRAINING
from lib.contracts.tables import Provenance
from lib.graph import fusion
from lib.graph.algorithms import AS_IT_IS, IN_BF16
from lib.machine.targets import AnyTarget
from lib.measure import onnx_peer
from lib.measure.onnx_peer import OnnxFile, OnnxPeer
from lib.measure.protocol import BuildModel
from lib.measure.runner import Pool
from lib.models import onnx_facts
from lib.runtime.family_tuner_runtime.ranges import cut
from lib.tir.numerics import relative_error
from lib.tuning import agreement, history, planning
from lib.tuning.history import History
from lib.tuning.members import join, joint_members
from lib.verification import Built, CompileConfig, Estimate, Peer, verify
from lib.winners import Choice, choose_all

Say = Callable[[str], None]
_UNKNOWN = Estimate(0.0, is_complete=False)  # of the untuned model, which is not run in each shape
_ONNX_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in one of its shapes."""

    files: ModelFiles
    extents: Mapping[str, int]

    @property
    def name(self) -> str:
        return "x".join(map(str, self.extents.values()))


def run(
    shapes: Sequence[Shape],
    joint: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    target: AnyTarget,
    config: CompileConfig,
    pool: Pool,
    *,
    limits: Mapping[str, tuple[int, int]],
    onnx: OnnxFile,
    provenance: Provenance,
    out: CompiledFiles,
    precision: str = AS_IT_IS,
    say: Say = lambda _text: None,
) -> Path:
    """Compile a model for a range of shapes with the best schedules of a run.

    Args:
        shapes: Those that are compiled; each has `module.json`, `weights.npz` and the SUBGRAPHS table.
        joint: Has the SUBGRAPHS of all, the MODELS and SHARED tables, and `range.json`; `families`: their FAMILIES.
        past: What was recalled, and the finished rounds.
        limits: The lowest and highest extent of each open dimension.
        onnx: The file that the model came from: all is compared with it.
        out: Gets a library for each shape, the weights, a reference, `results.parquet` and, last, `manifest.json`.

    Raises:
        VerificationError: A library computes something else, or something else where it is padded. What was compiled
            before stays.
        CompilationError: One does not compile in the time and the memory that it may take.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    subgraphs = join(tables.read(joint.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
    so_far, probed = history.load(past), manifest.read(joint.probed)
    with clock.spent("finalists"):
        agreed = _agreed(joint, families, so_far)
        # All are checked, whatever that takes: a wrong one would cost the bundle, not a library that gives way.
        thorough = replace(config, finalists_share=math.inf)
        choices = choose_all(subgraphs, agreed, thorough, pool, say, RunFiles(past[0].run).finalists)
    out.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.folder, prefix=tables.BUILDING) as work:
        made = CompiledFiles(Path(work) / "bundle")
        made.folder.mkdir()
        with onnx_peer.opened(onnx, _ONNX_TIMEOUT_S) as session:
            with clock.spent("build"):
                say(f"compiling the model in {len(shapes)} shapes")
                built = [_built(shape, Path(work), precision) for shape in shapes]
                _build_all([_order(*each, choices) for each in zip(shapes, built, strict=True)], target, config)
            with clock.spent("verify"):
                found = []
                for shape, each in zip(shapes, built, strict=True):
                    say(f"checking {probing.told(shape.extents)}")
                    found.append(_verified(shape, each, config, pool, Peer(onnx, session), target))
                together = sharing.write(made.params, [each.packed for each in built])
                for shape, each in zip(shapes, built, strict=True):
                    shutil.copyfile(each.delivered, made.library_of(shape.name))
                rows = [{k: v for k, v in asdict(choice).items() if k != "trace"} for choice in choices]
                tables.write(pa.Table.from_pylist(rows, schema=RESULTS), made.results, RESULTS, provenance)
                facts = {
                    **_facts(shapes, found, together, probed, limits, target, onnx, made),
                    "precision": precision,
                    "compared_with": found[0]["compared_with"],
                    "max_error": max(each["max_error"] for each in found),
                    "tolerance": max(each["tolerance"] for each in found),
                    "agreement": _cost(shapes, so_far, agreed),
                    "settings": settings.digest(settings.deciding(config)),
                    "session": provenance.session,
                    "n_rounds": so_far.n_rounds,
                    "n_trials": so_far.n_trials,
                }
                say("checking lengths between the compiled ones")
                manifest.write(made.manifest, provenance.inputs, facts, _delivered(made, shapes))
                facts["padded"] = _padded(shapes, probed, limits, facts["tolerance"], onnx, session, made, config)
        facts["reference"] = made.reference.name if made.reference.exists() else None
        facts["clock"] = clock.read()
        manifest.write(made.manifest, provenance.inputs, facts, _delivered(made, shapes))
        return _move(made, out)


def inputs(past: Sequence[RoundFiles], config: CompileConfig) -> str:
    """Digest of what a bundle is compiled from: the last round stands on all before it."""
    made_as = settings.digest(settings.deciding(config), bundle.OF_RANGES)
    return digests.of_text(made_as, tables.made_from((past[-1].training, TRAINING)))


def _agreed(joint: ModelFiles, families: Path, so_far: History) -> History:
    """What was measured, as if of each subgraph only the programs had been that pack weights as its group does."""
    members = joint_members(
        tables.read(joint.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES), tables.read(joint.models, MODELS),
        so_far, tables.read(joint.shared, SHARED),
    )  # fmt: skip
    wanted = agreement.chosen(planning.sharing(members), so_far, is_final=True)
    found = {
        subgraph_id: agreement.restricted(past, wanted[subgraph_id]) if subgraph_id in wanted else past
        for subgraph_id, past in so_far.subgraphs.items()
    }
    return replace(so_far, subgraphs=found)


def _built(shape: Shape, work: Path, precision: str) -> Built:
    folder = work / shape.name
    folder.mkdir()
    interface = deploy.interface(tvm.ir.load_json(shape.files.module.read_text()))
    has_bytes = any(
        row.endswith("_int8") for row in tables.read(shape.files.subgraphs, SUBGRAPHS)["core_operator"].to_pylist()
    )
    return Built(folder, shape.files, interface, has_bytes or precision == IN_BF16, has_bytes)


def _order(shape: Shape, built: Built, choices: Sequence[Choice]) -> BuildModel:
    trace_of = {choice.subgraph_id: choice.trace for choice in choices}
    traces = {
        name: trace_of[row["subgraph_id"]]
        for row in tables.read(shape.files.subgraphs, SUBGRAPHS).select(["subgraph_id", "functions"]).to_pylist()
        if trace_of[row["subgraph_id"]]
        for name in row["functions"]
    }
    chosen = built.folder / "traces.json"
    chosen.write_text(json.dumps(traces))
    return BuildModel(built.module, built.tuned, chosen, pack=True)


def _build_all(orders: Sequence[BuildModel], target: AnyTarget, config: CompileConfig) -> None:
    """Raises: CompilationError: One could not be built within its limits."""
    failed = building.build_all(orders, target, memory_share=config.memory_share, timeout_s=config.build_timeout_s)
    for library, reason in failed.items():
        raise CompilationError(
            f"The model could not be compiled for {library.parent.name}: {reason}. Nothing was shipped; the "
            "measurements are kept. [compile] build_timeout_s and memory_share limit the time and the memory of that."
        )


def _verified(
    shape: Shape, built: Built, config: CompileConfig, pool: Pool, peer: Peer, target: AnyTarget
) -> dict[str, Any]:
    """Facts of one shape: see `verification.verify`. The untuned model is not run beside it."""

    def check(library: Path) -> None:
        if not library.exists():
            module = built.module if library == built.rounded else built.reference
            _build_all([BuildModel(module, library, in_plain_loops=True)], target, config)

    peer.infer(built.inputs, built.folder / "outputs-onnx.npz")
    try:
        return verify(built, _UNKNOWN, config, pool, peer, None, check)
    except VerificationError as error:
        raise VerificationError(f"With {probing.told(shape.extents)}: {error}") from error


def _padded(
    shapes: Sequence[Shape],
    probed: Mapping[str, Any],
    limits: Mapping[str, tuple[int, int]],
    tolerance: float,
    onnx: OnnxFile,
    session: OnnxPeer,
    made: CompiledFiles,
    config: CompileConfig,
) -> list[dict[str, Any]]:
    """Run the bundle as users do with lengths between those that were compiled, and in the compiled ones with anything
    in what would be padded; the largest errors to what the file makes of the lengths themselves.

    The reference that comes with the bundle is the smallest of these lengths.

    Raises:
        VerificationError: It computes something else.
    """
    folder = made.folder.parent / "padded"
    folder.mkdir()
    inputs, outputs = probed["inputs"], probed["outputs"]
    lengths = list(probing.lengths_within([shape.extents for shape in shapes], limits, seed=len(shapes)))
    expected: list[list[np.ndarray]] = []
    for n, (shape, extents) in enumerate(zip(shapes, lengths, strict=True)):
        given = probing.values(inputs, extents, seed=n)
        np.savez(folder / f"{n:03d}-own.in.npz", *given)
        np.savez(folder / f"{n:03d}-any.in.npz", *probing.padded(inputs, given, shape.extents, seed=n + 1))
        expected.append(session.outputs(onnx, folder / f"{n:03d}-own.in.npz", folder / f"{n:03d}.npz")[0])
        if n == len(shapes) - 1:
            bundle.write_reference(given, expected[-1], made)
    command = [sys.executable, "-m", "lib.run_bundle", str(made.folder), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=config.timeout_s, check=False)
    if done.returncode:
        raise VerificationError(
            f"The bundle does not run: {done.stderr.strip().splitlines()[-1:]}. Nothing was shipped."
        )
    facts = []
    for n, (shape, extents) in enumerate(zip(shapes, lengths, strict=True)):
        errors = [
            relative_error(cut(found, said["shape"], extents), wanted)
            for kind in ("own", "any")
            for found, wanted, said in zip(
                arrays.values(folder / f"{n:03d}-{kind}.out.npz"), expected[n], outputs, strict=True
            )
        ]
        if not max(errors) <= tolerance:
            raise VerificationError(
                f"With {probing.told(extents)}, padded to {probing.told(shape.extents)}, the bundle's outputs differ "
                f"from those of {onnx.path} by {max(errors):.1e} of their largest value; {tolerance:.2g} is allowed. "
                "Nothing was shipped; the measurements are kept."
            )
        facts.append({"extents": extents, "bucket": dict(shape.extents), "max_error": max(errors)})
    return facts


def _facts(
    shapes: Sequence[Shape],
    found: Sequence[Mapping[str, Any]],
    together: sharing.Together,
    probed: Mapping[str, Any],
    limits: Mapping[str, tuple[int, int]],
    target: AnyTarget,
    onnx: OnnxFile,
    made: CompiledFiles,
) -> dict[str, Any]:
    """What the manifest says to whoever runs the bundle."""
    buckets = [
        {
            "extents": dict(shape.extents),
            "library": made.library_of(shape.name).name,
            "weights": named,
            "latency_s": median(facts["latencies_s"]["tuned"]),
            "onnxruntime_s": median(facts["latencies_s"]["onnxruntime"])
            if "onnxruntime" in facts["latencies_s"]
            else None,
            "max_error": facts["max_error"],
        }
        for shape, facts, named in zip(shapes, found, together.of_each, strict=True)
    ]
    told = bundle.facts(made, probed["inputs"], probed["outputs"], target, fusion.ENTRY, onnx_facts.licence(onnx.path))
    return {
        **bundle.of_range(told, limits, buckets),
        "weights_bytes": {"all": together.n_bytes, "one_shape": together.n_bytes_least},
        "probed": {"by": probed["by"], "checked": probed["checked"]},
    }


def _cost(shapes: Sequence[Shape], so_far: History, agreed: History) -> list[dict[str, Any]]:
    """By shape: its estimated latency with the programs that it would have alone, and with those that agree."""
    costs = []
    for shape in shapes:
        rows = tables.read(shape.files.subgraphs, SUBGRAPHS).select(["subgraph_id", "weight", "tunable"]).to_pylist()
        pairs = [
            (row["weight"], so_far.of(row["subgraph_id"]), agreed.of(row["subgraph_id"]))
            for row in rows
            if row["tunable"]
        ]
        known = [(n, alone.fastest[0].latency_s, own.fastest[0].latency_s) for n, alone, own in pairs if own.fastest]
        costs.append({
            "extents": dict(shape.extents),
            "alone_s": sum(n * best for n, best, _ in known),
            "agreed_s": sum(n * best for n, _, best in known),
        })  # fmt: skip
    return costs


def _delivered(made: CompiledFiles, shapes: Sequence[Shape]) -> list[Path]:
    found = [*(made.library_of(shape.name) for shape in shapes), made.params, made.results]
    return [*found, made.reference] if made.reference.exists() else found


def _move(made: CompiledFiles, out: CompiledFiles) -> Path:
    """Put a bundle in its place; the manifest comes last. Of the bundle before, what is no longer named goes."""
    out.manifest.unlink(missing_ok=True)
    files = sorted(made.folder.iterdir(), key=lambda path: path == made.manifest)
    for path in out.folder.iterdir():
        if path.is_file() and path.name not in {each.name for each in files}:
            path.unlink()
    for path in files:
        path.replace(out.folder / path.name)
    return out.manifest
