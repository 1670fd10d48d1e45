"""Operators that are taken apart here: what they compute, against torch."""

import math

import numpy as np
import pytest

from lib.models import torch_import
from tests.helpers import computed
from tests.lib.models.torch_helpers import assert_function_like_torch, assert_like_torch, names, save

IMAGE, ROWS, VOLUME = (2, 6, 9, 8), (3, 4, 5), (1, 2, 6, 5, 4)


def functions(torch):
    """By name: a function of tensors, and the shapes of these."""
    F = torch.nn.functional
    return {
        "selu": (F.selu, [ROWS]),
        "elu": (lambda x: F.elu(x, 1.3), [ROWS]),
        "average pool by a divisor": (
            lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5), [IMAGE],
        ),
        "average pool of volumes by a divisor": (
            lambda x: F.avg_pool3d(x, (2, 3, 2), (2, 1, 2), (1, 1, 0), divisor_override=7), [VOLUME],
        ),
        "average pool": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), [IMAGE]),
        "norm by the batch": (
            lambda x, mean, weight: F.batch_norm(x, mean.clone(), mean.abs(), weight, mean, training=True),
            [IMAGE, (6,), (6,)],
        ),
        "norm by the batch alone": (lambda x: F.batch_norm(x, None, None, training=True), [IMAGE]),
        "norm by each image": (
            lambda x, mean: F.instance_norm(x, mean.clone(), mean.abs(), momentum=0.5), [IMAGE, (6,)],
        ),
        "distances": (torch.cdist, [(2, 5, 3), (2, 4, 3)]),
        "distances in another norm": (lambda x, y: torch.cdist(x, y, 3.0), [(5, 3), (4, 3)]),
        "distances in the largest norm": (lambda x, y: torch.cdist(x, y, math.inf), [(5, 3), (4, 3)]),
        "windows": (lambda x: x.unfold(-1, 3, 2) * 2, [(2, 9)]),
        "windows of a middle axis": (lambda x: x.unfold(1, 2, 1) * 2, [ROWS]),
        "places in memory": (lambda x: x.as_strided((3, 4), (5, 1), 2) * 2, [(20,)]),
        "largest of a grid": (lambda x: F.adaptive_max_pool2d(x, (3, 4)), [IMAGE]),
        "largest of a grid that does not divide": (lambda x: F.adaptive_max_pool2d(x, (4, 5)), [IMAGE]),
        "largest of a signal": (lambda x: F.adaptive_max_pool1d(x, 4), [(2, 3, 10)]),
        "and where they are": (
            lambda x: sum(F.adaptive_max_pool3d(x, (4, 3, 3), return_indices=True)), [VOLUME],
        ),
        "places in sorted rows": (
            lambda x, y: torch.searchsorted(x.sort(-1).values, y, right=True).float(), [(3, 7), (3, 4)],
        ),
        "cumulative logarithms": (lambda x: torch.logcumsumexp(60 * x, 1), [ROWS]),
        "largest so far": (lambda x: torch.cummax(x.round(), 1).values + torch.cummin(x, -1).indices, [ROWS]),
        "kth of a row": (lambda x: sum(torch.kthvalue(x, 2, 1)) + sum(x.kthvalue(1, 1, True)), [ROWS]),
        "bilinear layer": (lambda x, w, y: F.bilinear(x, y, w), [(3, 4), (6, 4, 5), (3, 5)]),
        "sum of products": (lambda x, a, b: torch.addbmm(x, a, b, beta=0.5, alpha=2), [(4, 6), (3, 4, 5), (3, 5, 6)]),
        "product with a vector": (lambda x, a, b: torch.addmv(x, a, b, beta=0.5), [(4,), (4, 5), (5,)]),
        "mean and variance": (lambda x: sum(torch.var_mean(x, (0, 2), correction=0)), [ROWS]),
        "any of all": (lambda x: torch.any(x.relu()).float() + x, [ROWS]),
        "any of numbers": (lambda x: x.relu().any(-1).float(), [ROWS]),
        "limits that are tensors": (lambda x, y: x.clamp(min=y).clamp_max(y.abs() / 2), [ROWS, (5,)]),
        "features among others": (
            lambda x, y: x.masked_scatter((x[..., :1] > 0), y), [ROWS, (60,)],
        ),
        "steps": (lambda x, y: torch.heaviside(x.relu(), y), [ROWS, ROWS]),
        "order": (lambda x: torch.sort(x.round(), stable=True).indices.float(), [ROWS]),
        "signs": (lambda x, y: torch.copysign(x, y.relu() * -1), [ROWS, ROWS]),
        "powers": (lambda x, y: torch.exp2(x) + torch.ldexp(x, y.round()), [ROWS, ROWS]),
        "angles": (lambda x, y: torch.angle(x) + torch.signbit(y), [ROWS, ROWS]),
        "hypotenuse": (lambda x, y: torch.hypot(x, y) + torch.erfc(x) + torch.dist(x, y), [ROWS, ROWS]),
    }  # fmt: skip


@pytest.mark.parametrize("name", names(functions))
def test_what_is_taken_apart_computes_what_torch_computes(tmp_path, cpu, torch, models, name):
    function, shapes = functions(torch)[name]

    assert_function_like_torch(torch, cpu, tmp_path / "m.pt2", models, function, shapes)


def test_the_larger_of_two_is_the_one_that_is_a_number(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x, y: torch.fmax(x, y).nan_to_num(9) + torch.fmin(x, y).nan_to_num(9))
    x, y = (torch.tensor(each) for each in ([1.0, math.nan, 3.0, math.nan], [2.0, 5.0, math.nan, math.nan]))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, x, y)


@pytest.mark.parametrize(
    ("offsets", "options"),
    [
        ([0, 3, 3, 5], {"mode": "sum"}),
        ([0, 3, 3, 5], {"mode": "mean", "padding_idx": 2}),
        ([0, 3, 5, 8], {"mode": "max", "include_last_offset": True}),
        (None, {"mode": "mean"}),
    ],
)
def test_rows_of_bags_are_taken_together(tmp_path, cpu, torch, models, offsets, options):
    bags = torch.nn.EmbeddingBag(7, 4, **options)
    model = models["function"](lambda self, *given: (self.bags(*given),), bags=bags).eval()
    ids = torch.tensor([1, 2, 6, 0, 2, 2, 5, 3])
    given = (ids.reshape(4, 2),) if offsets is None else (ids, torch.tensor(offsets))

    path = save(torch, tmp_path / "m.pt2", model, *given)

    [found] = computed(torch_import.load(path), cpu, *given)
    with torch.no_grad():
        np.testing.assert_allclose(found, bags(*given).numpy(), rtol=1e-5, atol=1e-6)


def test_weighted_rows_of_bags_are_added(tmp_path, cpu, torch, models):
    bags = torch.nn.EmbeddingBag(7, 4, mode="sum")
    model = models["function"](lambda self, ids, weights: (self.bags(ids, per_sample_weights=weights),), bags=bags)
    given = torch.tensor([[1, 2, 6], [0, 2, 2]]), torch.randn(2, 3)

    path = save(torch, tmp_path / "m.pt2", model.eval(), *given)

    [found] = computed(torch_import.load(path), cpu, *given)
    with torch.no_grad():
        np.testing.assert_allclose(found, bags(given[0], per_sample_weights=given[1]).numpy(), rtol=1e-5, atol=1e-6)
