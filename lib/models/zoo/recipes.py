"""Where the weights of each network lie in a checkpoint: timm's names, and those of the transformers library.

Each function takes a network and returns a recipe for every one of its weights, by our name.
"""

import math
from dataclasses import replace

import numpy as np

from lib.models.zoo.checkpoints import Recipe, Shape, affine, convolution, folded, linear, norm, same, vector
from lib.models.zoo.convolutional import BasicBlock, MobileNetV2, ResNet, ResNetV2, positions
from lib.models.zoo.transformers import Bert, Gpt2, Vit


def resnet(network: ResNet) -> dict[str, Recipe]:
    """timm's `resnet18` and `resnet50`, which are torchvision's, too."""
    recipes = folded("stem", "conv1", "bn1") | linear("classifier", "fc")
    for n, (group, position) in enumerate(positions(network.depths)):
        ours, theirs = f"blocks.{n}", f"layer{group + 1}.{position}"
        block = network.blocks[n]
        parts = ("first", "second") if isinstance(block, BasicBlock) else ("reduce", "middle", "expand")
        for number, part in enumerate(parts, start=1):
            recipes |= folded(f"{ours}.{part}", f"{theirs}.conv{number}", f"{theirs}.bn{number}")
        if block.shortcut:
            recipes |= folded(f"{ours}.shortcut", f"{theirs}.downsample.0", f"{theirs}.downsample.1")
    return recipes


def resnet_v2(network: ResNetV2) -> dict[str, Recipe]:
    """timm's `resnetv2_152`: the norm before a convolution in a block is folded into the convolution before it."""
    recipes = convolution("stem", "stem.conv") | affine("norm", "norm")
    recipes |= {"classifier.weight": _one_by_one("head.fc.weight"), "classifier.bias": vector("head.fc.bias")}
    for n, (group, position) in enumerate(positions(network.depths)):
        ours, theirs = f"blocks.{n}", f"stages.{group}.blocks.{position}"
        recipes |= affine(f"{ours}.norm", f"{theirs}.norm1")
        recipes |= folded(f"{ours}.reduce", f"{theirs}.conv1", f"{theirs}.norm2")
        recipes |= folded(f"{ours}.middle", f"{theirs}.conv2", f"{theirs}.norm3")
        recipes |= convolution(f"{ours}.expand", f"{theirs}.conv3")
        if not position:
            recipes |= convolution(f"{ours}.shortcut", f"{theirs}.downsample.conv")
    return recipes


def mobilenet_v2(network: MobileNetV2) -> dict[str, Recipe]:
    """timm's `mobilenetv2_050`: a block that does not expand has other names."""
    recipes = folded("stem", "conv_stem", "bn1") | folded("head", "conv_head", "bn2")
    recipes |= linear("classifier", "classifier")
    for n, (stage, position) in enumerate(positions(network.depths)):
        ours, theirs = f"blocks.{n}", f"blocks.{stage}.{position}"
        parts = [("expand", "conv_pw"), ("depthwise", "conv_dw"), ("project", "conv_pwl")]
        if not network.blocks[n].expand:
            parts = [("depthwise", "conv_dw"), ("project", "conv_pw")]
        for number, (part, conv) in enumerate(parts, start=1):
            recipes |= folded(f"{ours}.{part}", f"{theirs}.{conv}", f"{theirs}.bn{number}")
    return recipes


def bert(network: Bert) -> dict[str, Recipe]:
    """BertModel and RobertaModel. What was trained for masked words alone, as RoBERTa, has no pooler: zeros then."""
    pooler = linear("pooler", "pooler.dense")
    recipes = {
        "embedding.word": same("embeddings.word_embeddings.weight"),
        "embedding.position": _positions(
            network, "embeddings.position_embeddings.weight", types="embeddings.token_type_embeddings.weight"
        ),
        **norm("norm", "embeddings.LayerNorm"),
        **{weight: replace(recipe, optional=True) for weight, recipe in pooler.items()},
    }
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    return recipes | _encoder(network, attention="attention.self", norms=norms)


