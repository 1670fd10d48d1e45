"""Networks whose kernels are long along one axis: voices, hearts, genomes, series, robots, films, roads.

Imported, they join the table of `architectures.py`, as those of `domains.py` do. Written after `lib.graph.winograd_1d`
and before it was tried on them; nothing in it is made for them.
"""

import itertools
from collections.abc import Sequence

import torch
from architectures import Example, maker
from torch import nn
from torch.nn import functional
from wall_models import Positional


def along(c_in: int, c_out: int, taps: int, distance: int = 1, stride: int = 1) -> nn.Conv1d:
    """A convolution of a signal that keeps its length, but for a stride."""
    return nn.Conv1d(c_in, c_out, taps, stride, (taps - 1) * distance // 2, distance)


class _Gated(nn.Module):
    """WaveNet's layers: a gate of a tanh and a sigmoid, what goes on, and what is summed."""

    def __init__(self, width: int, taps: int, distances: Sequence[int]) -> None:
        super().__init__()
        self.into = nn.ModuleList(along(width, 2 * width, taps, n) for n in distances)
        self.out = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in distances)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for into, out in zip(self.into, self.out, strict=True):
            a, b = into(x).chunk(2, 1)
            on, summed = out(torch.tanh(a) * torch.sigmoid(b)).chunk(2, 1)
            x, total = (x + on) * 0.5**0.5, total + summed
        return total


