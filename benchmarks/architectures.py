"""Models of today in torch, built from transformers' configurations with seeded random weights; nothing is downloaded.

Each maker returns a model and an example of its inputs by name; batch 1, float32. `files.py` writes them to files.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from onnxscript import optimizer
from torch import nn

Inputs = dict[str, torch.Tensor]
Example = tuple[nn.Module, Inputs]

MAKERS: dict[str, Callable[[], Example]] = {}

_TOKENS = 128
_LONGEST = 512  # tokens, where their number is left open
_VOCABULARY = 4096  # of the language model, small: a real one's logits would be a third of its work
_SPREAD = 0.1
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LARGEST_CONSTANT = 2**20  # values


class FirstOutput(nn.Module):
    """A model of transformers that returns its first output alone, a tensor."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Logits or the last hidden state."""
        return self.body(**inputs, return_dict=False)[0]


def make(name: str, seed: int = 0) -> Example:
    """A model whose activations stay alive, and inputs for it, equal for equal seeds."""
    torch.manual_seed(seed)
    return prepared(*MAKERS[name]())


def prepared(model: nn.Module, inputs: Inputs) -> Example:
    """The same with norms and constants that keep activations alive, for inference."""
    norms = [module for module in model.modules() if isinstance(module, _NORMS)]
    if norms:
        reset(model, norms)
    spread_constants(model)
    if norms:
        calibrate(model.eval(), norms, inputs)
    return model.eval(), inputs


def export(name: str) -> torch.export.ExportedProgram:
    """The program of a model, with static shapes; its example inputs are `example_inputs[1]`, by name."""
    model, inputs = make(name)
    return torch.export.export(model, (), inputs)


def export_open(name: str) -> torch.export.ExportedProgram:
    """The same of a model of tokens, with their number left open from 2 to `_LONGEST`."""
    model, inputs = make(name)
    length = torch.export.Dim("sequence", min=2, max=_LONGEST)
    named = _Masked(model) if "attention_mask" in inputs else _Plain(model)
    return torch.export.export(named.eval(), (), inputs, dynamic_shapes={each: {1: length} for each in inputs})


class _Masked(nn.Module):
    """Open dimensions are given by the names of arguments."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids=input_ids, attention_mask=attention_mask)


class _Plain(nn.Module):
    """The same without a mask."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.body(input_ids=input_ids)


def save_onnx(program: torch.export.ExportedProgram, path: Path, n_outputs: int = 1) -> None:
    """Write a program as an ONNX file whose weights are inside.

    Masks and tables of positions, whose sizes are known, are computed here and not at each start of each framework.
    """
    names = list(program.example_inputs[1])
    outputs = ["output", *(f"output_{n}" for n in range(1, n_outputs))]
    made = torch.onnx.export(program, dynamo=True, input_names=names, output_names=outputs, verbose=False)
    optimizer.optimize_ir(made.model, input_size_limit=_LARGEST_CONSTANT, output_size_limit=_LARGEST_CONSTANT)
    for node in made.model.graph:
        node.metadata_props.clear()  # stack traces, with the folders of this machine
    made.save(str(path), external_data=False)


def reset(model: nn.Module, norms: Sequence[nn.Module]) -> None:
    """He's initialisation for the convolutions of a model with batch norms, and ones for the norms' scales.

    transformers draws both from N(0, 0.02) for some models, whose output would then not depend on the input.
    """
    for norm in norms:
        nn.init.ones_(norm.weight)
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


@torch.no_grad()
def spread_constants(model: nn.Module) -> None:
    """Draw what a library initialises to one number: biases, the scales of norms, class tokens.

    With the zeros and ones that they start from, a graph that drops or mixes them up would still be right.
    """
    for parameter in model.parameters():
        if parameter.numel() > 1 and parameter.min() == parameter.max():
            parameter.add_(torch.randn_like(parameter) * _SPREAD)


@torch.no_grad()
def calibrate(model: nn.Module, norms: Sequence[nn.Module], inputs: Inputs) -> None:
    """Set the means and variances of batch norms to those of four random images.

    With the zeros and ones that they start from, activations shrink or grow from layer to layer.
    """
    for norm in norms:
        norm.momentum = 1.0  # of the statistics, the last batch's alone
        norm.train()
    model(**{name: torch.randn(4, *value.shape[1:]) for name, value in inputs.items()})


def image(size: int = 224) -> Inputs:
    """Normalised pixels [1, 3, size, size]."""
    return {"pixel_values": torch.randn(1, 3, size, size)}