def vit(network: Vit) -> dict[str, Recipe]:
    """ViTForImageClassification; timm names the same weights otherwise, and its files are not read."""
    patches = "embeddings.patch_embeddings.projection"
    recipes = {
        "token": same("embeddings.cls_token"),
        "position": same("embeddings.position_embeddings"),
        **convolution("patches", patches),
        "patches.bias": vector(f"{patches}.bias"),
        **norm("norm", "layernorm"),
        **linear("classifier", "classifier"),
    }
    norms = ("layernorm_before", "layernorm_after")
    return recipes | _encoder(network, attention="attention.attention", norms=norms)


def gpt2(network: Gpt2) -> dict[str, Recipe]:
    """GPT2Model, whose products lie as (in, out) in the file, those of query, key and value side by side."""
    recipes = {
        "embedding.word": same("wte.weight"),
        "embedding.position": _positions(network, "wpe.weight"),
        **norm("norm", "ln_f"),
    }
    for n in range(len(network.layers)):
        ours, theirs = f"layers.{n}", f"h.{n}"
        recipes |= norm(f"{ours}.norm1", f"{theirs}.ln_1")
        recipes |= _in_out(f"{ours}.attention.projections", f"{theirs}.attn.c_attn")
        recipes |= _in_out(f"{ours}.attention.out", f"{theirs}.attn.c_proj")
        recipes |= norm(f"{ours}.norm2", f"{theirs}.ln_2")
        recipes |= _in_out(f"{ours}.up", f"{theirs}.mlp.c_fc")
        recipes |= _in_out(f"{ours}.down", f"{theirs}.mlp.c_proj")
    return recipes


def _encoder(network: Bert | Vit, *, attention: str, norms: tuple[str, str]) -> dict[str, Recipe]:
    """The layers of BERT and ViT, whose names differ in that of the attention and those of the norms."""
    recipes: dict[str, Recipe] = {}
    for n in range(len(network.layers)):
        ours, theirs = f"layers.{n}", f"encoder.layer.{n}"
        recipes |= _side_by_side(f"{ours}.attention.projections", f"{theirs}.{attention}")
        recipes |= linear(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        recipes |= linear(f"{ours}.up", f"{theirs}.intermediate.dense")
        recipes |= linear(f"{ours}.down", f"{theirs}.output.dense")
        for number, name in enumerate(norms, start=1):
            recipes |= norm(f"{ours}.norm{number}", f"{theirs}.{name}")
    return recipes


def _one_by_one(name: str) -> Recipe:
    """A product that is a 1x1 convolution in the file."""
    return Recipe(lambda shape: {name: (*shape[::-1], 1, 1)}, lambda kernel: kernel[:, :, 0, 0].transpose())


def _positions(network: Bert | Gpt2, name: str, *, types: str | None = None) -> Recipe:
    """The rows of a table of positions that the network uses and, if named, the first of a table of types on top."""
    words = network.vocabulary
    length = int(network.embedding.position.shape[0])

    def tensors(shape: Shape) -> dict[str, Shape]:
        found: dict[str, Shape] = {name: (words.n_positions, shape[1])}
        return found | {types: (words.n_types, shape[1])} if types else found

    def make(table: np.ndarray, *type_table: np.ndarray) -> np.ndarray:
        rows = table[words.offset : words.offset + length]
        return rows + type_table[0][0] if type_table else rows

    return Recipe(tensors, make)


def _side_by_side(ours: str, theirs: str) -> dict[str, Recipe]:
    """The products for query, key and value as one: theirs (out, in) each, ours (in, 3 out)."""
    parts = ("query", "key", "value")

    def weights(shape: Shape) -> dict[str, Shape]:
        return {f"{theirs}.{part}.weight": (shape[1] // len(parts), shape[0]) for part in parts}

    def biases(shape: Shape) -> dict[str, Shape]:
        return {f"{theirs}.{part}.bias": (math.prod(shape) // len(parts),) for part in parts}

    return {
        f"{ours}.weight": Recipe(weights, lambda *tensors: np.concatenate(tensors).transpose()),
        f"{ours}.bias": Recipe(biases, lambda *tensors: np.concatenate(tensors)),
    }


def _in_out(ours: str, theirs: str) -> dict[str, Recipe]:
    """A product that lies as (in, out) in the file, too."""
    return {f"{ours}.weight": same(f"{theirs}.weight"), f"{ours}.bias": vector(f"{theirs}.bias")}
