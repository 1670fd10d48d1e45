"""What is read of a file of torch.export.save, and what is refused."""

import json
import pickle
import re
import zipfile
from pathlib import Path

import pytest

from lib.contracts.errors import ModelError
from lib.models import torch_archive, torch_import
from tests.lib.models.torch_helpers import assert_like_torch, rewrite, save


@pytest.mark.parametrize("prefix", ["custom_obj", "opaque_obj"])
def test_pickled_objects_are_refused(tmp_path, prefix):
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/models/model.json", "{}")
        archive.writestr(f"m/data/constants/{prefix}_0", b"")

    with zipfile.ZipFile(path) as archive, pytest.raises(ModelError, match=rf"pickled object .*{prefix}_0"):
        torch_archive._check_payload(archive, path)


def test_containers_of_packages_that_are_not_imported_come_out_flat(tmp_path, torch, models):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))

    def rename(name, content):
        if not re.search(r"models/model\.json$|exported_program\.json$", name):
            return content
        program = json.loads(content)
        signature = program["graph_module"]["module_call_graph"][0]["signature"]
        protocol, spec = json.loads(signature["out_spec"])
        spec.update(type="nowhere.ModelOutput", context="any text")
        signature["out_spec"] = json.dumps([protocol, spec])
        return json.dumps(program).encode()

    model = torch_import.load(rewrite(path, rename))

    assert len(model.module["main"].ret_ty.fields) == 2


class WritesFile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_unpickled_but_tensors(tmp_path, torch, models):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))
    trace = tmp_path / "code_was_run"
    evil = pickle.dumps(WritesFile(trace))

    rewrite(path, lambda name, content: evil if re.search("(sample|example)_inputs", name) else content)

    with pytest.raises(ModelError, match=r"block\.pt2 cannot be read by torch .*"):
        torch_import.load(path)
    assert not trace.exists()


@pytest.mark.parametrize("content", [b"", b"not a program at all"])
def test_a_foreign_file_is_called_damaged(tmp_path, torch, content):
    path = tmp_path / "bad.pt2"
    path.write_bytes(content)

    with pytest.raises(ModelError, match=r"bad\.pt2 is damaged or was not written by torch\.export\.save"):
        torch_import.load(path)


@pytest.mark.parametrize("kept", [0.5, 0.99])  # of the latter, an archive inside the archive is whole
def test_a_truncated_file_is_called_damaged(tmp_path, torch, models, kept):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])

    with pytest.raises(ModelError, match=r"block\.pt2 .*damaged"):
        torch_import.load(path)


def test_a_state_dict_is_told_from_a_program(tmp_path, torch, models):
    path = tmp_path / "weights.pt2"
    torch.save(models["block"].state_dict(), path)

    with pytest.raises(ModelError, match=r"holds no exported program.*torch\.export\.save"):
        torch_import.load(path)


def test_what_is_computed_without_gradients_and_never_read_does_not_matter(tmp_path, cpu, torch, models):
    """torch 2.13 writes nothing of what such a subgraph gives, and does not read back what it wrote."""

    def masked(self, x):
        with torch.no_grad():
            x.eq(3).unsqueeze(-1)
        return x * 2

    path = save(torch, tmp_path / "m.pt2", models["function"](masked), torch.randn(2, 3))
    with pytest.raises(Exception, match="missing val"):
        torch.export.load(path)

    assert_like_torch(torch, cpu, path, models["function"](masked), torch.randn(2, 3))
