"""Networks behind services and machines: language a token at a time, search, molecules, roads, pitches, games, alarms.

Imported, they join the table of `architectures.py`, as those of `domains.py` do, and nothing was made for them before
they were tuned. Where a paper names the widths they are its small ones.
"""

import itertools
from functools import partial

import torch
import transformers as hf
from architectures import Example, FirstOutput, maker, reset
from deployed import same
from torch import nn
from torch.nn import functional
from wall_models import Positional, timm_model

_linear = partial(nn.Linear, bias=False)


def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, -1)
    return x * cosines + torch.cat([-b, a], -1) * sines


class _Layer(nn.Module):
    """A Llama's, of which several query heads read one head of keys; it returns these with its token's at the end."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm, self.norm_inner = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = _linear(width, width), _linear(width, width)
        self.key, self.value = (_linear(width, kv_heads * self.size) for _ in range(2))
        self.gate, self.up, self.down = _linear(width, inner), _linear(width, inner), _linear(inner, width)

    def forward(self, x: torch.Tensor, angles: tuple, keys: torch.Tensor, values: torch.Tensor) -> tuple:
        y = self.norm(x)
        query = _turned(self.query(y).view(1, 1, self.heads, -1).transpose(1, 2), *angles)
        key = _turned(self.key(y).view(1, 1, self.kv_heads, -1).transpose(1, 2), *angles)
        keys = torch.cat([keys, key], 2)
        values = torch.cat([values, self.value(y).view(1, 1, self.kv_heads, -1).transpose(1, 2)], 2)
        each = self.heads // self.kv_heads
        wide = (part[:, :, None].expand(-1, -1, each, -1, -1).reshape(1, self.heads, -1, self.size)
                for part in (keys, values))  # fmt: skip
        wide_keys, wide_values = wide
        scores = (query @ wide_keys.transpose(2, 3) * self.size**-0.5).softmax(-1)
        x = x + self.out((scores @ wide_values).transpose(1, 2).reshape(1, 1, -1))
        y = self.norm_inner(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), keys, values


class _Token(nn.Module):
    """One token of a decoder as exporters write it: keys and values of each layer come in, and go out longer by one."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(width, heads, kv_heads, inner) for _ in range(layers))
        self.norm, self.logits = nn.RMSNorm(width), _linear(width, 8192)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, **past: torch.Tensor) -> tuple:
        present = []
        for n, layer in enumerate(self.layers):
            x, *both = layer(x, (cosines, sines), past[f"key_{n}"], past[f"value_{n}"])
            present += both
        return self.logits(self.norm(x)), *present


@maker
def llama_step() -> Example:
    """The 512th token of a Llama of six layers, four query heads to one of keys."""
    angle = torch.rand(1, 64) * 6
    inputs = {"x": torch.randn(1, 1, 1024), "cosines": angle.cos(), "sines": angle.sin()}
    for n in range(6):
        inputs |= {f"key_{n}": torch.randn(1, 4, 511, 64), f"value_{n}": torch.randn(1, 4, 511, 64)}
    return _Token(1024, 16, 4, 2816, 6), inputs


