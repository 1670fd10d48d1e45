"""The best of each subgraph of a model in several shapes, in one bundle: a library a shape, and weights that stand
once.

Programs that read the same weights are to pack them alike (`lib.tuning.agreement`); the manifest says what that costs.
Each library is verified as one of a single shape is, and the bundle with lengths between them, padded. A shape that is
no faster than a larger one is left out: what it was for is padded to that one.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

from lib import building, bundle, checking, probing, sharing
from lib.contracts import arrays, digests, manifest, settings, tables
from lib.contracts.clock import Clock
from lib.contracts.errors import VerificationError
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import FAMILIES, RESULTS, SUBGRAPHS, TRAINING
from lib.contracts.tables import Provenance
from lib.graph import fusion
from lib.graph.algorithms import AS_IT_IS
from lib.machine.targets import AnyTarget
from lib.measure import file_peer
from lib.measure.file_peer import FilePeer, Original
from lib.measure.protocol import PackWeights
from lib.measure.runner import Pool
from lib.models import file_facts, onnx_float32
from lib.runtime.family_tuner_runtime.ranges import cut
from lib.shapes import Righted, Shape, agreed_of, built_of, order_of
from lib.tir.numerics import relative_error
from lib.tuning import history
from lib.tuning.history import History
from lib.tuning.members import join
from lib.verification import Built, CompileConfig, Peer
from lib.winners import Choice, choose_all

Say = Callable[[str], None]
_FILE_TIMEOUT_S = 120.0


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
    original: Original,
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
        original: The file that the model came from: all is compared with it.
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
        packings, agreed = agreed_of(joint, families, so_far)
        packed = {subgraph_id for subgraph_id, packing in packings.items() if packing}
        kept = RunFiles(past[0].run).finalists
        choices: Sequence[Choice] = choose_all(subgraphs, agreed, config, pool, say, kept, packed)
    out.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.folder, prefix=tables.BUILDING) as work:
        made = CompiledFiles(Path(work) / "bundle")
        made.folder.mkdir()
        with file_peer.opened(original, _FILE_TIMEOUT_S, onnx_float32.compared_with) as session:
            with clock.spent("build"):
                say(f"compiling the model in {len(shapes)} shapes")
                built = [built_of(shape, Path(work), precision) for shape in shapes]
                orders = [order_of(*each, choices) for each in zip(shapes, built, strict=True)]
                failed = building.build_all(
                    orders, target, memory_share=config.memory_share, timeout_s=config.build_timeout_s
                )
                together = _together(built, made, config)
            with clock.spent("verify"):
                say("checking all shapes")
                peers = [_peer(each, original, session) for each in built]
                found = []
                for shape, each, peer, facts in zip(
                    shapes, built, peers, checking.check_all(built, peers, target, config), strict=True
                ):
                    if facts is None:
                        say(f"looking what is wrong with {probing.told(shape.extents)}")
                        right = Righted(shape, each, subgraphs, agreed, config, pool, target)
                        facts, choices = right.verified(choices, peer, failed.get(each.tuned, ""))
                    found.append(facts)
                if not all(each.shared.exists() for each in built):
                    together = _together(built, made, config)
                say("timing all shapes")
                beside = [Peer(original, session) if shape.is_measured else None for shape in shapes]
                timed = checking.latencies(built, beside, pool, config.timeout_s)
                found = [{**facts, "latencies_s": own} for facts, own in zip(found, timed, strict=True)]
                say("looking whether a larger shape is faster")
                left_out = checking.slower([(shape.extents, each, facts["latencies_s"]["tuned"])
                                         for shape, each, facts in zip(shapes, built, found, strict=True)],
                                        pool, config.timeout_s)  # fmt: skip
                whole = list(zip(shapes, built, found, strict=True))
                shapes, built, found = (list(part) for part in zip(
                    *(each for n, each in enumerate(whole) if n not in left_out), strict=True))  # fmt: skip
                together = sharing.without(made.params, together, left_out)
                for shape, each in zip(shapes, built, strict=True):
                    shutil.copyfile(each.delivered, made.library_of(shape.name))
                rows = [{k: v for k, v in asdict(choice).items() if k != "trace"} for choice in choices]
                tables.write(pa.Table.from_pylist(rows, schema=RESULTS), made.results, RESULTS, provenance)
                facts = {
                    **_facts(shapes, found, together, probed, limits, target, original, made),
                    "precision": precision,
                    "compared_with": found[0]["compared_with"],
                    "max_error": max(each["max_error"] for each in found),
                    "tolerance": max(each["tolerance"] for each in found),
                    "agreement": _cost(shapes, so_far, agreed),
                    "left_out": [{"extents": dict(whole[n][0].extents), **why} for n, why in left_out.items()],
                    "settings": settings.digest(settings.deciding(config)),
                    "session": provenance.session,
                    "n_rounds": so_far.n_rounds,
                    "n_trials": so_far.n_trials,
                }
                say("checking lengths between the compiled ones")
                manifest.write(made.manifest, provenance.inputs, facts, _delivered(made, shapes))
                facts["padded"] = _padded(shapes, probed, limits, facts["tolerance"], original, session, made, config)
        facts["reference"] = made.reference.name if made.reference.exists() else None
        facts["clock"] = clock.read()
        manifest.write(made.manifest, provenance.inputs, facts, _delivered(made, shapes))
        return _move(made, out)


def _together(built: Sequence[Built], made: CompiledFiles, config: CompileConfig) -> sharing.Together:
    """The weights of all shapes that could be built, in the bundle's file, from which their libraries are run from now
    on."""
    whole = [each for each in built if each.tuned.exists()]
    listed = made.folder.parent / "together.json"
    packings = tuple(each.packing for each in whole)
    order = PackWeights(packings, tuple(each.weights for each in whole), made.params, listed)
    building.pack(order, memory_share=config.memory_share, timeout_s=config.build_timeout_s)
    together = sharing.read_together(listed)
    for each, named in zip(whole, together.of_each, strict=True):
        sharing.list_weights(each.shared, made.params, named)
    return together


def inputs(past: Sequence[RoundFiles], config: CompileConfig) -> str:
    """Digest of what a bundle is compiled from: the last round stands on all before it."""
    made_as = settings.digest(settings.deciding(config), bundle.OF_RANGES)
    return digests.of_text(made_as, tables.made_from((past[-1].training, TRAINING)))


def _peer(built: Built, original: Original, session: FilePeer) -> Peer:
    """The file, run on a shape's inputs, which its process keeps until it is run on others."""
    peer = Peer(original, session)
    peer.infer(built.inputs, built.peer_outputs)
    return peer


