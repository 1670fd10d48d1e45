import json
import shutil
import tarfile

import numpy as np
import pytest

from lib import bundle
from lib.contracts.files import CompiledFiles
from lib.runtime.family_tuner_runtime import Bundle, Model
from tests.lib.runtime.conftest import changed, pair, small, values

__all__ = ["pair", "small"]  # fixtures


@pytest.fixture
def copy(small, tmp_path):
    shutil.copytree(small.folder, tmp_path / "copy")
    return CompiledFiles(tmp_path / "copy")


def run(capsys, *arguments):
    """Exit status, what was printed, and what was complained about."""
    status = bundle.main(list(map(str, arguments)))
    return status, *capsys.readouterr()


def test_a_packed_bundle_runs_elsewhere_and_has_only_what_is_deployed(small, tmp_path, capsys):
    status, printed, _ = run(capsys, "pack", small.folder, tmp_path / "a" / "small.tar")
    with tarfile.open(tmp_path / "a" / "small.tar") as archive:
        archive.extractall(tmp_path / "elsewhere", filter="data")

    assert (status, printed.strip()) == (0, str(tmp_path / "a" / "small.tar"))
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == [
        "manifest.json", "model.so", "reference.safetensors", "weights.safetensors",
    ]  # fmt: skip
    assert np.array_equal(Model(tmp_path / "elsewhere")(values()), Model(small.folder)(values()))
    assert run(capsys, "check", tmp_path / "elsewhere")[0] == 0


def test_equal_bundles_make_equal_archives_and_folders(small, copy, tmp_path):
    for n, source in enumerate((small.folder, copy.folder)):
        bundle.pack(source, tmp_path / f"{n}.tar")
        bundle.pack(source, tmp_path / f"{n}")

    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes()
    for path in (tmp_path / "0").iterdir():
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()


def test_nothing_is_overwritten(small, tmp_path, capsys):
    (tmp_path / "there").mkdir()

    status, _, complaint = run(capsys, "pack", small.folder, tmp_path / "there")

    assert status == 1
    assert "exists" in complaint


@pytest.mark.parametrize("command", ["check", "pack"])
def test_a_byte_that_was_changed_is_found(copy, tmp_path, capsys, command):
    data = bytearray(copy.params.read_bytes())
    data[-70] ^= 1
    copy.params.write_bytes(data)

    status, _, complaint = run(capsys, command, copy.folder, *([tmp_path / "out"] if command == "pack" else []))

    assert status == 1
    assert "weights.safetensors is damaged: its digest is" in complaint
    assert not (tmp_path / "out").exists()


def test_all_that_is_wrong_is_told_at_once(copy, capsys):
    copy.reference.write_bytes(b"?")
    changed(copy, instructions=["no_such_instruction"], versions="apache-tvm 1.0")
    copy.library.unlink()

    status, _, complaint = run(capsys, "check", copy.folder)

    assert status == 1
    for told in ("model.so is missing", "reference.safetensors is damaged", "lacks no_such_instruction", "TVM 1.0"):
        assert told in complaint


def test_a_bundle_that_computes_something_else_is_told(copy, capsys):
    bundle.write_reference([values()], [np.ones((1, 10), np.float32)], copy)
    changed(copy)

    status, _, complaint = run(capsys, "check", copy.folder)

    assert status == 1
    assert "computes something else here: its outputs differ from the reference by" in complaint


def test_a_right_bundle_is_called_so(pair, capsys):
    status, printed, _ = run(capsys, "check", pair.folder)

    assert status == 0
    assert "whole, and fits this machine; its outputs differ from the reference by 0.0e+00" in printed


def test_a_large_reference_stays_away(copy, capsys, monkeypatch):
    monkeypatch.setattr(bundle, "_MOST_REFERENCE", 100)
    bundle.write_reference([values()], [np.ones((1, 10), np.float32)], copy)
    changed(copy, reference=None)

    assert not copy.reference.exists()
    assert Bundle.read(copy.folder).reference is None
    assert "has no reference" in run(capsys, "check", copy.folder)[1]


def test_info_says_what_it_takes_and_needs_and_under_which_licence(pair, capsys):
    status, printed, _ = run(capsys, "info", pair.folder)

    assert status == 0
    for told in (
        "x: float32[5, 8]; ids: int64[7]",
        "product: float32[5, 3]",
        "BSD-3-Clause (weights)",
        "apache-tvm 0.27",
    ):
        assert told in printed


def test_the_manifest_is_the_same_wherever_the_bundle_lies(small):
    text = small.manifest.read_text()

    assert str(small.folder) not in text
    assert json.loads(text)["library"] == "model.so"
