"""Networks of trades: translators, readers, weather, bodies, portraits, streets, shops, studios, laboratories.

Imported, they join the table of `architectures.py`, as those of `services.py` do, and nothing was made for them before
they were tuned. Those of transformers have the widths of the small models that people take, of fewer layers; where a
paper names the widths of the others they are its small ones.
"""

import itertools
import math
from typing import Any

import torch
import transformers as hf
from architectures import Example, FirstOutput, maker
from deployed import normed, same
from torch import nn
from torch.nn import functional
from wall_models import Positional


def _hub(kind: Any, config: Any, **inputs: torch.Tensor) -> Example:
    """A model of transformers with attention as products and a softmax."""
    config._attn_implementation = "eager"
    config.use_cache = False
    return FirstOutput(kind(config)), inputs


def _words(n: int, vocabulary: int = 4096, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, n))


@maker
def mamba() -> Example:
    """Four layers of Mamba-130M, 24 tokens: the scan over states is written out step by step."""
    config = hf.MambaConfig(vocab_size=4096, hidden_size=768, num_hidden_layers=4)
    return _hub(hf.MambaModel, config, input_ids=_words(24))


@maker
def mamba2() -> Example:
    """Four layers of a Mamba-2, 128 tokens in chunks of 64."""
    config = hf.Mamba2Config(
        vocab_size=4096, hidden_size=512, num_hidden_layers=4, num_heads=16, head_dim=64, n_groups=1, state_size=64,
        chunk_size=64,
    )  # fmt: skip
    return _hub(hf.Mamba2Model, config, input_ids=_words(128))


@maker
def modernbert() -> Example:
    """Six layers of ModernBERT-base, of which four see 64 words to each side; of 256 a quarter is padding."""
    config = hf.ModernBertConfig(vocab_size=4096, num_hidden_layers=6, pad_token_id=0, cls_token_id=1, sep_token_id=2)
    there = (torch.arange(256) < 192).long()[None]
    return _hub(hf.ModernBertModel, config, input_ids=_words(256), attention_mask=there)


@maker
def xlnet() -> Example:
    """Four layers of XLNet-base, which shifts a table of relative positions."""
    config = hf.XLNetConfig(vocab_size=4096, d_model=768, n_layer=4, n_head=12, d_inner=3072)
    return _hub(hf.XLNetModel, config, input_ids=_words(128))


@maker
def marian() -> Example:
    """A translator: three layers that read 64 words, three that have written 32."""
    config = hf.MarianConfig(
        vocab_size=4096, d_model=512, encoder_layers=3, decoder_layers=3, encoder_attention_heads=8,
        decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048, pad_token_id=0,
        decoder_start_token_id=0, max_position_embeddings=128,
    )  # fmt: skip
    return _hub(hf.MarianMTModel, config, input_ids=_words(64), decoder_input_ids=_words(32))


@maker
def gemma2() -> Example:
    """Four layers of a small Gemma 2, 96 tokens: scores through a tanh, every other layer sees 32 tokens back."""
    config = hf.Gemma2Config(
        vocab_size=4096, hidden_size=768, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=128, sliding_window=32, query_pre_attn_scalar=128,
    )  # fmt: skip
    return _hub(hf.Gemma2ForCausalLM, config, input_ids=_words(96))


@maker
def rtdetr() -> Example:
    """RT-DETR of ResNet-18 at 320x320: the hundred best places of three maps are refined in three layers."""
    config = hf.RTDetrConfig(
        d_model=256, num_queries=100, decoder_layers=3, anchor_image_size=[320, 320],
        encoder_in_channels=[128, 256, 512],
        backbone_config=hf.RTDetrResNetConfig(
            embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
            out_features=["stage2", "stage3", "stage4"],
        ),
    )  # fmt: skip
    return _hub(hf.RTDetrForObjectDetection, config, pixel_values=torch.randn(1, 3, 320, 320))


@maker
def wavlm() -> Example:
    """Four layers of WavLM-base, a second of speech: the table of relative positions has a gate for each frame."""
    config = hf.WavLMConfig(num_hidden_layers=4)
    return _hub(hf.WavLMModel, config, input_values=torch.randn(1, 16000))


@maker
def timesformer() -> Example:
    """Four layers of TimeSformer, four frames: attention along time, then along each frame."""
    config = hf.TimesformerConfig(image_size=112, num_frames=4, num_hidden_layers=4, hidden_size=384,
                                  num_attention_heads=6, intermediate_size=1536)  # fmt: skip
    return _hub(hf.TimesformerModel, config, pixel_values=torch.randn(1, 4, 3, 112, 112))


@maker
def swin2sr() -> Example:
    """A lightweight Swin2SR: 64x64 becomes 128x128."""
    config = hf.Swin2SRConfig(image_size=64, embed_dim=60, depths=[2, 2, 2], num_heads=[6, 6, 6], upscale=2,
                              mlp_ratio=2.0, upsampler="pixelshuffledirect")  # fmt: skip
    return _hub(hf.Swin2SRForImageSuperResolution, config, pixel_values=torch.rand(1, 3, 64, 64))


@maker
def esm() -> Example:
    """ESM-2 of 8 million weights, a protein of 160 residues."""
    config = hf.EsmConfig(
        vocab_size=33, hidden_size=320, num_hidden_layers=6, num_attention_heads=20, intermediate_size=1280,
        position_embedding_type="rotary", pad_token_id=1, mask_token_id=32,
    )  # fmt: skip
    there = torch.ones(1, 160, dtype=torch.long)
    return _hub(hf.EsmModel, config, input_ids=_words(160, 24), attention_mask=there)


class _Spectral(nn.Module):
    """A Fourier layer: few waves of each channel are mixed with a matrix each, by real and imaginary parts."""

    def __init__(self, c: int, waves: int, size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, waves * waves, c, c) / c)
        angle = 2 * math.pi * torch.outer(torch.arange(size), torch.arange(waves)) / size
        self.register_buffer("cosines", angle.cos())
        self.register_buffer("sines", angle.sin())
        self.waves = waves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c = x.shape[:2]
        along = (x @ self.cosines, -(x @ self.sines))  # [n, c, h, waves]
        real = along[0].mT @ self.cosines + along[1].mT @ self.sines
        imaginary = along[1].mT @ self.cosines - along[0].mT @ self.sines
        real, imaginary = (part.flatten(2).permute(2, 0, 1) for part in (real, imaginary))  # [waves^2, n, c]
        a = real @ self.weights[0] - imaginary @ self.weights[1]
        b = real @ self.weights[1] + imaginary @ self.weights[0]
        a, b = (part.permute(1, 2, 0).reshape(n, c, self.waves, self.waves) for part in (a, b))
        real, imaginary = a @ self.cosines.T - b @ self.sines.T, a @ self.sines.T + b @ self.cosines.T
        return (real.mT @ self.cosines.T - imaginary.mT @ self.sines.T) / x.shape[-1] ** 2 * 2