def tokens(vocabulary: int) -> Inputs:
    """Token ids [1, 128], int64."""
    return {"input_ids": torch.randint(vocabulary, (1, _TOKENS))}


def masked_tokens(vocabulary: int) -> Inputs:
    """Token ids and attention mask [1, 128], int64; the last quarter is padding."""
    return tokens(vocabulary) | {"attention_mask": (torch.arange(_TOKENS) < _TOKENS * 3 // 4).long()[None]}


def maker(of: Callable[[], Example]) -> Callable[[], Example]:
    """Enter a maker in the table, under its own name."""
    MAKERS[of.__name__] = of
    return of


def _classifier(model: Any, config: Any, size: int = 224) -> Example:
    """One of transformers' image classifiers, 1,000 classes."""
    config.num_labels = 1000
    return FirstOutput(model(config)), image(size)


def _eager(config: Any) -> Any:
    """Attention as matrix products and a softmax, the form that every framework's fusions look for."""
    config._attn_implementation = "eager"
    return config


@maker
def resnet50() -> Example:
    return _classifier(hf.ResNetForImageClassification, hf.ResNetConfig())


@maker
def distilbert() -> Example:
    config = hf.DistilBertConfig()
    return FirstOutput(hf.DistilBertModel(_eager(config))), masked_tokens(config.vocab_size)


@maker
def convnext_t() -> Example:
    return _classifier(hf.ConvNextForImageClassification, hf.ConvNextConfig())


@maker
def whisper_tiny_encoder() -> Example:
    """30 s of sound, 3,000 frames of 80 mel bins, of which the second convolution leaves 1,500."""
    config = hf.WhisperConfig()
    encoder = hf.WhisperModel(_eager(config)).get_encoder()
    return FirstOutput(encoder), {"input_features": torch.randn(1, config.num_mel_bins, 3000)}


@maker
def swin_t() -> Example:
    return _classifier(hf.SwinForImageClassification, _eager(hf.SwinConfig()))


@maker
def llama_prefill() -> Example:
    """The prompt of a small Llama: rotary positions, RMS norms, gated MLPs, three query heads to a key head."""
    config = hf.LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=_TOKENS,
        use_cache=False,
    )
    return FirstOutput(hf.LlamaForCausalLM(_eager(config))), tokens(_VOCABULARY)


@maker
def regnet_y() -> Example:
    """RegNetY-1.6GF."""
    config = hf.RegNetConfig(depths=[2, 6, 17, 2], hidden_sizes=[48, 120, 336, 888], groups_width=24, layer_type="y")
    return _classifier(hf.RegNetForImageClassification, config)


@maker
def efficientnet_b0() -> Example:
    """With a mean of all positions before the classifier, for which transformers takes a window of 1,280 x 1,280."""
    config = hf.EfficientNetConfig(
        width_coefficient=1.0, depth_coefficient=1.0, image_size=224, hidden_dim=1280, depthwise_padding=[]
    )
    made, inputs = _classifier(hf.EfficientNetForImageClassification, config)
    made.body.efficientnet.pooler = nn.AdaptiveAvgPool2d(1)
    return made, inputs


@maker
def mobilenet_v2() -> Example:
    """Padded on both sides, as all but TensorFlow's is."""
    return _classifier(hf.MobileNetV2ForImageClassification, hf.MobileNetV2Config(tf_padding=False))


@maker
def mobilevit_s() -> Example:
    config = hf.MobileViTConfig()
    return _classifier(hf.MobileViTForImageClassification, _eager(config), config.image_size)


@maker
def vit_base() -> Example:
    """Patches of 16 x 16: 197 tokens."""
    return _classifier(hf.ViTForImageClassification, _eager(hf.ViTConfig()))


@maker
def segformer_b0() -> Example:
    """Logits of 150 classes at a quarter of 512 x 512."""
    config = hf.SegformerConfig(num_labels=150)
    return FirstOutput(hf.SegformerForSemanticSegmentation(_eager(config))), image(512)


@maker
def bert_base() -> Example:
    config = hf.BertConfig()
    return FirstOutput(hf.BertModel(_eager(config), add_pooling_layer=False)), tokens(config.vocab_size)


@maker
def t5_small_encoder() -> Example:
    config = hf.T5Config()
    return FirstOutput(hf.T5EncoderModel(_eager(config))), tokens(config.vocab_size)
