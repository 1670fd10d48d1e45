"""The options that README and `--help` name, as they are typed."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from luigi.cmdline_parser import CmdlineParser

import pipeline
from lib.contracts import tables
from lib.contracts.errors import TunerError
from lib.contracts.files import ModelFiles
from lib.contracts.schemas import SUBGRAPHS
from lib.tir.workload import load_module
from tests import range_files
from tests.helpers import ROOT, environment, luigi, luigi_command

# A value of each that is not its default, and what a task gets of it.
TYPED = {
    "model": ("bert_base", "bert_base"),
    "shape": ("batch=2", "batch=2"),
    "lengths": ("lengths.csv", "lengths.csv"),
    "batch-size": ("2", 2),
    "sequence": ("64", 64),
    "weights": ("there.safetensors", "there.safetensors"),
    "fix": ("x=1,2 y=true", "x=1,2 y=true"),
    "trials": ("7", 7),
    "trials-per-subgraph": ("9", 9),
    "minutes": ("0.5", 0.5),
    "target-latency-ms": ("1.5", 1.5),
    "families": ("each", "each"),
    "strategy": ("gradient", "gradient"),
    "foresee": ("0.5", 0.5),
    "seed": ("3", 3),
    "target": ("cuda", "cuda"),
    "threads": ("1", 1),
    "precision": ("bf16", "bf16"),
    "calibration": ("samples.npz", "samples.npz"),
    "devices": ("replay:there", "replay:there"),
}


def options_in_readme() -> list[str]:
    """The names in the first column of its table of options."""
    text = (ROOT / "README.md").read_text().split("| option | meaning |")[1].split("\n\n")[0]
    return re.findall(r"`--([\w-]+)`", " ".join(line.split("|")[1] for line in text.splitlines()[2:]))


def test_the_readme_names_every_option_of_tune_model():
    options = {name.replace("_", "-") for name, _ in pipeline.TuneModel.get_params()} - {"session", "models"}

    assert sorted(options_in_readme()) == sorted(options) == sorted(TYPED)


@pytest.mark.parametrize("option", TYPED)
@pytest.mark.parametrize("joined", [False, True])
def test_every_option_can_be_typed(monkeypatch, option, joined):
    monkeypatch.setattr(pipeline.TunerTask, "__init__", pipeline.luigi.Task.__init__)  # without looking at the model
    text, value = TYPED[option]
    typed = [f"--{option}={text}"] if joined else [f"--{option}", text]
    command = ["--module", "pipeline", "TuneModel", *([] if option == "model" else ["--model", "bert_base"]), *typed]

    with CmdlineParser.global_instance(command) as parser:
        kwargs = parser._get_task_kwargs()

    assert kwargs[option.replace("-", "_")] == value


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["--trials", "1.5"], r"--trials '1\.5': expected a whole number"),
        (["--minutes", "abc"], "--minutes 'abc': expected a number"),
        (["--seed", "abc"], "--seed 'abc': expected a whole number"),
        (["--strategy", "best"], "--strategy 'best': expected one of foresee, gradient, round-robin"),
        (["--families", "none"], "--families 'none': expected one of core-operator"),
        (["--trials", "-5"], "must be numbers from 0 on, but got -5, 0 and 0"),
        (["--trials-per-subgraph", "0"], "--trials-per-subgraph must be at least 1, but got 0"),
        (["--minutes", "-3"], "must be numbers from 0 on, but got 0, -3 and 0"),
        (["--minutes", "nan"], "must be numbers from 0 on, but got 0, nan and 0"),
        (["--shape", "x=2²"], "--shape is for files"),
        (["--fix", "x=2"], "--fix is for ONNX files"),
        (["--model", "nothing"], "nothing"),
        (["--devices", "rpc://host:9²/key"], "rpc://"),
    ],
)
def test_an_option_that_makes_no_sense_is_told_by_name(typed, told):
    model = [] if "--model" in typed else ["--model", "tiny_cnn"]
    with (
        pytest.raises(TunerError, match=told),
        CmdlineParser.global_instance(["--module", "pipeline", "TuneModel", *model, *typed]) as parser,
    ):
        parser.get_task_obj()


@pytest.mark.parametrize(
    ("typed", "told"),
    [(["--trials", "1.5"], "error: --trials '1.5': expected a whole number."), (["--model", ""], "'model'")],
)
def test_such_an_option_costs_one_line_and_a_status(tmp_path, typed, told):
    done = luigi(tmp_path, "TuneModel", *([] if "--model" in typed else ["--model", "tiny_cnn"]), *typed)

    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if told in line]


def test_a_batch_that_was_typed_is_what_is_imported(tmp_path):
    done = luigi(tmp_path, "ExtractSubgraphs", "--model", "tiny_cnn", "--batch-size", "3")

    [folder] = (tmp_path / "artifacts").glob("*/tiny_cnn-batch3")
    workloads = tables.read(ModelFiles(folder).subgraphs, SUBGRAPHS)["workload"].to_pylist()
    functions = [load_module(text)["main"] for text in workloads]
    assert done.returncode == 0, done.stderr
    assert functions
    assert {int(function.params[0].ty.shape[0]) for function in functions} == {3}


@pytest.mark.parametrize(
    ("task", "hidden"), [("TuneModel", {"models"}), ("TuneModels", {"model", "shape", "lengths", "weights", "fix"})]
)
def test_help_shows_each_option_once_and_with_what_it_means(tmp_path, task, hidden):
    text = luigi(tmp_path, task, "--help").stdout

    shown = re.findall(r"^  (--[\w-]+) [A-Z_]+", text, flags=re.MULTILINE)
    options = [name for name, _ in getattr(pipeline, task).get_params() if name not in {"session", *hidden}]
    assert [name for name in shown if name != "--module"] == [f"--{name.replace('_', '-')}" for name in options]
    assert not re.findall(r"--TuneModel-|--session", text)


@pytest.mark.parametrize("option", ["--model", "--shape", "--weights", "--fix"])
def test_what_is_said_of_one_model_is_refused_where_several_are_listed(tmp_path, option):
    done = luigi(tmp_path, "TuneModels", "--models", "tiny_cnn", option, "tiny_cnn")

    assert done.returncode != 0
    assert "error: --model, --shape, --fix and --weights are for one model" in done.stderr
    assert "Traceback" not in done.stderr


def test_sections_and_keys_that_nobody_reads_are_told_once(tmp_path):
    surroundings = environment(tmp_path)
    with Path(surroundings["LUIGI_CONFIG_PATH"]).open("a") as config:
        config.write("[measurement]\nrepeats = 9\n[TuneModel]\nseed = 1\n[logging]\nx = 1\n")
    done = subprocess.run(
        luigi_command("ExtractSubgraphs", "--model", "tiny_cnn"), cwd=ROOT, env=surroundings, text=True,
        capture_output=True, timeout=100,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nobody reads") == 1
    assert "nobody reads [measurement] of the configuration; this project's sections are tuner, extract" in done.stderr


@pytest.mark.parametrize(("own", "status"), [("", 30), ("[retcode]\ntask_failed = 3\n", 3)])
def test_the_projects_configuration_holds_in_any_folder_below_that_of_the_folder(tmp_path, own, status):
    if own:
        (tmp_path / "luigi.cfg").write_text(own)
    (tmp_path / "m.onnx").write_bytes(b"no model")

    done = subprocess.run(
        luigi_command("ExtractSubgraphs", "--model", "m.onnx"), cwd=tmp_path, env=environment(tmp_path), text=True,
        capture_output=True, timeout=30,
    )  # fmt: skip

    assert done.returncode == status  # without the project's, Luigi looks for a scheduler on a port for a minute
    assert "m.onnx is damaged or no ONNX file" in done.stderr
    assert "DEBUG" not in done.stderr


def test_a_round_that_another_process_made_meanwhile_is_not_the_end(monkeypatch):
    """Luigi goes on behind a `yield` of what is complete already, and begins `run` anew behind any other."""
    task = pipeline.TuneModel(model="tiny_cnn")
    standings = iter(["", "", "9 trials"])
    monkeypatch.setattr(task, "look", lambda: SimpleNamespace(ended=next(standings)))
    monkeypatch.setattr(task, "next_round", lambda: iter(["a round"]))
    monkeypatch.setattr(task, "foretelling", lambda: iter(["what was not tried"]))

    asked = [each if isinstance(each, str) else each.task_family for each in task.run()]

    assert asked == [
        "TrainFamilyModels", "a round", "a round", "what was not tried", "CompileModel", "Report",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trials": 0}, "A range of shapes needs some trials"),
        ({"target_latency_ms": 1.0}, "--target-latency-ms is for one shape"),
        ({"precision": "int8"}, "is quantised with samples of its inputs"),
        ({"target": "raspberry-pi/5", "threads": 4}, "for this machine's CPU alone"),
        ({"shape": "tokens=1..8"}, "has no open dimension 'tokens'"),
    ],
)
def test_what_ranges_do_not_have_is_told_at_once(tmp_path, options, complaint):
    file = str(range_files.attention(tmp_path / "mask.onnx", "mask"))

    with pytest.raises(TunerError, match=complaint):
        pipeline.TuneModel(**{"model": file, "shape": "batch=1 sequence=8,24", **options})
