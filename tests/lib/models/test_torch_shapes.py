"""Exported programs with open dimensions, in shapes that are asked for, against torch."""

import re

import numpy as np
import pytest

from lib.contracts.errors import ModelError
from lib.models import torch_import
from tests.helpers import computed
from tests.lib.models.torch_helpers import save


@pytest.fixture(scope="module")
def text(torch, models, tmp_path_factory):
    """A layer of a transformer that counts positions and hides what a mask hides, of any batch and up to 64 tokens."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()

    def compute(self, ids, mask):
        x = self.table(ids) + 0.1 * torch.arange(ids.shape[1])[None, :, None]
        return (self.layer(x, src_key_padding_mask=mask == 0).mean(1),)

    model = models["function"](compute, table=torch.nn.Embedding(100, 16), layer=layer).eval()
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=64)
    shapes = {"inputs": ({0: batch, 1: sequence}, {0: batch, 1: sequence})}
    ids, mask = torch.randint(0, 100, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    return model, save(torch, tmp_path_factory.mktemp("text") / "m.pt2", model, ids, mask, dynamic_shapes=shapes)


def symbols(torch, path):
    """Of the first input's shape."""
    program = torch.export.load(path)
    node = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
    return [str(extent) for extent in node.meta["val"].shape]


def assert_like_torch(torch, cpu, model, path, shapes, *inputs):
    found = computed(torch_import.load(path, shapes), cpu, *inputs)
    with torch.no_grad():
        [expected] = model(*inputs)
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def a_text(torch, *shape):
    ids, mask = torch.randint(0, 100, shape), torch.ones(*shape, dtype=torch.int64)
    mask[:, -2:] = 0
    return ids, mask


def test_what_one_input_is_says_what_others_are(torch, cpu, text):
    model, path = text
    [name, _] = torch.export.load(path).graph_signature.user_inputs

    assert_like_torch(torch, cpu, model, path, {name: (3, 9)}, *a_text(torch, 3, 9))


def test_dimensions_are_given_by_their_symbols(torch, cpu, text):
    model, path = text
    batch, sequence = symbols(torch, path)

    assert_like_torch(torch, cpu, model, path, {sequence: (5,), batch: (1,)}, *a_text(torch, 1, 5))


def test_images_are_enlarged_from_any_size(torch, cpu, models, tmp_path):
    def compute(self, x):
        found = torch.nn.functional.interpolate(self.conv(x), scale_factor=2.0, mode="bilinear")
        return (found.flatten(2).transpose(1, 2),)

    model = models["function"](compute, conv=torch.nn.Conv2d(3, 8, 3, padding=1)).eval()
    auto = torch.export.Dim.AUTO
    shapes = {"inputs": ({0: auto, 2: auto, 3: auto},)}
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 3, 16, 16), dynamic_shapes=shapes)
    [name] = torch.export.load(path).graph_signature.user_inputs

    assert_like_torch(torch, cpu, model, path, {name: (1, 3, 6, 10)}, torch.randn(1, 3, 6, 10))


@pytest.mark.parametrize("given", [{0: (4,)}, {1: (8,)}])
def test_extents_that_are_computed_of_others_follow_and_say_what_these_are(torch, cpu, models, tmp_path, given):
    n = torch.export.Dim("n", min=3, max=9)
    model = models["function"](lambda self, x, y: (x.repeat_interleave(2) * y,))
    inputs = torch.randn(5), torch.randn(10)
    path = save(torch, tmp_path / "m.pt2", model, *inputs, dynamic_shapes={"inputs": ({0: n}, {0: 2 * n})})
    names = torch.export.load(path).graph_signature.user_inputs
    shapes = {names[place]: shape for place, shape in given.items()}

    assert_like_torch(torch, cpu, model, path, shapes, torch.randn(4), torch.randn(8))
    with pytest.raises(ModelError, match=rf"'{names[1]}' .* does not fit: 7 is not 2\*s\d+"):
        torch_import.load(path, {names[1]: (7,)})
    with pytest.raises(ModelError, match=r"was exported for s\d+ from 3 to 9, which 2 is not"):
        torch_import.load(path, {names[0]: (2,)})


def test_what_does_not_fit_is_told(torch, text):
    _, path = text
    batch, sequence = symbols(torch, path)
    ids, mask = torch.export.load(path).graph_signature.user_inputs
    refused = [
        ({}, f"input '{ids}' has the dynamic shape ({batch}, {sequence}): dimension 0 is not fixed"),
        ({batch: (2,)}, f"dimension 1 is not fixed. Say what it is, by --shape '{ids}=...'"),
        ({"tokens": (1, 2)}, f"no input and no open dimension 'tokens'. Inputs are {ids}, {mask}; open are"),
        ({sequence: (1, 2)}, f"{sequence} of {path} is one dimension, but got 1, 2"),
        ({ids: (2,)}, f"has the shape ({batch}, {sequence}), not 2"),
        ({ids: (2, 8), mask: (2, 9)}, f"where 2, 9 does not fit: 9 is not {sequence} = 8"),
        ({ids: (2, 65)}, f"was exported for {sequence} from 1 to 64, which 65 is not"),
    ]
    for shapes, told in refused:
        with pytest.raises(ModelError, match=re.escape(told)):
            torch_import.load(path, shapes)
