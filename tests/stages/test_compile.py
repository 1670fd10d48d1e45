import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import pytest
import safetensors.numpy
import tvm
from tvm import relax

from lib import bundle
from lib.contracts import manifest, tables, weights
from lib.contracts.errors import CompilationError, VerificationError
from lib.contracts.files import CompiledFiles, ModelFiles, RunFiles
from lib.contracts.schemas import RESULTS, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.graph.algorithms import AlgorithmConfig
from lib.measure.file_peer import Original
from lib.models.source import Source
from lib.tir import cpu_check
from lib.tir.numerics import random_values, relative_error
from lib.winners import Choice
from stages import cluster, compile, extract, generate, measure, train
from stages.compile import CompileConfig
from tests.lib.models.test_onnx_import import block
from tests.stages.conftest import PLAN, PROVENANCE, SEARCH, TRAIN
from tests.stages.test_extract import wide

QUICK = CompileConfig(finalists=1, finalists_share=99, repeats=1, turns=2, timeout_s=60)


@pytest.fixture(scope="module")
def compiled(started, cpu, pool, tmp_path_factory):
    out = CompiledFiles(tmp_path_factory.mktemp("compiled"))
    compile.run(
        started.model, started.families, started.run.rounds(1), cpu, QUICK, pool, provenance=PROVENANCE, out=out
    )
    return out


def infer(files, *inputs):
    """By TVM's own classes and safetensors' reader."""
    manifest = json.loads(files.manifest.read_text())
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(files.folder / manifest["library"])), tvm.cpu())
    found = safetensors.numpy.load_file(files.folder / manifest["params"])
    params = [tvm.runtime.tensor(found[name]) for name in sorted(found) if not name.startswith("__")]
    return machine[manifest["entry"]](*[tvm.runtime.tensor(x) for x in inputs], *params).numpy()


def test_every_subgraph_has_a_result_and_none_is_slower_than_untuned(started, compiled):
    subgraphs = tables.read(started.model.subgraphs, SUBGRAPHS).to_pylist()

    rows = tables.read(compiled.results, RESULTS).to_pylist()

    assert [row["subgraph_id"] for row in rows] == [s["subgraph_id"] for s in subgraphs]
    assert all(row["tuned_s"] <= row["untuned_s"] for row in rows)
    for row in rows:
        assert (row["candidate_id"] is None) == (row["max_error"] is None)
        assert row["max_error"] is None or row["max_error"] <= QUICK.tolerance


def test_what_is_shipped_stays_unless_a_new_library_is_faster(started, cpu, pool, tmp_path):
    """Without any round nothing is tuned, so the new library is the slower one."""
    out = CompiledFiles(tmp_path / "compiled")

    def compile_with(rounds):
        compile.run(
            started.model, started.families, rounds, cpu, replace(QUICK, turns=5), pool, provenance=PROVENANCE, out=out
        )  # fmt: skip
        return json.loads(out.manifest.read_text()), out.library.read_bytes(), out.results.read_bytes()

    _, untuned, _ = compile_with([])
    first, tuned, results = compile_with(started.run.rounds(1))
    again, kept, kept_results = compile_with([])

    assert first["shipped"] == "tuned"
    assert tuned != untuned
    assert (again["shipped"], kept, kept_results) == ("previous", tuned, results)
    assert median(again["latencies_s"]["tuned"]) <= median(again["latencies_s"]["new"])
    assert again["files"] == first["files"]


def test_an_untuned_model_takes_longer_than_what_was_timed_of_it_where_hopeless_programs_were_spared():
    timed, heavy, view, failed = (
        Choice(name, "f", None, untuned_s, tuned_s, None, "")
        for name, untuned_s, tuned_s in (("t", 0.1, 0.01), ("h", None, 0.01), ("v", None, None), ("u", None, 0.02))
    )
    flops = {"t": 1e6, "h": 8e8, "v": 0.0, "u": 1e6}
    rows = [{"weight": 2, "flop": flops[name], "tunable": name != "v"} for name in "thvu"]

    [whole, spared, unknown] = (compile.estimate(rows[:n], [timed, heavy, view, failed][:n]) for n in (1, 3, 4))

    assert (whole.seconds, whole.is_lower_bound) == (0.2, False)
    assert spared.seconds == pytest.approx(0.2 + 2 * 0.03)  # several times as slow as the tuned one
    assert spared.is_lower_bound
    assert (spared.at_most(1.0), spared.at_most(1.5)) == (False, True)  # of 1.6e9 FLOP an untuned program takes 1 s
    assert (unknown.is_lower_bound, unknown.at_most(99.0)) == (True, False)


