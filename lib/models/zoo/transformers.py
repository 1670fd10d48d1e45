"""Transformers: BERT (and RoBERTa, which computes the same), GPT-2 and ViT, as the transformers library has them."""

from dataclasses import dataclass

from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

from lib.models.zoo.layers import Attention, Conv, Dense, Embedding, Norm, first_token


@dataclass(frozen=True, slots=True)
class Size:
    """What all transformers have."""

    layers: int
    width: int
    heads: int
    hidden: int  # width inside the MLP
    eps: float  # of the layer norms


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a transformer knows of text."""

    n_tokens: int
    n_positions: int  # rows of the checkpoint's table
    offset: int = 0  # row of the first position; RoBERTa numbers from 2
    n_types: int = 2  # of tokens; only BERT and RoBERTa have types

    @property
    def longest(self) -> int:
        """Most tokens that have positions."""
        return self.n_positions - self.offset


class PostNormLayer(nn.Module):
    """BERT's layer: norms after the residuals."""

    def __init__(self, size: Size):
        self.attention, self.norm1 = Attention(size.width, size.heads), Norm(size.width, size.eps)
        self.up, self.down = Dense(size.width, size.hidden), Dense(size.hidden, size.width)
        self.norm2 = Norm(size.width, size.eps)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.norm1(self.attention(x) + x)
        return self.norm2(self.down(op.gelu(self.up(x))) + x)


class PreNormLayer(nn.Module):
    """GPT-2's and ViT's layer: norms before attention and MLP, none after."""

    def __init__(self, size: Size, *, causal: bool = False, approximate: str | None = None):
        self.norm1, self.attention = Norm(size.width, size.eps), Attention(size.width, size.heads, causal=causal)
        self.norm2 = Norm(size.width, size.eps)
        self.up, self.down = Dense(size.width, size.hidden), Dense(size.hidden, size.width)
        self.approximate = approximate

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = self.attention(self.norm1(x)) + x
        return self.down(op.gelu(self.up(self.norm2(x)), self.approximate)) + x


class Bert(nn.Module):
    """BertModel with its pooler: all tokens attend to all, none is padding, and all are of type 0.

    The embedding of type 0 is a part of `embedding.position`: both are added to every token.
    """

    def __init__(self, length: int, vocabulary: Vocabulary, size: Size):
        self.vocabulary = vocabulary
        self.embedding = Embedding(vocabulary.n_tokens, length, size.width)
        self.norm = Norm(size.width, size.eps)
        self.layers = nn.ModuleList([PostNormLayer(size) for _ in range(size.layers)])
        self.pooler = Dense(size.width, size.width)

    def forward(self, x: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        """Token ids (b, n) to the last hidden state (b, n, width) and the pooled first token (b, width)."""
        x = self.norm(self.embedding(x))
        for layer in self.layers:
            x = layer(x)
        return x, op.tanh(self.pooler(first_token(x)))


class Gpt2(nn.Module):
    """GPT2Model: each token attends to itself and those before it."""

    def __init__(self, length: int, vocabulary: Vocabulary, size: Size):
        self.vocabulary = vocabulary
        self.embedding = Embedding(vocabulary.n_tokens, length, size.width)
        self.layers = nn.ModuleList([PreNormLayer(size, causal=True, approximate="tanh") for _ in range(size.layers)])
        self.norm = Norm(size.width, size.eps)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Token ids (b, n) to the last hidden state (b, n, width)."""
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Vit(nn.Module):
    """ViTForImageClassification: patches and a class token, whose last state is classified."""

    def __init__(self, image: int, patch: int, n_classes: int, size: Size):
        self.n_patches, self.width = (image // patch) ** 2, size.width
        self.patches = Conv(3, size.width, patch, patch, padding=0)
        self.token = nn.Parameter((1, 1, size.width))
        self.position = nn.Parameter((1, self.n_patches + 1, size.width))
        self.layers = nn.ModuleList([PreNormLayer(size) for _ in range(size.layers)])
        self.norm = Norm(size.width, size.eps)
        self.classifier = Dense(size.width, n_classes)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        """Images (b, y, x, 3) to (b, classes)."""
        batch = x.shape[0]
        patches = op.reshape(self.patches(x), (batch, self.n_patches, self.width))
        x = op.concat([op.broadcast_to(self.token, (batch, 1, self.width)), patches], 1) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.classifier(first_token(self.norm(x)))
