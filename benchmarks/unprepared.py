"""Models for which nothing was prepared: of timm, of transformers, and small ones after their papers.

Imported, they join the table of `architectures.py`, for the same care for their weights. Each is a kind of network that
people deploy: what a tuner does with them as they come is what a user's model meets.
"""

import itertools
from functools import partial

import torch
import transformers as hf
from architectures import MAKERS, Example, FirstOutput, image, maker, tokens
from torch import nn
from torch.nn import functional
from wall_models import Positional, timm_model

# timm's name and pixels of a side.
_TIMM: dict[str, tuple[str, int]] = {
    "mobilenet_v3": ("mobilenetv3_large_100", 224),
    "mobilenetv4": ("mobilenetv4_conv_medium", 256),
    "mobileone": ("mobileone_s1", 224),
    "mnasnet": ("mnasnet_100", 224),
    "ghostnet": ("ghostnet_100", 224),
    "efficientnetv2": ("efficientnetv2_rw_t", 224),
    "resnext50": ("resnext50_32x4d", 224),
    "res2net": ("res2net50_26w_4s", 224),
    "resnest": ("resnest26d", 224),
    "repvgg": ("repvgg_a0", 224),
    "densenet": ("densenet121", 224),
    "inception_v3": ("inception_v3", 299),
    "dla": ("dla34", 224),
    "nfnet": ("eca_nfnet_l0", 224),
    "hrnet": ("hrnet_w18_small", 224),
    "convmixer": ("convmixer_768_32", 224),
    "convnextv2": ("convnextv2_nano", 224),
    "inception_next": ("inception_next_tiny", 224),
    "mixer_s16": ("mixer_s16_224", 224),
    "poolformer": ("poolformer_s12", 224),
    "levit": ("levit_192", 224),
    "edgenext": ("edgenext_small", 256),
    "fastvit": ("fastvit_t8", 256),
    "efficientvit": ("efficientvit_b1", 224),
    "efficientformer": ("efficientformer_l1", 224),
    "swinv2": ("swinv2_tiny_window8_256", 256),
    "maxvit": ("maxvit_tiny_rw_224", 224),
    "coatnet": ("coatnet_0_rw_224", 224),
    "xcit": ("xcit_tiny_12_p16_224", 224),
    "pvt_v2": ("pvt_v2_b1", 224),
    "focalnet": ("focalnet_tiny_srf", 224),
    "tiny_vit": ("tiny_vit_5m_224", 224),
    "davit": ("davit_tiny", 224),
    "gcvit": ("gcvit_xxtiny", 224),
    "mvitv2": ("mvitv2_tiny", 224),
    "twins": ("twins_svt_small", 224),
    "hiera": ("hiera_tiny_224", 224),
    "volo": ("volo_d1_224", 224),
    "sequencer": ("sequencer2d_s", 224),
    "crossvit": ("crossvit_tiny_240", 240),
    "cait": ("cait_xxs24_224", 224),
    "nextvit": ("nextvit_small", 224),
    "repvit": ("repvit_m1_0", 224),
    "mambaout": ("mambaout_tiny", 224),
    "starnet": ("starnet_s1", 224),
    "hgnetv2": ("hgnetv2_b1", 224),
    "tresnet": ("tresnet_m", 224),
    "mixnet": ("mixnet_s", 224),
    "xception": ("xception41", 299),
    "rexnet": ("rexnet_100", 224),
    "sknet": ("skresnet18", 224),
    "dpn": ("dpn68", 224),
    "cspdarknet": ("cspdarknet53", 256),
    "botnet": ("botnet26t_256", 256),
    "halonet": ("halonet26t", 256),
    "gmlp": ("gmlp_s16_224", 224),
    "samvit": ("samvit_base_patch16_224", 224),
    "coat": ("coat_tiny", 224),
    "csatv2": ("csatv2", 512),
    "inception_next_atto": ("inception_next_atto", 224),
    "nest": ("jx_nest_tiny", 224),
    "swiftformer": ("swiftformer_xs", 224),
    "vit_s8": ("vit_small_patch8_224", 224),
    # Images as large as detectors and segmentation have them: what is between the steps of a convolution leaves caches.
    "resnet18_wide": ("resnet18", 640),
    "repvgg_wide": ("repvgg_a0", 512),
    "hrnet_wide": ("hrnet_w18_small", 512),
    "dla_wide": ("dla34", 448),
    "cspdarknet_wide": ("cspdarknet53", 512),
}


