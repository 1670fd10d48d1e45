import json
import pickle
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import relax

from lib import graph, torch_import, workloads
from lib.errors import ModelError

# What runs without torch.


def test_without_torch_the_message_says_how_to_install_it(tmp_path, monkeypatch):
    path = tmp_path / "m.pt2"
    path.touch()
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(ModelError, match=r"m\.pt2 needs torch.*pip install torch.*\.\[torch\]"):
        torch_import.load(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"nowhere\.pt2: there is no such file"):
        torch_import.load(tmp_path / "nowhere.pt2")


@pytest.mark.parametrize("prefix", ["custom_obj", "opaque_obj"])
def test_pickled_objects_are_refused(tmp_path, prefix):
    path = tmp_path / "m.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("m/models/model.json", "{}")
        archive.writestr(f"m/data/constants/{prefix}_0", b"")

    with zipfile.ZipFile(path) as archive, pytest.raises(ModelError, match=rf"pickled object .*{prefix}_0"):
        torch_import._check_payload(archive, path)


# What needs torch.


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def models(torch):
    """Small modules, made where torch is there."""
    nn = torch.nn

    class Block(nn.Module):
        """A residual block with a batch norm and a classifier."""

        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
            self.head = nn.Linear(8, 4)
            for values in (self.norm.running_mean, self.norm.running_var, self.norm.weight):
                nn.init.uniform_(values, 0.5, 1.5)

        def forward(self, image):
            features = torch.relu(self.norm(self.conv(image)) + image)
            return {"features": features, "logits": self.head(features.mean((2, 3)))}

    class Function(nn.Module):
        """Any function of tensors."""

        def __init__(self, function, **modules):
            super().__init__()
            self.function = function
            for name, module in modules.items():
                self.add_module(name, module)

        def forward(self, *inputs):
            return self.function(self, *inputs)

    torch.manual_seed(0)
    return {"block": Block().eval(), "function": Function}


def save(torch, path, model, *inputs, **options):
    torch.export.save(torch.export.export(model, inputs, **options), path)
    return path


