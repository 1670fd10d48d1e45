"""Whole programs of torch as models."""

import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lib.contracts.errors import ModelError
from lib.graph import fusion
from lib.graph.subgraphs import extract_subgraphs
from lib.models import torch_import
from tests.helpers import computed
from tests.lib.models.torch_helpers import assert_like_torch, save


def test_without_torch_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    path = tmp_path / "m.pt2"
    path.touch()
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ModelError, match=r"m\.pt2 needs torch.*pip install torch.*\.\[torch\]"):
        torch_import.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.pt2: there is no such file"):
        torch_import.load(tmp_path / "nowhere.pt2")


def test_an_exported_block_computes_what_torch_computes(tmp_path, cpu, torch, models):
    image = torch.randn(1, 8, 10, 10)
    path = save(torch, tmp_path / "block.pt2", models["block"], image)

    found = computed(torch_import.load(path), cpu, image)

    with torch.no_grad():
        expected = models["block"](image)
    assert len(found) == 2
    for output, name in zip(found, ("features", "logits"), strict=True):
        np.testing.assert_allclose(output, expected[name].numpy(), rtol=1e-4, atol=1e-5)


def test_inputs_keep_their_names_and_weights_follow(tmp_path, torch, models):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))

    model = torch_import.load(path)

    names = [str(param.name) for param in model.module["main"].params]
    assert [str(param.name) for param in fusion.inputs(model.module)] == ["image"]
    assert names == ["image", *model.weights]
    assert {(3, 3, 8, 8), (8, 4)} <= {weight.shape for weight in model.weights.values()}  # folded, transposed


def test_a_weight_that_is_read_twice_is_one_weight(tmp_path, torch, models):
    model = models["function"](lambda self, x: (x + self.shift) * self.shift)
    model.register_parameter("shift", torch.nn.Parameter(torch.randn(5)))
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 5))

    weights = torch_import.load(path).weights

    [value] = weights.values()
    np.testing.assert_array_equal(value, model.shift.detach().numpy())


def test_shapes_that_constants_decide_are_fixed(tmp_path, cpu, torch, models):
    def repeated(self, x):
        positions = torch.arange(4)
        repeats = (positions.max() + 1).item()
        return x.unsqueeze(1).repeat(1, repeats, 1)[:, positions] * positions.view(1, -1, 1)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", models["function"](repeated), torch.randn(2, 5))


def test_a_graph_whose_edges_are_known_has_as_many_without_loops_as_there_are(tmp_path, cpu, torch, models):
    def summed(self, x):
        edges = self.edges[:, self.edges[0] != self.edges[1]]
        weights = torch.ones(edges.shape[1]) / edges.shape[1]
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] * weights[:, None])

    model = models["function"](summed)
    model.register_buffer("edges", torch.tensor([[0, 1, 2, 2, 3], [1, 0, 2, 3, 0]]))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(4, 5))


def test_shapes_that_are_written_part_by_part_are_fixed(tmp_path, cpu, torch, models):
    def repeated(self, x):
        sizes = torch.zeros(2, dtype=torch.int64)
        sizes[0], sizes[1] = 3, 2
        return x.unsqueeze(1).repeat(1, sizes.sum().item(), 1)[:, torch.arange(5)]

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", models["function"](repeated), torch.randn(2, 4))


def test_positions_that_fall_are_computed_at_import_though_an_assertion_reads_them(tmp_path, cpu, torch, models):
    def encoded(self, x):
        return x + (torch.arange(3, -4, -1)[:, None].to(torch.float32) * self.rates).sin()

    model = models["function"](encoded)
    model.register_buffer("rates", torch.rand(5))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(7, 5))


def test_what_depends_on_no_input_is_computed_at_import(tmp_path, cpu, torch, models):
    def masked(self, scores):
        positions = torch.arange(6)
        causal = positions[:, None] >= positions
        counted = (positions.diff() > 0).cumsum(-1)
        return torch.where(causal, scores, 0.0) + counted[-1] + self.shift

    model = models["function"](masked)
    model.register_buffer("shift", torch.randn(6))
    scores = torch.randn(1, 6, 6)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, scores)

    subgraphs = extract_subgraphs(fusion.fuse(torch_import.load(tmp_path / "m.pt2").module, cpu.tvm()))
    assert [subgraph.operators for subgraph in subgraphs] == [["select", "add"]]


