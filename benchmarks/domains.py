"""Networks of other trades: scans, motion, text in pictures, sources of sound, voices, tables, series, points, rays.

Imported, they join the table of `architectures.py`, as those of `deployed.py` do, and were looked at by nobody before
they were tuned. Where a paper names the widths they are its small ones.
"""

import itertools

import torch
import transformers as hf
from architectures import Example, FirstOutput, maker, reset
from deployed import normed, resized, same
from torch import nn
from torch.nn import functional
from wall_models import Positional, timm_model


class _Scan(nn.Sequential):
    """Two convolutions of a volume with norms of each channel, as nnU-Net has them."""

    def __init__(self, c_in: int, c_out: int, stride: int = 1) -> None:
        pairs = ((c_in, c_out, stride), (c_out, c_out, 1))
        super().__init__(*itertools.chain.from_iterable(
            (nn.Conv3d(a, b, 3, s, 1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01)) for a, b, s in pairs
        ))  # fmt: skip


class _Scans(nn.Module):
    def __init__(self, c: int = 16) -> None:
        super().__init__()
        self.down = nn.ModuleList([_Scan(1, c), *(_Scan(c << n, c << n + 1, 2) for n in range(3))])
        self.up = nn.ModuleList(nn.ConvTranspose3d(c << n + 1, c << n, 2, 2) for n in (2, 1, 0))
        self.merge, self.classes = nn.ModuleList(_Scan(2 * c << n, c << n) for n in (2, 1, 0)), nn.Conv3d(c, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down:
            x = down(x)
            kept.append(x)
        for up, merge, beside in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = merge(torch.cat([up(x), beside], 1))
        return self.classes(x)


@maker
def unet3d() -> Example:
    """Four kinds of tissue in a scan of 48x48x48."""
    return Positional(_Scans()), {"x": torch.randn(1, 1, 48, 48, 48)}


class _Flow(nn.Module):
    """PWC-Net, three levels: features of one image are moved by the motion so far, and compared with 81 neighbours."""

    def __init__(self, reach: int = 4) -> None:
        super().__init__()
        widths, self.reach = [3, 16, 32, 64, 96], reach
        act = nn.LeakyReLU(0.1)
        self.levels = nn.ModuleList(
            nn.Sequential(same(a, b, 3, 2), act, same(b, b), act) for a, b in itertools.pairwise(widths)
        )
        n = (2 * reach + 1) ** 2
        self.motion = nn.ModuleList(
            nn.Sequential(same(n + c + 2, 96), act, same(96, 64), act, same(64, 32), act, same(32, 2))
            for c in widths[:1:-1]
        )

    def moved(self, x: torch.Tensor, flow: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[2:]
        y, x_ = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        grid = torch.stack([x_, y], -1)[None] + flow.permute(0, 2, 3, 1) * torch.tensor([2 / (w - 1), 2 / (h - 1)])
        return functional.grid_sample(x, grid, align_corners=True)

    def compared(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Means of products with each neighbour: [n, (2 reach + 1)^2, h, w]."""
        (h, w), r = one.shape[2:], self.reach
        wide = functional.pad(other, (r, r, r, r))
        shifts = itertools.product(range(2 * r + 1), repeat=2)
        return torch.cat([(one * wide[:, :, i : i + h, j : j + w]).mean(1, keepdim=True) for i, j in shifts], 1)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        found = []
        for level in self.levels:
            first, second = level(first), level(second)
            found.append((first, second))
        flow = torch.zeros_like(first[:, :2])
        for n, ((one, other), motion) in enumerate(zip(found[:0:-1], self.motion, strict=True)):
            if n:
                flow = 2 * resized(flow, scale_factor=2)
            costs = functional.leaky_relu(self.compared(one, self.moved(other, flow)), 0.1)
            flow = flow + motion(torch.cat([costs, one, flow], 1))
        return flow


@maker
def pwc() -> Example:
    """Motion between two images of 192x256, an eighth as large."""
    model = _Flow()
    reset(model, ())
    return model, {"first": torch.randn(1, 3, 192, 256), "second": torch.randn(1, 3, 192, 256)}


class _Points(nn.Module):
    """SuperPoint: where corners are, pixel by pixel, and what they look like."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for n, (a, b) in enumerate(itertools.pairwise((1, 64, 64, 128, 128))):
            layers += [same(a, b), nn.ReLU(), same(b, b), nn.ReLU(), *([nn.MaxPool2d(2)] if n < 3 else [])]
        self.body = nn.Sequential(*layers)
        self.where, self.what = (nn.Sequential(same(128, 256), nn.ReLU(), nn.Conv2d(256, c, 1)) for c in (65, 256))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return functional.pixel_shuffle(self.where(y).softmax(1)[:, :-1], 8), functional.normalize(self.what(y), dim=1)


@maker
def superpoint() -> Example:
    """Corners of a grey image of 120x160."""
    model = _Points()
    reset(model, ())
    return model, {"x": torch.randn(1, 1, 120, 160)}


class _Separable(nn.Sequential):
    def __init__(self, c: int) -> None:
        super().__init__(same(c, c, groups=c, bias=False), nn.Conv2d(c, c, 1), nn.BatchNorm2d(c))


class _Pyramid(nn.Module):
    """A layer of EfficientDet's BiFPN: weighted sums, from coarse to fine and back."""

    def __init__(self, c: int, levels: int = 5) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(n) for n in (*[2] * (levels - 1), *[3] * (levels - 2), 2))
        self.after = nn.ModuleList(_Separable(c) for _ in range(2 * levels - 2))

    def merged(self, n: int, *parts: torch.Tensor) -> torch.Tensor:
        weights = functional.relu(self.weights[n])
        weights = weights / (weights.sum() + 1e-4)
        return self.after[n](functional.silu(sum(weight * part for weight, part in zip(weights, parts, strict=True))))

    def forward(self, levels: list[torch.Tensor]) -> list[torch.Tensor]:
        n, fine = len(levels) - 1, [levels[-1]]
        for k, level in enumerate(levels[-2::-1]):
            fine.append(self.merged(k, level, functional.interpolate(fine[-1], scale_factor=2)))
        fine, out = fine[::-1], [fine[-1]]
        for k in range(1, n + 1):
            coarser = functional.max_pool2d(out[-1], 3, 2, 1)
            out.append(self.merged(n - 1 + k, levels[k], *([fine[k]] if k < n else []), coarser))
        return out


class _Detector(nn.Module):
    def __init__(self, c: int = 64, classes: int = 90) -> None:
        super().__init__()
        self.body = timm_model("efficientnet_b0", features_only=True, out_indices=(2, 3, 4)).body
        self.into = nn.ModuleList(nn.Sequential(nn.Conv2d(k, c, 1), nn.BatchNorm2d(c)) for k in (40, 112, 320))
        self.more = nn.Sequential(nn.Conv2d(320, c, 1), nn.BatchNorm2d(c), nn.MaxPool2d(3, 2, 1))
        self.most, self.pyramid = nn.MaxPool2d(3, 2, 1), nn.ModuleList(_Pyramid(c) for _ in range(3))
        self.heads = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(_Separable(c), nn.SiLU()) for _ in range(3)), nn.Conv2d(c, 9 * k, 1))
            for k in (classes, 4)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = self.body(x)
        levels = [into(y) for into, y in zip(self.into, seen, strict=True)] + [self.more(seen[-1])]
        levels.append(self.most(levels[-1]))
        for layer in self.pyramid:
            levels = layer(levels)
        found = [[head(y).permute(0, 2, 3, 1).flatten(1, 2) for y in levels] for head in self.heads]
        return tuple(torch.cat(each, 1) for each in found)


