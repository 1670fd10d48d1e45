"""Tiny checkpoints with an input and the output of the library they come from, for tests/lib/test_zoo_checkpoints.py.

    pip install torch==2.15.0 transformers==5.23.0 timm==1.0.31 safetensors==0.8.0    # as was done on Python 3.11
    python tests/data/zoo/make.py

Each file has the tensors of a checkpoint as the library writes it, and beside them `test.input` and
`test.output.0`, `test.output.1`, ... for a batch of two. Weights are random, norms and biases too: with the usual
initial zeros and ones a wrong fold would go unseen. The networks of tests/lib/test_zoo_checkpoints.py have the same
sizes. Ours has no counterpart for two of them:

- resnet_v1: timm's ResNet with the strides moved from the 3x3 convolutions to the first 1x1 ones.
- mobilenet: written here; its weights are stored by our names and in our layouts.
"""

import tempfile
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from timm.layers import BatchNormAct2d, create_conv2d
from timm.models._efficientnet_builder import decode_arch_def, round_channels
from timm.models.efficientnet import EfficientNet
from timm.models.resnet import BasicBlock, Bottleneck, ResNet, downsample_conv
from timm.models.resnetv2 import ResNetV2
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2Model,
    RobertaConfig,
    RobertaModel,
    ViTConfig,
    ViTForImageClassification,
)

HERE = Path(__file__).parent
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DEPTHS, CHANNELS = (1, 2, 1, 1), (4, 8, 16, 32)


def randomize(model: nn.Module) -> nn.Module:
    """Draw every parameter and every statistic of a batch norm."""
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5)
        elif tensor.dtype == torch.float32:
            tensor.normal_(0, 0.3 if tensor.ndim < 2 or "embed" in name else tensor[0].numel() ** -0.5)
            if tensor.ndim == 1 and name.endswith("weight"):
                tensor += 1
    return model.eval()


def save(name: str, tensors: dict[str, torch.Tensor], given: torch.Tensor, outputs: list[torch.Tensor]) -> None:
    """Write one file; images are stored in NHWC, as our networks take them."""
    given = given.permute(0, 2, 3, 1) if given.ndim == 4 else given.to(torch.int32)
    tests = {"test.input": given, **{f"test.output.{n}": output for n, output in enumerate(outputs)}}
    floats = {key: tensor for key, tensor in tensors.items() if tensor.ndim}  # not num_batches_tracked
    save_file({key: tensor.contiguous() for key, tensor in (floats | tests).items()}, HERE / f"{name}.safetensors")


def text(name: str, model: nn.Module) -> None:
    ids = torch.randint(2, 50, (2, 12))  # 1 is RoBERTa's padding
    found = randomize(model)(ids)
    pooled = getattr(found, "pooler_output", None)
    save(name, written(model), ids, [found.last_hidden_state] + ([] if pooled is None else [pooled]))


def images(name: str, model: nn.Module) -> None:
    x = torch.randn(2, 3, 32, 32)
    output = randomize(model)(x)
    save(name, model.state_dict(), x, [output])


def written(model: nn.Module) -> dict[str, torch.Tensor]:
    """What transformers writes: its names in a file are not those in memory."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def vit() -> None:
    model = randomize(ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=7, **SIZE)))
    x = torch.randn(2, 3, 32, 32)
    save("vit", written(model), x, [model(x).logits])


def resnet(block: type[BasicBlock] | type[Bottleneck]) -> nn.Module:
    """timm's ResNet with a stem as narrow as its first group, which its options do not offer."""
    model = ResNet(block, DEPTHS, num_classes=10, channels=CHANNELS)
    width = CHANNELS[0]
    model.conv1, model.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
    shortcut = downsample_conv(width, 4 * width, 1) if block is Bottleneck else None
    model.layer1[0] = block(width, width, downsample=shortcut)
    return model


def resnet_v1() -> nn.Module:
    """timm's ResNet with strides in the first 1x1 convolutions."""
    model = resnet(Bottleneck)
    for group in (model.layer2, model.layer3, model.layer4):
        group[0].conv1.stride, group[0].conv2.stride = (2, 2), (1, 1)
    return model


def mobilenet_v2() -> nn.Module:
    """As timm makes `mobilenetv2_050`, with fewer stages and a smaller head."""
    return EfficientNet(
        decode_arch_def([["ds_r1_k3_s1_c16"], ["ir_r2_k3_s2_e6_c24"]]),
        num_classes=10,
        num_features=20,
        stem_size=32,
        round_chs_fn=partial(round_channels, multiplier=0.5),
        act_layer=nn.ReLU6,
        norm_layer=nn.BatchNorm2d,
    )


def mobilenet() -> None:
    blocks = [(16, 32, 1), (32, 64, 2)]  # channels in and out, stride
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1)]
    names = ["stem"]
    for n, (n_in, n_out, stride) in enumerate(blocks):
        layers += [nn.Conv2d(n_in, n_in, 3, stride, 1, groups=n_in), nn.Conv2d(n_in, n_out, 1)]
        names += [f"blocks.{n}.depthwise", f"blocks.{n}.pointwise"]
    body = randomize(nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU()))))
    classifier = randomize(nn.Linear(64, 10))
    tensors = {"classifier.weight": classifier.weight.T, "classifier.bias": classifier.bias}
    for name, layer in zip(names, layers, strict=True):
        tensors |= {f"{name}.weight": layer.weight.permute(2, 3, 1, 0), f"{name}.bias": layer.bias.view(1, 1, 1, -1)}
    x = torch.randn(2, 3, 32, 32)
    save("mobilenet", tensors, x, [classifier(body(x).mean((2, 3)))])


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    text("bert", BertModel(BertConfig(vocab_size=50, max_position_embeddings=20, **SIZE)))
    roberta = RobertaConfig(
        vocab_size=50, max_position_embeddings=22, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1, **SIZE
    )
    text("roberta", RobertaModel(roberta))
    gpt2 = GPT2Config(vocab_size=50, n_positions=20, n_embd=32, n_layer=2, n_head=4, n_inner=48, use_cache=False)
    text("gpt2", GPT2Model(gpt2))
    vit()
    images("resnet18", resnet(BasicBlock))
    images("resnet_v1", resnet_v1())
    images("resnet_v1b", resnet(Bottleneck))
    norm = {"conv_layer": create_conv2d, "norm_layer": BatchNormAct2d}
    images("resnet_v2", ResNetV2([2, 1], channels=(32, 64), num_classes=10, stem_chs=8, **norm))
    images("mobilenet_v2", mobilenet_v2())
    mobilenet()


if __name__ == "__main__":
    main()