def rewrite(path, change):
    """Replace members of an archive: `change` maps (name, content) to the new content."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))
    return path


def run_untuned(model, cpu, *inputs):
    """The outputs of the imported model as TVM compiles it, without any schedule."""
    module = graph.fuse(model.module, cpu.tvm())
    with cpu.tvm():
        machine = relax.VirtualMachine(relax.build(module, target=cpu.tvm()), tvm.cpu())
    arguments = [*(value.numpy() for value in inputs), *model.weights.values()]
    outputs = machine["main"](*[tvm.runtime.tensor(argument) for argument in arguments])
    return [outputs.numpy()] if hasattr(outputs, "numpy") else [output.numpy() for output in outputs]


def assert_like_torch(torch, cpu, path, model, *inputs):
    save(torch, path, model, *inputs)
    found = run_untuned(torch_import.load(path), cpu, *inputs)
    with torch.no_grad():
        [expected] = [model(*inputs)]
    np.testing.assert_allclose(found[0], expected.numpy(), rtol=1e-4, atol=1e-5)


def test_an_exported_block_computes_what_torch_computes(tmp_path, cpu, torch, models):
    image = torch.randn(1, 8, 10, 10)
    path = save(torch, tmp_path / "block.pt2", models["block"], image)

    found = run_untuned(torch_import.load(path), cpu, image)

    with torch.no_grad():
        expected = models["block"](image)
    assert len(found) == 2
    for output, name in zip(found, ("features", "logits"), strict=True):
        np.testing.assert_allclose(output, expected[name].numpy(), rtol=1e-4, atol=1e-5)


def test_inputs_keep_their_names_and_weights_follow(tmp_path, torch, models):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))

    model = torch_import.load(path)

    names = [str(param.name) for param in model.module["main"].params]
    assert [str(param.name) for param in graph.inputs(model.module)] == ["image"]
    assert names == ["image", *model.weights]
    assert {(3, 3, 8, 8), (8, 4)} <= {weight.shape for weight in model.weights.values()}  # folded, transposed


def test_a_weight_that_is_read_twice_is_one_weight(tmp_path, torch, models):
    model = models["function"](lambda self, x: (x + self.shift) * self.shift)
    model.register_parameter("shift", torch.nn.Parameter(torch.randn(5)))
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 5))

    weights = torch_import.load(path).weights

    [value] = weights.values()
    np.testing.assert_array_equal(value, model.shift.detach().numpy())


def test_a_linear_layer_on_a_batch_of_sequences_is_one_operator(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: torch.relu(self.layer(x)), layer=torch.nn.Linear(8, 6)).eval()
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 5, 8))

    subgraphs = workloads.extract(graph.fuse(torch_import.load(path).module, cpu.tvm()))

    assert [subgraph.operators for subgraph in subgraphs] == [["matmul", "add", "max"]]


def attention_cases():
    readable = np.array([[True, True, False, True, False], [True] * 5, [False] * 5])  # one row reads nothing
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "booleans": {"attn_mask": readable},
        "numbers": {"attn_mask": np.where(readable, 0.5, -np.inf).astype(np.float32)},
        "scaled": {"scale": 0.3},
        "grouped": {"enable_gqa": True},
    }


@pytest.mark.parametrize("case", attention_cases())
def test_attention_computes_what_torch_computes(tmp_path, cpu, torch, models, case):
    options = attention_cases()[case]
    masks = [torch.from_numpy(options.pop("attn_mask"))] if "attn_mask" in options else []
    heads = 2 if case == "grouped" else 4
    attention = torch.nn.functional.scaled_dot_product_attention
    model = models["function"](lambda self, q, k, v, *mask: attention(q, k, v, *mask, **options))
    inputs = (torch.randn(1, 4, 3, 8), torch.randn(1, heads, 5, 8), torch.randn(1, heads, 5, 8), *masks)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, *inputs)


def test_booleans_are_counted_not_or_ed(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, mask: mask.cumsum(-1))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.tensor([[True, False, True, True]]))


def test_one_of_many_is_selected_also_from_the_end(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: x[:, -2] + x.select(-2, 0))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, 4))


def test_axes_may_be_counted_from_the_end(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: x.permute(0, -1, 1, -2).squeeze(-1) + x.squeeze((-2, 3)))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, 1, 3))


@pytest.mark.parametrize("limits", [{"min": -0.5}, {"max": 0.5}, {"min": -0.5, "max": 1}])
def test_clamps_have_the_limits_they_are_given(tmp_path, cpu, torch, models, limits):
    model = models["function"](lambda self, x: x.clamp(**limits) + torch.nn.functional.hardtanh(x) + x.clamp_max(0.2))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(4, 5))


def test_convolutions_stay_in_one_layout_through_relu6_and_empty_pads(tmp_path, cpu, torch, models):
    nn = torch.nn
    stages = [nn.Conv2d(8, 8, 1), nn.ReLU6(), nn.ZeroPad2d(0), nn.Conv2d(8, 8, 1), nn.Hardtanh(0, 2)]
    path = save(torch, tmp_path / "m.pt2", nn.Sequential(*stages), torch.randn(1, 8, 4, 4))

    subgraphs = workloads.extract(graph.fuse(torch_import.load(path).module, cpu.tvm()))

    tunable = [subgraph.operators for subgraph in subgraphs if "conv2d_1x1" in subgraph.operators]
    assert tunable == [["conv2d_1x1", "add", "max", "min"]] * 2
    assert sum(subgraph.weight for subgraph in subgraphs) == 4  # to NHWC, two convolutions, and back


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

    subgraphs = workloads.extract(graph.fuse(torch_import.load(tmp_path / "m.pt2").module, cpu.tvm()))
    assert [subgraph.operators for subgraph in subgraphs] == [["select", "add"]]


@pytest.mark.parametrize(("order", "operators"), [([0, 1, 2], []), ([0, 2, 1], ["index_tensor"])])
def test_to_read_all_in_order_is_to_reshape(tmp_path, cpu, torch, models, order, operators):
    rows, columns = torch.zeros(1, 1, dtype=torch.int64), torch.tensor(order)
    model = models["function"](lambda self, x: x[rows, columns].unsqueeze(0) * 2)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(1, 3))

    script = torch_import.load(tmp_path / "m.pt2").module.script(show_meta=False)
    assert [name for name in ("index_tensor", "take") if f"R.{name}(" in script] == operators


def test_a_choice_that_is_always_the_same_is_made_at_import(tmp_path, torch, models):
    attention = torch.nn.functional.scaled_dot_product_attention
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    model = models["function"](lambda self, x: attention(x, x, x, mask))
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 2, 4, 8))

    assert "R.where" not in torch_import.load(path).module.script(show_meta=False)


def test_token_ids_keep_their_bound(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, ids: self.table(ids), table=torch.nn.Embedding(50, 8))
    path = save(torch, tmp_path / "m.pt2", model, torch.tensor([[0, 49, 7]]))

    module = graph.fuse(torch_import.load(path).module, cpu.tvm())

    assert list(graph.index_bounds(module).values()) == [50]


def test_containers_of_packages_that_are_not_imported_come_out_flat(tmp_path, torch, models):
    path = save(torch, tmp_path / "block.pt2", models["block"], torch.randn(1, 8, 10, 10))

    def rename(name, content):
        if not name.endswith("models/model.json"):
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

    rewrite(path, lambda name, content: evil if "sample_inputs" in name else content)

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
    path = save(torch, tmp_path / "m.pt2", models["function"](lambda self, x: torch.fft.rfft(x)), torch.ones(4))

    with pytest.raises(ModelError, match=r"operators that cannot be imported: _fft_r2c\.default"):
        torch_import.load(path)


def test_weights_of_half_precision_are_named(tmp_path, torch, models):
    model = models["function"](lambda self, x: self.layer(x), layer=torch.nn.Linear(4, 4)).half()
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(1, 4).half())

    with pytest.raises(ModelError, match=r"'layer\.weight' is torch\.float16\. Call model\.float\(\)"):
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

    assert [str(param.name) for param in graph.inputs(model.module)] == ["x"]
    [found] = run_untuned(model, cpu, x)
    np.testing.assert_allclose(found, x.numpy() * 2 + 1, rtol=1e-6)


def test_a_model_in_training_mode_is_refused(tmp_path, torch, models):
    model = models["function"](lambda self, x: self.norm(x), norm=torch.nn.BatchNorm2d(3)).train()
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 3, 4, 4))

    with pytest.raises(ModelError, match=r"changes 'norm\.running_mean'.*model\.eval\(\)"):
        torch_import.load(path)
