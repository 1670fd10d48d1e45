"""The models of the zoo: their names, sizes and inputs, with random weights or those of a checkpoint.

The speed of a network hardly depends on the values of its weights, so that random ones do for tuning. Batch norms are
folded into convolutions wherever that can be.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm
from tvm.relax.frontend import nn

from lib.contracts.errors import ModelError
from lib.graph.fusion import ENTRY, Model
from lib.models.zoo import checkpoints, recipes
from lib.models.zoo.checkpoints import Recipe, Shape
from lib.models.zoo.convolutional import (
    MOBILENET_V1,
    MOBILENET_V2,
    BasicBlock,
    Bottleneck,
    BottleneckB,
    MobileNet,
    MobileNetV2,
    ResNet,
    ResNetV2,
)
from lib.models.zoo.transformers import Bert, Gpt2, Size, Vit, Vocabulary

Recipes = Callable[[nn.Module], dict[str, Recipe]]


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the zoo."""

    make: Callable[..., nn.Module]  # takes the number of tokens, if the model takes tokens
    shape: Shape  # of one sample: (224, 224, 3), or (tokens,) unless asked for otherwise
    checkpoint: Recipes | str  # how one becomes the weights, or why none does
    longest: int = 0  # most tokens; 0 for images

    @property
    def dtype(self) -> str:
        return "int32" if self.longest else "float32"


def _images(make: Callable[[], nn.Module], checkpoint: Recipes | str, size: int = 224) -> Entry:
    return Entry(make, (size, size, 3), checkpoint)


def _text(
    network: type[Bert] | type[Gpt2], vocabulary: Vocabulary, size: Size, checkpoint: Recipes | str, length: int = 128
) -> Entry:
    return Entry(lambda tokens: network(tokens, vocabulary, size), (length,), checkpoint, vocabulary.longest)


_NOT_V1B = (
    "those of timm and torchvision have their strides in the 3x3 convolutions; the shapes would fit and the results "
    "be wrong. Use --model resnet50_v1b."
)
_NO_MOBILENET = "neither timm nor transformers has a MobileNet v1 of width 0.5 that computes the same."
_TINY = "it is there for tests."

_BERT_WORDS, _ROBERTA_WORDS = Vocabulary(30522, 512), Vocabulary(50265, 514, offset=2, n_types=1)
_BASE, _LARGE = Size(12, 768, 12, 3072, eps=1e-12), Size(24, 1024, 16, 4096, eps=1e-12)
_ROBERTA_LARGE = Size(24, 1024, 16, 4096, eps=1e-5)
_GPT2 = Size(12, 768, 12, 3072, eps=1e-5)
_HUGE = Size(32, 1280, 16, 5120, eps=1e-12)

_RESNET50_V1 = _images(lambda: ResNet(Bottleneck, (3, 4, 6, 3), 64, 1000), _NOT_V1B)

ZOO = {
    "resnet18": _images(lambda: ResNet(BasicBlock, (2, 2, 2, 2), 64, 1000), recipes.resnet),
    "resnet50": _RESNET50_V1,
    "resnet50_v1": _RESNET50_V1,
    "resnet50_v1b": _images(lambda: ResNet(BottleneckB, (3, 4, 6, 3), 64, 1000), recipes.resnet),
    "resnet152_v2": _images(lambda: ResNetV2((3, 8, 36, 3), 64, 1000), recipes.resnet_v2),
    "mobilenet": _images(lambda: MobileNet(MOBILENET_V1, 0.5, 1000), _NO_MOBILENET),
    "mobilenetv2": _images(lambda: MobileNetV2(MOBILENET_V2, 0.5, 1280, 1000), recipes.mobilenet_v2),
    "vit_huge": _images(lambda: Vit(224, 16, 1000, _HUGE), recipes.vit),
    "bert_base": _text(Bert, _BERT_WORDS, _BASE, recipes.bert),
    "bert_large": _text(Bert, _BERT_WORDS, _LARGE, recipes.bert),
    "roberta_large": _text(Bert, _ROBERTA_WORDS, _ROBERTA_LARGE, recipes.bert),
    "gpt2": _text(Gpt2, Vocabulary(50257, 1024), _GPT2, recipes.gpt2),
    "tiny_cnn": _images(lambda: ResNet(BasicBlock, (1, 1), 8, 10), _TINY, size=32),
    "tiny_transformer": _text(Bert, Vocabulary(100, 64), Size(1, 32, 2, 64, eps=1e-12), _TINY, length=16),
}


