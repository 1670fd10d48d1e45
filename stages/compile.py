"""The best of each subgraph, measured again and checked, in one library that is verified and never slower."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from lib import building, bundle, deploy
from lib.contracts import arrays, digests, manifest, settings, tables, weights
from lib.contracts.clock import Clock
from lib.contracts.errors import CompilationError, TunerError, VerificationError
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import FAMILIES, RESULTS, SUBGRAPHS, TRAINING
from lib.contracts.tables import Provenance
from lib.graph import fusion
from lib.graph.algorithms import AS_IT_IS, MULTIPLY_BF16
from lib.machine import host, targets
from lib.machine.dots import BF16, INT8, INT16
from lib.machine.registers import registers
from lib.measure import peak
from lib.measure.absent import AbsentDevice
from lib.measure.file_peer import Original
from lib.measure.protocol import BuildModel
from lib.measure.runner import Pool
from lib.models import file_facts, onnx_rest
from lib.report.text import narrow_kind
from lib.tir.workload import load_module
from lib.tuning import history
from lib.tuning.hopeless import LEAST, guess_s, is_hopeless
from lib.tuning.members import join
from lib.verification import Built, CompileConfig, Estimate, Peer, emulated, is_quantized, peer_of, verify
from lib.winners import Choice, choose_all, without_wrong

Say = Callable[[str], None]

_MOST_EXPECTED = 64 << 20  # bytes of outputs that are kept


def run(
    model: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    target: targets.AnyTarget,
    config: CompileConfig,
    pool: Pool,
    *,
    provenance: Provenance,
    out: CompiledFiles,
    original: Original | None = None,
    precision: str = AS_IT_IS,
    say: Say = lambda _text: None,
) -> Path:
    """Compile the model with the best schedules of a run.

    Args:
        model: Has `module.json`, `weights.npz` and the SUBGRAPHS table.
        families: A FAMILIES table; `past`: the finished rounds.
        pool: Measures the finalists.
        out: Gets `model.so`, `weights.safetensors`, `reference.safetensors` if that is not large, `results.parquet`
            and, last, `manifest.json`. If it has those of the same model, they stay unless the new ones are faster.
        original: The file that the model came from, if it is one: to be compared with.
        precision: Of its products and convolutions; decides how far the model may be from what it was in float32.
        say: Told what is being done.

    Raises:
        VerificationError: The compiled model computes something else. What was compiled before stays.
        CompilationError: It does not compile in the time and the memory that it may take.
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    clock = Clock()
    subgraphs = join(tables.read(model.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
    has_bytes = is_quantized((row["core_operator"] for row in subgraphs), model)
    so_far = history.load(past)
    kept = RunFiles(past[0].run).finalists if past else None
    with clock.spent("finalists"):
        choices = choose_all(subgraphs, so_far, config, pool, say, kept)
    identity = {"model": _digest(model), "conditions": pool.conditions.id}
    before = _shipped_before(out, identity)
    digest = settings.digest(settings.deciding(config))
    made = {"session": provenance.session, "earlier": _earlier(out), "settings": digest}
    if before and _is_of(before, choices, digest):  # nothing that was found since is of this model
        facts = {key: value for key, value in manifest.read(out.manifest).items() if key not in ("inputs", "files")}
    else:
        out.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=out.folder, prefix=tables.BUILDING) as work:
            module = load_module(model.module.read_text())
            interface = deploy.interface(module)
            built = Built(Path(work), model, interface, precision, has_bytes)
            _recall_expected(model, identity, built)
            with peer_of(original) as peer:

                def check(library: Path) -> None:
                    if not library.exists():
                        _build_all([built.in_plain_loops(library)], pool.runs, config)

                def make(choices: Sequence[Choice]) -> dict[str, Any]:
                    with clock.spent("build"):
                        say("compiling the model")
                        untuned = estimate(subgraphs, choices)
                        runs_untuned = untuned.at_most(config.once_above_s)
                        _build(built, subgraphs, choices, target, pool, config, peer, runs_untuned=runs_untuned)
                    with clock.spent("verify"):
                        say("checking the model and timing it beside the untuned one")
                        return verify(built, untuned, config, pool, peer, before, check, is_timed=pool.runs == target)

                try:
                    found = make(choices)
                except (CompilationError, VerificationError):
                    with clock.spent("verify"):
                        right = without_wrong(choices, subgraphs, so_far, config, pool)
                    if right == choices:
                        raise
                    choices = right
                    found = make(choices)
            _keep_expected(model, identity, built)
            if isinstance(pool, AbsentDevice) and pool.emulator:
                say(f"running the library by {pool.emulator.by}")
                with clock.spent("verify"):
                    found["emulated"] = emulated(built, pool.emulator, target.threads, found["tolerance"], config)
            _ship(built, choices, str(found["shipped"]), target, config, provenance, out)
            bundle.write_reference(arrays.values(built.inputs), arrays.values(built.agreed), out)
        with clock.spent("finalists"):
            peaks = {"peak_flops": peak.flops(target, pool)}
            machine = registers(target.tvm()) if isinstance(target, targets.CpuTarget) else None
            operators = {narrow_kind(row["core_operator"]) for row in subgraphs}
            for name, kind in (("bf16", BF16), ("int8", INT8), ("int16", INT16)):
                is_used = f"_{name}" in operators or (kind == BF16 and precision in MULTIPLY_BF16)
                if is_used and machine and (instruction := machine.fastest(kind.weights)):
                    peaks[f"peak_flops_{name}"] = peak.flops(target, pool, instruction)
            multiplies = {"multiplies_matrices": machine is not None and machine.matrix(BF16) is not None}
        onnx = original.path if original and original.path.suffix == ".onnx" else None
        said = file_facts.of(onnx) if onnx else file_facts.Facts({}, ())
        outputs = deploy.outputs(module, said.outputs)
        rest = onnx_rest.of(onnx) if onnx else None
        told = bundle.facts(out, interface, outputs, target, fusion.ENTRY, said.licence)
        if rest:
            told |= bundle.with_rest(rest.file, rest.outputs, rest.told, out)
        facts = {**told, **_where(target, pool), **peaks, **multiplies, **identity, **found}
    facts |= {
        **made,
        "precision": precision,
        "clock": clock.read(),
        "n_rounds": so_far.n_rounds,
        "n_trials": so_far.n_trials,
    }
    written = manifest.write(out.manifest, provenance.inputs, facts, bundle.delivered(out))
    bundle.sweep(out)
    return written


def _ship(
    built: Built,
    choices: Sequence[Choice],
    name: str,
    target: targets.AnyTarget,
    config: CompileConfig,
    provenance: Provenance,
    out: CompiledFiles,
) -> None:
    """Put what `verify` said, and what it was made of, in its place; if that is the previous one, it is there."""
    if name == "previous":
        return
    if name == "untuned":
        if not built.untuned.exists():
            _build_all([BuildModel(built.reference, built.untuned)], target, config)
        choices = [replace(c, candidate_id=None, note="the model as a whole was no faster") for c in choices]
    ship(built, name, out)
    rows = [{k: v for k, v in asdict(choice).items() if k != "trace"} for choice in choices]
    tables.write(pa.Table.from_pylist(rows, schema=RESULTS), out.results, RESULTS, provenance)


def _is_of(shipped: CompiledFiles, choices: Sequence[Choice], config: str) -> bool:
    """Whether a library was made of these, and verified with the same settings."""
    if manifest.read(shipped.manifest).get("settings") != config:
        return False
    found = tables.read(shipped.results, RESULTS).select(["subgraph_id", "candidate_id"]).to_pylist()
    return found == [{"subgraph_id": choice.subgraph_id, "candidate_id": choice.candidate_id} for choice in choices]


def _digest(model: ModelFiles) -> str:
    """Of what a model computes."""
    return digests.of_text(digests.of_state(model.module), digests.of_state(model.weights))


def _earlier(out: CompiledFiles) -> list[dict[str, Any]]:
    """Who made the libraries of this run before, and their clocks: their seconds count."""
    try:
        found = manifest.read(out.manifest)
    except TunerError:
        return []
    return [*found.get("earlier", []), {"session": found["session"], "clock": found["clock"]}]


def _recall_expected(model: ModelFiles, identity: Mapping[str, str], built: Built) -> None:
    """What the model should compute, if it was computed for a library before: a large one takes minutes for that."""
    try:
        is_same = manifest.read(model.expected_from)["inputs"] == _expected_from(identity, built)
        if is_same and not manifest.damaged_files(model.expected_from):
            shutil.copyfile(model.expected, built.expected)
    except TunerError:
        return


def _keep_expected(model: ModelFiles, identity: Mapping[str, str], built: Built) -> None:
    """For the next library of the model."""
    if not built.checked.exists() or built.expected.stat().st_size > _MOST_EXPECTED:
        return
    with tables.written_whole(model.expected) as partial:
        shutil.copyfile(built.expected, partial)
    manifest.write(model.expected_from, _expected_from(identity, built), {}, [model.expected])


def _expected_from(identity: Mapping[str, str], built: Built) -> str:
    return digests.of_text(*identity.values(), digests.of_file(built.inputs))


def _shipped_before(out: CompiledFiles, identity: Mapping[str, str]) -> CompiledFiles | None:
    """What is there, if it is tuned, whole, and of the same model under the same conditions."""
    try:
        found = manifest.read(out.manifest)
        is_whole = not manifest.damaged_files(out.manifest)
    except TunerError:
        return None
    is_same = all(found.get(key) == value for key, value in {**identity, "format": bundle.FORMAT}.items())
    return out if is_whole and is_same and found["shipped"] != "untuned" else None


def estimate(subgraphs: Sequence[Mapping[str, Any]], choices: Sequence[Choice]) -> Estimate:
    """Of an untuned inference.

    Args:
        subgraphs: Rows of SUBGRAPHS. One that is not tunable is a view, and takes no time.
        choices: In the same order.
    """
    known, missing, beyond_s = 0.0, 0, 0.0
    for subgraph, choice in zip(subgraphs, choices, strict=True):
        weight, flop = subgraph["weight"], subgraph["flop"]
        if not subgraph["tunable"]:
            continue
        if choice.untuned_s is not None:
            known += weight * choice.untuned_s
        elif choice.tuned_s is not None and is_hopeless(flop):
            least_s = weight * LEAST * choice.tuned_s
            known += least_s
            beyond_s += max(0.0, weight * guess_s(flop) - least_s)
        else:
            missing += 1
    return Estimate(known, missing == 0, beyond_s)


def _build(
    built: Built,
    subgraphs: Sequence[Mapping[str, Any]],
    choices: Sequence[Choice],
    target: targets.AnyTarget,
    pool: Pool,
    config: CompileConfig,
    peer: Peer | None,
    *,
    runs_untuned: bool,
) -> None:
    """Compile the tuned model, and the untuned one if that is to be run; beside that the file that the model came from
    computes what it says. Where there is none, also what the tuned one is checked against.

    Where there is no device of the target, the tuned model is also built for this machine, to run here.
    """
    traces = {name: c.trace for s, c in zip(subgraphs, choices, strict=True) if c.trace for name in s["functions"]}
    chosen = built.folder / "traces.json"
    chosen.write_text(json.dumps(traces))
    orders = [built.order(chosen)]
    if not peer and not built.expected.exists():
        orders.append(built.in_plain_loops(built.checked))
    if runs_untuned:  # an untuned ViT takes minutes
        orders.append(BuildModel(built.reference, built.untuned))
    with ThreadPoolExecutor(1) as beside:
        inferred = beside.submit(peer.infer, built.inputs, built.peer_outputs) if peer else None
        _build_all(orders, pool.runs, config)
        building.pack(built.order_to_pack(), memory_share=config.memory_share, timeout_s=config.build_timeout_s)
        if pool.runs != target:
            _build_all([replace(orders[0], library=built.deliver_another())], target, config)
        if inferred:
            inferred.result()


def _build_all(orders: Sequence[BuildModel], target: targets.AnyTarget, config: CompileConfig) -> None:
    """Raises: CompilationError: One that is shipped or checked could not be built within its limits."""
    limits = {"memory_share": config.memory_share, "timeout_s": config.build_timeout_s}
    failed = building.build_all(orders, target, **limits)
    for library, reason in failed.items():
        library.unlink(missing_ok=True)
        if len(orders) == 1 or library.stem != "untuned":  # which is for comparison alone, else it is what is shipped
            raise building.failure(f"The {library.stem} model could not be compiled", reason)


def _where(target: targets.AnyTarget, pool: Pool) -> dict[str, Any]:
    """Where the library ran, for the manifest: not on a device of a target that this machine is not."""
    ran = pool.runs == target
    return {
        "device": pool.conditions.device,
        "ran": ran,  # else it was verified as compiled for this machine
        "verified_on": pool.conditions.device if ran else host.cpu_name(),
    }


def inputs(past: Sequence[RoundFiles], config: CompileConfig) -> str:
    """Digest of what a model is compiled from: the last round stands on all before it."""
    made_as = settings.digest(settings.deciding(config), bundle.FORMAT)
    return digests.of_text(made_as, tables.made_from((past[-1].training, TRAINING)))


def ship(built: Built, name: str, out: CompiledFiles) -> None:
    """Put library and parameters in their place, each whole."""
    library, params = built.library(name)
    if name == "tuned":
        library = built.delivered
    with tables.written_whole(out.library) as partial:
        shutil.copyfile(library, partial)
    with tables.written_whole(out.params) as partial:
        if params == built.packed:
            shutil.copyfile(params, partial)
        else:
            weights.write(partial, weights.numbered(arrays.values(params)))
