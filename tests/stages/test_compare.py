import json
import shutil

import pytest

from lib.contracts.errors import ConfigError
from lib.contracts.files import RunFiles
from stages import compare, compile
from tests.lib.report.test_page import Parsed
from tests.stages.conftest import PROVENANCE
from tests.stages.test_compile import QUICK


@pytest.fixture(scope="module")
def compiled(started, cpu, pool, tmp_path_factory):
    """The tiny model's run with a library: as a run of its own, and as one of a night."""
    target = tmp_path_factory.mktemp("target")
    own, joint = target / "tiny_cnn", target / "nights" / "1-models"
    for folder in (own, joint):
        folder.mkdir(parents=True)
        for path in started.model.folder.glob("*.*"):
            shutil.copy(path, folder)
    for model, name in ((own, "alone"), (joint, "night")):
        shutil.copytree(started.run.folder, model / "runs" / name)
        files = RunFiles(model / "runs" / name)
        shutil.copytree(files.round(0).folder, files.recalled.folder)
    for name, options in (("alone", {"seed": 0}), ("night", {"seed": 1, "models": "1-models"})):
        files = RunFiles(own / "runs" / name)
        files.folder.mkdir(exist_ok=True)
        compile.run(
            started.model, started.families, started.run.rounds(1), cpu, QUICK, pool, provenance=PROVENANCE,
            out=files.compiled,
        )  # fmt: skip
        files.settings.write_text(
            json.dumps({"deciding": {"options": {"families": "core-operator", **options}}, "limits": {}})
        )
    return own / "runs"


def test_a_run_stands_beside_one_of_a_night(compiled, tmp_path):
    out = compare.run(compiled / "alone", compiled / "night", out=tmp_path / "page.html")

    text = Parsed(out.read_text()).text
    assert "tiny_cnn, alone" in text
    assert "tiny_cnn, night" in text
    assert "[options] seed 0 1" in text
    assert "[options] models - 1-models" in text
    assert "[options] families" not in text
    assert "times as fast as the first" in text


@pytest.mark.parametrize("name", ["", "nothing", "alone/compiled"])
def test_a_folder_that_is_no_run_is_refused_by_name(compiled, tmp_path, name):
    with pytest.raises(ConfigError, match="is no run with a library: expected a folder like"):
        compare.run(compiled / "alone", compiled / name, out=tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