def _padded(
    shapes: Sequence[Shape],
    probed: Mapping[str, Any],
    limits: Mapping[str, tuple[int, int]],
    tolerance: float,
    original: Original,
    session: FilePeer,
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
        expected.append(session.outputs(original, folder / f"{n:03d}-own.in.npz", folder / f"{n:03d}.npz")[0])
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
                f"from those of {original.path} by {max(errors):.1e} of their largest value; {tolerance:.2g} is "
                "allowed. Nothing was shipped; the measurements are kept."
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
    original: Original,
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
    told = bundle.facts(
        made, probed["inputs"], probed["outputs"], target, fusion.ENTRY, file_facts.of(original.path).licence
    )
    return {
        **bundle.of_range(told, limits, buckets),
        "weights_bytes": {"all": together.n_bytes, "one_shape": together.n_bytes_least},
        "probed": {"by": probed["by"], "checked": probed["checked"]},
    }


def _cost(shapes: Sequence[Shape], so_far: History, agreed: History) -> list[dict[str, Any]]:
    """By shape: its estimated latency with the programs that it would have alone, and with those that agree; none for
    shapes of which nothing was measured."""
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
            "alone_s": sum(n * best for n, best, _ in known) if shape.is_measured else None,
            "agreed_s": sum(n * best for n, _, best in known) if shape.is_measured else None,
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
