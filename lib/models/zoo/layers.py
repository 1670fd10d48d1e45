"""Layers of which the zoo's networks are built: what Relax's `nn` frontend lacks, or has with weights turned.

Shapes: b batch, y and x image, c channels; n tokens, m tokens attended to, h heads, s size of a head.
Weights lie as the kernels read them: HWIO for convolutions, (in, out) for products. Where a residual is added,
the sum is `branch + residual`: `residual + branch` would be another subgraph, tuned on its own.
"""

import math
from collections.abc import Callable

from tvm import relax, te, tirx, topi
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.core import wrap_nested

Activation = Callable[[nn.Tensor], nn.Tensor]

_OPAQUE = 8  # TVM's OpPatternKind: never fused
_BY_HEAD, _TURNED = (0, 2, 1, 3), (0, 2, 3, 1)  # (b, n, h, s) to (b, h, n, s), or to (b, h, s, n)


class Conv(nn.Module):
    """Convolution with bias (a batch norm folded in) and, if asked for, an activation: one subgraph once fused."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        stride: int = 1,
        act: Activation | None = None,
        *,
        padding: int | None = None,
        groups: int = 1,
        bias: bool = True,
    ):
        self.weight = nn.Parameter((kernel, kernel, n_in // groups, n_out))
        self.bias = nn.Parameter((1, 1, 1, n_out)) if bias else None
        self.stride, self.groups, self.act = stride, groups, act
        self.padding = kernel // 2 if padding is None else padding

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """(b, y, x, n_in) to (b, y / stride, x / stride, n_out)."""
        y = relax.op.nn.conv2d(
            x._expr,
            self.weight._expr,
            self.stride,
            self.padding,
            groups=self.groups,
            data_layout="NHWC",
            kernel_layout="HWIO",
        )
        y = wrap_nested(y, "conv")
        if self.bias is not None:
            y = y + self.bias
        return self.act(y) if self.act else y


class Affine(nn.Module):
    """ReLU of x * scale + shift, by channel: a batch norm in front of a convolution, which nothing can take in."""

    def __init__(self, channels: int):
        self.scale, self.shift = (nn.Parameter((1, 1, 1, channels)) for _ in range(2))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.relu(x * self.scale + self.shift)


class Dense(nn.Module):
    """x @ weight + bias."""

    def __init__(self, n_in: int, n_out: int):
        self.weight, self.bias = nn.Parameter((n_in, n_out)), nn.Parameter((n_out,))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.matmul(x, self.weight) + self.bias


class Norm(nn.Module):
    """Layer norm over the last dimension."""

    def __init__(self, width: int, eps: float):
        self.weight, self.bias = nn.Parameter((width,)), nn.Parameter((width,))
        self.width, self.eps = width, eps

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.layer_norm(x, self.width, self.weight, self.bias, self.eps)


class Attention(nn.Module):
    """Multi-head self-attention, of each token to all or, if causal, to itself and those before it.

    Query, key and value come from one product, which is faster than three (`benchmarks/projections.py`); taking a
    part of it and splitting that into heads is one copy. What the heads gather is written token by token, so that
    the last product reads it as it lies.
    """

    def __init__(self, width: int, heads: int, *, causal: bool = False):
        self.projections, self.out = Dense(width, 3 * width), Dense(width, width)
        self.heads, self.size, self.causal = heads, width // heads, causal

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """(b, n, width) to the same."""
        joint = self.projections(x)
        query, key, value = (
            self._part(joint, 0, _BY_HEAD),
            self._part(joint, 1, _TURNED),
            self._part(joint, 2, _BY_HEAD),
        )
        scores = op.matmul(query, key) * (1 / math.sqrt(self.size))
        if self.causal:
            scores = op.tensor_expr_op(_mask_later, "mask_later", [scores])
        gathered = _einsum("bhnm,bhms->bnhs", op.softmax(scores, axis=-1), value)
        return self.out(op.reshape(gathered, x.shape))

    def _part(self, joint: nn.Tensor, number: int, order: tuple[int, ...]) -> nn.Tensor:
        """One third of (b, n, 3 width), split into heads, with its axes (b, n, h, s) in another order."""
        batch, tokens, _ = joint.shape
        width = self.heads * self.size
        begin, end = number * width, (number + 1) * width
        part = wrap_nested(relax.op.strided_slice(joint._expr, [2], [begin], [end], [1]), "part")
        return op.permute_dims(op.reshape(part, (batch, tokens, self.heads, self.size)), order)


class Embedding(nn.Module):
    """Rows of a table by token id, plus one row for each position."""

    def __init__(self, n_tokens: int, length: int, width: int):
        self.word, self.position = nn.Parameter((n_tokens, width)), nn.Parameter((length, width))

    def forward(self, ids: nn.Tensor) -> nn.Tensor:
        """int32 (b, n) to (b, n, width); an id out of range counts as the nearest one in it."""
        rows = wrap_nested(relax.op.take(self.word._expr, ids._expr, axis=0, mode="clip"), "take")
        return rows + self.position


def max_pool(x: nn.Tensor) -> nn.Tensor:
    """Largest of 3x3 at every second place."""
    return wrap_nested(relax.op.nn.max_pool2d(x._expr, [3, 3], [2, 2], [1, 1], layout="NHWC"), "max_pool")


def global_pool(x: nn.Tensor) -> nn.Tensor:
    """Mean over the image: (b, y, x, c) to (b, c)."""
    return wrap_nested(relax.op.mean(x._expr, axis=[1, 2]), "mean")


def first_token(x: nn.Tensor) -> nn.Tensor:
    """(b, n, width) to (b, width); a kernel of its own, lest it makes another subgraph of what comes before."""
    return op.tensor_expr_op(_first_token, "first_token", [x], attrs={"op_pattern": _OPAQUE})


def _einsum(subscripts: str, a: nn.Tensor, b: nn.Tensor) -> nn.Tensor:
    """Sums of products; TVM loops over what is summed by alphabet, so letters go as the data lies."""
    return wrap_nested(relax.op.einsum((a._expr, b._expr), subscripts), "einsum")


def _first_token(x: te.Tensor) -> te.Tensor:
    batch, _, width = x.shape
    # Two steps: TVM takes a single copy of what lies at the start of a buffer for a reshape, which this is not.
    return topi.reshape(topi.strided_slice(x, [0], [1], strides=[1], axes=[1]), (batch, width))


def _mask_later(scores: te.Tensor) -> te.Tensor:
    """Scores (b, h, n, m) with the lowest number where m > n: computed in place, where a mask would be read."""
    lowest = tirx.min_value("float32")
    return te.compute(
        scores.shape, lambda b, h, n, m: tirx.Select(m <= n, scores[b, h, n, m], lowest), name="mask_later"
    )