@pytest.mark.acceptance
def test_a_library_that_crashes_now_is_replaced_whatever_it_was(started, cpu, pool, tmp_path):
    out = CompiledFiles(tmp_path / "compiled")
    rounds = started.run.rounds(1)
    compile.run(started.model, started.families, rounds, cpu, QUICK, pool, provenance=PROVENANCE, out=out)
    out.library.write_bytes(b"no library")
    facts = manifest.read(out.manifest)
    facts.pop("files")
    manifest.write(out.manifest, facts.pop("inputs"), facts, bundle.delivered(out))

    others = replace(QUICK, turns=1)  # else it would not be made again
    compile.run(started.model, started.families, rounds, cpu, others, pool, provenance=PROVENANCE, out=out)

    assert manifest.read(out.manifest)["shipped"] == "tuned"
    assert out.library.read_bytes() != b"no library"


def test_what_a_model_should_compute_is_computed_once_and_again_if_that_is_damaged(
    started, cpu, pool, tmp_path, monkeypatch
):
    model = ModelFiles(tmp_path / "model")
    shutil.copytree(started.model.folder, model.folder, ignore=shutil.ignore_patterns("expected.*", "runs"))
    real, built = compile.building.build_all, []

    def watched(orders, target, **limits):
        built.append(sorted(order.library.stem for order in orders))
        return real(orders, target, **limits)

    monkeypatch.setattr(compile.building, "build_all", watched)

    def error(name):
        out = CompiledFiles(tmp_path / name)
        compile.run(
            model, started.families, started.run.rounds(1), cpu, QUICK, pool, provenance=PROVENANCE, out=out
        )  # fmt: skip
        return manifest.read(out.manifest)["max_error"]

    first, second = error("first"), error("second")
    model.expected.write_bytes(model.expected.read_bytes()[:-1] + b"?")
    third = error("third")

    assert ["checked" in each for each in built] == [True, False, True]
    assert first == second == third


def test_a_library_of_the_same_candidates_is_not_made_again(started, cpu, pool, tmp_path, monkeypatch):
    out = CompiledFiles(tmp_path / "compiled")

    def compile_again(inputs, config=QUICK):
        compile.run(
            started.model, started.families, started.run.rounds(1), cpu, config, pool,
            provenance=Provenance(inputs, inputs), out=out,
        )  # fmt: skip
        return manifest.read(out.manifest)

    first, results = compile_again("first"), out.results.read_bytes()
    monkeypatch.setattr(compile, "_build", None)  # whoever calls it fails
    second = compile_again("second")
    damaged = out.library.read_bytes()
    out.library.write_bytes(damaged[:-1])

    assert (second["inputs"], second["session"], second["earlier"]) == (
        "second", "second", [{"session": "first", "clock": first["clock"]}],
    )  # fmt: skip
    assert out.results.read_bytes() == results
    changed = ("inputs", "session", "earlier", "clock")
    assert {k: v for k, v in second.items() if k not in changed} == {k: v for k, v in first.items() if k not in changed}
    with pytest.raises(TypeError):  # a damaged one is
        compile_again("third")
    out.library.write_bytes(damaged)
    with pytest.raises(TypeError):  # and one that was checked otherwise
        compile_again("fourth", replace(QUICK, tolerance=1e-2))