def _timm(name: str, size: int) -> Example:
    return timm_model(name, exportable=True), {"x": torch.randn(1, 3, size, size)}


MAKERS.update({name: partial(_timm, *source) for name, source in _TIMM.items()})


@maker
def wav2vec2() -> Example:
    """A second of sound at 16 kHz, six layers."""
    return FirstOutput(hf.Wav2Vec2Model(hf.Wav2Vec2Config(num_hidden_layers=6))), {
        "input_values": torch.randn(1, 16000)
    }


@maker
def gpt2_64() -> Example:
    return FirstOutput(hf.GPT2Model(hf.GPT2Config(use_cache=False))), {"input_ids": tokens(5000)["input_ids"][:, :64]}


@maker
def clip_vision() -> Example:
    """CLIP's image encoder, 50 tokens."""
    return FirstOutput(hf.CLIPVisionModel(hf.CLIPVisionConfig())), image()


@maker
def mobilevit() -> Example:
    return FirstOutput(hf.MobileViTModel(hf.MobileViTConfig())), image(256)


class _Step(nn.Module):
    """One token of a decoder, beside the keys and values of those before it."""

    def __init__(self, width: int, heads: int, layers: int, inner: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        linear = partial(nn.Linear, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers + 1))
        self.into = nn.ModuleList(linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(linear(width, width) for _ in range(layers))
        self.gates = nn.ModuleList(linear(width, 2 * inner) for _ in range(layers))
        self.down = nn.ModuleList(linear(inner, width) for _ in range(layers))
        self.logits = linear(width, 4096)

    def forward(self, x: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """`x`: [1, 1, width]; `past`: [layers, 2, 1, heads, tokens, width / heads]."""
        for layer, (into, out, gates, down) in enumerate(zip(self.into, self.out, self.gates, self.down, strict=True)):
            query, key, value = (
                part.view(1, 1, self.heads, -1).transpose(1, 2)
                for part in into(self.norms[2 * layer](x)).chunk(3, dim=-1)
            )
            keys, values = torch.cat([past[layer, 0], key], 2), torch.cat([past[layer, 1], value], 2)
            scores = torch.softmax(query @ keys.transpose(2, 3) / keys.shape[-1] ** 0.5, -1)
            x = x + out((scores @ values).transpose(1, 2).reshape(1, 1, self.width))
            gate, up = gates(self.norms[2 * layer + 1](x)).chunk(2, dim=-1)
            x = x + down(functional.silu(gate) * up)
        return self.logits(self.norms[-1](x))


@maker
def decoder_step() -> Example:
    """The 256th token of a Llama of eight layers: matrices times vectors."""
    return _Step(768, 12, 8, 2048), {"x": torch.randn(1, 1, 768), "past": torch.randn(8, 2, 1, 12, 255, 64)}


def _block(
    c_in: int, c_out: int, kernel: int = 3, stride: int = 1, activation: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(c_in, c_out, kernel, stride, (kernel - 1) // 2, bias=False),
        nn.BatchNorm2d(c_out),
        activation(),
    )


class _UNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        widths = [width << n for n in range(5)]
        self.down = nn.ModuleList(
            nn.Sequential(_block(c_in, c_out), _block(c_out, c_out))
            for c_in, c_out in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in reversed(widths[:-1]))
        self.merge = nn.ModuleList(nn.Sequential(_block(2 * c, c), _block(c, c)) for c in reversed(widths[:-1]))
        self.classes = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for down in self.down[:-1]:
            x = down(x)
            kept.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, merge, other in zip(self.up, self.merge, reversed(kept), strict=True):
            x = merge(torch.cat([up(x), other], 1))
        return self.classes(x)


@maker
def unet() -> Example:
    return _UNet(), {"x": torch.randn(1, 3, 192, 192)}


class _Dilated(nn.Module):
    """Conv-TasNet's mask of one source: dilated depthwise convolutions of a signal."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.bottleneck = nn.Conv1d(1, 256, 16, 8), nn.Conv1d(256, 128, 1)
        self.layers = nn.ModuleList(self._layer(2 ** (n % 8)) for n in range(16))
        self.mask, self.decoder = nn.Conv1d(128, 256, 1), nn.ConvTranspose1d(256, 1, 16, 8)

    @staticmethod
    def _layer(dilation: int) -> nn.Sequential:
        depthwise = nn.Conv1d(256, 256, 3, padding=dilation, dilation=dilation, groups=256)
        first = [nn.Conv1d(128, 256, 1), nn.PReLU(), nn.BatchNorm1d(256)]
        return nn.Sequential(*first, depthwise, nn.PReLU(), nn.BatchNorm1d(256), nn.Conv1d(256, 128, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sound = self.encoder(x)
        y = self.bottleneck(sound)
        for layer in self.layers:
            y = y + layer(y)
        return self.decoder(sound * torch.sigmoid(self.mask(y)))


@maker
def tcn() -> Example:
    """A second of sound at 8 kHz."""
    return _Dilated(), {"x": torch.randn(1, 1, 8000)}


class _Residual1d(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        same = partial(nn.Conv1d, width, width, kernel)
        self.dilated = nn.ModuleList(same(dilation=d, padding=(kernel - 1) * d // 2) for d in (1, 3, 5))
        self.plain = nn.ModuleList(same(padding=(kernel - 1) // 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            x = x + plain(functional.leaky_relu(dilated(functional.leaky_relu(x, 0.1)), 0.1))
        return x


class _Vocoder(nn.Module):
    """HiFi-GAN V2's generator."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        steps = [(width >> n, stride) for n, stride in enumerate((8, 8, 2, 2))]
        self.first, self.last = nn.Conv1d(80, width, 7, padding=3), nn.Conv1d(width >> 4, 1, 7, padding=3)
        self.up = nn.ModuleList(
            nn.ConvTranspose1d(c, c // 2, 2 * stride, stride, padding=stride // 2) for c, stride in steps
        )
        self.residual = nn.ModuleList(nn.ModuleList(_Residual1d(c // 2, k) for k in (3, 7, 11)) for c, _ in steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, residual in zip(self.up, self.residual, strict=True):
            x = up(functional.leaky_relu(x, 0.1))
            x = sum(each(x) for each in residual) / 3
        return torch.tanh(self.last(functional.leaky_relu(x)))


@maker
def hifigan() -> Example:
    """32 frames of 80 mel bins, 8,192 samples."""
    return _Vocoder(), {"x": torch.randn(1, 80, 32)}


@maker
def dcgan() -> Example:
    """A generator of images of 64 x 64 pixels."""
    layers: list[nn.Module] = []
    for n, (c_in, c_out) in enumerate(zip([100, 512, 256, 128], [512, 256, 128, 64], strict=True)):
        stride, padding = (2, 1) if n else (1, 0)
        layers += [nn.ConvTranspose2d(c_in, c_out, 4, stride, padding, bias=False), nn.BatchNorm2d(c_out), nn.ReLU()]
    return Positional(nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())), {
        "x": torch.randn(1, 100, 1, 1)
    }


class _Shuffled(nn.Module):
    """A unit of ShuffleNetV2."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        half, self.stride = c_out // 2, stride
        depthwise = partial(nn.Conv2d, kernel_size=3, stride=stride, padding=1, bias=False)
        into = c_in if stride > 1 else half
        self.right = nn.Sequential(
            _block(into, half, 1), depthwise(half, half, groups=half), nn.BatchNorm2d(half), _block(half, half, 1)
        )
        self.left = nn.Sequential(depthwise(c_in, c_in, groups=c_in), nn.BatchNorm2d(c_in), _block(c_in, half, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = (self.left(x), x) if self.stride > 1 else x.chunk(2, dim=1)
        return functional.channel_shuffle(torch.cat([left, self.right(right)], 1), 2)


@maker
def shufflenet_v2() -> Example:
    layers: list[nn.Module] = [_block(3, 24, stride=2), nn.MaxPool2d(3, 2, 1)]
    for c_in, c_out, repeats in ((24, 116, 4), (116, 232, 8), (232, 464, 4)):
        layers += [_Shuffled(c_in if not n else c_out, c_out, 1 if n else 2) for n in range(repeats)]
    head = [_block(464, 1024, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000)]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 3, 224, 224)}


class _Sum(nn.Module):
    """Two branches, added, and a ReLU if wanted."""

    def __init__(self, one: nn.Module, other: nn.Module, last: nn.Module | None = None) -> None:
        super().__init__()
        self.one, self.other, self.last = one, other, last or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.one(x) + self.other(x))


def _volumes(c_in: int, c_out: int, stride: int) -> nn.Module:
    conv = partial(nn.Conv3d, bias=False)
    body = nn.Sequential(
        conv(c_in, c_out, 3, stride, 1), nn.BatchNorm3d(c_out), nn.ReLU(),
        conv(c_out, c_out, 3, 1, 1), nn.BatchNorm3d(c_out),
    )  # fmt: skip
    same = stride == 1 and c_in == c_out
    return _Sum(
        body, nn.Identity() if same else nn.Sequential(conv(c_in, c_out, 1, stride), nn.BatchNorm3d(c_out)), nn.ReLU()
    )


@maker
def r3d_18() -> Example:
    """A ResNet-18 of volumes, eight frames."""
    layers: list[nn.Module] = [
        nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(64), nn.ReLU()
    ]  # fmt: skip
    for c_in, c_out in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [_volumes(c_in, c_out, 1 if c_in == c_out else 2), _volumes(c_out, c_out, 1)]
    head = [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(512, 400)]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 3, 8, 112, 112)}


class _Csp(nn.Module):
    """A stage of YOLO's: half of the channels through residual blocks, the other beside them."""

    def __init__(self, c_in: int, c_out: int, repeats: int, add: bool = True) -> None:
        super().__init__()
        half, silu = c_out // 2, partial(_block, activation=nn.SiLU)
        self.left, self.right, self.out = silu(c_in, half, 1), silu(c_in, half, 1), silu(c_out, c_out, 1)
        blocks = [nn.Sequential(silu(half, half, 1), silu(half, half)) for _ in range(repeats)]
        self.body = nn.Sequential(*(_Sum(block, nn.Identity()) if add else block for block in blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.body(self.left(x)), self.right(x)], 1))


class _Yolo(nn.Module):
    """YOLOv5's small network: what it sees at three sizes, boxes decoded."""

    def __init__(self, c: int = 32, classes: int = 80) -> None:
        super().__init__()
        silu = partial(_block, activation=nn.SiLU)
        self.stem = nn.Sequential(silu(3, c, 6, 2), silu(c, 2 * c, 3, 2), _Csp(2 * c, 2 * c, 1))
        self.d3 = nn.Sequential(silu(2 * c, 4 * c, 3, 2), _Csp(4 * c, 4 * c, 2))
        self.d4 = nn.Sequential(silu(4 * c, 8 * c, 3, 2), _Csp(8 * c, 8 * c, 3))
        self.d5 = nn.Sequential(silu(8 * c, 16 * c, 3, 2), _Csp(16 * c, 16 * c, 1))
        self.pooled, self.all = silu(16 * c, 8 * c, 1), silu(32 * c, 16 * c, 1)
        self.r5, self.u4 = silu(16 * c, 8 * c, 1), _Csp(16 * c, 8 * c, 1, add=False)
        self.r4, self.u3 = silu(8 * c, 4 * c, 1), _Csp(8 * c, 4 * c, 1, add=False)
        self.s3, self.p4 = silu(4 * c, 4 * c, 3, 2), _Csp(8 * c, 8 * c, 1, add=False)
        self.s4, self.p5 = silu(8 * c, 8 * c, 3, 2), _Csp(16 * c, 16 * c, 1, add=False)
        self.heads = nn.ModuleList(nn.Conv2d(n * c, 3 * (classes + 5), 1) for n in (4, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        three = self.d3(self.stem(x))
        four = self.d4(three)
        pools = [self.pooled(self.d5(four))]
        for _ in range(3):
            pools.append(functional.max_pool2d(pools[-1], 5, 1, 2))
        five = self.r5(self.all(torch.cat(pools, 1)))
        up = partial(functional.interpolate, scale_factor=2.0)
        wide = self.r4(self.u4(torch.cat([up(five), four], 1)))
        fine = self.u3(torch.cat([up(wide), three], 1))
        middle = self.p4(torch.cat([self.s3(fine), wide], 1))
        coarse = self.p5(torch.cat([self.s4(middle), five], 1))
        return torch.cat([self._boxes(head(y)) for head, y in zip(self.heads, (fine, middle, coarse), strict=True)], 1)

    @staticmethod
    def _boxes(y: torch.Tensor) -> torch.Tensor:
        """Centres and sizes in cells, and probabilities: [1, boxes, 5 + classes]."""
        height, width = y.shape[2:]
        y = torch.sigmoid(y.view(1, 3, -1, height, width).permute(0, 1, 3, 4, 2))
        rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        centre = y[..., :2] * 2 + torch.stack([columns, rows], -1) - 0.5
        return torch.cat([centre, (y[..., 2:4] * 2) ** 2, y[..., 4:]], -1).flatten(1, 3)


@maker
def yolo() -> Example:
    return _Yolo(), {"x": torch.randn(1, 3, 320, 320)}


@maker
def edsr() -> Example:
    """Super-resolution by two: sixteen residual blocks of 64 channels on 96 x 96, then pixels out of channels."""
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    blocks = [_Sum(nn.Sequential(conv(64, 64), nn.ReLU(), conv(64, 64)), nn.Identity()) for _ in range(16)]
    body = _Sum(nn.Sequential(*blocks, conv(64, 64)), nn.Identity())
    return Positional(nn.Sequential(conv(3, 64), body, conv(64, 256), nn.PixelShuffle(2), conv(64, 3))), {
        "x": torch.randn(1, 3, 96, 96)
    }


@maker
def style() -> Example:
    """Johnson's transformer of an image's style: reflected borders, instance norms, nearest neighbours."""

    def conv(c_in: int, c_out: int, kernel: int, stride: int = 1, last: bool = False) -> nn.Sequential:
        layers: list[nn.Module] = [nn.ReflectionPad2d(kernel // 2), nn.Conv2d(c_in, c_out, kernel, stride)]
        return nn.Sequential(*layers, nn.InstanceNorm2d(c_out, affine=True), *([] if last else [nn.ReLU()]))

    residual = [_Sum(nn.Sequential(conv(128, 128, 3), conv(128, 128, 3, last=True)), nn.Identity()) for _ in range(5)]
    up = [nn.Upsample(scale_factor=2), conv(128, 64, 3), nn.Upsample(scale_factor=2), conv(64, 32, 3)]
    first, last = (
        [conv(3, 32, 9), conv(32, 64, 3, 2), conv(64, 128, 3, 2)],
        [nn.ReflectionPad2d(4), nn.Conv2d(32, 3, 9)],
    )
    return Positional(nn.Sequential(*first, *residual, *up, *last)), {"x": torch.randn(1, 3, 128, 128)}


class _Attended(nn.Module):
    """One head of attention over the pixels of an image, after a group norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = (
            nn.GroupNorm(32, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(self.norm(x)).flatten(2).chunk(3, dim=1)
        weights = torch.softmax(query.transpose(1, 2) @ key / query.shape[1] ** 0.5, -1)
        return x + self.out((value @ weights.transpose(1, 2)).view_as(x))


@maker
def vae_decoder() -> Example:
    """The decoder of a diffusion model's images, 16 x 16 to 128 x 128, narrow."""

    def residual(c_in: int, c_out: int) -> nn.Module:
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        body = [nn.GroupNorm(32, c_in), nn.SiLU(), conv(c_in, c_out), nn.GroupNorm(32, c_out), nn.SiLU()]
        same = nn.Identity() if c_in == c_out else nn.Conv2d(c_in, c_out, 1)
        return _Sum(nn.Sequential(*body, conv(c_out, c_out)), same)

    layers: list[nn.Module] = [nn.Conv2d(4, 256, 3, padding=1), residual(256, 256), _Attended(256), residual(256, 256)]
    for c_in, c_out in ((256, 256), (256, 128), (128, 64)):
        layers += [residual(c_in, c_out), residual(c_out, c_out), nn.Upsample(scale_factor=2)]
        layers += [nn.Conv2d(c_out, c_out, 3, padding=1)]
    head = [nn.GroupNorm(32, 64), nn.SiLU(), nn.Conv2d(64, 3, 3, padding=1)]
    return Positional(nn.Sequential(*layers, *head)), {"x": torch.randn(1, 4, 16, 16)}


class _Crnn(nn.Module):
    """Lines of text: convolutions, then two LSTMs in both directions, classes of each column."""

    def __init__(self) -> None:
        super().__init__()
        pool, narrow = nn.MaxPool2d(2), nn.MaxPool2d((2, 1))
        self.image = nn.Sequential(
            _block(1, 64), pool, _block(64, 128), pool, _block(128, 256), _block(256, 256), narrow,
            _block(256, 512), _block(512, 512), narrow, nn.Conv2d(512, 512, (2, 1)), nn.ReLU(),
        )  # fmt: skip
        self.lines = nn.LSTM(512, 256, 2, bidirectional=True, batch_first=True)
        self.classes = nn.Linear(512, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classes(self.lines(self.image(x).squeeze(2).transpose(1, 2))[0])


@maker
def crnn() -> Example:
    return _Crnn(), {"x": torch.randn(1, 1, 32, 160)}


class _DeepSpeech(nn.Module):
    """Speech, after Deep Speech 2: two convolutions over spectra, three GRUs in both directions, letters."""

    def __init__(self) -> None:
        super().__init__()
        self.spectra = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), (2, 1), (10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.steps = nn.GRU(32 * 41, 512, 3, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(1024, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.letters(self.steps(self.spectra(x).flatten(1, 2).transpose(1, 2))[0])


@maker
def deepspeech() -> Example:
    """Four seconds: 200 steps."""
    return _DeepSpeech(), {"x": torch.randn(1, 1, 161, 400)}


class _PointNet(nn.Module):
    """Classes of a cloud of points: shared layers, a maximum over the points, and a transformation of each cloud."""

    def __init__(self) -> None:
        super().__init__()
        self.aligned, self.first = self._shared(3, 64, 128, 1024), self._shared(3, 64, 64)
        self.matrix = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Linear(256, 9))
        self.rest = self._shared(64, 128, 1024)
        self.classes = nn.Sequential(nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 40))

    @staticmethod
    def _shared(*widths: int) -> nn.Sequential:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(
            nn.Sequential(nn.Conv1d(a, b, 1), nn.BatchNorm1d(b), nn.ReLU()) for a, b in pairs
        ))  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix(self.aligned(x).amax(2)).view(-1, 3, 3)
        return self.classes(self.rest(self.first(matrix @ x)).amax(2))


@maker
def pointnet() -> Example:
    """1,024 points."""
    return _PointNet(), {"x": torch.randn(1, 3, 1024)}


class _Recommender(nn.Module):
    """DLRM: dense features through a network, 26 embeddings, all products of two, a network."""

    def __init__(self, rows: int = 5000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(26))
        self.dense = self._network(13, 512, 256, width)
        self.top = nn.Sequential(self._network(width + 27 * 26 // 2, 512, 256), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(27, 27, -1))

    @staticmethod
    def _network(*widths: int) -> nn.Sequential:
        pairs = itertools.pairwise(widths)
        return nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs))

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """`dense`: [batch, 13]; `ids`: [batch, 26]."""
        bottom = self.dense(dense)
        vectors = torch.stack([bottom, *(table(ids[:, n]) for n, table in enumerate(self.tables))], 1)
        products = vectors @ vectors.transpose(1, 2)
        return torch.sigmoid(self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], 1)))


@maker
def dlrm() -> Example:
    """Batch 32."""
    return _Recommender(), {"dense": torch.randn(32, 13), "ids": torch.randint(5000, (32, 26))}