def test_a_dynamic_shape_is_named_with_its_input_and_dimension(tmp_path, torch, models):
    model = models["function"](lambda self, x, y: torch.relu(x) + y)
    shapes = {"inputs": ({1: torch.export.Dim("length")}, {})}
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 4), torch.randn(1, 1), dynamic_shapes=shapes)

    with pytest.raises(ModelError, match=r"dynamic shape \(1, s\d+\): dimension 1 .*without `dynamic_shapes`"):
        torch_import.load(path)


def test_a_shape_that_depends_on_values_is_named(tmp_path, torch, models):
    path = save(torch, tmp_path / "m.pt2", models["function"](lambda self, x: x.nonzero()), torch.ones(4))

    with pytest.raises(ModelError, match=r"shape of 'nonzero', which nonzero\.default makes, depends on its values"):
        torch_import.load(path)


def test_an_unsupported_operator_is_named(tmp_path, torch, models):
    path = save(torch, tmp_path / "m.pt2", models["function"](lambda self, x: torch.erfinv(x)), torch.ones(4))

    with pytest.raises(ModelError, match=r"operators that cannot be imported: erfinv\.default"):
        torch_import.load(path)


def test_weights_that_nothing_reads_are_left_out(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: self.layer(x), layer=torch.nn.Linear(4, 4), other=torch.nn.Linear(9, 9))
    model.register_buffer("turns", torch.ones(3, dtype=torch.complex64), persistent=False)
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 4))

    found = torch_import.load(path)

    assert sorted(array.shape for array in found.weights.values()) == [(4,), (4, 4)]
    assert_like_torch(torch, cpu, path, model, torch.randn(1, 4))


def test_weights_of_double_precision_are_named(tmp_path, torch, models):
    model = models["function"](lambda self, x: self.layer(x), layer=torch.nn.Linear(4, 4)).double()
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 4).double())

    with pytest.raises(ModelError, match=r"'layer\.weight' is torch\.float64\. Call model\.float\(\)"):
        torch_import.load(path)


def test_weights_of_another_device_are_named(torch):
    program = SimpleNamespace(state_dict={"table": torch.empty(1, device="meta")}, constants={})

    with pytest.raises(ModelError, match=r"'table' is on meta\. Call model\.cpu\(\)"):
        torch_import._check_weights(torch, program, Path("m.pt2"))


def test_flags_and_missing_results_leave_the_interface(tmp_path, cpu, torch, models):
    class Optional(torch.nn.Module):
        def forward(self, x, mask=None, twice=False):
            return None, (x * 2 if twice else x) + 1, mask

    x = torch.randn(3)
    path = save(torch, tmp_path / "m.pt2", Optional(), x, None, True)

    model = torch_import.load(path)

    assert [str(param.name) for param in fusion.inputs(model.module)] == ["x"]
    [found] = computed(model, cpu, x)
    np.testing.assert_allclose(found, x.numpy() * 2 + 1, rtol=1e-6)


def test_a_model_in_training_mode_is_refused(tmp_path, torch, models):
    model = models["function"](lambda self, x: self.norm(x), norm=torch.nn.BatchNorm2d(3)).train()
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 3, 4, 4))

    with pytest.raises(ModelError, match=r"changes 'norm\.running_mean'.*model\.eval\(\)"):
        torch_import.load(path)


def test_what_torch_warns_of_while_it_imports_is_not_the_models_fault(tmp_path, torch, models, monkeypatch):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))
    load = torch.export.load

    def warns(path):
        warnings.warn("torch will drop this", FutureWarning, stacklevel=1)
        return load(path)

    monkeypatch.setattr(torch.export, "load", warns)

    assert torch_import.load(path).weights  # although these tests make errors of warnings
    with pytest.raises(FutureWarning):
        warns(path)
