"""Operators one by one: what they compute, and that they stay whole."""

import numpy as np
import pytest

from lib.contracts.errors import ModelError
from lib.graph import fusion, inputs
from lib.graph.inputs import Values
from lib.graph.subgraphs import extract_subgraphs
from lib.models import torch_archive, torch_import
from tests.helpers import computed
from tests.lib.models.torch_helpers import assert_like_torch, save


def test_a_linear_layer_on_a_batch_of_sequences_is_one_operator(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: torch.relu(self.layer(x)), layer=torch.nn.Linear(8, 6)).eval()
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(2, 5, 8))

    subgraphs = extract_subgraphs(fusion.fuse(torch_import.load(path).module, cpu.tvm()))

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

    subgraphs = extract_subgraphs(fusion.fuse(torch_import.load(path).module, cpu.tvm()))

    tunable = [subgraph.operators for subgraph in subgraphs if "conv2d_1x1" in subgraph.operators]
    assert tunable == [["conv2d_1x1", "add", "max", "min"]] * 2
    assert sum(subgraph.weight for subgraph in subgraphs) == 4  # to NHWC, two convolutions, and back


@pytest.mark.parametrize(("order", "operators"), [([0, 1, 2], []), ([0, 2, 1], ["take"])])
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

    module = fusion.fuse(torch_import.load(path).module, cpu.tvm())

    assert list(inputs.values(module).values()) == [Values("ids", 50)]


RECURRENT = {
    "two layers, both ways": ("LSTM", {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "states": ("LSTM", {"num_layers": 2}),
    "without biases": ("GRU", {"bidirectional": True, "bias": False}),
    "gru": ("GRU", {"batch_first": True}),
    "relu": ("RNN", {"nonlinearity": "relu"}),
}


exports_layers = pytest.mark.filterwarnings("ignore:The tensor attributes self.layer._flat_weights")  # torch's own


@exports_layers
@pytest.mark.parametrize("case", RECURRENT)
def test_recurrent_layers_stay_whole_and_compute_what_torch_computes(tmp_path, cpu, torch, models, case):
    kind, given = RECURRENT[case]
    made = getattr(torch.nn, kind)(6, 20, **given)
    before = [torch.randn(2, 3, 20) for _ in range(2)] if case == "states" else []

    def run(self, x, *states):
        y, last = self.layer(x, *([states] if states else []))
        return torch.cat([y.flatten(), *(each.flatten() for each in (last if kind == "LSTM" else [last]))])[None]

    model = models["function"](run, layer=made).eval()

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(4, 3, 6), *before)
    found = extract_subgraphs(fusion.fuse(torch_import.load(tmp_path / "m.pt2").module, cpu.tvm()))
    assert sum(each.weight for each in found if each.core_operator == "recurrence") == given.get("num_layers", 1)


@exports_layers
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_a_recurrent_layer_with_projections_is_taken_apart(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: self.layer(x)[0], layer=torch.nn.LSTM(6, 20, proj_size=8)).eval()

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(4, 3, 6))


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: x / 4,
        lambda self, x: x * 0.5 + 1,
        lambda self, x: (x < 2.5).float(),
        lambda self, x: x / x.abs().clamp(min=1),
        lambda self, x: x.float().add(x, alpha=3),
        lambda self, x: ((x > -3) * (x < 4)).float(),
        lambda self, x: ((x < -3) + (x > 4)).float(),
    ],
    ids=["quotient", "half", "less", "two", "alpha", "both are true", "one is true"],
)
def test_numbers_of_two_kinds_are_what_torch_makes_of_them(tmp_path, cpu, torch, models, function):
    x = torch.arange(-7, 8).reshape(3, 5)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", models["function"](function), x)


def test_a_value_goes_where_a_mask_says(tmp_path, cpu, torch, models):
    def masked(self, x):
        y = x.clone()
        y[x[..., 0] > 0] = 7.0
        return y + 1

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", models["function"](masked), torch.randn(3, 5, 2))


def test_a_cache_that_begins_with_an_empty_tensor_is_what_is_put_to_it(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: torch.cat([torch.tensor([]), x], -2) * 2)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(1, 3, 5))


