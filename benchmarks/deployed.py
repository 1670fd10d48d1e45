"""Networks of products: faces, restored images, depth, masks, speech, video, images of texts; small enough for a CPU.

Imported, they join the table of `architectures.py`, as those of `unprepared.py` do, and were looked at by nobody before
they were tuned. Where a paper names the widths they are its small ones.
"""

import itertools
from functools import partial

import torch
import transformers as hf
from architectures import Example, FirstOutput, image, maker, masked_tokens
from torch import nn
from torch.nn import functional
from wall_models import Positional, timm_model

resized = partial(functional.interpolate, mode="bilinear", align_corners=False)


def same(c_in: int, c_out: int, kernel: int = 3, stride: int = 1, **options: int) -> nn.Conv2d:
    """A convolution that keeps the size of an image, but for its stride."""
    dilation = options.get("dilation", 1)
    return nn.Conv2d(c_in, c_out, kernel, stride, dilation * (kernel - 1) // 2, **options)


def normed(c_in: int, c_out: int, kernel: int = 3, stride: int = 1, **options: int) -> nn.Sequential:
    """The same with a batch norm, rectified."""
    return nn.Sequential(same(c_in, c_out, kernel, stride, **options), nn.BatchNorm2d(c_out), nn.ReLU())


class _Face(nn.Module):
    """A block of BlazeFace: a depthwise 5x5 and a 1x1, beside a pooled and padded image."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(same(c_in, c_in, 5, stride, groups=c_in), nn.Conv2d(c_in, c_out, 1))
        self.stride, self.more = stride, c_out - c_in

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = functional.max_pool2d(x, 2) if self.stride > 1 else x
        return functional.relu(self.body(x) + functional.pad(beside, (0, 0, 0, 0, 0, self.more)))


class _BlazeFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [24, 24, 28, 32, 36, 42, 48, 56, 64, 72, 80, 88]
        blocks = [_Face(a, b, 2 if n in (2, 5) else 1) for n, (a, b) in enumerate(itertools.pairwise(widths))]
        self.first = nn.Sequential(nn.Conv2d(3, 24, 5, 2, 2), nn.ReLU(), *blocks)
        self.second = nn.Sequential(_Face(88, 96, 2), *(_Face(96, 96) for _ in range(4)))
        self.heads = nn.ModuleList(nn.Conv2d(c, n * 17, 1) for c, n in ((88, 2), (96, 6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        found = [head(y).permute(0, 2, 3, 1) for head, y in zip(self.heads, (first, self.second(first)), strict=True)]
        return torch.cat([y.reshape(1, -1, 17) for y in found], 1)


@maker
def blazeface() -> Example:
    """Faces and their points: [1, 896, 1 + 4 + 12]."""
    return _BlazeFace(), {"x": torch.randn(1, 3, 128, 128)}


class _Identity(nn.Module):
    """A block of ArcFace's residual network: norms first, PReLU between its convolutions."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(c_in), same(c_in, c_out, bias=False), nn.BatchNorm2d(c_out), nn.PReLU(c_out),
            same(c_out, c_out, 3, stride, bias=False), nn.BatchNorm2d(c_out),
        )  # fmt: skip
        short = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))
        self.short = short if stride > 1 or c_in != c_out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.short(x)


@maker
def arcface() -> Example:
    """IResNet-18: the embedding of a face, 512 numbers."""
    layers: list[nn.Module] = [same(3, 64, bias=False), nn.BatchNorm2d(64), nn.PReLU(64)]
    for c_in, c_out in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [_Identity(c_in, c_out, 2), _Identity(c_out, c_out, 1)]
    head = [nn.BatchNorm2d(512), nn.Flatten(), nn.Linear(512 * 7 * 7, 512), nn.BatchNorm1d(512)]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 3, 112, 112)}