class _Operator(nn.Module):
    def __init__(self, c: int = 32, size: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, c, 1), nn.Sequential(nn.Conv2d(c, 128, 1), nn.GELU(), nn.Conv2d(128, 1, 1))
        self.spectral = nn.ModuleList(_Spectral(c, 12, size) for _ in range(layers))
        self.direct = nn.ModuleList(nn.Conv2d(c, c, 1) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for spectral, direct in zip(self.spectral, self.direct, strict=True):
            y = functional.gelu(spectral(y) + direct(y))
        return self.last(y)


@maker
def fluid() -> Example:
    """A Fourier neural operator of four layers on a field of 64x64."""
    return Positional(_Operator()), {"x": torch.randn(1, 3, 64, 64)}


def _mlp(c_in: int, c: int, c_out: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(c_in, c), nn.SiLU(), nn.Linear(c, c_out or c), nn.LayerNorm(c_out or c))


class _Weather(nn.Module):
    """GraphCast's steps on a mesh: edges from both of their ends, nodes from the sum of their edges."""

    def __init__(self, nodes: int = 642, c: int = 128, steps: int = 4) -> None:
        super().__init__()
        ends = torch.stack([torch.arange(nodes).repeat_interleave(6), torch.randint(nodes, (6 * nodes,))])
        self.register_buffer("ends", ends)
        self.node, self.edge = _mlp(78, c), nn.Parameter(torch.randn(6 * nodes, c) * 0.3)
        self.edges = nn.ModuleList(_mlp(3 * c, c) for _ in range(steps))
        self.nodes = nn.ModuleList(_mlp(2 * c, c) for _ in range(steps))
        self.out = nn.Linear(c, 78)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        v, e = self.node(x), self.edge
        for edges, nodes in zip(self.edges, self.nodes, strict=True):
            e = e + edges(torch.cat([e, v[self.ends[0]], v[self.ends[1]]], -1))
            summed = torch.zeros_like(v).index_add(0, self.ends[1], e)
            v = v + nodes(torch.cat([v, summed], -1))
        return x + self.out(v)


@maker
def weather() -> Example:
    """Four steps on the 642 nodes of an icosahedron's mesh."""
    return Positional(_Weather()), {"x": torch.randn(642, 78)}


class _Skeleton(nn.Module):
    """ST-GCN's block: joints along three kinds of bones, then nine frames."""

    def __init__(self, c_in: int, c: int, stride: int) -> None:
        super().__init__()
        self.bones = nn.Parameter(torch.rand(3, 25, 25) / 8)
        self.into, self.norm = nn.Conv2d(c_in, 3 * c, 1), nn.BatchNorm2d(c)
        self.time = nn.Sequential(nn.Conv2d(c, c, (9, 1), (stride, 1), (4, 0)), nn.BatchNorm2d(c))
        straight = (c_in, stride) == (c, 1)
        self.beside = (
            nn.Identity() if straight else nn.Sequential(nn.Conv2d(c_in, c, 1, (stride, 1)), nn.BatchNorm2d(c))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, _, t, v = x.shape
        y = torch.einsum("nkctv,kvw->nctw", self.into(x).view(n, 3, -1, t, v), self.bones)
        return functional.relu(self.time(functional.relu(self.norm(y))) + self.beside(x))


class _Skeletons(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [3, 64, 64, 64, 128, 128, 256, 256]
        self.body = nn.Sequential(*(_Skeleton(a, b, 1 + (b > a > 3)) for a, b in itertools.pairwise(widths)))
        self.classes = nn.Linear(256, 60)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.body(x).mean((2, 3)))


@maker
def skeletons() -> Example:
    """What two people of 25 joints do in 64 frames."""
    return Positional(_Skeletons()), {"x": torch.randn(2, 3, 64, 25)}


class _Body(nn.Module):
    """SMPL: shapes and poses move 6,890 points, then 24 joints turn them, each a chain of matrices from its parent."""

    _PARENTS = (0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 12, 13, 14, 16, 17, 18, 19, 20, 21)

    def __init__(self, points: int = 6890) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(2048 + 157, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                                      nn.Linear(1024, 157))  # fmt: skip
        self.mean, self.rest = nn.Parameter(torch.randn(157)), nn.Parameter(torch.randn(points, 3))
        self.shapes = nn.Parameter(torch.randn(10, points * 3) * 0.03)
        self.poses = nn.Parameter(torch.randn(207, points * 3) * 0.01)
        self.joints = nn.Parameter(torch.rand(24, points) * 2 / points)
        self.skin = nn.Parameter((torch.randn(points, 24) * 2).softmax(-1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        state = self.mean.expand(n, -1)
        for _ in range(3):  # HMR looks at its own guess
            state = state + self.features(torch.cat([x, state], 1))
        a, b = (functional.normalize(part, dim=-1) for part in state[:, :144].view(n, 24, 2, 3).unbind(2))
        b = functional.normalize(b - (a * b).sum(-1, keepdim=True) * a, dim=-1)
        turns = torch.stack([a, b, torch.linalg.cross(a, b)], -1)  # [n, 24, 3, 3]
        shaped = self.rest + (state[:, 144:154] @ self.shapes).view(n, -1, 3)
        joints = self.joints @ shaped
        moved = shaped + ((turns[:, 1:] - torch.eye(3)).reshape(n, -1) @ self.poses).view(n, -1, 3)
        whole, places = [turns[:, 0]], [joints[:, 0, :, None]]
        for k, parent in enumerate(self._PARENTS[1:], 1):
            step = (joints[:, k] - joints[:, parent])[..., None]
            places.append(whole[parent] @ step + places[parent])
            whole.append(whole[parent] @ turns[:, k])
        turn, place = torch.stack(whole, 1), torch.stack(places, 1)[..., 0]
        shift = place - (turn @ joints[..., None])[..., 0]
        each = (self.skin @ turn.reshape(n, 24, 9)).view(n, -1, 3, 3)
        return (each @ moved[..., None])[..., 0] + self.skin @ shift


@maker
def body() -> Example:
    """Two people's surfaces from what a network saw of them."""
    return Positional(_Body()), {"x": torch.randn(2, 2048)}


class _Portrait(nn.Module):
    """A face's volume of features is moved along key points, seen from the front and drawn (LivePortrait, of 64x64)."""

    def __init__(self, c: int = 32, depth: int = 8, points: int = 15) -> None:
        super().__init__()
        self.depth, self.points = depth, points
        self.first = nn.Sequential(normed(3, 32), normed(32, 64, stride=2), nn.Conv2d(64, c * depth, 1))
        self.flow = nn.Sequential(nn.Conv3d((points + 1) * 5, 32, 3, 1, 1), nn.BatchNorm3d(32), nn.ReLU(),
                                  nn.Conv3d(32, 32, 3, 1, 1), nn.BatchNorm3d(32), nn.ReLU())  # fmt: skip
        self.mask, self.less = nn.Conv3d(32, points + 1, 3, 1, 1), nn.Conv3d(c, 4, 1)
        self.draw = nn.Sequential(normed(c * depth, 128), normed(128, 128), nn.Conv2d(128, 12, 3, 1, 1))
        axes = (torch.linspace(-1, 1, 32), torch.linspace(-1, 1, 32), torch.linspace(-1, 1, depth))
        self.register_buffer("grid", torch.stack(torch.meshgrid(axes[2], axes[1], axes[0], indexing="ij")[::-1], -1))

    def forward(self, x: torch.Tensor, source: torch.Tensor, driven: torch.Tensor) -> torch.Tensor:
        n = x.shape[0]
        volume = self.first(x).view(n, -1, self.depth, 32, 32)
        heat = [torch.exp(-((self.grid - at[:, :, None, None, None]) ** 2).sum(-1) / 0.02) for at in (driven, source)]
        heat = functional.pad(heat[0] - heat[1], (0, 0, 0, 0, 0, 0, 1, 0))[:, :, None]  # none of them: the background
        moves = self.grid + (source - driven)[:, :, None, None, None]
        moves = torch.cat([self.grid.expand(n, 1, -1, -1, -1, -1), moves], 1)
        few = self.less(volume)
        wide = few[:, None].expand(-1, self.points + 1, -1, -1, -1, -1).flatten(0, 1)
        moved = functional.grid_sample(wide, moves.flatten(0, 1), align_corners=False)
        seen = torch.cat([heat, moved.view(n, self.points + 1, 4, self.depth, 32, 32)], 2).flatten(1, 2)
        mask = self.mask(self.flow(seen)).softmax(1)
        where = (mask[..., None] * moves).sum(1)
        out = functional.grid_sample(volume, where, align_corners=False)
        return functional.pixel_shuffle(self.draw(out.flatten(1, 2)), 2).sigmoid()


@maker
def portrait() -> Example:
    """One frame of a face of 64x64 that is driven by fifteen points."""
    points = {"source": torch.rand(1, 15, 3) * 1.6 - 0.8, "driven": torch.rand(1, 15, 3) * 1.6 - 0.8}
    return _Portrait(), {"x": torch.rand(1, 3, 64, 64)} | points


class _Recurrent(nn.Module):
    """Robust video matting's ConvGRU of half of the channels."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.gates, self.new = same(c, c), same(c, c // 2)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = x.chunk(2, 1)
        reset, update = torch.sigmoid(self.gates(torch.cat([b, state], 1))).chunk(2, 1)
        new = torch.tanh(self.new(torch.cat([b, reset * state], 1)))
        state = (1 - update) * state + update * new
        return torch.cat([a, state], 1), state


class _Matting(nn.Module):
    """A person before any background: a recurrent decoder at a quarter of the size, refined by a guided filter."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            (normed(3, 16, stride=2), normed(16, 24, stride=2), normed(24, 40, stride=2), normed(40, 128, stride=2))
        )
        self.recur = nn.ModuleList(_Recurrent(c) for c in (128, 80, 40, 32))
        self.up = nn.ModuleList((normed(128 + 40 + 3, 80), normed(80 + 24 + 3, 40), normed(40 + 16 + 3, 32)))
        self.last, self.out = normed(32 + 3, 16), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor, **states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        small = functional.interpolate(x, scale_factor=0.25, mode="bilinear")
        pictures = [small] + [functional.avg_pool2d(small, 2**n) for n in (1, 2, 3)]
        seen, y = [], small
        for down in self.down:
            seen.append(y := down(y))
        y, new = self.recur[0](y, states["state_0"])
        kept = [new]
        for n, up in enumerate(self.up, 1):
            y = functional.interpolate(y, scale_factor=2, mode="bilinear")
            y, new = self.recur[n](up(torch.cat([y, seen[3 - n], pictures[4 - n]], 1)), states[f"state_{n}"])
            kept.append(new)
        y = self.last(torch.cat([functional.interpolate(y, scale_factor=2, mode="bilinear"), small], 1))
        return self._guided(x, small, self.out(y)), *kept

    @staticmethod
    def _guided(x: torch.Tensor, small: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        grey, guide = x.mean(1, keepdim=True), small.mean(1, keepdim=True)
        mean_x, mean_y = functional.avg_pool2d(guide, 3, 1, 1), functional.avg_pool2d(y, 3, 1, 1)
        together = functional.avg_pool2d(guide * y, 3, 1, 1) - mean_x * mean_y
        a = together / (functional.avg_pool2d(guide * guide, 3, 1, 1) - mean_x * mean_x + 1e-2)
        b = mean_y - a * mean_x
        a, b = (functional.interpolate(part, scale_factor=4, mode="bilinear") for part in (a, b))
        return (a * grey + b).clamp(0, 1)


@maker
def matting() -> Example:
    """One frame of 512x256, with what is remembered of the frames before."""
    states = {f"state_{n}": torch.randn(1, c // 2, 4 << n, 8 << n) for n, c in enumerate((128, 80, 40, 32))}
    return _Matting(), {"x": torch.rand(1, 3, 256, 512)} | states


class _Glue(nn.Module):
    """SuperGlue: points of two pictures look at their own and at the others', then twenty turns of Sinkhorn's."""

    def __init__(self, c: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.heads, self.bin = heads, nn.Parameter(torch.ones(1, 1, 1))
        self.place = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, c))
        self.query, self.both, self.out = (nn.ModuleList(nn.Linear(c, k * c) for _ in range(layers)) for k in (1, 2, 1))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * c, 2 * c), nn.LayerNorm(2 * c), nn.ReLU(), nn.Linear(2 * c, c))
            for _ in range(layers)
        )
        self.last = nn.Linear(c, c)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = x + self.place(places)  # [2 pictures, points, c]
        for n, inner in enumerate(self.inner):
            other = x.flip(0) if n % 2 else x
            query = self.query[n](x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            key, value = self.both[n](other).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value
            x = x + inner(torch.cat([x, self.out[n](seen.transpose(1, 2).flatten(2))], -1))
        a, b = self.last(x)
        points = a.shape[0]
        scores = functional.pad(a @ b.mT * a.shape[-1] ** -0.5, (0, 1, 0, 1))
        edge = torch.arange(points + 1) == points
        scores = torch.where(edge[:, None] | edge, self.bin[0], scores)
        mass = torch.full((points + 1,), -math.log(2 * points))
        mass = torch.where(edge, mass + math.log(points), mass)
        u, v = torch.zeros(points + 1), torch.zeros(points + 1)
        for _ in range(20):
            u = mass - torch.logsumexp(scores + v, 1)
            v = mass - torch.logsumexp(scores + u[:, None], 0)
        return scores + u[:, None] + v + math.log(2 * points)


@maker
def matcher() -> Example:
    """Two pictures of 256 points."""
    return _Glue(), {"x": torch.randn(2, 256, 128), "places": torch.rand(2, 256, 3)}


class _TwoPaths(nn.Module):
    """A dual-path network: LSTMs within pieces of a signal, and across them."""

    def __init__(self, c: int = 64, hidden: int = 64, layers: int = 2, piece: int = 50) -> None:
        super().__init__()
        self.piece, self.first, self.last = piece, nn.Conv1d(1, c, 16, 8, 4), nn.ConvTranspose1d(c, 1, 16, 8, 4)
        self.within = nn.ModuleList(nn.LSTM(c, hidden, bidirectional=True, batch_first=True) for _ in range(layers))
        self.across = nn.ModuleList(nn.LSTM(c, hidden, bidirectional=True, batch_first=True) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(2 * hidden, c) for _ in range(2 * layers))
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(2 * layers))
        self.masks = nn.Conv1d(c, 2 * c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        signal = functional.relu(self.first(x))
        y = signal[0].mT.unflatten(0, (-1, self.piece))  # [pieces, piece, c]
        for n, (within, across) in enumerate(zip(self.within, self.across, strict=True)):
            y = y + self.norms[2 * n](self.out[2 * n](within(y)[0]))
            z = y.transpose(0, 1)
            y = (z + self.norms[2 * n + 1](self.out[2 * n + 1](across(z)[0]))).transpose(0, 1)
        masks = self.masks(y.flatten(0, 1).mT[None]).unflatten(1, (2, -1)).sigmoid()[0]
        return self.last(masks * signal)


@maker
def speakers() -> Example:
    """Two speakers apart, a second at 8 kHz."""
    return Positional(_TwoPaths()), {"x": torch.randn(1, 1, 8000)}


class _Complex(nn.Module):
    """DCCRN's convolution of complex numbers, as two of real ones, with the norm and the slope of each part."""

    def __init__(self, c_in: int, c: int, up: bool = False) -> None:
        super().__init__()
        kind, extra = (nn.ConvTranspose2d, {"output_padding": (1, 0)}) if up else (nn.Conv2d, {})
        self.real, self.imaginary = (kind(c_in, c, (5, 3), (2, 1), (2, 1), **extra) for _ in range(2))
        self.norm, self.slope = nn.BatchNorm2d(2 * c), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, 1)
        y = torch.cat([self.real(a) - self.imaginary(b), self.real(b) + self.imaginary(a)], 1)
        return self.slope(self.norm(y))


class _Clean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [1, 16, 32, 64, 64]
        self.down = nn.ModuleList(_Complex(a, b) for a, b in itertools.pairwise(widths))
        self.time, self.back = nn.LSTM(16 * 128, 128, batch_first=True), nn.Linear(128, 16 * 128)
        self.up = nn.ModuleList(_Complex(2 * b, a, up=True) for a, b in itertools.pairwise(widths[1:]))
        self.last = nn.ConvTranspose2d(4 * 16, 2, (5, 3), (2, 1), (2, 1), (1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, seen = x, []
        for down in self.down:
            seen.append(y := down(y))
        along = self.back(self.time(y.flatten(1, 2).mT)[0]).mT
        y = along.view_as(y)
        for up, beside in zip(reversed(self.up), reversed(seen), strict=False):
            y = up(self._beside(y, beside))
        a, b = self.last(self._beside(y, seen[0])).chunk(2, 1)
        size = torch.tanh(torch.sqrt(a * a + b * b + 1e-8))
        real, imaginary = x.chunk(2, 1)
        angle = torch.sqrt(a * a + b * b + 1e-8)
        return torch.cat([real * a - imaginary * b, real * b + imaginary * a], 1) * size / angle

    @staticmethod
    def _beside(y: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        parts = zip(y.chunk(2, 1), other.chunk(2, 1), strict=True)
        return torch.cat([part for pair in parts for part in pair], 1)


@maker
def denoiser() -> Example:
    """A hundred frames of 256 complex bins without their noise."""
    return Positional(_Clean()), {"x": torch.randn(1, 2, 256, 100)}


class _Snake(nn.Module):
    """BigVGAN's x + sin^2(ax) / a at twice the rate, between two filters of twelve taps, so that no wave is folded."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.rand(c, 1) + 0.5), c
        taps = torch.sinc((torch.arange(12) - 5.5) / 2) * torch.kaiser_window(12, periodic=False, beta=4.66)
        self.register_buffer("taps", (taps / taps.sum()).expand(c, 1, 12).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.pad(x, (5, 5), mode="replicate")
        y = 2 * functional.conv_transpose1d(y, self.taps, stride=2, groups=self.c)[..., 15:-15]
        y = y + torch.sin(y * self.a) ** 2 / (self.a + 1e-9)
        return functional.conv1d(functional.pad(y, (5, 6), mode="replicate"), self.taps, stride=2, groups=self.c)


class _Voice(nn.Module):
    def __init__(self, c: int = 128) -> None:
        super().__init__()
        self.first, self.ups, self.blocks = nn.Conv1d(80, c, 7, padding=3), nn.ModuleList(), nn.ModuleList()
        for n, rate in enumerate((4, 4, 2)):
            half = c >> n + 1
            self.ups.append(nn.ConvTranspose1d(2 * half, half, 2 * rate, rate, rate // 2))
            self.blocks.append(
                nn.ModuleList(
                    nn.Sequential(_Snake(half), nn.Conv1d(half, half, 3, padding=d, dilation=d),
                                  _Snake(half), nn.Conv1d(half, half, 3, padding=1))
                    for d in (1, 3)
                )
            )  # fmt: skip
        self.last = nn.Sequential(_Snake(c >> 3), nn.Conv1d(c >> 3, 1, 7, padding=3), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        for up, blocks in zip(self.ups, self.blocks, strict=True):
            y = up(y)
            for block in blocks:
                y = y + block(y)
        return self.last(y)


@maker
def voice() -> Example:
    """Sixty-four frames of a small BigVGAN."""
    return Positional(_Voice()), {"x": torch.randn(1, 80, 64)}


class _Mixed(nn.Module):
    """SVTR's block: tokens of a line of text see all others, or those of a window of 7x11."""

    def __init__(self, c: int, heads: int, size: tuple[int, int], local: bool) -> None:
        super().__init__()
        self.heads, self.one, self.two = heads, nn.LayerNorm(c), nn.LayerNorm(c)
        self.into, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.inner = nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(), nn.Linear(4 * c, c))
        y, x = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
        far = ((y.flatten()[:, None] - y.flatten()).abs() > 3) | ((x.flatten()[:, None] - x.flatten()).abs() > 5)
        self.register_buffer("mask", torch.where(far & torch.tensor(local), -torch.inf, 0.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(self.one(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = (query @ key.mT * query.shape[-1] ** -0.5 + self.mask).softmax(-1) @ value
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.inner(self.two(x))


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(normed(3, 32, stride=2), normed(32, 64, stride=2))
        sizes, widths, heads = ((8, 32), (4, 32), (2, 32)), (64, 128, 256), (2, 4, 8)
        self.stages = nn.ModuleList(
            nn.Sequential(*(_Mixed(c, h, size, local=n < 2 - k) for n in range(3)))
            for k, (size, c, h) in enumerate(zip(sizes, widths, heads, strict=True))
        )
        self.fewer = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, (2, 1), 1) for c in widths[:2])
        self.norms, self.sizes = nn.ModuleList(nn.LayerNorm(2 * c) for c in widths[:2]), sizes
        self.letters = nn.Sequential(nn.Linear(256, 192), nn.Hardswish(), nn.Linear(192, 97))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).flatten(2).mT
        for n, stage in enumerate(self.stages):
            y = stage(y)
            if n < 2:
                y = self.norms[n](self.fewer[n](y.mT.unflatten(2, self.sizes[n])).flatten(2).mT)
        return self.letters(y.unflatten(1, self.sizes[2]).mean(1)).softmax(-1)


@maker
def reader() -> Example:
    """A word of 32x128: letters along it."""
    return Positional(_Reader()), {"x": torch.randn(1, 3, 32, 128)}


class _Tags(nn.Module):
    """Names in a text: letters of each word, an LSTM in both directions, and Viterbi's best path through the tags."""

    def __init__(self, tags: int = 17, c: int = 100, hidden: int = 128) -> None:
        super().__init__()
        self.words, self.letters = nn.Embedding(4096, c), nn.Embedding(96, 25)
        self.spelled, self.along = nn.Conv1d(25, 50, 3, padding=1), nn.LSTM(c + 50, hidden, bidirectional=True)
        self.tags, self.steps = nn.Linear(2 * hidden, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, words: torch.Tensor, letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        spelled = self.spelled(self.letters(letters).mT).amax(-1)
        found = self.tags(self.along(torch.cat([self.words(words), spelled], -1)[:, None])[0][:, 0])
        score = found[0]
        back: list[torch.Tensor] = []
        for n in range(1, found.shape[0]):
            best = (score[:, None] + self.steps).max(0)
            score, back = best.values + found[n], [*back, best.indices]
        at = score.argmax(0, keepdim=True)
        path = [at]
        for pointers in reversed(back):
            path.append(at := pointers.gather(0, at))
        return score, torch.cat(path[::-1]).float()


@maker
def names() -> Example:
    """A sentence of 24 words of up to 16 letters."""
    return _Tags(), {"words": torch.randint(4096, (24,)), "letters": torch.randint(96, (24, 16))}


class _Parser(nn.Module):
    """A biaffine parser: for each two words how well one is the other's head, and by which of 40 relations."""

    def __init__(self, c: int = 256, arcs: int = 256, labels: int = 64) -> None:
        super().__init__()
        self.words, self.along = nn.Embedding(4096, c), nn.LSTM(c, c, 2, bidirectional=True)
        self.arcs = nn.ModuleList(nn.Sequential(nn.Linear(2 * c, arcs), nn.LeakyReLU(0.1)) for _ in range(2))
        self.labels = nn.ModuleList(nn.Sequential(nn.Linear(2 * c, labels), nn.LeakyReLU(0.1)) for _ in range(2))
        self.arc = nn.Parameter(torch.randn(arcs + 1, arcs) / arcs)
        self.label = nn.Parameter(torch.randn(40, labels + 1, labels + 1) / labels)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.along(self.words(x)[:, None])[0][:, 0]
        one = torch.ones(y.shape[0], 1)
        a, b = (part(y) for part in self.arcs)
        c, d = (torch.cat([part(y), one], -1) for part in self.labels)
        arcs = torch.cat([a, one], -1) @ self.arc @ b.mT
        return arcs, torch.einsum("xi,oij,yj->xyo", c, self.label, d)


@maker
def parser() -> Example:
    """A sentence of 40 words."""
    return _Parser(), {"x": torch.randint(4096, (40,))}


def _bert(layers: int, c: int) -> nn.Module:
    config = hf.BertConfig(hidden_size=c, num_hidden_layers=layers, num_attention_heads=c // 32,
                           intermediate_size=4 * c, vocab_size=4096)  # fmt: skip
    config._attn_implementation = "eager"
    return hf.BertForMaskedLM(config)


class _Late(nn.Module):
    """ColBERT: each word of a question takes its best word of each passage."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.less = FirstOutput(_bert(4, 256).bert), nn.Linear(256, 128, bias=False)

    def forward(self, input_ids: torch.Tensor, passages: torch.Tensor) -> torch.Tensor:
        question = functional.normalize(self.less(self.body(input_ids=input_ids)), dim=-1)
        return torch.einsum("qc,nwc->nqw", question[0], passages).amax(-1).sum(-1)


@maker
def passages() -> Example:
    """A question of 32 words, and 200 passages of 100."""
    found = functional.normalize(torch.randn(200, 100, 128), dim=-1)
    return _Late(), {"input_ids": _words(32), "passages": found}


class _Sparse(nn.Module):
    """SPLADE: how much a text is about each word of the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.body = FirstOutput(_bert(4, 256))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits = self.body(input_ids=input_ids, attention_mask=attention_mask)
        return (torch.log1p(functional.relu(logits)) * attention_mask[..., None]).amax(1)


@maker
def about() -> Example:
    """A text of 96 words, of which 80 are there."""
    return _Sparse(), {"input_ids": _words(96), "attention_mask": (torch.arange(96) < 80).long()[None]}


class _Columns(nn.Module):
    """FT-Transformer: each column of a table is a token, 24 of numbers and 8 of categories."""

    def __init__(self, c: int = 128, heads: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.weights, self.biases = (nn.Parameter(torch.randn(24, c)) for _ in range(2))
        self.kinds, self.cls = nn.Embedding(8 * 50, c), nn.Parameter(torch.randn(1, 1, c))
        layer = nn.TransformerEncoderLayer(c, heads, 4 * c // 3, 0.0, "relu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(c), nn.ReLU(), nn.Linear(c, 1))

    def forward(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        tokens = numbers[..., None] * self.weights + self.biases
        tokens = torch.cat([self.cls.expand(numbers.shape[0], -1, -1), tokens, self.kinds(kinds)], 1)
        return self.out(self.body(tokens)[:, 0])


@maker
def table() -> Example:
    """Sixty-four customers."""
    kinds = torch.randint(50, (64, 8)) + torch.arange(8) * 50
    return _Columns(), {"numbers": torch.randn(64, 24), "kinds": kinds}


class _Offers(nn.Module):
    """DCN v2's crosses, then experts that two questions weigh each in its own way (MMoE)."""

    def __init__(self, fields: int = 26, c: int = 16, experts: int = 4) -> None:
        super().__init__()
        width = 13 + fields * c
        self.tables, self.offsets = nn.Embedding(fields * 1000, c), torch.arange(fields) * 1000
        self.crosses = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64, bias=False), nn.Linear(64, width)) for _ in range(3)
        )
        self.into, self.out = nn.Linear(width, experts * 128), nn.Parameter(torch.randn(experts, 128, 64) / 11)
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid()) for _ in range(2)
        )

    def forward(self, numbers: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x = torch.cat([torch.log1p(numbers), self.tables(kinds + self.offsets).flatten(1)], 1)
        y = x
        for cross in self.crosses:
            y = x * cross(y) + y
        each = functional.relu(self.into(y)).unflatten(-1, (self.out.shape[0], -1)).transpose(0, 1)
        experts = functional.relu(each @ self.out).transpose(0, 1)  # [n, experts, 64]
        towers = zip(self.gates, self.towers, strict=True)
        return torch.cat([tower((gate(y).softmax(-1)[:, None] @ experts)[:, 0]) for gate, tower in towers], 1)


@maker
def offers() -> Example:
    """Whether 256 people look at an offer, and whether they buy."""
    return _Offers(), {"numbers": torch.rand(256, 13) * 50, "kinds": torch.randint(1000, (256, 26))}


class _Session(nn.Module):
    """SASRec: what comes after fifty things, among all twenty thousand."""

    def __init__(self, things: int = 20000, c: int = 64, length: int = 50) -> None:
        super().__init__()
        self.things, self.places = nn.Embedding(things, c), nn.Parameter(torch.randn(length, c) * 0.1)
        layer = nn.TransformerEncoderLayer(c, 2, 4 * c, 0.0, "gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", torch.full((length, length), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(self.things(x) * 8 + self.places, self.mask, is_causal=True)
        best = (y[:, -1] @ self.things.weight.mT).topk(20)
        return best.values, best.indices / self.things.num_embeddings


@maker
def session() -> Example:
    """Eight people."""
    return _Session(), {"x": torch.randint(20000, (8, 50))}


class _Gated(nn.Module):
    """A gated residual network, with or without a context."""

    def __init__(self, c_in: int, c: int, c_out: int | None = None) -> None:
        super().__init__()
        c_out = c_out or c
        self.one, self.two, self.gate = nn.Linear(c_in, c), nn.Linear(c, c), nn.Linear(c, 2 * c_out)
        self.beside = nn.Linear(c_in, c_out) if c_in != c_out else nn.Identity()
        self.context, self.norm = nn.Linear(c, c, bias=False), nn.LayerNorm(c_out)

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        y = self.one(x) if context is None else self.one(x) + self.context(context)
        return self.norm(self.beside(x) + functional.glu(self.gate(self.two(functional.elu(y)))))


class _Forecast(nn.Module):
    """A temporal fusion transformer: chosen variables, an LSTM of the past and of the future, attention over both."""

    def __init__(self, c: int = 64, variables: int = 8, past: int = 96) -> None:
        super().__init__()
        self.past, self.fixed = past, nn.Linear(12, c)
        self.weights, self.biases = (nn.Parameter(torch.randn(variables, c)) for _ in range(2))
        self.choose = _Gated(variables * c, c, variables)
        self.each = nn.ModuleList(_Gated(c, c) for _ in range(variables))
        self.read, self.write = nn.LSTM(c, c, batch_first=True), nn.LSTM(c, c, batch_first=True)
        self.gate, self.norm, self.enriched = nn.Linear(c, 2 * c), nn.LayerNorm(c), _Gated(c, c)
        self.attention, self.gate_seen = nn.MultiheadAttention(c, 4, batch_first=True), nn.Linear(c, 2 * c)
        self.norm_seen, self.inner, self.out = nn.LayerNorm(c), _Gated(c, c), nn.Linear(c, 7)

    def forward(self, x: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        context = self.fixed(fixed)[:, None]
        tokens = x[..., None] * self.weights + self.biases  # [n, time, variables, c]
        chosen = self.choose(tokens.flatten(2), context).softmax(-1)
        each = torch.stack([one(part) for one, part in zip(self.each, tokens.unbind(2), strict=True)], 2)
        y = (chosen[..., None] * each).sum(2)
        state = (context.transpose(0, 1), context.transpose(0, 1))
        read, state = self.read(y[:, : self.past], state)
        along = torch.cat([read, self.write(y[:, self.past :], state)[0]], 1)
        y = self.enriched(self.norm(y + functional.glu(self.gate(along))), context)
        later = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool).triu(1)
        seen = self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        y = self.inner(self.norm_seen(y + functional.glu(self.gate_seen(seen))))
        return self.out(y[:, self.past :])


@maker
def forecast() -> Example:
    """Four shops' next day, an hour at a time, from four days."""
    return _Forecast(), {"x": torch.randn(4, 120, 8), "fixed": torch.randn(4, 12)}


class _Pooled(nn.Module):
    """N-HiTS: blocks that see a series pooled, and say few points of it and of what follows."""

    def __init__(self, past: int = 336, future: int = 96) -> None:
        super().__init__()
        self.sizes, self.past, self.future = (8, 4, 1), past, future
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(past // k, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                          nn.Linear(512, past + future // k))
            for k in self.sizes
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        said: torch.Tensor | int = 0
        for size, block in zip(self.sizes, self.blocks, strict=True):
            y = block(functional.max_pool1d(x[:, None], size)[:, 0])
            x = x - y[:, : self.past]
            said = said + functional.interpolate(y[:, None, self.past :], self.future, mode="linear")[:, 0]
        return said


@maker
def demand() -> Example:
    """Thirty-two series, two weeks of hours each."""
    return Positional(_Pooled()), {"x": torch.randn(32, 336)}


class _Lift(nn.Module):
    """Lift, splat: pixels of four cameras at all of their depths are added where they stand in a map of 64x64."""

    def __init__(self, c: int = 32, depths: int = 16) -> None:
        super().__init__()
        self.c, self.depths = c, depths
        self.cameras = nn.Sequential(normed(3, 32, stride=2), normed(32, 64, stride=2), normed(64, 128, stride=2),
                                     normed(128, 128), nn.Conv2d(128, c + depths, 1))  # fmt: skip
        self.register_buffer("where", torch.randint(64 * 64, (4 * depths * 8 * 22,)))
        self.map = nn.Sequential(normed(c, 64), normed(64, 64), nn.Conv2d(64, 4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.cameras(x)
        depth = y[:, : self.depths].softmax(1)
        volume = depth[:, :, None] * y[:, None, self.depths :]  # [cameras, depths, c, h, w]
        points = volume.permute(0, 1, 3, 4, 2).reshape(-1, self.c)
        flat = torch.zeros(64 * 64, self.c).index_add(0, self.where, points)
        return self.map(flat.mT.reshape(1, self.c, 64, 64))


@maker
def cameras() -> Example:
    """Four cameras of 64x176."""
    return Positional(_Lift()), {"x": torch.randn(4, 3, 64, 176)}


class _Strips(nn.Module):
    """SegNeXt's block: attention by strips of 7, 11 and 21 pixels along each axis."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.into, self.square = nn.Conv2d(c, c, 1), same(c, c, 5, groups=c)
        self.strips = nn.ModuleList(
            nn.Sequential(nn.Conv2d(c, c, (1, k), padding=(0, k // 2), groups=c),
                          nn.Conv2d(c, c, (k, 1), padding=(k // 2, 0), groups=c))
            for k in (7, 11, 21)
        )  # fmt: skip
        self.merge, self.out = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.inner = nn.Sequential(nn.Conv2d(c, 4 * c, 1), same(4 * c, 4 * c, groups=4 * c), nn.GELU(),
                                   nn.Conv2d(4 * c, c, 1))  # fmt: skip
        self.scales = nn.ParameterList(torch.full((c, 1, 1), 0.5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.into(self.one(x)))
        z = self.square(y)
        z = z + sum(strip(z) for strip in self.strips)
        x = x + self.scales[0] * self.out(self.merge(z) * y)
        return x + self.scales[1] * self.inner(self.two(x))


class _Streets(nn.Module):
    """SegNeXt-T of one block a stage, with a Hamburger (three steps of a factorization into sixteen) at the end."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 64, 160, 256)
        self.fewer = nn.ModuleList(
            (nn.Sequential(normed(3, 16, stride=2), normed(16, 32, stride=2)),
             *(normed(a, b, stride=2) for a, b in itertools.pairwise(widths)))
        )  # fmt: skip
        self.blocks = nn.ModuleList(_Strips(c) for c in widths)
        self.squeeze, self.low, self.back = normed(480, 128, 1), nn.Conv2d(128, 128, 1), nn.Conv2d(128, 128, 1)
        self.bases, self.classes = nn.Parameter(torch.rand(1, 128, 16)), nn.Conv2d(128, 19, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for fewer, block in zip(self.fewer, self.blocks, strict=True):
            seen.append(x := block(fewer(x)))
        size = seen[1].shape[2:]
        wide = [functional.interpolate(part, size, mode="bilinear") for part in seen[1:]]
        y = self.squeeze(torch.cat(wide, 1))
        z = functional.relu(self.low(y)).flatten(2)  # [1, c, n]
        bases = functional.normalize(self.bases, dim=1)
        codes = (z.mT @ bases * 100).softmax(-1)
        for _ in range(3):
            codes = codes * (z.mT @ bases) / (codes @ (bases.mT @ bases) + 1e-6)
            bases = bases * (z @ codes) / (bases @ (codes.mT @ codes) + 1e-6)
        y = functional.relu(y + self.back((bases @ codes.mT).unflatten(2, size)))
        return functional.interpolate(self.classes(y), x.shape[2] * 32, mode="bilinear")


@maker
def streets() -> Example:
    """A street of 256x256, its 19 kinds of things."""
    return Positional(_Streets()), {"x": torch.randn(1, 3, 256, 256)}


class _Transducer(nn.Module):
    """An RNN-T's joint network: what was said so far, beside each frame."""

    def __init__(self, c: int = 320, words: int = 1025) -> None:
        super().__init__()
        self.words, self.said = nn.Embedding(words, c), nn.LSTM(c, c, batch_first=True)
        self.heard, self.spoken, self.out = nn.Linear(256, c), nn.Linear(c, c), nn.Linear(c, words)

    def forward(self, frames: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        said = self.spoken(self.said(self.words(words))[0])
        return self.out(torch.tanh(self.heard(frames)[:, :, None] + said[:, None])).log_softmax(-1)


@maker
def transducer() -> Example:
    """Fifty frames, twelve words."""
    return _Transducer(), {"frames": torch.randn(1, 50, 256), "words": torch.randint(1025, (1, 12))}


class _Player(nn.Module):
    """IMPALA's residual network, what was remembered, and what to do."""

    def __init__(self) -> None:
        super().__init__()
        parts, widths = [], (4, 16, 32, 32)
        for a, b in itertools.pairwise(widths):
            parts += [same(a, b), nn.MaxPool2d(3, 2, 1), _Residual(b), _Residual(b)]
        self.seen = nn.Sequential(*parts, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 121, 256), nn.ReLU())
        self.memory, self.actions = nn.LSTMCell(256, 256), nn.Linear(256, 19)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, cell = self.memory(self.seen(x / 255), (hidden, cell))
        return self.actions(hidden), hidden, cell


class _Residual(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.ReLU(), same(c, c), nn.ReLU(), same(c, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


@maker
def player() -> Example:
    """Sixteen games of four frames of 84x84."""
    frames = torch.randint(256, (16, 4, 84, 84)).float()
    return _Player(), {"x": frames, "hidden": torch.randn(16, 256), "cell": torch.randn(16, 256)}


class _Equivariant(nn.Module):
    """EGNN: all pairs of 64 atoms, their distances, and forces along what lies between them."""

    def __init__(self, c: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.kinds = nn.Embedding(16, c)
        self.pairs, self.forces, self.atoms = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            self.pairs.append(nn.Sequential(nn.Linear(2 * c + 1, c), nn.SiLU(), nn.Linear(c, c), nn.SiLU()))
            self.forces.append(nn.Sequential(nn.Linear(c, c), nn.SiLU(), nn.Linear(c, 1)))
            self.atoms.append(nn.Sequential(nn.Linear(2 * c, c), nn.SiLU(), nn.Linear(c, c)))

    def forward(self, kinds: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, n = self.kinds(kinds), kinds.shape[0]
        for pairs, forces, atoms in zip(self.pairs, self.forces, self.atoms, strict=True):
            between = places[:, None] - places
            square = (between**2).sum(-1, keepdim=True)
            both = torch.cat([h[:, None].expand(n, n, -1), h.expand(n, n, -1), square], -1)
            messages = pairs(both)
            places = places + (between / (square.sqrt() + 1) * forces(messages)).sum(1) / n
            h = h + atoms(torch.cat([h, messages.sum(1) / n], -1))
        return h, places


@maker
def atoms() -> Example:
    """Four layers on 64 atoms."""
    return _Equivariant(), {"kinds": torch.randint(16, (64,)), "places": torch.randn(64, 3) * 3}


class _Streams(nn.Module):
    """Flux's double block: words and pictures each have weights of their own, and see each other."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.time = nn.ModuleList(nn.Linear(c, 6 * c) for _ in range(2))
        self.into, self.out = (nn.ModuleList(nn.Linear(c, k * c) for _ in range(2)) for k in (3, 1))
        self.query, self.key = (nn.ModuleList(nn.RMSNorm(c // heads) for _ in range(2)) for _ in range(2))
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(c, 4 * c), nn.GELU(approximate="tanh"), nn.Linear(4 * c, c)) for _ in range(2)
        )
        self.norm = nn.LayerNorm(c, elementwise_affine=False, eps=1e-6)

    def forward(self, both: tuple, time: torch.Tensor, turns: tuple) -> tuple:
        moves = [part(functional.silu(time))[:, None].chunk(6, -1) for part in self.time]
        queries, keys, values = [], [], []
        for n, x in enumerate(both):
            y = self.norm(x) * (1 + moves[n][1]) + moves[n][0]
            query, key, value = self.into[n](y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            queries.append(self.query[n](query))
            keys.append(self.key[n](key))
            values.append(value)
        query, key, value = (torch.cat(parts, 2) for parts in (queries, keys, values))
        query, key = (self._turned(part, *turns) for part in (query, key))
        seen = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        out = []
        for n, (x, part) in enumerate(zip(both, seen.split([x.shape[1] for x in both], 1), strict=True)):
            x = x + moves[n][2] * self.out[n](part)
            out.append(x + moves[n][5] * self.inner[n](self.norm(x) * (1 + moves[n][4]) + moves[n][3]))
        return tuple(out)

    @staticmethod
    def _turned(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Rotary positions of neighbours, as pairs."""
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([a * cosines - b * sines, a * sines + b * cosines], -1).flatten(-2)


class _Painter(nn.Module):
    def __init__(self, c: int = 512, heads: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.patches, self.words, self.time = nn.Linear(64, c), nn.Linear(256, c), nn.Linear(256, c)
        self.blocks, self.last = nn.ModuleList(_Streams(c, heads) for _ in range(layers)), nn.Linear(c, 64)

    def forward(
        self, x: torch.Tensor, words: torch.Tensor, time: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
    ) -> torch.Tensor:
        angles = time[:, None] * torch.exp(torch.arange(128) * (-9.21 / 128))
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        both = (self.words(words), self.patches(x))
        for block in self.blocks:
            both = block(both, time, (cosines, sines))
        return self.last(both[1])


@maker
def painter() -> Example:
    """One step of a small Flux: 256 patches and 64 words."""
    angle = torch.rand(1, 1, 320, 32) * 6
    inputs = {"x": torch.randn(1, 256, 64), "words": torch.randn(1, 64, 256), "time": torch.rand(1) * 900}
    return _Painter(), inputs | {"cosines": angle.cos(), "sines": angle.sin()}


class _Click(nn.Module):
    """SAM's decoder: points and picture look at each other twice, then four masks are made by products."""

    def __init__(self, c: int = 256, heads: int = 8) -> None:
        super().__init__()
        kinds = {"batch_first": True}
        self.tokens, self.point = nn.Parameter(torch.randn(1, 5, c)), nn.Linear(3, c)
        self.own, self.there, self.back = (
            nn.ModuleList(nn.MultiheadAttention(c, heads, **kinds) for _ in range(2)) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(8))
        self.inner = nn.ModuleList(nn.Sequential(nn.Linear(c, 2048), nn.ReLU(), nn.Linear(2048, c)) for _ in range(2))
        self.places = nn.Parameter(torch.randn(1, 1024, c) * 0.3)
        self.up = nn.Sequential(nn.ConvTranspose2d(c, c // 4, 2, 2), nn.GroupNorm(1, c // 4), nn.GELU(),
                                nn.ConvTranspose2d(c // 4, c // 8, 2, 2), nn.GELU())  # fmt: skip
        self.made = nn.ModuleList(
            nn.Sequential(nn.Linear(c, c), nn.ReLU(), nn.Linear(c, c), nn.ReLU(), nn.Linear(c, c // 8))
            for _ in range(4)
        )
        self.sure = nn.Linear(c, 4)

    def forward(self, x: torch.Tensor, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sparse = torch.cat([self.tokens, self.point(points)], 1)
        tokens, image = sparse, x.flatten(2).mT
        for n in range(2):
            query = tokens + sparse
            tokens = self.norms[4 * n](tokens + self.own[n](query, query, tokens, need_weights=False)[0])
            key = image + self.places
            seen = self.there[n](tokens + sparse, key, image, need_weights=False)[0]
            tokens = self.norms[4 * n + 1](tokens + seen)
            tokens = self.norms[4 * n + 2](tokens + self.inner[n](tokens))
            seen = self.back[n](key, tokens + sparse, tokens, need_weights=False)[0]
            image = self.norms[4 * n + 3](image + seen)
        wide = self.up(image.mT.unflatten(2, x.shape[2:]))
        made = torch.stack([part(tokens[:, 1 + n]) for n, part in enumerate(self.made)], 1)
        return (made @ wide.flatten(2)).unflatten(2, wide.shape[2:]), self.sure(tokens[:, 0])


@maker
def click() -> Example:
    """Two points on a picture's 32x32 features."""
    return _Click(), {"x": torch.randn(1, 256, 32, 32), "points": torch.randn(1, 2, 3)}


class _Autoformer(nn.Module):
    """A layer that subtracts moving means, as Autoformer and DLinear do, around an inception of periods (TimesNet)."""

    def __init__(self, c: int, period: int) -> None:
        super().__init__()
        self.period = period
        self.into = nn.ModuleList(nn.Conv2d(c, 2 * c, 2 * k + 1, padding=k) for k in range(4))
        self.out = nn.ModuleList(nn.Conv2d(2 * c, c, 2 * k + 1, padding=k) for k in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(x, (12, 12), mode="replicate")
        season = x - functional.avg_pool1d(padded, 25, 1)
        image = season.unflatten(2, (-1, self.period))
        y = functional.gelu(sum(part(image) for part in self.into) / 4)
        return x + (sum(part(y) for part in self.out) / 4).flatten(2)


@maker
def seasons() -> Example:
    """Eight series of 192 hours, by days, half days and quarters of days."""
    layers = (_Autoformer(32, period) for period in (24, 12, 6))
    body = nn.Sequential(nn.Conv1d(7, 32, 3, padding=1), *layers, nn.Conv1d(32, 7, 1))
    return Positional(body), {"x": torch.randn(8, 7, 192)}