@pytest.mark.parametrize("of", ["volumes", "two axes of three", "columns alone"])
def test_axes_are_read_at_places_of_their_own(tmp_path, cpu, torch, models, of):
    functions = {
        "volumes": lambda self, x: torch.nn.functional.interpolate(x, scale_factor=2, mode="trilinear"),
        "two axes of three": lambda self, x: x[:, :, torch.tensor([[2], [0]]), torch.tensor([3, 1, 1])],
        "columns alone": lambda self, x: x[:, :, :, :, torch.tensor([[1], [0]])],
    }

    model = models["function"](functions[of])

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, 4, 5, 6))


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"stride": (1, 2, 2), "padding": (1, 0, 1), "output_padding": (0, 1, 1), "bias": False},
     {"stride": 2, "groups": 2, "dilation": 2}],
)  # fmt: skip
def test_volumes_are_convolved_transposed(tmp_path, cpu, torch, models, options):
    layer = torch.nn.ConvTranspose3d(4, 6, 3, **options)
    model = models["function"](lambda self, x: self.layer(x), layer=layer).eval()

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(1, 4, 3, 4, 5))


@pytest.fixture
def routed(torch, models):
    """A mixture of experts as transformers exports it: the largest two of each row, sorted by expert."""
    torch_archive.declare_experts(torch)

    def forward(self, x):
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2, sorted=False)
        ids, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(ids.float(), bins=6, min=0, max=5).cumsum(0, dtype=torch.int32)
        hidden = torch.ops.transformers.grouped_mm_fallback(x[order // 2], self.up.transpose(1, 2), ends)
        rows = torch.ops.transformers.grouped_mm_fallback(torch.relu(hidden), self.down, ends)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel())
        return rows[back].view(len(x), 2, -1).sum(1)

    weights = {"up": torch.randn(6, 16, 12), "down": torch.randn(6, 16, 12)}
    model = models["function"](forward, router=torch.nn.Linear(12, 6)).eval()
    for name, value in weights.items():
        model.register_parameter(name, torch.nn.Parameter(value))
    return model


def test_a_mixture_of_experts_computes_what_each_expert_computes(tmp_path, cpu, torch, routed):
    x = torch.randn(9, 12)
    path = save(torch, tmp_path / "m.pt2", routed, x)

    [found] = computed(torch_import.load(path), cpu, x)

    with torch.no_grad():
        shares = routed.router(x).softmax(-1)
        kept = torch.where(shares >= shares.topk(2).values[:, -1:], shares, 0.0)
        of_each = torch.relu(torch.einsum("sk,enk->esn", x, routed.up)) @ routed.down
        expected = torch.einsum("se,esn->sn", kept, of_each)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("low", "high", "bins"), [(0, 5, 6), (-1, 2, 4), (0.5, 0.9, 3)])
def test_elements_are_counted_by_interval(tmp_path, cpu, torch, models, low, high, bins):
    model = models["function"](lambda self, x: torch.histc(x, bins=bins, min=low, max=high))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.tensor([[0.0, 1, 5, 2, -1], [0.6, 0.9, 7, 5, 0.7]]))


def test_a_histogram_whose_limits_values_decide_is_refused_by_name(tmp_path, torch, models):
    model = models["function"](lambda self, x: torch.histc(x, bins=4))
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(5))

    with pytest.raises(ModelError, match="histc has no limits of its own"):
        torch_import.load(path)


def test_integers_are_divided_downwards(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: x // 2 + torch.div(x, x.abs() + 1, rounding_mode="floor"))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.tensor([-3, -2, 0, 5]))


def test_integers_are_divided_towards_zero(tmp_path, cpu, torch, models):
    def divided(_, x):
        return torch.div(x, 2, rounding_mode="trunc") * 100 + torch.div(x, x.abs() + 1, rounding_mode="trunc")

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", models["function"](divided), torch.tensor([-7, -3, -2, 0, 5]))


def turned(torch, x, angles):
    """As DeepSeek-V2 and Llama 4 turn queries: by complex numbers of length one."""
    turns = torch.polar(torch.ones_like(angles), angles) * 0.5
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(numbers * turns.unsqueeze(-2)).flatten(-2)


def test_a_layer_of_a_neural_operator_multiplies_spectra_by_complex_weights(tmp_path, cpu, torch, models):
    """As neuraloperator's: the middle of a shifted spectrum, between convolutions, whose layout changes."""
    weight = torch.nn.Parameter(torch.randn(8, 8, 4, 3, dtype=torch.cfloat) / 4)

    def layer(self, x):
        spectrum = torch.fft.fftshift(torch.fft.rfft2(self.lift(x.flatten(2)).unflatten(2, x.shape[2:])), dim=2)
        made = torch.zeros(1, 8, 8, 5, dtype=torch.cfloat)
        made[:, :, 2:6, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, 2:6, :3], self.weight)
        found = torch.fft.irfft2(torch.fft.ifftshift(made, dim=2), s=x.shape[2:])
        return self.drop(torch.nn.functional.gelu(found).flatten(2))

    model = models["function"](layer, lift=torch.nn.Conv1d(3, 8, 1), drop=torch.nn.Conv1d(8, 2, 1))
    model.weight = weight

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(1, 3, 8, 8))