class _ChannelNorm(nn.Module):
    """A layer norm over the channels of an image, written out as restoration networks have it."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1, c, 1, 1)), nn.Parameter(torch.zeros(1, c, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(1, keepdim=True)
        return (x - mean) / ((x - mean).pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * self.weight + self.bias


class _Naf(nn.Module):
    """A block of NAFNet: gates are products of halves, and channels are weighted by their means."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(_ChannelNorm(c) for _ in range(2))
        self.spread = nn.Sequential(nn.Conv2d(c, 2 * c, 1), same(2 * c, 2 * c, groups=2 * c))
        self.weights = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, c, 1))
        self.out, self.more, self.less = nn.Conv2d(c, c, 1), nn.Conv2d(c, 2 * c, 1), nn.Conv2d(c, c, 1)
        self.scales = nn.ParameterList(torch.ones(1, c, 1, 1) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.spread(self.norms[0](x)).chunk(2, dim=1)
        gated = one * other
        x = x + self.out(gated * self.weights(gated)) * self.scales[0]
        one, other = self.more(self.norms[1](x)).chunk(2, dim=1)
        return x + self.less(one * other) * self.scales[1]


class _NafNet(nn.Module):
    def __init__(self, c: int = 32) -> None:
        super().__init__()
        self.into, self.out = same(3, c), same(c, 3)
        self.down = nn.ModuleList(nn.Sequential(_Naf(c << n), nn.Conv2d(c << n, c << n + 1, 2, 2)) for n in range(3))
        self.middle = nn.Sequential(_Naf(8 * c), _Naf(8 * c))
        up = [nn.Sequential(nn.Conv2d(c << n, c << n + 1, 1, bias=False), nn.PixelShuffle(2)) for n in (3, 2, 1)]
        self.up, self.after = nn.ModuleList(up), nn.ModuleList(_Naf(c << n) for n in (2, 1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, kept = self.into(x), []
        for block, down in self.down:
            kept.append(block(y))
            y = down(kept[-1])
        y = self.middle(y)
        for up, block, beside in zip(self.up, self.after, reversed(kept), strict=True):
            y = block(up(y) + beside)
        return x + self.out(y)


@maker
def nafnet() -> Example:
    """An image without its noise or blur."""
    return _NafNet(), {"x": torch.randn(1, 3, 128, 128)}


class _Dense(nn.Module):
    """A dense block of ESRGAN: each convolution reads all before it."""

    def __init__(self, c: int, grown: int) -> None:
        super().__init__()
        self.grow = nn.ModuleList(same(c + n * grown, grown) for n in range(4))
        self.out = same(c + 4 * grown, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        all_of = x
        for grow in self.grow:
            all_of = torch.cat([all_of, functional.leaky_relu(grow(all_of), 0.2)], 1)
        return x + 0.2 * self.out(all_of)


class _Esrgan(nn.Module):
    """Four times as many pixels of a side."""

    def __init__(self, c: int = 64) -> None:
        super().__init__()
        self.first, self.trunk = same(3, c), nn.Sequential(*(_Dense(c, 32) for _ in range(3)), same(c, c))
        self.up = nn.ModuleList(same(c, c) for _ in range(2))
        self.last = nn.Sequential(same(c, c), nn.LeakyReLU(0.2), same(c, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.trunk(x)
        for up in self.up:
            x = functional.leaky_relu(up(functional.interpolate(x, scale_factor=2.0, mode="nearest")), 0.2)
        return self.last(x)


@maker
def esrgan() -> Example:
    return _Esrgan(), {"x": torch.randn(1, 3, 32, 32)}


class _Nested(nn.Module):
    """A block of U2-Net: a small U-Net with a residual sum, its innermost convolution dilated."""

    def __init__(self, c_in: int, middle: int, c_out: int, depth: int) -> None:
        super().__init__()
        self.into = normed(c_in, c_out)
        self.down = nn.ModuleList(normed(c_out if not n else middle, middle) for n in range(depth))
        self.inner = normed(middle, middle, dilation=2)
        self.up = nn.ModuleList(normed(2 * middle, c_out if n == depth - 1 else middle) for n in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = whole = self.into(x)
        kept = []
        for n, down in enumerate(self.down):
            y = down(functional.max_pool2d(y, 2, ceil_mode=True) if n else y)
            kept.append(y)
        y = self.inner(y)
        for up, beside in zip(self.up, reversed(kept), strict=True):
            larger = resized(y, size=beside.shape[2:])
            y = up(torch.cat([larger, beside], 1))
        return y + whole


class _U2Net(nn.Module):
    """What stands out in an image: U2-Net's small version, four stages of its six."""

    def __init__(self, c: int = 64, middle: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList(_Nested(3 if depth == 5 else c, middle, c, depth) for depth in (5, 4, 3, 2))
        self.up = nn.ModuleList(_Nested(2 * c, middle, c, depth) for depth in (3, 4, 5))
        self.sides = nn.ModuleList(same(c, 1) for _ in range(4))
        self.fused = nn.Conv2d(4, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, kept = x.shape[2:], []
        for n, down in enumerate(self.down):
            x = down(functional.max_pool2d(x, 2) if n else x)
            kept.append(x)
        found = [x]
        for up, beside in zip(self.up, reversed(kept[:-1]), strict=True):
            larger = resized(found[-1], size=beside.shape[2:])
            found.append(up(torch.cat([larger, beside], 1)))
        maps = [side(y) for side, y in zip(self.sides, found, strict=True)]
        maps = [resized(y, size=size) for y in maps]
        return torch.sigmoid(self.fused(torch.cat(maps, 1)))


@maker
def u2net() -> Example:
    return _U2Net(), {"x": torch.randn(1, 3, 160, 160)}


class _DeepLab(nn.Module):
    """DeepLabV3: a MobileNetV3 of stride 16, dilated convolutions side by side, the mean of the image, classes."""

    def __init__(self, c: int = 128) -> None:
        super().__init__()
        self.body = timm_model("mobilenetv3_large_100", features_only=True, output_stride=16, out_indices=(4,)).body
        c_in = self.body.feature_info.channels()[-1]
        self.beside = nn.ModuleList([normed(c_in, c, 1), *(normed(c_in, c, dilation=rate) for rate in (6, 12, 18))])
        self.mean = nn.Sequential(nn.AdaptiveAvgPool2d(1), normed(c_in, c, 1))
        self.classes = nn.Sequential(normed(5 * c, c, 1), normed(c, c), nn.Conv2d(c, 21, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.body(x)[-1]
        mean = self.mean(seen).expand(-1, -1, *seen.shape[2:])
        classes = self.classes(torch.cat([*(each(seen) for each in self.beside), mean], 1))
        return resized(classes, size=x.shape[2:])


@maker
def deeplab() -> Example:
    return _DeepLab(), {"x": torch.randn(1, 3, 256, 256)}


class _Excited(nn.Module):
    """Channels weighted by their means."""

    def __init__(self, c: int, inner: int) -> None:
        super().__init__()
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool3d(1), nn.Conv3d(c, inner, 1), nn.ReLU(), nn.Conv3d(inner, c, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weights(x)


class _Frames(nn.Module):
    """A block of X3D: a depthwise convolution of volumes between two of single elements."""

    def __init__(self, c_in: int, c_out: int, stride: int, is_excited: bool) -> None:
        super().__init__()
        c = int(2.25 * c_in)
        self.body = nn.Sequential(
            nn.Conv3d(c_in, c, 1, bias=False), nn.BatchNorm3d(c), nn.ReLU(),
            nn.Conv3d(c, c, 3, (1, stride, stride), 1, groups=c, bias=False), nn.BatchNorm3d(c),
            _Excited(c, max(8, c // 16 // 8 * 8)) if is_excited else nn.Identity(), nn.SiLU(),
            nn.Conv3d(c, c_out, 1, bias=False), nn.BatchNorm3d(c_out),
        )  # fmt: skip
        self.has_sum = stride == 1 and c_in == c_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        return functional.relu(y + x) if self.has_sum else functional.relu(y)


@maker
def x3d() -> Example:
    """Actions in four frames, extra small."""
    layers: list[nn.Module] = [nn.Conv3d(3, 24, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)]
    layers += [nn.Conv3d(24, 24, (5, 1, 1), padding=(2, 0, 0), groups=24, bias=False), nn.BatchNorm3d(24), nn.ReLU()]
    for c_in, c_out, repeats in ((24, 24, 3), (24, 48, 5), (48, 96, 11), (96, 192, 7)):
        layers += [_Frames(c_in if not n else c_out, c_out, 1 if n else 2, n % 2 == 0) for n in range(repeats)]
    head = [nn.Conv3d(192, 432, 1), nn.BatchNorm3d(432), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()]
    return Positional(nn.Sequential(*layers, *head, nn.Linear(432, 400))), {"x": torch.randn(1, 3, 4, 160, 160)}


class _Cross(nn.Module):
    """A transformer's block of a diffusion model: pixels look at each other, then at a text, then a gated network."""

    def __init__(self, c: int, heads: int, text: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(c) for _ in range(3))
        self.query = nn.ModuleList(linear(c, c) for _ in range(2))
        self.pair = nn.ModuleList(linear(source, 2 * c) for source in (c, text))
        self.out = nn.ModuleList(nn.Linear(c, c) for _ in range(2))
        self.more, self.less = nn.Linear(c, 8 * c), nn.Linear(4 * c, c)

    def _attended(self, n: int, x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        def split(y: torch.Tensor) -> torch.Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        key, value = self.pair[n](source).chunk(2, dim=-1)
        found = functional.scaled_dot_product_attention(split(self.query[n](x)), split(key), split(value))
        return self.out[n](found.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self._attended(0, y, y)
        x = x + self._attended(1, self.norms[1](x), text)
        value, gate = self.more(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.less(value * functional.gelu(gate))


class _Level(nn.Module):
    """A residual block that is told the time, and a transformer's block over its pixels."""

    def __init__(self, c_in: int, c: int, time: int, text: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, c_in), nn.SiLU(), same(c_in, c))
        self.second = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), same(c, c))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time, c))
        self.short = nn.Identity() if c_in == c else nn.Conv2d(c_in, c, 1)
        self.norm, self.into, self.out = nn.GroupNorm(32, c), nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 1)
        self.cross = _Cross(c, c // 32, text)

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.short(x) + self.second(self.first(x) + self.time(time)[:, :, None, None])
        y = self.cross(self.into(self.norm(x)).flatten(2).transpose(1, 2), text)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class _Denoiser(nn.Module):
    """The U-Net of a latent diffusion model, three levels, one block each."""

    def __init__(self, c: int = 128, text: int = 256) -> None:
        super().__init__()
        widths, level = [c, 2 * c, 2 * c], partial(_Level, time=4 * c, text=text)
        self.time = nn.Sequential(nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, 4 * c))
        self.into = same(4, c)
        self.down = nn.ModuleList(level(a, b) for a, b in zip([c, *widths], widths, strict=False))
        self.smaller = nn.ModuleList(same(w, w, 3, 2) for w in widths[:-1])
        self.up = nn.ModuleList(level(a, b) for a, b in ((4 * c, 2 * c), (4 * c, 2 * c), (3 * c, c)))
        self.larger = nn.ModuleList(same(2 * c, 2 * c) for _ in range(2))
        self.out = nn.Sequential(nn.GroupNorm(32, c), nn.SiLU(), same(c, 4))

    def forward(self, x: torch.Tensor, time: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """`x`: [1, 4, 32, 32]; `time`: [1, c], sines of the step; `text`: [1, 77, text]."""
        time, x, kept = self.time(time), self.into(x), []
        for n, down in enumerate(self.down):
            x = down(self.smaller[n - 1](x) if n else x, time, text)
            kept.append(x)
        for n, up in enumerate(self.up):
            x = self.larger[n - 1](functional.interpolate(x, scale_factor=2.0, mode="nearest")) if n else x
            x = up(torch.cat([x, kept[-1 - n]], 1), time, text)
        return self.out(x)


@maker
def diffusion() -> Example:
    """One step of text to images."""
    return _Denoiser(), {
        "x": torch.randn(1, 4, 32, 32), "time": torch.randn(1, 128), "text": torch.randn(1, 77, 256)
    }  # fmt: skip


class _Elu1d(nn.Module):
    """A residual block of EnCodec's."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ELU(), nn.ReflectionPad1d((2, 0)), nn.Conv1d(c, c // 2, 3), nn.ELU(), nn.Conv1d(c // 2, c, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


class _Codec(nn.Module):
    """EnCodec's decoder, causal, half as wide: an LSTM over frames, then four steps up to samples."""

    def __init__(self, c: int = 256) -> None:
        super().__init__()
        self.first, self.steps = nn.Sequential(nn.ReflectionPad1d((6, 0)), nn.Conv1d(128, c, 7)), nn.LSTM(c, c, 2)
        up: list[nn.Module] = []
        for n, ratio in enumerate((8, 5, 4, 2)):
            a, b = c >> n, c >> n + 1
            up += [nn.ELU(), nn.ConvTranspose1d(a, b, 2 * ratio, ratio, (ratio + 1) // 2, ratio % 2), _Elu1d(b)]
        self.up = nn.Sequential(*up, nn.ELU(), nn.ReflectionPad1d((6, 0)), nn.Conv1d(c >> 4, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.up(x + self.steps(x.permute(2, 0, 1))[0].permute(1, 2, 0))


@maker
def encodec() -> Example:
    """Half a second at 24 kHz: 38 frames."""
    return _Codec(), {"x": torch.randn(1, 128, 38)}


class _Relative(nn.Module):
    """Attention that adds products with sines of distances, shifted as Transformer-XL has it."""

    def __init__(self, c: int, heads: int) -> None:
        super().__init__()
        self.heads, self.into, self.out = heads, nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.distance = nn.Linear(c, c, bias=False)
        self.biases = nn.ParameterList(torch.zeros(heads, 1, c // heads) for _ in range(2))

    def forward(self, x: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """`x`: [n, frames, c]; `sines`: [1, 2 frames - 1, c], of the distances from frames - 1 down to its negative."""
        n, frames, _ = x.shape
        heads = self.heads
        query, key, value = (y.view(n, frames, heads, -1).transpose(1, 2) for y in self.into(x).chunk(3, dim=-1))
        place = self.distance(sines).view(1, 2 * frames - 1, heads, -1).transpose(1, 2)
        far = functional.pad((query + self.biases[1]) @ place.transpose(2, 3), (1, 0))
        far = far.view(n, heads, 2 * frames, frames)[:, :, 1:].reshape(n, heads, frames, -1)[..., :frames]
        scores = ((query + self.biases[0]) @ key.transpose(2, 3) + far) * query.shape[-1] ** -0.5
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(x.shape))


class _Conformer(nn.Module):
    """A layer: half a network, attention, a gated depthwise convolution over frames, the other half."""

    def __init__(self, c: int, heads: int, kernel: int = 31) -> None:
        super().__init__()
        self.halves = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(c), nn.Linear(c, 4 * c), nn.SiLU(), nn.Linear(4 * c, c)) for _ in range(2)
        )
        self.attention, self.norms = _Relative(c, heads), nn.ModuleList(nn.LayerNorm(c) for _ in range(3))
        depthwise = nn.Conv1d(c, c, kernel, padding=kernel // 2, groups=c)
        self.frames = nn.Sequential(
            nn.Conv1d(c, 2 * c, 1), nn.GLU(1), depthwise, nn.BatchNorm1d(c), nn.SiLU(), nn.Conv1d(c, c, 1)
        )

    def forward(self, x: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        x = x + self.halves[0](x) / 2
        x = x + self.attention(self.norms[0](x), sines)
        x = x + self.frames(self.norms[1](x).transpose(1, 2)).transpose(1, 2)
        return self.norms[2](x + self.halves[1](x) / 2)


class _Speech(nn.Module):
    def __init__(self, c: int = 144, layers: int = 8, frames: int = 100, letters: int = 29) -> None:
        super().__init__()
        self.less = nn.Sequential(nn.Conv2d(1, c, 3, 2, 1), nn.ReLU(), nn.Conv2d(c, c, 3, 2, 1), nn.ReLU())
        self.into, self.letters = nn.Linear(20 * c, c), nn.Linear(c, letters)
        self.layers = nn.ModuleList(_Conformer(c, 4) for _ in range(layers))
        angles = torch.arange(frames - 1, -frames, -1)[:, None] * 1e4 ** (-torch.arange(0, c, 2) / c)
        self.register_buffer("sines", torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(self.less(x).transpose(1, 2).flatten(2))
        for layer in self.layers:
            x = layer(x, self.sines)
        return self.letters(x)


@maker
def conformer() -> Example:
    """Letters of four seconds of speech, 400 frames of 80 mel bins, half of the layers of a small Conformer."""
    return _Speech(), {"x": torch.randn(1, 1, 400, 80)}


@maker
def deberta() -> Example:
    """DeBERTa-v3 extra small, six layers: scores of contents and of distances."""
    config = hf.DebertaV2Config(
        vocab_size=4096, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True,
        pos_att_type=["p2c", "c2p"], position_biased_input=False, max_relative_positions=-1,
    )  # fmt: skip
    return FirstOutput(hf.DebertaV2Model(config)), masked_tokens(4096)


@maker
def mobilebert() -> Example:
    """Twelve of its 24 narrow layers."""
    return FirstOutput(hf.MobileBertModel(hf.MobileBertConfig(num_hidden_layers=12))), masked_tokens(5000)


@maker
def depth_anything() -> Example:
    """Depth of each pixel: DINOv2's small network of eight layers, and what joins four of them."""
    backbone = hf.Dinov2Config(
        hidden_size=384, num_hidden_layers=8, num_attention_heads=6, image_size=196, patch_size=14,
        out_indices=[2, 4, 6, 8], reshape_hidden_states=False, apply_layernorm=True,
    )  # fmt: skip
    config = hf.DepthAnythingConfig(
        backbone_config=backbone, reassemble_hidden_size=384, neck_hidden_sizes=[48, 96, 192, 384],
        fusion_hidden_size=64, head_hidden_size=32,
    )  # fmt: skip
    model = hf.DepthAnythingForDepthEstimation(config)
    for module in (*model.neck.modules(), *model.head.modules()):
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")  # of 0.02, hardly anything would be left
    nn.init.ones_(model.head.conv3.bias)  # its last ReLU hides what is below zero
    return FirstOutput(model), image(196)


class _Detr(nn.Module):
    def __init__(self, c: int = 256) -> None:
        super().__init__()
        self.body = timm_model("resnet18", features_only=True, out_indices=(4,)).body
        self.into = nn.Conv2d(512, c, 1)
        self.places = nn.Parameter(torch.randn(1, 64, c))
        self.queries = nn.Parameter(torch.randn(1, 100, c))
        options = {"dim_feedforward": 1024, "batch_first": True, "dropout": 0.0}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(c, 8, **options) for _ in range(3))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(c, 8, **options) for _ in range(3))
        self.boxes, self.classes = nn.Linear(c, 4), nn.Linear(c, 92)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.into(self.body(x)[-1]).flatten(2).transpose(1, 2) + self.places
        for encoder in self.encoder:
            seen = encoder(seen)
        found = self.queries.expand(len(x), -1, -1)
        for decoder in self.decoder:
            found = decoder(found, seen)
        return torch.cat([self.classes(found), torch.sigmoid(self.boxes(found))], -1)


@maker
def detr() -> Example:
    """Objects: a ResNet-18 after timm, and a transformer of three layers either way with 100 queries."""
    return _Detr(), {"x": torch.randn(1, 3, 256, 256)}


@maker
def resnet18_8() -> Example:
    """Eight images at once."""
    return timm_model("resnet18"), {"x": torch.randn(8, 3, 224, 224)}
