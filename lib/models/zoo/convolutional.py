"""Convolutional networks: ResNet v1 and v2, MobileNet v1 and v2. Images are (b, y, x, 3), results (b, classes)."""

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from lib.models.zoo.layers import Affine, Conv, Dense, global_pool, max_pool


class BasicBlock(nn.Module):
    """ResNet-18's block: two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, n_in: int, width: int, stride: int):
        self.first = Conv(n_in, width, 3, stride, op.relu)
        self.second = Conv(width, width, 3)
        self.shortcut = Conv(n_in, width, 1, stride) if stride > 1 or n_in != width else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = self.second(self.first(x))  # before the shortcut: FuseOps adds the residual to what comes first
        return op.relu(y + (self.shortcut(x) if self.shortcut else x))


class Bottleneck(nn.Module):
    """ResNet-50's block, with the stride in the first 1x1 convolution (v1)."""

    expansion = 4
    strides_first = True

    def __init__(self, n_in: int, width: int, stride: int):
        first, second = (stride, 1) if self.strides_first else (1, stride)
        self.reduce = Conv(n_in, width, 1, first, op.relu)
        self.middle = Conv(width, width, 3, second, op.relu)
        self.expand = Conv(width, 4 * width, 1)
        self.shortcut = Conv(n_in, 4 * width, 1, stride) if stride > 1 or n_in != 4 * width else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = self.expand(self.middle(self.reduce(x)))  # before the shortcut, as in BasicBlock
        return op.relu(y + (self.shortcut(x) if self.shortcut else x))


class BottleneckB(Bottleneck):
    """The same with the stride in the 3x3 convolution (v1b, or v1.5), as timm and torchvision have it."""

    strides_first = False


class ResNet(nn.Module):
    """ResNet v1: 7x7 stem, groups of blocks, global pooling, classifier."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], width: int, n_classes: int):
        self.stem = Conv(3, width, 7, 2, op.relu)
        self.blocks = nn.ModuleList([])
        self.depths = depths
        channels = width
        for group, position in positions(depths):
            self.blocks.append(block(channels, width << group, _stride(group, position)))
            channels = (width << group) * block.expansion
        self.classifier = Dense(channels, n_classes)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = max_pool(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.classifier(global_pool(x))


class PreActivation(nn.Module):
    """ResNet v2's bottleneck: norms come before the convolutions; those behind a convolution are folded into it."""

    def __init__(self, n_in: int, width: int, stride: int, *, first: bool):
        self.norm = Affine(n_in)
        self.reduce = Conv(n_in, width, 1, 1, op.relu)
        self.middle = Conv(width, width, 3, stride, op.relu)
        self.expand = Conv(width, 4 * width, 1, bias=False)
        self.shortcut = Conv(n_in, 4 * width, 1, stride, bias=False) if first else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        normed = self.norm(x)
        y = self.expand(self.middle(self.reduce(normed)))  # before the shortcut, as in BasicBlock
        return y + (self.shortcut(normed) if self.shortcut else x)


class ResNetV2(nn.Module):
    """ResNet v2 as timm has it: a bare 7x7 stem, groups of pre-activation blocks, a last norm, classifier."""

    def __init__(self, depths: tuple[int, ...], width: int, n_classes: int):
        self.stem = Conv(3, width, 7, 2, bias=False)
        self.blocks = nn.ModuleList([])
        self.depths = depths
        channels = width
        for group, position in positions(depths):
            stride = _stride(group, position)
            self.blocks.append(PreActivation(channels, width << group, stride, first=not position))
            channels = 4 * (width << group)
        self.norm = Affine(channels)
        self.classifier = Dense(channels, n_classes)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = max_pool(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.classifier(global_pool(self.norm(x)))


class Separable(nn.Module):
    """MobileNet's block: a 3x3 convolution of each channel by itself, then a 1x1 one across channels."""

    def __init__(self, n_in: int, n_out: int, stride: int):
        self.depthwise = Conv(n_in, n_in, 3, stride, op.relu, groups=n_in)
        self.pointwise = Conv(n_in, n_out, 1, 1, op.relu)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.pointwise(self.depthwise(x))


# Channels at full width, and stride, of each block.
MOBILENET_V1 = (
    (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1),
)  # fmt: skip


class MobileNet(nn.Module):
    """MobileNet v1: stem, separable blocks, classifier."""

    def __init__(self, blocks: tuple[tuple[int, int], ...], width: float, n_classes: int):
        channels = int(32 * width)
        self.stem = Conv(3, channels, 3, 2, op.relu)
        self.blocks = nn.ModuleList([])
        for full, stride in blocks:
            self.blocks.append(Separable(channels, int(full * width), stride))
            channels = int(full * width)
        self.classifier = Dense(channels, n_classes)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(global_pool(x))


class Inverted(nn.Module):
    """MobileNet v2's block: expand the channels, convolve each, project back; a residual where shapes allow."""

    def __init__(self, n_in: int, n_out: int, expansion: int, stride: int):
        wide = n_in * expansion
        self.expand = Conv(n_in, wide, 1, 1, op.relu6) if expansion > 1 else None
        self.depthwise = Conv(wide, wide, 3, stride, op.relu6, groups=wide)
        self.project = Conv(wide, n_out, 1)
        self.residual = stride == 1 and n_in == n_out

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = self.project(self.depthwise(self.expand(x) if self.expand else x))
        return y + x if self.residual else y


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks of MobileNet v2 of one size; the first takes the stride."""

    expansion: int
    channels: int  # at full width
    depth: int
    stride: int


MOBILENET_V2 = (
    Stage(1, 16, 1, 1), Stage(6, 24, 2, 2), Stage(6, 32, 3, 2), Stage(6, 64, 4, 2),
    Stage(6, 96, 3, 1), Stage(6, 160, 3, 2), Stage(6, 320, 1, 1),
)  # fmt: skip


class MobileNetV2(nn.Module):
    """MobileNet v2: stem, inverted blocks, a 1x1 head that does not shrink with the width, classifier."""

    def __init__(self, stages: tuple[Stage, ...], width: float, head: int, n_classes: int):
        channels = by_eights(32 * width)
        self.stem = Conv(3, channels, 3, 2, op.relu6)
        self.blocks = nn.ModuleList([])
        self.depths = tuple(stage.depth for stage in stages)
        for group, position in positions(self.depths):
            stage = stages[group]
            n_out = by_eights(stage.channels * width)
            self.blocks.append(Inverted(channels, n_out, stage.expansion, 1 if position else stage.stride))
            channels = n_out
        self.head = Conv(channels, head, 1, 1, op.relu6)
        self.classifier = Dense(head, n_classes)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(global_pool(self.head(x)))


def by_eights(channels: float) -> int:
    """The nearest multiple of 8, but not under 90 % of what was asked for: TensorFlow's rule, timm's too."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def positions(depths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Group and position in it, of each block of a network with groups of these depths."""
    return [(group, position) for group, depth in enumerate(depths) for position in range(depth)]


def _stride(group: int, position: int) -> int:
    """Of a ResNet's block: the first of each group but the first group's halves the image."""
    return 2 if group and not position else 1