COMPLEX = {
    "products of matrices": lambda torch, x: torch.matmul(x, x.mT.conj()),
    "joined": lambda torch, x: torch.cat([x, x[:1] * 2]),
    "padded": lambda torch, x: torch.nn.functional.pad(x, (1, 2)),
    "expanded": lambda torch, x: x[:1].expand(3, 2, 5) * x[None, 0],
    "read at places": lambda torch, x: x.index_select(-1, torch.tensor([4, 0, 0])),
    "put into a slice": lambda torch, x: torch.slice_scatter(x, x[:, :2] * 3, -1, -3, -1),
}


@pytest.mark.parametrize("of", COMPLEX.values(), ids=COMPLEX)
def test_complex_numbers_move_as_real_ones_do(tmp_path, cpu, torch, models, of):
    model = models["function"](
        lambda self, x, y: (torch.view_as_real(of(torch, torch.complex(x, y))), of(torch, x) + of(torch, y)[..., :1])
    )
    inputs = torch.randn(2, 5), torch.randn(2, 5)
    path = save(torch, tmp_path / "m.pt2", model, *inputs)

    found = computed(torch_import.load(path), cpu, *inputs)

    for one, expected in zip(found, model(*inputs), strict=True):
        np.testing.assert_allclose(one, expected.numpy(), rtol=1e-4, atol=1e-5)


def test_complex_numbers_turn_pairs_by_constants(tmp_path, cpu, torch, models):
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    model = models["function"](lambda self, x: turned(torch, x, angles))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 5, 4, 6))


def test_complex_numbers_turn_pairs_by_inputs(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x, angles: turned(torch, x, angles) * 2)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 5, 4, 6), torch.randn(2, 5, 3))


def test_complex_numbers_take_real_factors_and_shapes(tmp_path, cpu, torch, models):
    def scaled(self, x, y):
        return torch.view_as_real(torch.view_as_complex(x).reshape(6) * y)

    model = models["function"](scaled)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(2, 3, 2), torch.randn(6))


def test_models_of_complex_inputs_are_refused_by_name(tmp_path, torch, models):
    model = models["function"](lambda self, x: torch.view_as_real(x * 2))
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(4, dtype=torch.complex64))

    with pytest.raises(ModelError, match=r"input '\S+' is of complex numbers"):
        torch_import.load(path)


def test_other_operators_on_complex_numbers_are_refused_by_name(tmp_path, torch, models):
    model = models["function"](lambda self, x: torch.view_as_complex(x).angle())
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(4, 2))

    with pytest.raises(ModelError, match=r"the operator \S+ is of complex numbers. Known of these are .*mul.Tensor"):
        torch_import.load(path)


def test_a_tensor_of_one_value_is_that_value_everywhere(tmp_path, cpu, torch, models):
    model = models["function"](lambda self, x: torch.full_like(x, -2.5) + torch.full((3, 4), 1.0) * x)

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(3, 4))


EXTREMES = {
    "amax": lambda torch, x: x.amax((0, -1)) + x.amin(1, keepdim=True).amax(),
    "min": lambda torch, x: sum(x.min(1)) + sum(x.min(-1, keepdim=True)).sum(),
    "product": lambda torch, x: x.prod(1),
    "logsumexp": lambda torch, x: x.logsumexp((0, 2)),
    "largest norm": lambda torch, x: torch.linalg.vector_norm(x, torch.inf, -1),
    "one part": lambda torch, x: x.split(9, 1)[0] * 2 + x.chunk(1, 2)[0],
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_and_products_along_axes_are_torchs(tmp_path, cpu, torch, models, name):
    model = models["function"](lambda self, x: EXTREMES[name](torch, x))

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(3, 4, 5))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "amax", "amin", "mean"])
def test_elements_are_brought_together_where_indices_say(tmp_path, cpu, torch, models, reduce, include_self):
    def gathered(self, x, source, index):
        found = x.scatter_reduce(0, index, source, reduce, include_self=include_self)
        return found + x.scatter_add(1, index, source) if reduce == "sum" else found

    model, index = models["function"](gathered), torch.tensor([[0, 1, 0], [2, 0, 1]])

    assert_like_torch(torch, cpu, tmp_path / "m.pt2", model, torch.randn(4, 4), torch.randn(3, 4), index)


def test_the_mean_that_a_norm_was_made_with_is_refused_by_name(tmp_path, torch, models):
    model = models["function"](lambda self, x: torch.native_layer_norm(x, (5,), None, None, 1e-5)[1])
    path = save(torch, tmp_path / "m.pt2", model, torch.randn(3, 5))

    with pytest.raises(ModelError, match=r"native_layer_norm.default nothing but the norm is imported"):
        torch_import.load(path)