def test_a_library_of_before_there_were_bundles_is_made_again(started, cpu, pool, tmp_path):
    out = CompiledFiles(tmp_path / "compiled")

    def compile_again():
        compile.run(
            started.model, started.families, started.run.rounds(1), cpu, QUICK, pool, provenance=PROVENANCE, out=out
        )  # fmt: skip
        return manifest.read(out.manifest)

    facts = compile_again()
    old = out.params.rename(out.folder / "params.npz")
    kept = {name: value for name, value in facts.items() if name not in ("files", "inputs", "format")}
    manifest.write(out.manifest, PROVENANCE.inputs, {**kept, "params": "params.npz"}, [out.library, old, out.results])

    again = compile_again()

    assert (again["shipped"], again["format"], again["params"]) == ("tuned", bundle.FORMAT, "weights.safetensors")
    assert not old.exists()
    assert manifest.damaged_files(out.manifest) == []
    assert bundle.main(["check", str(out.folder)]) == 0


def test_the_manifest_says_what_was_verified_and_how_fast_it_is(compiled, cpu):
    manifest = json.loads(compiled.manifest.read_text())

    assert manifest["max_error"] <= QUICK.tolerance
    assert manifest["threads"] == cpu.threads
    assert manifest["model_inputs"] == [
        {"name": "x", "shape": [1, 32, 32, 3], "dtype": "float32", "values": "real", "bound": 0}
    ]
    assert manifest["model_outputs"] == [{"name": "output0", "shape": [1, 10], "dtype": "float32"}]
    assert manifest["instructions"] == cpu_check.needed(cpu.tvm())
    assert manifest["precision"] == "model"
    assert next(each["of"] for each in manifest["licences"]) == "weights"
    assert [len(manifest["latencies_s"][name]) for name in ("tuned", "untuned")] == [QUICK.turns] * 2


def test_a_slow_untuned_model_is_not_run(started, cpu, pool, tmp_path):
    out = CompiledFiles(tmp_path / "compiled")
    config = replace(QUICK, once_above_s=0.0)

    compile.run(
        started.model, started.families, started.run.rounds(1), cpu, config, pool, provenance=PROVENANCE, out=out
    )

    manifest, rows = json.loads(out.manifest.read_text()), tables.read(out.results, RESULTS).to_pylist()
    weights = tables.read(started.model.subgraphs, SUBGRAPHS)["weight"].to_pylist()
    expected = sum(weight * (row["untuned_s"] or 0) for weight, row in zip(weights, rows, strict=True))
    assert manifest["untuned_estimated"]
    assert manifest["latencies_s"]["untuned"] == [pytest.approx(expected)]
    assert manifest["max_error"] <= QUICK.tolerance


def test_no_work_files_are_left(compiled):
    assert sorted(p.name for p in compiled.folder.iterdir()) == [
        "manifest.json", "model.so", "reference.safetensors", "results.parquet", "weights.safetensors",
    ]  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """An ONNX file with one finished round."""

    model: ModelFiles
    families: Path
    run: RunFiles


def tuned(path, folder, cpu, pool):
    model = ModelFiles(folder)
    families, run = model.families("single"), model.run("run")
    extract.run(Source(str(path)), cpu, AlgorithmConfig(), provenance=PROVENANCE, out=model)
    cluster.run(model.subgraphs, "single", provenance=PROVENANCE, out=families)
    first = run.round(0)
    generate.run(model.subgraphs, families, [], cpu, PLAN, SEARCH, seed=0, provenance=PROVENANCE, out=first)
    measure.run(model.subgraphs, pool, provenance=PROVENANCE, out=first)
    train.run(families, [first], TRAIN, seed=0, provenance=PROVENANCE, out=first)
    return Tuned(model, families, run)


def compile_tuned(made, cpu, pool, original=None):
    compile.run(
        made.model, made.families, made.run.rounds(1), cpu, QUICK, pool, provenance=PROVENANCE, out=made.run.compiled,
        original=original,
    )  # fmt: skip
    return made.run.compiled


