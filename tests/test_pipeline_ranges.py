"""A model tuned for a range of shapes, started as a user starts it."""

import json
import shutil
import signal
import subprocess
import time

import numpy as np
import onnxruntime
import pyarrow as pa
import pytest

from lib.contracts import tables
from lib.contracts.files import CompiledFiles, ModelFiles, RunFiles
from lib.contracts.schemas import CANDIDATES, MEASUREMENTS, MODELS, PLAN, RESULTS
from lib.contracts.tables import Provenance
from lib.graph.algorithms import AlgorithmConfig
from lib.measure.file_peer import Original
from lib.models import file_facts
from lib.report.text import milliseconds
from lib.runtime.family_tuner_runtime import Model
from lib.search.evolution import SearchConfig
from lib.shapes import Shape
from lib.tuning.base import BaseModels
from lib.verification import CompileConfig
from pipeline import ExtractSubgraphs, JoinSubgraphs
from stages import adapt, compile_range
from tests import range_files
from tests.helpers import ROOT, environment, luigi, luigi_command

SHAPE = ("--shape", "batch=1 sequence=8,16,24")  # 16 takes over what the others have
TWO = ("--shape", "batch=1 sequence=8,24")
LIMITS = ("--trials", "20")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for kind in ("mask", "causal", "open"):
        range_files.attention(folder / f"{kind}.onnx", kind)
    return folder


