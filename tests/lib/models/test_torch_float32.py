"""Exported programs in halves and bf16: computed in float32, with inputs and outputs as they are."""

import copy

import ml_dtypes
import numpy as np
import pytest

from lib.models import torch_archive, torch_import, torch_outputs
from tests.helpers import computed
from tests.lib.models.torch_helpers import save

EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def text(torch, models):
    """Attention with a mask of the smallest number, softmax in float32 and a cast back, as transformers has it."""

    def compute(self, ids, mask):
        with torch.no_grad():  # a graph of its own
            x = self.table(ids).to(self.table.weight.dtype)
        x = x + (0.1 * torch.arange(ids.shape[1]))[:, None].sin().to(x.dtype)
        hidden = torch.zeros(mask.shape, dtype=x.dtype).masked_fill(mask == 0, torch.finfo(x.dtype).min)
        scores = x @ x.mT * 0.1 + hidden[:, None]
        return (self.head(scores.float().softmax(-1).to(x.dtype) @ x),)

    nn = torch.nn
    model = models["function"](compute, table=nn.Embedding(50, 32), head=nn.Linear(32, 50, bias=False)).eval()
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[:, -2:] = 0
    return model, (torch.randint(0, 50, (2, 6)), mask)


def image(torch, models):
    nn = torch.nn
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
    return models["function"](lambda self, x: (self.layers(x),), layers=layers).eval(), (torch.randn(1, 3, 8, 8),)


@pytest.mark.parametrize("kind", EPSILON)
@pytest.mark.parametrize("make", [text, image])
def test_nothing_but_results_is_rounded(tmp_path, cpu, torch, models, make, kind):
    torch.manual_seed(0)
    model, inputs = make(torch, models)
    narrow = getattr(torch, kind)
    model = model.to(narrow)
    given = [each.to(narrow) if each.is_floating_point() else each for each in inputs]
    path = save(torch, tmp_path / "m.pt2", model, *given)
    with torch.no_grad():
        [exact] = copy.deepcopy(model).float()(*[each.float() if each.is_floating_point() else each for each in given])
    arrays = [torch_outputs._array(torch, each) for each in given]

    [found] = computed(torch_import.load(path), cpu, *arrays)
    [compared] = torch_outputs.computed(torch_archive.read(torch, path), arrays)

    assert found.dtype == compared.dtype == np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
    for each in (found, compared):
        np.testing.assert_allclose(each.astype(np.float32), exact.numpy(), rtol=EPSILON[kind], atol=1e-6)


@pytest.mark.parametrize("kind", EPSILON)
@pytest.mark.parametrize(("rows", "stays_narrow"), [(1, True), (8, True), (9, False)])
def test_few_rows_read_weights_as_they_are(tmp_path, cpu, torch, models, kind, rows, stays_narrow):
    layer = torch.nn.Linear(260, 300).to(getattr(torch, kind))
    model = models["function"](lambda self, x: (self.layer(x.to(self.layer.weight.dtype)).float(),), layer=layer).eval()
    x = torch.randn(1, rows, 260)

    found = torch_import.load(save(torch, tmp_path / "m.pt2", model, x))

    kinds = {str(array.dtype) for array in found.weights.values() if array.size > 1000}
    assert kinds == {kind if stays_narrow else "float32"}
    with torch.no_grad():
        exact = layer.float()(x).numpy()
    np.testing.assert_allclose(computed(found, cpu, x)[0], exact, rtol=0, atol=2e-6 * np.abs(exact).max())