@maker
def efficientdet() -> Example:
    """EfficientDet-D0 at 256x256: ninety classes and four edges at nine anchors of five levels."""
    return _Detector(), {"x": torch.randn(1, 3, 256, 256)}


class _Lines(nn.Module):
    """DBNet: maps of text and of its borders, from four levels of a ResNet-18."""

    def __init__(self, c: int = 256) -> None:
        super().__init__()
        self.body = timm_model("resnet18", features_only=True, out_indices=(1, 2, 3, 4)).body
        self.into = nn.ModuleList(nn.Conv2d(k, c, 1, bias=False) for k in (64, 128, 256, 512))
        self.after = nn.ModuleList(same(c, c // 4, bias=False) for _ in range(4))
        self.maps = nn.ModuleList(
            nn.Sequential(
                normed(c, c // 4, bias=False),
                nn.ConvTranspose2d(c // 4, c // 4, 2, 2), nn.BatchNorm2d(c // 4), nn.ReLU(),
                nn.ConvTranspose2d(c // 4, 1, 2, 2), nn.Sigmoid(),
            ) for _ in range(2)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = [into(y) for into, y in zip(self.into, self.body(x), strict=True)]
        for n in (2, 1, 0):
            levels[n] = levels[n] + functional.interpolate(levels[n + 1], scale_factor=2)
        found = [
            functional.interpolate(after(y), scale_factor=1 << n) if n else after(y)
            for n, (after, y) in enumerate(zip(self.after, levels, strict=True))
        ]
        together = torch.cat(found[::-1], 1)
        text, border = (each(together) for each in self.maps)
        return torch.cat([text, border, 1 / (1 + torch.exp(-50 * (text - border)))], 1)


@maker
def dbnet() -> Example:
    """Lines of text in an image of 320x320."""
    return _Lines(), {"x": torch.randn(1, 3, 320, 320)}


class _Sources(nn.Module):
    """A block of Conv-TasNet: depthwise over frames far apart, norms over all that there is."""

    def __init__(self, c: int, inner: int, dilation: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(c, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner, 1e-8),
            nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner),
            nn.PReLU(), nn.GroupNorm(1, inner, 1e-8),
        )  # fmt: skip
        self.next, self.kept = nn.Conv1d(inner, c, 1), nn.Conv1d(inner, c, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return x + self.next(y), self.kept(y)


class _TasNet(nn.Module):
    def __init__(self, filters: int = 512, kernel: int = 16, c: int = 128, repeats: int = 2, sources: int = 2) -> None:
        super().__init__()
        self.sources, self.into = sources, nn.Conv1d(1, filters, kernel, kernel // 2, bias=False)
        self.first = nn.Sequential(nn.GroupNorm(1, filters, 1e-8), nn.Conv1d(filters, c, 1))
        self.blocks = nn.ModuleList(_Sources(c, 4 * c, 1 << n) for _ in range(repeats) for n in range(8))
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(c, sources * filters, 1), nn.Sigmoid())
        self.out = nn.ConvTranspose1d(filters, 1, kernel, kernel // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waves = self.into(x)
        y, total = self.first(waves), torch.zeros(())
        for block in self.blocks:
            y, kept = block(y)
            total = total + kept
        masks = self.masks(total).view(self.sources, -1, waves.shape[-1])
        return self.out(masks * waves)


@maker
def convtasnet() -> Example:
    """Two voices in half a second at 8 kHz."""
    return Positional(_TasNet()), {"x": torch.randn(1, 1, 4000)}


class _Speaker(nn.Module):
    """A block of ECAPA-TDNN: eight parts of the channels, each added to the next, and weights of channels."""

    def __init__(self, c: int, dilation: int, scale: int = 8) -> None:
        super().__init__()
        self.scale, width = scale, c // scale
        self.into, self.out = (nn.Sequential(nn.Conv1d(c, c, 1), nn.ReLU(), nn.BatchNorm1d(c)) for _ in range(2))
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation), nn.ReLU(), nn.BatchNorm1d(width)
            ) for _ in range(scale - 1)
        )  # fmt: skip
        self.weights = nn.Sequential(
            nn.AdaptiveAvgPool1d(1), nn.Conv1d(c, 128, 1), nn.ReLU(), nn.Conv1d(128, c, 1), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *rest = self.into(x).chunk(self.scale, dim=1)
        done = [first]
        for n, (part, layer) in enumerate(zip(rest, self.parts, strict=True)):
            done.append(layer(part + done[-1] if n else part))
        y = self.out(torch.cat(done, 1))
        return x + y * self.weights(y)


class _Ecapa(nn.Module):
    def __init__(self, c: int = 512, last: int = 1536) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv1d(80, c, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(c))
        self.blocks = nn.ModuleList(_Speaker(c, dilation) for dilation in (2, 3, 4))
        self.together = nn.Sequential(nn.Conv1d(3 * c, last, 1), nn.ReLU())
        self.attention = nn.Sequential(nn.Conv1d(3 * last, 128, 1), nn.Tanh(), nn.Conv1d(128, last, 1), nn.Softmax(-1))
        self.out = nn.Sequential(nn.BatchNorm1d(2 * last), nn.Linear(2 * last, 192))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, found = self.into(x), []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        x = self.together(torch.cat(found, 1))
        mean, spread = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True) + 1e-5).sqrt()
        weights = self.attention(torch.cat([x, mean.expand_as(x), spread.expand_as(x)], 1))
        mean = (x * weights).sum(-1)
        return self.out(torch.cat([mean, ((x * x * weights).sum(-1) - mean * mean).clamp(min=1e-5).sqrt()], 1))


@maker
def ecapa() -> Example:
    """Who speaks: the embedding of two seconds, 200 frames of 80 mel bins."""
    return _Ecapa(), {"x": torch.randn(1, 80, 200)}


class _Voice(nn.Module):
    """A layer of FastSpeech 2: attention, then convolutions over nine frames."""

    def __init__(self, c: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads, self.into, self.out = heads, nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.frames = nn.Sequential(nn.Conv1d(c, inner, 9, padding=4), nn.ReLU(), nn.Conv1d(inner, c, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(c) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, frames, c = x.shape
        query, key, value = (y.view(n, frames, self.heads, -1).transpose(1, 2) for y in self.into(x).chunk(3, dim=-1))
        scores = (query @ key.transpose(2, 3) * (c // self.heads) ** -0.5).softmax(-1)
        x = self.norms[0](x + self.out((scores @ value).transpose(1, 2).reshape(x.shape)))
        return self.norms[1](x + self.frames(x.transpose(1, 2)).transpose(1, 2))


class _Mel(nn.Module):
    def __init__(self, c: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_Voice(c, 2, 4 * c) for _ in range(layers)))
        self.mel, post = nn.Linear(c, 80), [80, *[512] * 4, 80]
        self.post = nn.Sequential(
            *itertools.chain.from_iterable(
                (nn.Conv1d(a, b, 5, padding=2), nn.BatchNorm1d(b), nn.Tanh()) for a, b in itertools.pairwise(post)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mel = self.mel(self.layers(x))
        return mel + self.post(mel.transpose(1, 2)).transpose(1, 2)


@maker
def fastspeech() -> Example:
    """FastSpeech 2's decoder and what sharpens its spectrogram: 200 frames."""
    return _Mel(), {"x": torch.randn(1, 200, 256)}


class _Listener(nn.Module):
    """One token of Whisper-tiny's decoder: attention to 64 tokens before, and to 1,500 frames of sound."""

    def __init__(self, c: int = 384, heads: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.heads, linear = heads, nn.Linear
        self.into, self.asks = (nn.ModuleList(linear(c, k * c) for _ in range(layers)) for k in (3, 1))
        self.out, self.heard = (nn.ModuleList(linear(c, c) for _ in range(layers)) for _ in range(2))
        self.inner = nn.ModuleList(nn.Sequential(linear(c, 4 * c), nn.GELU(), linear(4 * c, c)) for _ in range(layers))
        self.norms, self.tokens = nn.ModuleList(nn.LayerNorm(c) for _ in range(3 * layers + 1)), linear(c, 8192)

    def attended(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        scores = (query.view(1, self.heads, 1, -1) @ keys.transpose(2, 3) * keys.shape[-1] ** -0.5).softmax(-1)
        return (scores @ values).reshape(1, 1, -1)

    def forward(self, x: torch.Tensor, past: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
        """`x`: [1, 1, c]; `past`, `sound`: [layers, 2, 1, heads, tokens or frames, c / heads]."""
        for n, inner in enumerate(self.inner):
            query, key, value = self.into[n](self.norms[3 * n](x)).view(1, 1, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            keys, values = torch.cat([past[n, 0], key], 2), torch.cat([past[n, 1], value], 2)
            x = x + self.out[n](self.attended(query, keys, values))
            x = x + self.heard[n](self.attended(self.asks[n](self.norms[3 * n + 1](x)), sound[n, 0], sound[n, 1]))
            x = x + inner(self.norms[3 * n + 2](x))
        return self.tokens(self.norms[-1](x))


@maker
def whisper_step() -> Example:
    """The 65th token of speech to text."""
    past, sound = torch.randn(4, 2, 1, 6, 64, 64), torch.randn(4, 2, 1, 6, 1500, 64)
    return _Listener(), {"x": torch.randn(1, 1, 384), "past": past, "sound": sound}


class _Modulated(nn.Module):
    """A convolution of StyleGAN2, whose weights depend on a style, and are of length one again for each channel."""

    def __init__(self, c_in: int, c_out: int, style: int, kernel: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c_out, c_in, kernel, kernel) / (c_in * kernel * kernel) ** 0.5)
        self.style, self.bias, self.kernel = nn.Linear(style, c_in), nn.Parameter(torch.zeros(c_out, 1, 1)), kernel
        self.is_last = kernel == 1

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        weight = self.weight * (1 + self.style(style)).view(1, -1, 1, 1)
        if not self.is_last:
            weight = weight * (weight.square().sum((1, 2, 3), keepdim=True) + 1e-8).rsqrt()
        y = functional.conv2d(x, weight, padding=self.kernel // 2) + self.bias
        return y if self.is_last else functional.leaky_relu(y, 0.2) * 2**0.5


class _StyleGan(nn.Module):
    def __init__(self, style: int = 256, widths: tuple[int, ...] = (256, 256, 256, 128, 64)) -> None:
        super().__init__()
        self.mapped = nn.Sequential(*(nn.Sequential(nn.Linear(style, style), nn.LeakyReLU(0.2)) for _ in range(4)))
        self.first = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        pairs = list(itertools.pairwise((widths[0], *widths)))
        self.one = nn.ModuleList(_Modulated(a, b, style) for a, b in pairs)
        self.two = nn.ModuleList(_Modulated(b, b, style) for _, b in pairs)
        self.colours = nn.ModuleList(_Modulated(b, 3, style, 1) for _, b in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        style = self.mapped(x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt())
        y, picture = self.first, None
        for n, (one, two, colour) in enumerate(zip(self.one, self.two, self.colours, strict=True)):
            y = two(one(resized(y, scale_factor=2) if n else y, style), style)
            seen = colour(y, style)
            picture = seen if picture is None else seen + resized(picture, scale_factor=2)
        return picture


@maker
def stylegan() -> Example:
    """A picture of 64x64 from 256 numbers."""
    return _StyleGan(), {"x": torch.randn(1, 256)}


class _Neighbours(nn.Module):
    """DGCNN: edges to the twenty points that are nearest, of places first and of features then."""

    def __init__(self, k: int = 20, widths: tuple[int, ...] = (3, 64, 64, 128)) -> None:
        super().__init__()
        self.k, pairs = k, list(itertools.pairwise(widths))
        self.edges = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2 * a, b, 1, bias=False), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in pairs
        )
        self.together = nn.Sequential(nn.Conv1d(sum(widths[1:]), 512, 1, bias=False), nn.BatchNorm1d(512))
        self.out = nn.Sequential(nn.Linear(1024, 256), nn.BatchNorm1d(256), nn.LeakyReLU(0.2), nn.Linear(256, 40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [n, 3, points]."""
        found = []
        for edge in self.edges:
            n, c, points = x.shape
            squares = x.square().sum(1, keepdim=True)
            near = (2 * x.transpose(1, 2) @ x - squares - squares.transpose(1, 2)).topk(self.k).indices
            there = x.transpose(1, 2).reshape(n * points, c)
            base = torch.arange(n).view(n, 1, 1) * points
            there = there[(near + base).flatten()].view(n, points, self.k, c)
            here = x.transpose(1, 2)[:, :, None].expand(n, points, self.k, c)
            x = edge(torch.cat([there - here, here], -1).permute(0, 3, 1, 2)).max(-1).values
            found.append(x)
        x = functional.leaky_relu(self.together(torch.cat(found, 1)), 0.2)
        return self.out(torch.cat([x.amax(-1), x.mean(-1)], 1))


@maker
def dgcnn() -> Example:
    """Forty kinds of things, 512 points."""
    return Positional(_Neighbours()), {"x": torch.randn(1, 3, 512)}


class _Graph(nn.Module):
    """GAT with a dense matrix of edges: two layers, eight heads."""

    def __init__(self, c_in: int = 256, c: int = 16, heads: int = 8, classes: int = 7) -> None:
        super().__init__()
        self.into = nn.ModuleList([nn.Linear(c_in, heads * c), nn.Linear(heads * c, heads * classes)])
        self.ends = nn.ParameterList(torch.randn(2, heads, k) * k**-0.5 for k in (c, classes))
        self.heads = heads

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """`x`: [nodes, c_in]; `edges`: [nodes, nodes], 0 where there is none."""
        hidden = torch.where(edges > 0, 0.0, -1e9)[:, :, None]
        for n, (into, ends) in enumerate(zip(self.into, self.ends, strict=True)):
            y = into(x).view(x.shape[0], self.heads, -1)
            scores = (y * ends[0]).sum(-1)[:, None] + (y * ends[1]).sum(-1)[None]
            weights = (functional.leaky_relu(scores, 0.2) + hidden).softmax(1)
            y = torch.einsum("ijh,jhc->ihc", weights, y)
            x = y.mean(1) if n else functional.elu(y.flatten(1))
        return x


@maker
def gat() -> Example:
    """Seven kinds of 512 nodes."""
    return _Graph(), {"x": torch.randn(512, 256), "edges": (torch.rand(512, 512) < 0.05).float()}


class _Forecast(nn.Module):
    """PatchTST: patches of each series are tokens of one encoder."""

    def __init__(self, c: int = 128, heads: int = 16, layers: int = 3, patches: int = 42, ahead: int = 96) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(c, heads, 2 * c, activation="gelu", batch_first=True)
        self.into, self.place = nn.Linear(16, c), nn.Parameter(torch.randn(patches, c) * 0.02)
        self.layers, self.out = nn.TransformerEncoder(layer, layers), nn.Linear(patches * c, ahead)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: [1, steps, series]."""
        mean, spread = x.mean(1, keepdim=True), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
        y = ((x - mean) / spread)[0].t()
        y = torch.cat([y, y[:, -1:].expand(-1, 8)], 1).unfold(1, 16, 8)
        y = self.out(self.layers(self.into(y) + self.place).flatten(1))
        return y.t()[None] * spread + mean


@maker
def patchtst() -> Example:
    """The next 96 of 336 steps, seven series."""
    return _Forecast(), {"x": torch.randn(1, 336, 7).cumsum(1)}


class _Interest(nn.Module):
    """DIN: what was bought is weighted by how it goes with what is offered; 64 offers, 50 things bought."""

    def __init__(self, c: int = 64, things: int = 10_000) -> None:
        super().__init__()
        self.things = nn.Embedding(things, c)
        self.weights = nn.Sequential(
            nn.Linear(4 * c, 80), nn.Sigmoid(), nn.Linear(80, 40), nn.Sigmoid(), nn.Linear(40, 1)
        )
        self.out = nn.Sequential(
            nn.Linear(3 * c, 200), nn.PReLU(200), nn.Linear(200, 80), nn.PReLU(80), nn.Linear(80, 1), nn.Sigmoid()
        )

    def forward(self, offered: torch.Tensor, bought: torch.Tensor) -> torch.Tensor:
        offer, past = self.things(offered)[:, None].expand(-1, bought.shape[1], -1), self.things(bought)
        weights = self.weights(torch.cat([offer, past, offer - past, offer * past], -1))
        interest = (weights * past).sum(1)
        return self.out(torch.cat([interest, offer[:, 0], interest * offer[:, 0]], 1))


@maker
def din() -> Example:
    """Which of 64 offers is taken."""
    return _Interest(), {"offered": torch.randint(10_000, (64,)), "bought": torch.randint(10_000, (64, 50))}


class _Rays(nn.Module):
    """NeRF: colours and densities of points, whose places and directions are sines."""

    def __init__(self, c: int = 256) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(63, c), nn.ReLU(), *self.layers(c, 3))
        self.second = nn.Sequential(nn.Linear(c + 63, c), nn.ReLU(), *self.layers(c, 3))
        self.density, self.seen = nn.Linear(c, 1), nn.Linear(c, c)
        self.colour = nn.Sequential(nn.Linear(c + 27, c // 2), nn.ReLU(), nn.Linear(c // 2, 3), nn.Sigmoid())

    @staticmethod
    def layers(c: int, n: int) -> list[nn.Module]:
        return [layer for _ in range(n) for layer in (nn.Linear(c, c), nn.ReLU())]

    @staticmethod
    def sines(x: torch.Tensor, n: int) -> torch.Tensor:
        waves = [f(x * 2.0**k) for k in range(n) for f in (torch.sin, torch.cos)]
        return torch.cat([x, *waves], -1)

    def forward(self, place: torch.Tensor, direction: torch.Tensor) -> torch.Tensor:
        place = self.sines(place, 10)
        y = self.second(torch.cat([self.first(place), place], -1))
        return torch.cat([self.colour(torch.cat([self.seen(y), self.sines(direction, 4)], -1)), self.density(y)], -1)


@maker
def nerf() -> Example:
    """2,048 points of rays."""
    return _Rays(), {"place": torch.randn(2048, 3), "direction": functional.normalize(torch.randn(2048, 3), dim=-1)}


class _LargeWindow(nn.Module):
    """A block of RepLKNet's, as deployed: one depthwise convolution of 31x31, or less, between two of 1x1."""

    def __init__(self, c: int, kernel: int) -> None:
        super().__init__()
        self.window = nn.Sequential(
            nn.BatchNorm2d(c),
            nn.Conv2d(c, c, 1),
            nn.ReLU(),
            same(c, c, kernel, groups=c),
            nn.ReLU(),
            nn.Conv2d(c, c, 1),
        )
        self.inner = nn.Sequential(nn.BatchNorm2d(c), nn.Conv2d(c, 4 * c, 1), nn.GELU(), nn.Conv2d(4 * c, c, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.window(x)
        return x + self.inner(x)


@maker
def replknet() -> Example:
    """RepLKNet of a quarter of the base's width and fewer blocks, 1,000 classes."""
    layers: list[nn.Module] = [normed(3, 32, 3, 2), normed(32, 32, groups=32), normed(32, 32, 1)]
    layers.append(normed(32, 32, 3, 2, groups=32))
    for n, (kernel, blocks) in enumerate(((31, 2), (29, 2), (27, 4), (13, 2))):
        c = 32 << n
        layers += [_LargeWindow(c, kernel) for _ in range(blocks)]
        if n < 3:
            layers += [normed(c, 2 * c, 1), normed(2 * c, 2 * c, 3, 2, groups=2 * c)]
    head = [nn.BatchNorm2d(256), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 3, 224, 224)}


@maker
def videomae() -> Example:
    """A quarter of the layers of a small VideoMAE: 1,568 tokens of sixteen frames."""
    config = hf.VideoMAEConfig(hidden_size=384, num_hidden_layers=3, num_attention_heads=6, intermediate_size=1536)
    config._attn_implementation = "eager"
    return FirstOutput(hf.VideoMAEModel(config)), {"pixel_values": torch.randn(1, 16, 3, 224, 224)}


@maker
def yamnet() -> Example:
    """Sounds of a second: a MobileNet of 96 frames of 64 mel bins."""
    layers: list[nn.Module] = [normed(1, 32, 3, 2, bias=False)]
    steps = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
    for (a, _), (b, stride) in itertools.pairwise(((32, 1), *steps)):
        layers += [normed(a, a, 3, stride, groups=a, bias=False), normed(a, b, 1, bias=False)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 521), nn.Sigmoid()]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 1, 96, 64)}


@maker
def keywords() -> Example:
    """DS-CNN: twelve words, 49 frames of ten coefficients."""
    layers: list[nn.Module] = [nn.Conv2d(1, 64, (10, 4), 2, (5, 1), bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for _ in range(4):
        layers += [normed(64, 64, groups=64, bias=False), normed(64, 64, 1, bias=False)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 12)]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 1, 49, 10)}