def load(
    name: str, *, batch: int = 1, sequence: int | None = None, weights: Path | None = None, seed: int = 0
) -> Model:
    """A zoo model with the weights of a checkpoint, or with random ones, equal for equal seeds.

    Args:
        batch: Samples in an inference.
        sequence: Tokens in a sample, of models that take tokens; else and by default the model's own.
        weights: A .safetensors file with the tensor names of timm (convolutional networks) or of the transformers
            library (the others). Not all models have one. RoBERTa's has no pooler: what it gives is then zero.

    Raises:
        ModelError: There is no model of that name, or it does not have that batch or sequence; the file is
            missing, damaged or of another model, or the model has no checkpoints. The message says which.
    """
    module, network = define(name, batch=batch, sequence=sequence)
    if weights is None:
        return _with_random_weights(module, shapes(network), seed)
    found = entry(name).checkpoint
    if isinstance(found, str):
        raise ModelError(f"--model {name} takes no checkpoint: {found}")
    return Model(module, checkpoints.read(weights, name, found(network), shapes(network)))


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


def define(name: str, *, batch: int = 1, sequence: int | None = None) -> tuple[tvm.IRModule, nn.Module]:
    """A zoo model as a graph and as a network, without its weights: those of ViT-Huge take 2.5 GB.

    Raises:
        ModelError: There is no model of that name, or it does not have that batch or sequence.
    """
    found = entry(name)
    if batch < 1:
        raise ModelError(f"--model {name}: a batch has at least one sample, but got {batch}.")
    if not found.longest:
        if sequence is not None:
            raise ModelError(f"--model {name} takes images, which have no sequence length, but got {sequence}.")
        network, shape = found.make(), found.shape
    else:
        [length] = found.shape if sequence is None else (sequence,)
        if not 1 <= length <= found.longest:
            raise ModelError(f"--model {name} takes sequences of 1 to {found.longest} tokens, but got {length}.")
        network, shape = found.make(length), (length,)
    return _as_graph(network, (batch, *shape), found.dtype), network


def export(network: nn.Module, shape: Shape, dtype: str, seed: int = 0) -> Model:
    """A network of one input, with seeded random weights."""
    return _with_random_weights(_as_graph(network, shape, dtype), shapes(network), seed)


def shapes(network: nn.Module) -> dict[str, Shape]:
    """The shape of each weight by its name, in parameter order."""
    return {name: tuple(int(extent) for extent in weight.shape) for name, weight in network.named_parameters()}


def _as_graph(network: nn.Module, shape: Shape, dtype: str) -> tvm.IRModule:
    """The network's `forward` as `main`, with the weights as parameters after the one input, `x`."""
    module, _ = network.export_tvm({"forward": {"x": nn.spec.Tensor(list(shape), dtype)}})
    functions = dict(module.functions_items())
    forward = functions.pop(module.get_global_var("forward"))
    return tvm.IRModule({**functions, tvm.ir.GlobalVar(ENTRY): forward.with_attr("global_symbol", ENTRY)})


def _with_random_weights(module: tvm.IRModule, shapes: Mapping[str, Shape], seed: int) -> Model:
    rng = np.random.default_rng(seed)
    return Model(module, {name: _random(name, shape, rng) for name, shape in shapes.items()})


def _random(name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Values that keep activations near 1 through any depth, so that a wrong result shows."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("scale") or (len(shape) == 1 and name.endswith("weight")):  # of a norm
        noise *= np.float32(0.1)
        noise += 1
    elif name.endswith(("bias", "shift", "word", "position", "token")):
        noise *= np.float32(0.1)
    else:
        noise /= np.float32(math.sqrt(math.prod(shape[:-1])))
        if len(shape) == 4 and shape[2] == 1 and shape[0] > 1:
            # A depthwise kernel: it stands between two ReLUs without a shortcut, and each of them halves the variance.
            # In MobileNet's 27 layers nothing but biases would be left of an image.
            noise *= np.float32(2)
    return noise
