"""Exported programs: written, spoilt, run, and compared with torch."""

import zipfile
from unittest.mock import MagicMock

import numpy as np

from lib.models import torch_import
from tests.helpers import computed


def save(torch, path, model, *inputs, **options):
    torch.export.save(torch.export.export(model, inputs, **options), path)
    return path


def rewrite(path, change):
    """Replace members of an archive: `change` maps (name, content) to the new content; one differs at least."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    changed = {name: change(name, content) for name, content in members.items()}
    assert changed != members
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in changed.items():
            archive.writestr(name, content)
    return path


def assert_like_torch(torch, cpu, path, model, *inputs):
    save(torch, path, model, *inputs)
    found = computed(torch_import.load(path), cpu, *inputs)
    with torch.no_grad():
        [expected] = [model(*inputs)]
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def names(cases):
    """Of cases that are made of torch's functions, by name: without torch, which may not be there."""
    return list(cases(MagicMock()))


def assert_function_like_torch(torch, cpu, path, models, function, shapes):
    """Of random tensors of these shapes."""
    torch.manual_seed(0)
    model = models["function"](lambda self, *x: function(*x))
    assert_like_torch(torch, cpu, path, model, *(torch.randn(shape) for shape in shapes))
