"""Models that need no file: defined in Relax's `nn` frontend, NHWC, batch 1, fp32, seeded random weights.

The speed of a network does not depend on the values of its weights. Batch norms are defined as folded
(convolution and bias), and weights lie as the kernels read them: HWIO for convolutions, (in, out) for dense
layers, so that no transpose is left in the graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.core import wrap_nested

from lib.errors import ModelError
from lib.graph import Model

Activation = Callable[[nn.Tensor], nn.Tensor]


class Conv(nn.Module):
    """Convolution with bias and, if asked for, a residual and an activation: one subgraph once fused."""

    def __init__(self, n_in: int, n_out: int, kernel: int, stride: int = 1, act: Activation | None = None):
        self.weight = nn.Parameter((kernel, kernel, n_in, n_out))
        self.bias = nn.Parameter((1, 1, 1, n_out))
        self.stride, self.padding, self.act = stride, kernel // 2, act

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = relax.op.nn.conv2d(
            x._expr, self.weight._expr, self.stride, self.padding, data_layout="NHWC", kernel_layout="HWIO"
        )
        y = wrap_nested(y, "conv") + self.bias
        return self.act(y) if self.act else y


class Dense(nn.Module):
    """x @ weight + bias."""

    def __init__(self, n_in: int, n_out: int):
        self.weight, self.bias = nn.Parameter((n_in, n_out)), nn.Parameter((n_out,))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, self.weight) + self.bias


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

    def __init__(self, n_in: int, width: int, stride: int):
        self.reduce = Conv(n_in, width, 1, stride, op.relu)
        self.middle = Conv(width, width, 3, 1, op.relu)
        self.expand = Conv(width, 4 * width, 1)
        self.shortcut = Conv(n_in, 4 * width, 1, stride) if stride > 1 or n_in != 4 * width else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = self.expand(self.middle(self.reduce(x)))  # before the shortcut, as in BasicBlock
        return op.relu(y + (self.shortcut(x) if self.shortcut else x))


class ResNet(nn.Module):
    """ResNet v1: 7x7 stem, four groups of blocks, global pooling, classifier."""

    def __init__(self, block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], width: int, n_classes: int):
        self.stem = Conv(3, width, 7, 2, op.relu)
        self.blocks = nn.ModuleList([])
        channels = width
        for group, depth in enumerate(depths):
            for position in range(depth):
                stride = 2 if group and not position else 1
                self.blocks.append(block(channels, width << group, stride))
                channels = (width << group) * block.expansion
        self.classifier = Dense(channels, n_classes)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.stem(x)
        x = wrap_nested(relax.op.nn.max_pool2d(x._expr, [3, 3], [2, 2], [1, 1], layout="NHWC"), "max_pool")
        for block in self.blocks:
            x = block(x)
        return self.classifier(wrap_nested(relax.op.mean(x._expr, axis=[1, 2]), "mean"))


class Norm(nn.Module):
    """Layer norm over the last dimension."""

    def __init__(self, width: int):
        self.weight, self.bias, self.width = nn.Parameter((width,)), nn.Parameter((width,)), width

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.layer_norm(x, self.width, self.weight, self.bias, 1e-12)


class Attention(nn.Module):
    """Multi-head self-attention without a mask."""

    def __init__(self, width: int, heads: int):
        self.query, self.key, self.value, self.out = (Dense(width, width) for _ in range(4))
        self.heads = heads

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        batch, length, width = x.shape
        size = width // self.heads

        def split(y: nn.Tensor) -> nn.Tensor:
            return op.permute_dims(op.reshape(y, (batch, length, self.heads, size)), (0, 2, 1, 3))

        query, key, value = split(self.query(x)), split(self.key(x)), split(self.value(x))
        weights = op.matmul(query, op.permute_dims(key, (0, 1, 3, 2))) * (1 / math.sqrt(size))
        y = op.permute_dims(op.matmul(op.softmax(weights, axis=-1), value), (0, 2, 1, 3))
        return self.out(op.reshape(y, (batch, length, width)))


class EncoderLayer(nn.Module):
    """BERT's layer: norms after the residuals."""

    def __init__(self, width: int, heads: int, hidden: int):
        self.attention, self.norm1 = Attention(width, heads), Norm(width)
        self.up, self.down, self.norm2 = Dense(width, hidden), Dense(hidden, width), Norm(width)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.norm1(self.attention(x) + x)
        return self.norm2(self.down(op.gelu(self.up(x))) + x)


class Encoder(nn.Module):
    """Token and position embeddings, encoder layers."""

    def __init__(self, n_tokens: int, length: int, layers: int, width: int, heads: int, hidden: int):
        self.word, self.position = nn.Parameter((n_tokens, width)), nn.Parameter((length, width))
        self.norm = Norm(width)
        self.layers = nn.ModuleList([EncoderLayer(width, heads, hidden) for _ in range(layers)])
        self.length, self.width = length, width

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        ids = op.reshape(x, (self.length,))
        rows = wrap_nested(relax.op.take(self.word._expr, ids._expr, axis=0, mode="clip"), "take")
        x = self.norm(op.reshape(rows, (1, self.length, self.width)) + self.position)
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: str = "float32"


ZOO = {
    "resnet18": Entry(lambda: ResNet(BasicBlock, (2, 2, 2, 2), 64, 1000), (1, 224, 224, 3)),
    "resnet50": Entry(lambda: ResNet(Bottleneck, (3, 4, 6, 3), 64, 1000), (1, 224, 224, 3)),
    "tiny_cnn": Entry(lambda: ResNet(BasicBlock, (1, 1), 8, 10), (1, 32, 32, 3)),
    "tiny_transformer": Entry(lambda: Encoder(100, 16, 1, 32, 2, 64), (1, 16), "int32"),
}


def load(name: str, seed: int = 0) -> Model:
    """A zoo model with random weights, equal for equal seeds.

    Raises:
        ModelError: There is no model of that name; the message lists those there are.
    """
    found = entry(name)
    return export(found.make(), found.shape, found.dtype, seed)


def entry(name: str) -> Entry:
    """What the zoo has under a name.

    Raises:
        ModelError: There is no model of that name; the message lists those there are.
    """
    if name not in ZOO:
        raise ModelError(
            f"--model {name!r} is neither a model of the zoo nor an .onnx file. The zoo has: {', '.join(ZOO)}."
        )
    return ZOO[name]


def export(module: nn.Module, shape: tuple[int, ...], dtype: str, seed: int = 0) -> Model:
    """A model of one input, with seeded random weights."""
    spec = {"forward": {"x": nn.spec.Tensor(list(shape), dtype)}}
    functions, parameters = module.export_tvm(spec)
    rng = np.random.default_rng(seed)
    weights = {key: _random(key, tuple(int(d) for d in p.shape), rng) for key, p in parameters}
    return Model.from_function(functions["forward"], weights)


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values that keep activations near 1 through any depth, so that a wrong result shows."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1 and name.endswith("weight"):  # scale of a norm
        return 1 + np.float32(0.1) * noise
    if name.endswith(("bias", "word", "position")):
        return np.float32(0.1) * noise
    return noise / np.float32(math.sqrt(math.prod(shape[:-1])))