class _Experts(nn.Module):
    """A mixture of which each token reads two experts' weights of eight, four layers (Mixtral, without attention)."""

    def __init__(self, width: int = 512, inner: int = 1024, experts: int = 8, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.routers = nn.ModuleList(_linear(width, experts) for _ in range(layers))
        self.into = nn.ParameterList(torch.randn(experts, 2 * inner, width) / width**0.5 for _ in range(layers))
        self.out = nn.ParameterList(torch.randn(experts, width, inner) / inner**0.5 for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, router, into, out in zip(self.norms, self.routers, self.into, self.out, strict=True):
            y = norm(x)
            weights, chosen = router(y).softmax(-1).topk(2)
            gate, up = (into[chosen] @ y[:, None, :, None]).chunk(2, 2)
            each = (out[chosen] @ (functional.silu(gate) * up))[..., 0]
            x = x + (each * weights[..., None]).sum(1)
        return x


@maker
def experts() -> Example:
    """Two tokens."""
    return Positional(_Experts()), {"x": torch.randn(2, 512)}


class _Sentence(nn.Module):
    """A MiniLM's mean over the tokens that are there, of length one."""

    def __init__(self) -> None:
        super().__init__()
        config = hf.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=4096
        )
        config._attn_implementation = "eager"
        self.body = FirstOutput(hf.BertModel(config, add_pooling_layer=False))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        tokens = self.body(input_ids=input_ids, attention_mask=attention_mask)
        there = attention_mask[..., None].to(tokens.dtype)
        return functional.normalize((tokens * there).sum(1) / there.sum(1).clamp(min=1e-9))


def _sentences(n: int, length: int) -> Example:
    there = (torch.arange(length)[None] < torch.randint(length // 2, length + 1, (n, 1))).long()
    return _Sentence(), {"input_ids": torch.randint(4096, (n, length)), "attention_mask": there}


@maker
def query() -> Example:
    """One question of 16 words, for a search by meaning."""
    return _sentences(1, 16)


@maker
def sentences() -> Example:
    """Sixteen passages of 48 words."""
    return _sentences(16, 48)


class _Triangle(nn.Module):
    """AlphaFold 2's blocks of pairs: products along triangles, attention around the start, a transition."""

    def __init__(self, c: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(4))
        self.sides, self.gate, self.merged = nn.Linear(c, 4 * c), nn.Linear(c, c), nn.Linear(c, c)
        self.into, self.bias, self.gates, self.out = (
            _linear(c, 3 * c),
            _linear(c, heads),
            nn.Linear(c, c),
            _linear(c, c),
        )
        self.transition = nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.ReLU(), nn.Linear(4 * c, c))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](z)
        a, b, gate_a, gate_b = self.sides(y).chunk(4, -1)
        around = torch.einsum("ikc,jkc->ijc", a * torch.sigmoid(gate_a), b * torch.sigmoid(gate_b))
        z = z + torch.sigmoid(self.gate(y)) * self.merged(self.norms[1](around))
        y, n = self.norms[2](z), z.shape[0]
        query, key, value = self.into(y).view(n, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5 + self.bias(y).permute(2, 0, 1)[None]
        seen = (scores.softmax(-1) @ value).transpose(1, 2).reshape(n, n, -1)
        z = z + self.out(torch.sigmoid(self.gates(y)) * seen)
        return z + self.transition(z)


@maker
def evoformer() -> Example:
    """Three blocks of the pairs of 96 residues."""
    return Positional(nn.Sequential(*(_Triangle() for _ in range(3)))), {"x": torch.randn(96, 96, 64)}


class _Conditioned(nn.Module):
    """DiT's block: shifts, scales and gates from the time."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = (nn.LayerNorm(c, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.into, self.out, self.time = nn.Linear(c, 3 * c), nn.Linear(c, c), nn.Linear(c, 6 * c)
        self.inner = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(approximate="tanh"), nn.Linear(4 * c, c))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        a, b, gate, c, d, gate_inner = self.time(functional.silu(time))[:, None].chunk(6, -1)
        y = self.one(x) * (1 + b) + a
        query, key, value = self.into(y).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value)
        x = x + gate * self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + gate_inner * self.inner(self.two(x) * (1 + d) + c)


class _Dit(nn.Module):
    def __init__(self, c: int = 384, heads: int = 6, layers: int = 8) -> None:
        super().__init__()
        self.patches, self.places = nn.Conv2d(4, c, 2, 2), nn.Parameter(torch.randn(1, 256, c) * 0.1)
        self.time = nn.Sequential(nn.Linear(256, c), nn.SiLU(), nn.Linear(c, c))
        self.blocks, self.last = nn.ModuleList(_Conditioned(c, heads) for _ in range(layers)), nn.Linear(c, 32)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        angles = time[:, None] * torch.exp(torch.arange(128) * (-9.21 / 128))
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        y = self.patches(x).flatten(2).mT + self.places
        for block in self.blocks:
            y = block(y, time)
        y = self.last(y).view(-1, 16, 16, 2, 2, 8)
        return y.permute(0, 5, 1, 3, 2, 4).reshape(-1, 8, 32, 32)


@maker
def dit() -> Example:
    """DiT-S/2 of eight layers: one step of a picture's 32x32x4 latents."""
    return _Dit(), {"x": torch.randn(1, 4, 32, 32), "time": torch.rand(1) * 900}


class _Channels(nn.Module):
    """Restormer's block: attention of channels to channels, and a gated inner layer with windows of 3x3."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, c * 8 // 3
        self.one, self.two = nn.LayerNorm(c), nn.LayerNorm(c)
        self.into = nn.Sequential(nn.Conv2d(c, 3 * c, 1), same(3 * c, 3 * c, groups=3 * c))
        self.out, self.heat = nn.Conv2d(c, c, 1), nn.Parameter(torch.ones(heads, 1, 1))
        self.inner = nn.Sequential(nn.Conv2d(c, 2 * inner, 1), same(2 * inner, 2 * inner, groups=2 * inner))
        self.last = nn.Conv2d(inner, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        parts = self.into(self.one(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).chunk(3, 1)
        query, key, value = (part.reshape(n, self.heads, -1, h * w) for part in parts)
        scores = functional.normalize(query, dim=-1) @ functional.normalize(key, dim=-1).mT * self.heat
        x = x + self.out((scores.softmax(-1) @ value).reshape(n, c, h, w))
        a, b = self.inner(self.two(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).chunk(2, 1)
        return x + self.last(functional.gelu(a) * b)


class _Restormer(nn.Module):
    def __init__(self, c: int = 24) -> None:
        super().__init__()
        self.first, self.last = same(3, c), same(2 * c, 3)
        self.down = nn.ModuleList(nn.Sequential(_Channels(c << n, 1 << n), _Channels(c << n, 1 << n)) for n in range(3))
        self.fewer = nn.ModuleList(nn.Sequential(same(c << n, c << n >> 1), nn.PixelUnshuffle(2)) for n in (0, 1))
        self.more = nn.ModuleList(nn.Sequential(same(c << n, 2 * c << n), nn.PixelShuffle(2)) for n in (2, 1))
        self.merge = nn.ModuleList((nn.Conv2d(4 * c, 2 * c, 1), nn.Identity()))
        self.up = nn.ModuleList((_Channels(2 * c, 2), _Channels(2 * c, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down[0](self.first(x))
        two = self.down[1](self.fewer[0](one))
        y = self.down[2](self.fewer[1](two))
        for more, merge, up, beside in zip(self.more, self.merge, self.up, (two, one), strict=True):
            y = up(merge(torch.cat([more(y), beside], 1)))
        return x + self.last(y)


@maker
def restormer() -> Example:
    """A picture of 128x128 without its rain."""
    model = _Restormer()
    reset(model, ())
    return Positional(model), {"x": torch.randn(1, 3, 128, 128)}


class _Raft(nn.Module):
    """RAFT: each position of an image against all of another's, looked up around the motion so far, four times."""

    def __init__(self, c: int = 96, hidden: int = 96, reach: int = 3, levels: int = 3) -> None:
        super().__init__()
        self.reach, self.n_levels, self.hidden, act = reach, levels, hidden, nn.ReLU()
        body = (same(3, 32, 7, 2), act, same(32, 64, 3, 2), act, same(64, c, 3, 2), act)
        self.features, self.context = (
            nn.Sequential(*body, nn.Conv2d(c, c, 1)),
            nn.Sequential(same(3, 32, 7, 2), act, same(32, 64, 3, 2), act, same(64, 2 * hidden, 3, 2)),
        )
        n = levels * (2 * reach + 1) ** 2
        self.seen, self.motion = nn.Sequential(nn.Conv2d(n, 96, 1), act), nn.Sequential(same(2, 32, 7), act)
        self.gates, self.new = same(2 * hidden + 128, 2 * hidden), same(2 * hidden + 128, hidden)
        self.step = nn.Sequential(same(hidden, 128), act, same(128, 2))

    def looked_up(self, volume: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        """Around each position's place in the other image, at each scale: [1, levels (2 reach + 1)^2, h, w]."""
        r, (h, w) = self.reach, places.shape[-2:]
        steps = torch.arange(-r, r + 1, dtype=torch.float32)
        window = torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1)
        found = []
        for n, part in enumerate(volume):
            at = places.permute(0, 2, 3, 1).reshape(h * w, 1, 1, 2) / 2**n + window
            high, wide = part.shape[-2:]
            grid = at * torch.tensor([2 / (wide - 1), 2 / (high - 1)]) - 1
            found.append(functional.grid_sample(part, grid, align_corners=True).view(h, w, -1))
        return torch.cat(found, -1).permute(2, 0, 1)[None]

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        one, other = self.features(first), self.features(second)
        _, c, h, w = one.shape
        costs = (one.view(c, h * w).T @ other.view(c, h * w) / c**0.5).view(h * w, 1, h, w)
        volume = [costs]
        for _ in range(self.n_levels - 1):
            volume.append(functional.avg_pool2d(volume[-1], 2))
        state, given = self.context(first).split(self.hidden, 1)
        state, given = torch.tanh(state), torch.relu(given)
        start = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"))[None].float()
        places = start
        for _ in range(4):
            read = torch.cat([given, self.seen(self.looked_up(volume, places)), self.motion(places - start)], 1)
            update, reset = torch.sigmoid(self.gates(torch.cat([state, read], 1))).chunk(2, 1)
            new = torch.tanh(self.new(torch.cat([reset * state, read], 1)))
            state = (1 - update) * state + update * new
            places = places + self.step(state)
        return places - start


@maker
def raft() -> Example:
    """Motion between two images of 160x224, an eighth as large."""
    model = _Raft()
    reset(model, ())
    return model, {"first": torch.randn(1, 3, 160, 224), "second": torch.randn(1, 3, 160, 224)}


class _Stereo(nn.Module):
    """GwcNet: groups of features compared at each of 24 shifts, a volume of convolutions, the mean shift."""

    def __init__(self, c: int = 64, groups: int = 16, shifts: int = 24) -> None:
        super().__init__()
        self.groups, self.shifts, act = groups, shifts, nn.ReLU()
        self.features = nn.Sequential(same(3, 32, 3, 2), act, same(32, 32), act, same(32, c, 3, 2), act, same(c, c))
        self.volume = nn.Sequential(
            nn.Conv3d(groups, 32, 3, 1, 1), act, nn.Conv3d(32, 32, 3, 1, 1), act, nn.Conv3d(32, 64, 3, 2, 1), act,
            nn.Conv3d(64, 64, 3, 1, 1), act, nn.ConvTranspose3d(64, 32, 3, 2, 1, output_padding=1), act,
            nn.Conv3d(32, 1, 3, 1, 1),
        )  # fmt: skip

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        one, other = self.features(left), self.features(right)
        n, _, h, w = one.shape
        costs = []
        for shift in range(self.shifts):
            product = (one[..., shift:] * other[..., : w - shift]).view(n, self.groups, -1, h, w - shift).mean(2)
            costs.append(functional.pad(product, (shift, 0)))
        likely = self.volume(torch.stack(costs, 2))[:, 0].softmax(1)
        return (likely * torch.arange(self.shifts, dtype=torch.float32)[:, None, None]).sum(1, keepdim=True)


@maker
def stereo() -> Example:
    """How far things are in two images of 128x224, a quarter as large."""
    model = _Stereo()
    reset(model, ())
    return model, {"left": torch.randn(1, 3, 128, 224), "right": torch.randn(1, 3, 128, 224)}


class _Pillars(nn.Module):
    """PointPillars: the largest features of each column's points, put in their places of a plan, and an SSD of it."""

    def __init__(self, c: int = 64, size: int = 160) -> None:
        super().__init__()
        self.size, self.points = size, nn.Sequential(nn.Linear(9, c), nn.ReLU())

        def block(a: int, b: int, n: int) -> nn.Sequential:
            layers = [(same(a, b, 3, 2), nn.ReLU()), *((same(b, b), nn.ReLU()) for _ in range(n))]
            return nn.Sequential(*itertools.chain.from_iterable(layers))

        self.down = nn.ModuleList((block(c, c, 2), block(c, 2 * c, 3), block(2 * c, 4 * c, 3)))
        self.up = nn.ModuleList(nn.ConvTranspose2d(c << n, 2 * c, 1 << n, 1 << n) for n in range(3))
        self.boxes = nn.Conv2d(6 * c, 20, 1)

    def forward(self, points: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        """`points`: [pillars, points, 9]; `cells`: int64 [pillars], no two alike."""
        pillars = self.points(points).amax(1)
        plan = torch.zeros(self.size**2, pillars.shape[1]).index_copy(0, cells, pillars)
        x, kept = plan.T.reshape(1, -1, self.size, self.size), []
        for down, up in zip(self.down, self.up, strict=True):
            x = down(x)
            kept.append(up(x))
        return self.boxes(torch.cat(kept, 1))


@maker
def pillars() -> Example:
    """2,000 columns of 20 points, on a plan of 160x160."""
    model = _Pillars()
    reset(model, ())
    return model, {"points": torch.randn(2000, 20, 9), "cells": torch.randperm(160 * 160)[:2000]}


@maker
def pose() -> Example:
    """Simple Baselines: seventeen joints of a person, ResNet-18 and three deconvolutions."""
    body = timm_model("resnet18", features_only=True, out_indices=(4,)).body
    layers: list[nn.Module] = []
    for c in (512, 256, 256):
        layers += [nn.ConvTranspose2d(c, 256, 4, 2, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU()]

    class _Joints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.up = body, nn.Sequential(*layers, nn.Conv2d(256, 17, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(self.body(x)[0])

    return Positional(_Joints()), {"x": torch.randn(1, 3, 256, 192)}


class _Tracker(nn.Module):
    """SiamRPN++ of small widths: features of what is followed are the kernels, channel by channel."""

    def __init__(self, c: int = 128) -> None:
        super().__init__()
        act = nn.ReLU()
        self.body = nn.Sequential(
            same(3, 32, 3, 2), act, same(32, 64, 3, 2), act, same(64, 64), act, same(64, c, 3, 2), act, same(c, c), act
        )
        self.what, self.where = nn.Conv2d(c, c, 3), nn.Conv2d(c, c, 3)
        self.heads = nn.Sequential(nn.Conv2d(c, c, 1), act, nn.Conv2d(c, 30, 1))

    def forward(self, template: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        kernel, seen = self.what(self.body(template)), self.where(self.body(image))
        c, h, w = kernel.shape[1:]
        return self.heads(functional.conv2d(seen, kernel.view(c, 1, h, w), groups=c))


@maker
def tracker() -> Example:
    """What an image of 64x64 shows, found in one of 256x256."""
    model = _Tracker()
    reset(model, ())
    return model, {"template": torch.randn(1, 3, 64, 64), "image": torch.randn(1, 3, 256, 256)}


class _Deformable(nn.Module):
    """A layer of Deformable DETR's decoder: each query looks at four points of three images, eight heads."""

    def __init__(self, c: int = 256, heads: int = 8, levels: int = 3, points: int = 4) -> None:
        super().__init__()
        self.shape = (heads, levels, points)
        self.values, self.out, n = nn.Linear(c, c), nn.Linear(c, c), heads * levels * points
        self.offsets, self.weights = nn.Linear(c, 2 * n), nn.Linear(c, n)
        self.own, self.norms = (
            nn.MultiheadAttention(c, heads, batch_first=True),
            nn.ModuleList(nn.LayerNorm(c) for _ in range(3)),
        )
        self.inner = nn.Sequential(nn.Linear(c, 4 * c), nn.ReLU(), nn.Linear(4 * c, c))

    def forward(self, x: torch.Tensor, images: list[torch.Tensor], places: torch.Tensor) -> torch.Tensor:
        heads, levels, points = self.shape
        x = self.norms[0](x + self.own(x, x, x, need_weights=False)[0])
        n = x.shape[1]
        offsets = self.offsets(x).view(n, heads, levels, points, 2)
        weights = self.weights(x).view(n, heads, levels * points).softmax(-1).view(n, heads, levels, points)
        total = torch.zeros(1)
        for level, image in enumerate(images):
            _, c, h, w = image.shape
            value = self.values(image.flatten(2).mT).mT.reshape(heads, c // heads, h, w)
            at = 2 * (places[0, :, None, None] + offsets[:, :, level] / torch.tensor([w, h])) - 1
            seen = functional.grid_sample(value, at.transpose(0, 1), align_corners=False)
            total = total + (seen * weights[:, :, level].transpose(0, 1)[:, None]).sum(-1)
        x = self.norms[1](x + self.out(total.reshape(1, -1, n).mT))
        return self.norms[2](x + self.inner(x))


class _Detector(nn.Module):
    def __init__(self, c: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Deformable(c) for _ in range(layers))
        self.places, self.classes = nn.ModuleList(nn.Linear(c, 2) for _ in range(layers)), nn.Linear(c, 80)

    def forward(
        self, queries: torch.Tensor, small: torch.Tensor, medium: torch.Tensor, large: torch.Tensor
    ) -> torch.Tensor:
        places = torch.full((1, queries.shape[1], 2), 0.5)
        for layer, place in zip(self.layers, self.places, strict=True):
            places = torch.sigmoid(place(queries) + torch.logit(places, eps=1e-5))
            queries = layer(queries, [large, medium, small], places)
        return torch.cat([self.classes(queries), places], -1)


@maker
def deformable() -> Example:
    """RT-DETR's decoder of three layers: 300 queries, images of 20x20 to 80x80."""
    sizes = {"small": 20, "medium": 40, "large": 80}
    inputs = {name: torch.randn(1, 256, size, size) for name, size in sizes.items()}
    return _Detector(), {"queries": torch.randn(1, 300, 256), **inputs}


class _Divided(nn.Module):
    """GDN: each channel over the root of a weighted sum of all channels' squares; or times it."""

    def __init__(self, c: int, inverse: bool = False) -> None:
        super().__init__()
        self.beta, self.gamma, self.inverse = nn.Parameter(torch.ones(c)), nn.Parameter(torch.rand(c, c) / c), inverse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums = functional.conv2d(x * x, self.gamma.abs()[:, :, None, None], self.beta.abs())
        return x * torch.sqrt(sums) if self.inverse else x * torch.rsqrt(sums)


@maker
def compressor() -> Example:
    """A picture of 192x256 to 12x16x192 numbers, and back (Ballé et al. 2018).

    They are not rounded: what lies between two numbers would be one in one framework, and the other in another.
    """
    c, m = 128, 192
    down = [
        same(3, c, 5, 2),
        _Divided(c),
        same(c, c, 5, 2),
        _Divided(c),
        same(c, c, 5, 2),
        _Divided(c),
        same(c, m, 5, 2),
    ]

    def more(a: int, b: int) -> nn.Module:
        return nn.ConvTranspose2d(a, b, 5, 2, 2, output_padding=1)

    up = [more(m, c), _Divided(c, True), more(c, c), _Divided(c, True), more(c, c), _Divided(c, True), more(c, 3)]
    model = nn.Sequential(*down, *up)
    reset(model, ())
    return Positional(model), {"x": torch.randn(1, 3, 192, 256)}


class _Anomalies(nn.Module):
    """PatchCore: how far each patch's features are from the nearest of 4,096 good ones."""

    def __init__(self) -> None:
        super().__init__()
        self.body = timm_model("resnet18", features_only=True, out_indices=(2, 3)).body
        self.good = nn.Parameter(torch.rand(4096, 384))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        two, three = (functional.avg_pool2d(part, 3, 1, 1) for part in self.body(x))
        wide = functional.interpolate(three, scale_factor=2, mode="bilinear")
        patches = torch.cat([two, wide], 1).flatten(2).mT
        apart = patches.square().sum(-1, keepdim=True) + self.good.square().sum(-1) - 2 * patches @ self.good.T
        nearest = apart.clamp(min=0).sqrt().topk(3, -1, largest=False).values
        return nearest.mean(-1).view(-1, 1, two.shape[2], two.shape[3])


@maker
def patchcore() -> Example:
    """Faults of a part in an image of 224x224."""
    return Positional(_Anomalies()), {"x": torch.randn(1, 3, 224, 224)}


class _Molecule(nn.Module):
    """SchNet: filters made of the distances between atoms, three interactions, sums at each atom."""

    def __init__(self, c: int = 64, spread: int = 50) -> None:
        super().__init__()
        self.atoms = nn.Embedding(100, c)
        self.register_buffer("centres", torch.linspace(0, 5, spread))

        def soft() -> nn.Softplus:
            return nn.Softplus()

        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(spread, c), soft(), nn.Linear(c, c)) for _ in range(3))
        self.before = nn.ModuleList(_linear(c, c) for _ in range(3))
        self.after = nn.ModuleList(nn.Sequential(nn.Linear(c, c), soft(), nn.Linear(c, c)) for _ in range(3))
        self.energy = nn.Sequential(nn.Linear(c, c // 2), soft(), nn.Linear(c // 2, 1))

    def forward(
        self, atoms: torch.Tensor, places: torch.Tensor, start: torch.Tensor, end: torch.Tensor
    ) -> torch.Tensor:
        far = (places[start] - places[end]).square().sum(-1, keepdim=True).sqrt()
        near = torch.exp(-10 * (far - self.centres).square())
        fades = 0.5 * (torch.cos(far * (torch.pi / 5)) + 1) * (far < 5)
        x = self.atoms(atoms)
        for filters, before, after in zip(self.filters, self.before, self.after, strict=True):
            sent = before(x)[end] * filters(near) * fades
            x = x + after(torch.zeros_like(x).index_add(0, start, sent))
        return self.energy(x).sum(0)


@maker
def molecule() -> Example:
    """The energy of 64 atoms with 2,048 pairs of neighbours."""
    pairs = {name: torch.randint(64, (2048,)) for name in ("start", "end")}
    return _Molecule(), {"atoms": torch.randint(1, 10, (64,)), "places": torch.rand(64, 3) * 6, **pairs}


class _DeepFm(nn.Module):
    """DeepFM: 26 kinds of things with a table each, products of all pairs, and three layers."""

    def __init__(self, fields: int = 26, rows: int = 1000, c: int = 16, inner: int = 400) -> None:
        super().__init__()
        self.tables, self.ones = (nn.ModuleList(nn.Embedding(rows, n) for _ in range(fields)) for n in (c, 1))
        layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise((fields * c + 13, inner, inner, inner))]
        self.deep = nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(inner, 1))

    def forward(self, numbers: torch.Tensor, things: torch.Tensor) -> torch.Tensor:
        read = torch.stack([table(things[:, n]) for n, table in enumerate(self.tables)], 1)
        first = torch.cat([one(things[:, n]) for n, one in enumerate(self.ones)], 1).sum(1, keepdim=True)
        pairs = 0.5 * (read.sum(1).square() - read.square().sum(1)).sum(1, keepdim=True)
        return torch.sigmoid(first + pairs + self.deep(torch.cat([read.flatten(1), numbers], 1)))


@maker
def deepfm() -> Example:
    """Which of 256 advertisements are clicked at."""
    return _DeepFm(), {"numbers": torch.randn(256, 13), "things": torch.randint(1000, (256, 26))}


class _Speech(nn.Module):
    """Silero's detector of speech: a spectrum by convolution, four layers, one step of an LSTM."""

    def __init__(self, c: int = 128) -> None:
        super().__init__()
        self.spectrum, act = nn.Conv1d(1, 258, 256, 128, bias=False), nn.ReLU()
        self.layers = nn.Sequential(
            nn.Conv1d(129, c, 3, 1, 1), act, nn.Conv1d(c, 64, 3, 2, 1), act, nn.Conv1d(64, 64, 3, 2, 1), act,
            nn.Conv1d(64, c, 3, 1, 1), act,
        )  # fmt: skip
        self.step, self.said = nn.LSTMCell(c, c), nn.Conv1d(c, 1, 1)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
        real, imaginary = self.spectrum(functional.pad(x, (0, 64), mode="reflect")[:, None]).chunk(2, 1)
        y = self.layers((real.square() + imaginary.square()).sqrt())[..., 0]
        hidden, cell = self.step(y, (hidden, cell))
        return torch.sigmoid(self.said(torch.relu(hidden)[..., None])[..., 0]), hidden, cell


@maker
def speech_there() -> Example:
    """Whether somebody speaks in 36 ms."""
    state = {name: torch.randn(1, 128) for name in ("hidden", "cell")}
    return _Speech(), {"x": torch.randn(1, 576), **state}


class _Denoiser(nn.Module):
    """Demucs for speech, as it streams: kernels of eight, gates, an LSTM of what is between."""

    def __init__(self, c: int = 48, layers: int = 4) -> None:
        super().__init__()
        widths = [1, *(c << n for n in range(layers))]
        self.down = nn.ModuleList(
            nn.Sequential(nn.Conv1d(a, b, 8, 4), nn.ReLU(), nn.Conv1d(b, 2 * b, 1), nn.GLU(1))
            for a, b in itertools.pairwise(widths)
        )
        self.steps = nn.LSTM(widths[-1], widths[-1], 1, batch_first=True)
        self.up = nn.ModuleList(
            nn.Sequential(nn.Conv1d(b, 2 * b, 1), nn.GLU(1), nn.ConvTranspose1d(b, a, 8, 4))
            for a, b in itertools.pairwise(widths)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        x = self.steps(x.mT)[0].mT
        for n, up in reversed(list(enumerate(self.up))):
            x = up(x + kept[n])
            x = torch.relu(x) if n else x
        return x


@maker
def demucs() -> Example:
    """Half a second of noisy speech."""
    return Positional(_Denoiser()), {"x": torch.randn(1, 1, 8532)}


@maker
def pitch() -> Example:
    """CREPE, small: which of 360 pitches 16 windows of 1,024 samples have."""
    layers: list[nn.Module] = []
    widths, taps = (1, 128, 64, 64, 64, 128, 256), (512, 64, 64, 64, 64, 64)
    for n, ((a, b), k) in enumerate(zip(itertools.pairwise(widths), taps, strict=True)):
        stride = 1 if n else 4
        around = (254, 254) if n == 0 else (31, 32)
        layers += [
            nn.ConstantPad1d(around, 0.0),
            nn.Conv1d(a, b, k, stride),
            nn.ReLU(),
            nn.BatchNorm1d(b),
            nn.MaxPool1d(2),
        ]
    return Positional(nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 360), nn.Sigmoid())), {
        "x": torch.randn(16, 1, 1024)
    }


class _Move(nn.Module):
    """A residual block of a chess network, whose channels are scaled and shifted by what the board is like."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.one, self.two = same(c, c), same(c, c)
        self.board = nn.Sequential(nn.Linear(c, 32), nn.ReLU(), nn.Linear(32, 2 * c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(torch.relu(self.one(x)))
        scale, shift = self.board(y.mean((2, 3))).chunk(2, 1)
        return torch.relu(x + torch.sigmoid(scale)[..., None, None] * y + shift[..., None, None])


class _Chess(nn.Module):
    def __init__(self, c: int = 128, blocks: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(same(112, c), nn.ReLU(), *(_Move(c) for _ in range(blocks)))
        self.moves = nn.Sequential(same(c, c), nn.ReLU(), same(c, 80))
        self.wins = nn.Sequential(
            nn.Conv2d(c, 32, 1), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 128), nn.ReLU(), nn.Linear(128, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return torch.cat([self.moves(y).flatten(1), self.wins(y).softmax(-1)], 1)


@maker
def chess() -> Example:
    """Leela's network of eight blocks: sixteen boards."""
    model = _Chess()
    reset(model, ())
    return Positional(model), {"x": torch.randn(16, 112, 8, 8)}


@maker
def alarm() -> Example:
    """MLPerf Tiny's autoencoder: how unusual a machine sounds, 196 windows."""
    widths = (640, 128, 128, 128, 128, 8, 128, 128, 128, 128)
    layers = ((nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in itertools.pairwise(widths))
    return Positional(nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(128, 640))), {
        "x": torch.randn(196, 640)
    }


class _Bands(nn.Module):
    """A dual-path recurrent network for calls (DPCRN): bands by convolutions, a GRU over bands, one over frames."""

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        act = nn.PReLU()
        self.down = nn.ModuleList(
            nn.Sequential(nn.ConstantPad2d((2, 2, 1, 0), 0.0), nn.Conv2d(a, b, (2, 5), (1, 2)), nn.BatchNorm2d(b), act)
            for a, b in itertools.pairwise((2, 16, 32, c))
        )
        self.over, self.along = nn.GRU(c, c // 2, batch_first=True, bidirectional=True), nn.GRU(c, c, batch_first=True)
        self.one, self.two = nn.Linear(c, c), nn.Linear(c, c)
        self.norms = nn.ModuleList(nn.LayerNorm((33, c)) for _ in range(2))
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(2 * a, b, (1, 5), (1, 2), (0, 2)), nn.BatchNorm2d(b), act)
            for a, b in itertools.pairwise((c, 32, 16, 2))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given, kept = x, []
        for down in self.down:
            x = down(x)
            kept.append(x)
        n, c, frames, bands = x.shape
        x = x.permute(0, 2, 3, 1)
        y = self.one(self.over(x.reshape(-1, bands, c))[0]).view(x.shape)
        x = x + self.norms[0](y)
        y = self.two(self.along(x.transpose(1, 2).reshape(-1, frames, c))[0]).view(n, bands, frames, c).transpose(1, 2)
        x = (x + self.norms[1](y)).permute(0, 3, 1, 2)
        for up, beside in zip(self.up, reversed(kept), strict=True):
            x = up(torch.cat([x, beside], 1))
        return given * torch.tanh(x)


@maker
def calls() -> Example:
    """A call without its noise: 50 frames of 257 bands, real and imaginary."""
    return Positional(_Bands()), {"x": torch.randn(1, 2, 50, 257)}