class _Residual(nn.Module):
    """HiFi-GAN's first kind of block."""

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.first = nn.ModuleList(along(width, width, taps, n) for n in (1, 3, 5))
        self.second = nn.ModuleList(along(width, width, taps) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(functional.leaky_relu(first(functional.leaky_relu(x, 0.1)), 0.1))
        return x


class _Voice(nn.Module):
    """VITS from the latent sequence on, in Piper's medium size: flows, backwards, and the decoder."""

    def __init__(self, width: int = 192, channels: int = 256) -> None:
        super().__init__()
        self.before = nn.ModuleList(nn.Conv1d(width // 2, width, 1) for _ in range(4))
        self.flows = nn.ModuleList(_Gated(width, 5, [1] * 4) for _ in range(4))
        self.after = nn.ModuleList(nn.Conv1d(width, width // 2, 1) for _ in range(4))
        self.first = along(width, channels, 7)
        self.up, self.blocks = nn.ModuleList(), nn.ModuleList()
        for n, rate in enumerate((8, 8, 4)):
            c = channels >> n
            self.up.append(nn.ConvTranspose1d(c, c // 2, 2 * rate, rate, rate // 2))
            self.blocks.append(nn.ModuleList(_Residual(c // 2, taps) for taps in (3, 5, 7)))
        self.last = along(channels >> 3, 1, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for before, flow, after in zip(self.before, self.flows, self.after, strict=True):
            kept, moved = x.flip(1).chunk(2, 1)
            x = torch.cat([kept, moved - after(flow(before(kept)))], 1)
        x = self.first(x)
        for up, blocks in zip(self.up, self.blocks, strict=True):
            x = up(functional.leaky_relu(x, 0.1))
            x = sum(block(x) for block in blocks) / len(blocks)
        return torch.tanh(self.last(functional.leaky_relu(x)))


@maker
def vits() -> Example:
    """64 frames, 16,384 samples: 0.7 s."""
    return Positional(_Voice()), {"x": torch.randn(1, 192, 64)}


class _Vocoder(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.stack = nn.Conv1d(81, width, 1), _Gated(width, 3, [1 << n % 10 for n in range(30)])
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.stack(self.first(x)))


@maker
def wavenet() -> Example:
    """Parallel WaveGAN's generator: noise and 80 mel bins at each of 6,144 samples, distances up to 512."""
    return Positional(_Vocoder()), {"x": torch.randn(1, 81, 6144)}


class _Read(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        layers = ((along(width, width, 5), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(3))
        self.convs = nn.Sequential(*itertools.chain.from_iterable(layers))
        self.steps = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps(self.convs(x).mT)[0]


@maker
def tacotron() -> Example:
    """Tacotron 2's encoder after its table of letters, 120 of them."""
    return Positional(_Read()), {"x": torch.randn(1, 512, 120)}


class _Beat(nn.Module):
    """A residual block of a network for ECGs (Ribeiro et al. 2020): kernels of 17, a quarter of the samples."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        act = nn.ReLU()
        self.long = nn.Sequential(
            along(c_in, c_out, 17), nn.BatchNorm1d(c_out), act, along(c_out, c_out, 17, stride=4), nn.BatchNorm1d(c_out)
        )
        self.short = nn.Sequential(nn.MaxPool1d(4), nn.Conv1d(c_in, c_out, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.long(x) + self.short(x))


@maker
def ecg() -> Example:
    """Six kinds of rhythm in 12 leads of 4,096 samples."""
    widths = (64, 128, 196, 256, 320)
    blocks = [_Beat(a, b) for a, b in itertools.pairwise(widths)]
    head = [nn.Flatten(), nn.Linear(320 * 16, 6), nn.Sigmoid()]
    return Positional(nn.Sequential(along(12, 64, 17), nn.BatchNorm1d(64), nn.ReLU(), *blocks, *head)), {
        "x": torch.randn(1, 12, 4096)
    }


def _apart(c_in: int, c_out: int, stride: int = 1) -> nn.Sequential:
    """An image's convolution, then one over frames, with as many parameters as both at once (R(2+1)D)."""
    middle = c_in * c_out * 27 // (c_in * 9 + c_out * 3) // 8 * 8
    return nn.Sequential(
        nn.Conv3d(c_in, middle, (1, 3, 3), (1, stride, stride), (0, 1, 1), bias=False), nn.BatchNorm3d(middle),
        nn.ReLU(), nn.Conv3d(middle, c_out, (3, 1, 1), (stride, 1, 1), (1, 0, 0), bias=False), nn.BatchNorm3d(c_out),
    )  # fmt: skip


class _Film(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.long = nn.Sequential(_apart(c_in, c_out, stride), nn.ReLU(), _apart(c_out, c_out))
        short = nn.Sequential(nn.Conv3d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm3d(c_out))
        self.short = short if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.long(x) + self.short(x))


@maker
def r2plus1d() -> Example:
    """R(2+1)D of 18 layers, 8 frames of 112x112."""
    stages = [_Film(a, b, s) for a, b, s in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2))]
    more = [_Film(c, c, 1) for c in (64, 128, 256, 512)]
    body = itertools.chain.from_iterable(zip(stages, more, strict=True))
    stem = (
        nn.Conv3d(3, 48, (1, 7, 7), (1, 2, 2), (0, 3, 3)),
        nn.BatchNorm3d(48),
        nn.ReLU(),
        nn.Conv3d(48, 64, (3, 1, 1), 1, (1, 0, 0)),
    )
    head = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 400))
    return Positional(nn.Sequential(*stem, nn.ReLU(), *body, *head)), {"x": torch.randn(1, 3, 8, 112, 112)}


@maker
def quartznet() -> Example:
    """QuartzNet's separable convolutions of 33 to 75 frames, five blocks of two; 256 frames of 64 mel bins."""
    layers: list[nn.Module] = []
    widths, taps = (64, 256, 256, 256, 512, 512, 512), (33, 33, 39, 51, 63, 75)
    for (a, b), n in zip(itertools.pairwise(widths), taps, strict=True):
        for c in (a, b):
            layers += [nn.Conv1d(c, c, n, padding=n // 2, groups=c), nn.Conv1d(c, b, 1), nn.BatchNorm1d(b), nn.ReLU()]
    return Positional(nn.Sequential(*layers, nn.Conv1d(512, 29, 1), nn.LogSoftmax(1))), {"x": torch.randn(1, 64, 256)}


class _Wide(nn.Module):
    """A dilated residual block of Basenji, for genomes."""

    def __init__(self, width: int, distance: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.GELU(), along(width, width // 2, 3, distance), nn.BatchNorm1d(width // 2),
            nn.GELU(), nn.Conv1d(width // 2, width, 1), nn.BatchNorm1d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


@maker
def genome() -> Example:
    """Basenji's tower and dilated blocks, 16,384 bases."""
    layers: list[nn.Module] = [along(4, 96, 15), nn.BatchNorm1d(96), nn.GELU(), nn.MaxPool1d(2)]
    for a, b in itertools.pairwise((96, 112, 128, 160, 192, 224, 256)):
        layers += [along(a, b, 5), nn.BatchNorm1d(b), nn.GELU(), nn.MaxPool1d(2)]
    layers += [_Wide(256, round(1.5**n)) for n in range(8)]
    return Positional(nn.Sequential(*layers, nn.GELU(), nn.Conv1d(256, 64, 1), nn.Softplus())), {
        "x": torch.randn(1, 4, 16384)
    }


class _Scales(nn.Module):
    """InceptionTime: kernels of 39, 19 and 9 beside one another."""

    def __init__(self, c_in: int, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Conv1d(c_in, width, 1, bias=False)
        self.long = nn.ModuleList(along(width, width, n) for n in (39, 19, 9))
        self.pooled = nn.Sequential(nn.MaxPool1d(3, 1, 1), nn.Conv1d(c_in, width, 1, bias=False))
        self.norm = nn.BatchNorm1d(4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        return functional.relu(self.norm(torch.cat([*(conv(first) for conv in self.long), self.pooled(x)], 1)))


@maker
def inception_time() -> Example:
    """Six blocks, ten classes of series of 9 sensors and 1,024 steps."""
    blocks = [_Scales(c) for c in (9, *[128] * 5)]
    return Positional(nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 10))), {
        "x": torch.randn(1, 9, 1024)
    }


class _Acting(nn.Module):
    """A residual block of a diffusion policy: what is known scales and moves channels between two convolutions."""

    def __init__(self, c_in: int, c_out: int, known: int) -> None:
        super().__init__()
        self.first = nn.Sequential(along(c_in, c_out, 5), nn.GroupNorm(8, c_out), nn.Mish())
        self.second = nn.Sequential(along(c_out, c_out, 5), nn.GroupNorm(8, c_out), nn.Mish())
        self.moved, self.short = nn.Sequential(nn.Mish(), nn.Linear(known, 2 * c_out)), nn.Conv1d(c_in, c_out, 1)

    def forward(self, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        scale, shift = self.moved(known)[..., None].chunk(2, 1)
        return self.second(self.first(x) * scale + shift) + self.short(x)


class _Policy(nn.Module):
    def __init__(self, widths: Sequence[int] = (256, 512, 1024), known: int = 388) -> None:
        super().__init__()
        pairs = list(itertools.pairwise((7, *widths)))
        self.down = nn.ModuleList(_Acting(a, b, known) for a, b in pairs)
        self.fewer = nn.ModuleList(nn.Conv1d(c, c, 3, 2, 1) for c in widths[:-1])
        self.middle = _Acting(widths[-1], widths[-1], known)
        self.more = nn.ModuleList(nn.ConvTranspose1d(b, a, 4, 2, 1) for a, b in pairs[:0:-1])
        self.up = nn.ModuleList(_Acting(2 * a, a, known) for a, _ in pairs[:0:-1])
        self.last = nn.Conv1d(widths[0], 7, 1)

    def forward(self, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        kept = []
        for n, down in enumerate(self.down):
            x = down(x, known)
            if n < len(self.fewer):
                kept.append(x)
                x = self.fewer[n](x)
        x = self.middle(x, known)
        for more, up, beside in zip(self.more, self.up, kept[::-1], strict=True):
            x = up(torch.cat([more(x), beside], 1), known)
        return self.last(x)


@maker
def policy() -> Example:
    """A step of a robot's diffusion policy: 16 actions of 7 joints, and what cameras and steps say."""
    return _Policy(), {"x": torch.randn(1, 7, 16), "known": torch.randn(1, 388)}


class _Crossed(nn.Module):
    """ERFNet's block: kernels of 3x1 and 1x3 in turn, the second pair with a distance."""

    def __init__(self, width: int, distance: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*itertools.chain.from_iterable(
            (nn.Conv2d(width, width, (3, 1), padding=(n, 0), dilation=(n, 1)), nn.ReLU(),
             nn.Conv2d(width, width, (1, 3), padding=(0, n), dilation=(1, n)), nn.BatchNorm2d(width),
             *((nn.ReLU(),) if n == 1 else ()))
            for n in (1, distance)
        ))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.layers(x))


class _Fewer(nn.Module):
    """Half the lines and columns: a convolution beside the largest of four pixels."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c_in, c_out - c_in, 3, 2, 1), nn.BatchNorm2d(c_out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.norm(torch.cat([self.conv(x), functional.max_pool2d(x, 2)], 1)))


@maker
def erfnet() -> Example:
    """Twenty classes of what is on a road, 256x512."""
    distant = [_Crossed(128, n) for n in (2, 4, 8, 16) * 2]
    up = [nn.ConvTranspose2d(128, 64, 3, 2, 1, 1), nn.ReLU(), _Crossed(64, 1), _Crossed(64, 1),
          nn.ConvTranspose2d(64, 16, 3, 2, 1, 1), nn.ReLU(), _Crossed(16, 1), _Crossed(16, 1)]  # fmt: skip
    near = [_Crossed(64, 1) for _ in range(5)]
    layers = [_Fewer(3, 16), _Fewer(16, 64), *near, _Fewer(64, 128), *distant, *up, nn.ConvTranspose2d(16, 20, 2, 2)]
    return Positional(nn.Sequential(*layers)), {"x": torch.randn(1, 3, 256, 512)}