def test_the_compiled_model_of_an_onnx_file_agrees_with_onnx_runtime_and_is_checked_by_it(
    tmp_path, cpu, pool, monkeypatch
):
    real, built = compile.building.build_all, []

    def watched(orders, target, **limits):
        built.extend(order.library.stem for order in orders)
        return real(orders, target, **limits)

    monkeypatch.setattr(compile.building, "build_all", watched)
    path = block(tmp_path / "block.onnx")

    made = tuned(path, tmp_path / "model", cpu, pool)
    files = compile_tuned(made, cpu, pool, Original(path, cpu, is_timed=True))

    assert "checked" not in built
    facts = manifest.read(files.manifest)
    assert facts["compared_with"].startswith("ONNX Runtime")
    assert [(each["name"], each["shape"]) for each in facts["model_outputs"]] == [("y", [1, 4])]
    assert not made.model.expected.exists()
    x = random_values((1, 8, 10, 10), "float32", 0, seed=5)
    [expected] = onnxruntime.InferenceSession(path).run(None, {"x": x})
    assert relative_error(infer(files, x), expected) < 1e-3  # whichever of its programs were the faster ones


@pytest.fixture(scope="module")
def winograd(tmp_path_factory, cpu, pool):
    """The file of a convolution that gains by Winograd's way, and what became of it."""
    folder = tmp_path_factory.mktemp("winograd")
    path = wide(folder / "wide.onnx")
    return path, tuned(path, folder / "model", cpu, pool)


def test_a_convolution_in_winograds_way_agrees_with_onnx_runtime(winograd, cpu, pool):
    path, made = winograd

    files = compile_tuned(made, cpu, pool)

    x = random_values((1, 32, 24, 24), "float32", 0, seed=5)
    [expected] = onnxruntime.InferenceSession(path).run(None, {"x": x})
    assert made.model.kernels.exists()
    assert relative_error(infer(files, x), expected) < 1e-5


def test_a_wrong_transform_is_found_since_the_reference_does_without(winograd, tmp_path, cpu, pool):
    _, right = winograd
    shutil.copytree(right.model.folder, tmp_path / "model")
    model = ModelFiles(tmp_path / "model")
    made = Tuned(model, model.families("single"), model.run("run"))
    kernels = {name: value * 1.01 for name, value in np.load(made.model.weights).items()}
    np.savez(made.model.weights, **kernels)

    with pytest.raises(VerificationError, match="outputs differ from the untuned model's by"):
        compile_tuned(made, cpu, pool)


def compile_untuned(made, cpu, pool, folder):
    """Of a model of which nothing was measured."""
    compile.run(
        made.model, made.families, [], cpu, QUICK, pool, provenance=PROVENANCE, out=CompiledFiles(folder)
    )  # fmt: skip


def test_a_model_whose_weights_cannot_be_packed_is_not_shipped(started, cpu, pool, tmp_path, monkeypatch):
    real = compile.building.build_all

    def without_packing(orders, target, **limits):
        return real([replace(order, packing=None) for order in orders], target, **limits)

    monkeypatch.setattr(compile.building, "build_all", without_packing)

    with pytest.raises(CompilationError, match=r"The weights could not be packed: .*packing\.json"):
        compile_untuned(started, cpu, pool, tmp_path)

    assert not CompiledFiles(tmp_path).manifest.exists()


def test_a_model_that_does_not_run_is_not_shipped(started, cpu, pool, tmp_path, monkeypatch):
    def without_one(request, **_limits):
        [given] = request.weights
        arrays = list(np.load(given).values())
        weights.write(request.out, weights.numbered(arrays[1:]))

    monkeypatch.setattr(compile.building, "pack", without_one)

    with pytest.raises(VerificationError, match=r"The compiled model does not run \(open_library\): "):
        compile_untuned(started, cpu, pool, tmp_path)

    assert not CompiledFiles(tmp_path).manifest.exists()


def test_a_model_that_computes_something_else_is_not_shipped(started, cpu, pool, tmp_path, monkeypatch):
    real = compile.building.build_all

    def sabotage(orders, target, **limits):
        tuned, *others = orders  # which gets another activation
        wrong = tmp_path / "wrong.json"
        wrong.write_text(tuned.module.read_text().replace("prim.Max", "prim.Min"))
        return real([replace(tuned, module=wrong), *others], target, **limits)

    monkeypatch.setattr(compile.building, "build_all", sabotage)

    with pytest.raises(VerificationError, match=r"outputs differ from the untuned model's by .* Nothing was shipped"):
        compile_untuned(started, cpu, pool, tmp_path)

    assert not CompiledFiles(tmp_path).manifest.exists()
    assert not CompiledFiles(tmp_path).library.exists()
