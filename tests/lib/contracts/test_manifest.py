import json

import pytest

from lib.contracts import manifest
from lib.contracts.errors import ContractError, MissingInput


@pytest.fixture
def delivered(tmp_path):
    """A manifest of two files."""
    files = [tmp_path / "model.so", tmp_path / "params.npz"]
    files[0].write_bytes(bytes(1000))
    files[1].write_bytes(b"weights")
    return manifest.write(tmp_path / "manifest.json", "inputs", {"threads": 2, "latencies_s": [0.1]}, files)


def test_facts_are_read_as_they_were_written(delivered):
    found = manifest.read(delivered)

    assert (found["inputs"], found["threads"], found["latencies_s"]) == ("inputs", 2, [0.1])
    assert {name: said["bytes"] for name, said in found["files"].items()} == {"model.so": 1000, "params.npz": 7}


def test_it_is_current_for_its_inputs_while_all_files_are_whole(delivered):
    assert manifest.is_current(delivered, "inputs")
    assert not manifest.is_current(delivered, "others")
    assert manifest.damaged_files(delivered) == []


@pytest.mark.parametrize("content", [b"", bytes(100), bytes(1001), bytes(500) + b"\1" + bytes(499)])
def test_a_file_that_was_cut_or_changed_is_named(delivered, content):
    delivered.with_name("model.so").write_bytes(content)

    assert manifest.damaged_files(delivered) == ["model.so"]
    assert not manifest.is_current(delivered, "inputs")


def test_a_file_that_is_gone_is_named(delivered):
    delivered.with_name("params.npz").unlink()

    assert manifest.damaged_files(delivered) == ["params.npz"]


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"7", b"{}", b"\xff\xfe", b"[" * 100_000, '{"inputs": "\u00e9"}'.encode("latin-1")]
)
def test_what_is_no_manifest_is_called_damaged_and_told_what_to_do(delivered, content):
    delivered.write_bytes(content)

    with pytest.raises(ContractError, match=r"manifest\.json is damaged: (.|\n)*Delete it"):
        manifest.is_current(delivered, "inputs")


def test_a_changed_value_does_not_fit_the_seal(delivered):
    delivered.write_text(delivered.read_text().replace('"threads": 2', '"threads": 3'))

    with pytest.raises(ContractError, match="do not fit its seal"):
        manifest.read(delivered)


def test_a_manifest_of_other_code_is_refused(delivered):
    delivered.write_text(json.dumps({"inputs": "inputs", "threads": 2}))

    with pytest.raises(ContractError, match="expected an object with a seal"):
        manifest.read(delivered)


def test_without_a_manifest_nothing_is_done(tmp_path):
    assert not manifest.is_current(tmp_path / "manifest.json", "inputs")
    with pytest.raises(MissingInput, match=r"manifest\.json does not exist"):
        manifest.read(tmp_path / "manifest.json")