def run_of(folder) -> RunFiles:
    [found] = (folder / "artifacts").glob("*/*/runs/*")
    return RunFiles(found)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, files):
    """Killed in the middle, and continued by the same command."""
    folder = tmp_path_factory.mktemp("tuned")
    command = luigi_command("TuneModel", "--model", str(files / "mask.onnx"), *SHAPE, *LIMITS)
    first = subprocess.Popen(command, cwd=ROOT, env=environment(folder), start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((folder / "artifacts").glob("*/*/runs/*/rounds/0000/measurements.parquet")):
        assert first.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.wait()
    kept = next((folder / "artifacts").glob("*/*/runs/*/rounds/0000/measurements.parquet")).read_bytes()
    done = luigi(folder, "TuneModel", "--model", str(files / "mask.onnx"), *SHAPE, *LIMITS)
    return folder, done, kept


def test_one_bundle_computes_all_lengths_as_the_file_means_them(tuned, files):
    folder, done, kept = tuned
    assert done.returncode == 0, done.stderr
    run = run_of(folder)
    assert (run.round(0).measurements).read_bytes() == kept
    model = Model(run.compiled.folder)
    session = onnxruntime.InferenceSession(files / "mask.onnx")
    rng = np.random.default_rng(0)

    for sequence in range(1, 25):
        ids = rng.integers(0, range_files.VOCABULARY, (1, sequence))
        mask = np.ones_like(ids)
        mask[:, 1 + sequence // 2 :] = rng.integers(0, 2, mask[:, 1 + sequence // 2 :].shape)
        [expected] = session.run(None, {"ids": ids, "mask": mask})
        np.testing.assert_allclose(model(ids, mask), expected, atol=2e-5)


def test_weights_stand_once_and_the_report_says_what_that_costs(tuned):
    folder, done, _ = tuned
    run = run_of(folder)
    facts = json.loads(run.compiled.manifest.read_text())

    assert facts["weights_bytes"]["all"] < 1.1 * facts["weights_bytes"]["one_shape"]
    one, *others = [{name for name, _ in bucket["weights"]} for bucket in facts["buckets"]]
    assert all(len(one & other) > 0.7 * len(one) for other in others)
    report = run.report.read_text()
    assert report in done.stdout
    assert f"one bundle for sequence from 1 to 24: {len(facts['buckets'])} shapes" in report
    for bucket, cost in zip(facts["buckets"], facts["agreement"], strict=True):
        assert milliseconds(bucket["latency_s"]) in report
        if bucket["extents"]["sequence"] == 16:
            assert (cost["alone_s"], cost["agreed_s"]) == (None, None)
        else:
            assert milliseconds(cost["agreed_s"]) in report
            assert cost["agreed_s"] >= cost["alone_s"]
    page = run.page.read_text()
    assert f"compiled in {len(facts['buckets'])} shapes" in page
    assert "sequence=24" in page
    for left_out in facts["left_out"]:  # by latency: which these are, nobody knows before
        assert f"sequence={left_out['extents']['sequence']} (" in report
        assert f"sequence={left_out['extents']['sequence']} (" in page
        assert left_out["latency_s"] >= left_out["taken_s"]


def test_no_shape_has_products_whose_weights_are_others(files):
    """With few words products are as they are, with many they would be Strassen's."""
    options = {"model": str(files / "mask.onnx")}
    joined = JoinSubgraphs(**options, shape="batch=1 sequence=8,24")
    alone = ExtractSubgraphs(**options, shape="batch=1 sequence=24")

    assert {task.given.algorithms.strassen for task in joined.extracted} == {"never"}
    assert [task.path for task in joined.extracted] == [each.subgraphs for each in joined.given.files_of_shapes]
    assert alone.given.algorithms.strassen == "auto"
    assert alone.path not in [task.path for task in joined.extracted]


def test_of_a_shape_that_is_no_anchor_nothing_is_measured_and_all_is_taken_over(tuned):
    run = run_of(tuned[0])
    joint = ModelFiles(run.folder.parents[1])
    of_shape = {row["name"].rpartition("_")[2]: row for row in tables.read(joint.models, MODELS).to_pylist()}
    own = set(of_shape["16"]["subgraphs"]) - set(of_shape["8"]["subgraphs"]) - set(of_shape["24"]["subgraphs"])
    measured = [files for files in run.past(100) if files.is_round and files.measurements.exists()]
    tried = {subgraph_id for files in measured
             for subgraph_id in tables.read(files.measurements, MEASUREMENTS)["subgraph_id"].to_pylist()}  # fmt: skip
    candidates = tables.read(run.foretold.candidates, CANDIDATES).to_pylist()

    assert {name: row["importance"] for name, row in of_shape.items()} == {"8": 1.0, "16": 0.0, "24": 2.0}
    assert own
    assert not own & tried
    assert own <= set(tables.read(run.foretold.plan, PLAN)["subgraph_id"].to_pylist())
    assert not tried & {row["subgraph_id"] for row in candidates}
    adapted = [row for row in candidates if row["origin"] == "adapted"]
    assert adapted
    assert {row["donor"] for row in adapted} <= tried


def test_what_is_taken_over_is_the_same_however_many_processes_look_for_it(tuned, cpu, tmp_path, monkeypatch):
    run = run_of(tuned[0])
    joint, past = ModelFiles(run.folder.parents[1]), run.past(json.loads(run.compiled.manifest.read_text())["n_rounds"])
    monkeypatch.setattr(adapt.host, "physical_cores", lambda: 2)
    found = []
    for least in (1, 1000):
        monkeypatch.setattr(adapt, "_WORTH_A_PROCESS", least)
        out = RunFiles(tmp_path / str(least)).foretold
        adapt.run(
            joint, joint.families("core-operator"), past, cpu, SearchConfig(), BaseModels(None), seed=0,
            provenance=Provenance(), out=out,
        )  # fmt: skip
        found.append(tables.read(out.candidates, CANDIDATES).drop_columns("features").to_pylist())  # which have NaN

    assert len({row["subgraph_id"] for row in found[0]}) > 1
    assert found[0] == found[1]


def test_a_program_that_was_taken_over_and_does_not_work_gives_way(tuned, files, cpu, pool, tmp_path):
    """All of a shape's first choices but one are as they were; that one cannot be applied."""
    run = run_of(tuned[0])
    joint, spoilt = ModelFiles(run.folder.parents[1]), RunFiles(tmp_path / "run")
    shutil.copytree(run.folder, spoilt.folder)
    rows = tables.read(run.foretold.candidates, CANDIDATES).to_pylist()
    broken = '[[["GetSBlock", [], ["no such", "main"], ["b0"]]], []]'
    first = next(row for row in rows if row["family_id"] == "matmul")
    rows = [{**row, "trace": broken} if row["candidate_id"] == first["candidate_id"] else row for row in rows]
    table = pa.Table.from_pylist(rows, schema=CANDIDATES)
    tables.write(table, spoilt.foretold.candidates, CANDIDATES, Provenance("inputs", "session"))
    described = tables.read(joint.models, MODELS).to_pylist()
    suffix = AlgorithmConfig().for_all_shapes.suffix
    shapes = [
        Shape(ModelFiles(joint.folder.parent / (row["name"] + suffix)),
                            {"sequence": int(row["name"].rpartition("_")[2])}, row["importance"] > 0)
        for row in described
    ]  # fmt: skip
    past = [spoilt.recalled, *spoilt.rounds(len(list((run.folder / "rounds").iterdir()))), spoilt.foretold]

    compile_range.run(
        shapes, joint, joint.families("core-operator"), past, cpu, CompileConfig(finalists=1, repeats=1, turns=1), pool,
        limits={"sequence": (1, 24)}, original=Original(files / "mask.onnx", cpu, is_timed=True),
        provenance=Provenance("inputs", "session"), out=CompiledFiles(tmp_path / "compiled"),
    )  # fmt: skip

    made = CompiledFiles(tmp_path / "compiled")
    found = {row["subgraph_id"]: row for row in tables.read(made.results, RESULTS).to_pylist()}
    assert found[first["subgraph_id"]]["candidate_id"] != first["candidate_id"]
    assert json.loads(made.manifest.read_text())["max_error"] < 1e-4
    ids = np.arange(13)[None]
    [expected] = onnxruntime.InferenceSession(files / "mask.onnx").run(None, {"ids": ids, "mask": np.ones_like(ids)})
    np.testing.assert_allclose(Model(made.folder)(ids, np.ones_like(ids)), expected, atol=2e-5)


def test_nothing_is_done_twice(tuned, files):
    folder, _, _ = tuned
    before = run_of(folder).compiled.manifest.read_bytes()

    done = luigi(folder, "TuneModel", "--model", str(files / "mask.onnx"), *SHAPE, *LIMITS)

    assert "Nothing is left to do; the report is" in done.stdout
    assert run_of(folder).compiled.manifest.read_bytes() == before


def test_a_range_that_padding_would_falsify_is_refused_before_it_is_tuned(files, tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", str(files / "open.onnx"), *TWO, *LIMITS)

    assert done.returncode != 0
    assert "changes the output states by" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "artifacts").glob("*/*/runs/*"))


def test_a_causal_model_needs_no_mask(files, tmp_path):
    done = luigi(tmp_path, "TuneModel", "--model", str(files / "causal.onnx"), *TWO, *LIMITS)
    assert done.returncode == 0, done.stderr
    model, session = Model(run_of(tmp_path).compiled.folder), onnxruntime.InferenceSession(files / "causal.onnx")

    for sequence in (1, 7, 11, 24):
        ids = np.random.default_rng(sequence).integers(0, range_files.VOCABULARY, (1, sequence))
        np.testing.assert_allclose(model(ids), session.run(None, {"ids": ids})[0], atol=2e-5)


def test_a_file_is_quantised_once_for_all_shapes(tmp_path):
    file = range_files.convolution(tmp_path / "images.onnx")
    images = np.random.default_rng(0).normal(size=(4, 2, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "samples.npz", x=images)
    options = ("--precision", "int8", "--calibration", str(tmp_path / "samples.npz"))

    done = luigi(tmp_path, "TuneModel", "--model", str(file), "--shape", "batch=1,3", *options, "--trials", "10")

    assert done.returncode == 0, done.stderr
    model = Model(run_of(tmp_path).compiled.folder)
    [quantized] = (tmp_path / "artifacts" / "quantized").iterdir()
    sessions = [onnxruntime.InferenceSession(path) for path in (quantized, file)]
    for batch in (1, 2, 3):
        given = np.concatenate(images)[:batch]
        found, (own, floats) = model(given), (session.run(None, {"x": given})[0] for session in sessions)
        assert np.abs(found - own).max() < 0.02 * np.abs(own).max()
        assert 0 < np.abs(found - floats).max() < 0.1 * np.abs(floats).max()


def test_a_program_of_torch_has_a_bundle_as_a_file_of_onnx_has(tmp_path):
    torch = pytest.importorskip("torch")
    file = range_files.program(torch, tmp_path / "mask.pt2")
    [symbol] = file_facts.of(file).open_dimensions

    done = luigi(tmp_path, "TuneModel", "--model", str(file), "--shape", f"{symbol}=8,24", *LIMITS)

    assert done.returncode == 0, done.stderr
    assert f"padding: torch {torch.__version__} makes the same of the file" in done.stdout
    model, program = Model(run_of(tmp_path).compiled.folder), torch.export.load(file).module()
    for sequence in (1, 7, 11, 24):
        ids = torch.randint(0, range_files.VOCABULARY, (1, sequence))
        mask = torch.ones_like(ids)
        mask[:, 1 + sequence // 2 :] = 0
        expected = program(ids, mask)
        for found, wanted in zip(model(ids.numpy(), mask.numpy()).values(), expected, strict=True):
            np.testing.assert_allclose(found, wanted.detach().numpy(), atol=2e-5)


def test_files_of_a_range_lie_where_the_map_says(tuned):
    run = run_of(tuned[0])
    joint = ModelFiles(run.folder.parents[1])

    assert joint.shared.exists()
    assert joint.probed.exists()
    facts = json.loads(run.compiled.manifest.read_text())
    kept = {bucket["extents"]["sequence"] for bucket in facts["buckets"]}
    assert kept | {each["extents"]["sequence"] for each in facts["left_out"]} == {8, 16, 24}
    assert {path.name for path in run.compiled.folder.glob("*.so")} == {f"model-{extent}.so" for extent in kept}
