"""Small models of every kind that people bring, from configurations of transformers and timm, with random weights.

    python benchmarks/wall_models.py --out FOLDER [--only NAME ...] [--jobs 2]

Widths and depths are cut, so that a file takes seconds; what makes an architecture itself, its operators and how they
hang together, is all there. Every other one has batch 4, the others 1. What fails is named, the others are made.
"""

import argparse
import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import transformers as hf
from torch import nn

Inputs = dict[str, torch.Tensor]

_DEADLINE_S = 300
TOKENS, IMAGE, VOCABULARY, SAMPLES = 16, 64, 200, 4000

# What configurations call their sizes. A model takes those that its configuration has.
SMALL: dict[str, Any] = {
    "hidden_size": 64, "d_model": 64, "dim": 64, "n_embd": 64, "embed_dim": 64, "embedding_size": 64, "emb_dim": 64,
    "d_embed": 64, "hidden_dim": 128, "word_embed_proj_dim": 64,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_encoder_layers": 2, "num_decoder_layers": 2, "num_layers_decoder": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "intermediate_size": 128, "n_inner": 128, "ffn_dim": 128, "d_ff": 128, "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128, "feed_forward_size": 128,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64,
    "image_size": IMAGE, "use_cache": False, "num_labels": 10, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "_attn_implementation": "eager",
}  # fmt: skip

_FOR_ALL = ("image_size", "num_labels", "_attn_implementation")


@dataclass(frozen=True)
class Entry:
    """A model of the wall."""

    config: str  # class of transformers, `Config` left out; or the name of a model of timm
    model: str  # class of transformers; or `timm`
    inputs: Callable[[int], Inputs]  # of a batch
    changed: Mapping[str, Any]  # keys of the configuration, besides `SMALL`


def text(batch: int) -> Inputs:
    """Token ids [batch, tokens], int64."""
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, TOKENS))}


def masked(batch: int) -> Inputs:
    """Token ids and a mask, a quarter of which is padding."""
    mask = (torch.arange(TOKENS) < TOKENS * 3 // 4).long()
    return text(batch) | {"attention_mask": mask[None].repeat(batch, 1)}


def pair(batch: int) -> Inputs:
    """Token ids for an encoder and for a decoder."""
    return text(batch) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (batch, TOKENS // 2))}


def image(batch: int) -> Inputs:
    """Normalised pixels [batch, 3, 64, 64]."""
    return {"pixel_values": torch.randn(batch, 3, IMAGE, IMAGE)}


def grey(batch: int) -> Inputs:
    """Pixels of one channel."""
    return {"pixel_values": torch.randn(batch, 1, IMAGE, IMAGE)}


def video(batch: int) -> Inputs:
    """Normalised pixels [batch, 4 frames, 3, 64, 64]."""
    return {"pixel_values": torch.randn(batch, 4, 3, IMAGE, IMAGE)}


def sound(batch: int) -> Inputs:
    """A quarter of a second at 16 kHz."""
    return {"input_values": torch.randn(batch, SAMPLES)}


def mel(frames: int, bins: int, name: str = "input_features", *, bins_last: bool = False) -> Callable[[int], Inputs]:
    """A spectrogram."""
    shape = (frames, bins) if bins_last else (bins, frames)
    return lambda batch: {name: torch.randn(batch, *shape)}


def speech(batch: int) -> Inputs:
    """A spectrogram for an encoder, token ids for a decoder."""
    return mel(64, 80)(batch) | {"decoder_input_ids": torch.randint(3, VOCABULARY, (batch, 8))}


def both(batch: int) -> Inputs:
    """Token ids and pixels."""
    return masked(batch) | image(batch)


def series(batch: int) -> Inputs:
    """Past values of two series."""
    return {"past_values": torch.randn(batch, 32, 2)}


def floats(name: str, *shape: int) -> Callable[[int], Inputs]:
    """One tensor of numbers."""
    return lambda batch: {name: torch.randn(batch, *shape)}


MODELS: dict[str, Entry] = {}


def _add(
    model: str, inputs: Callable[[int], Inputs], name: str = "", config: str = "", base: str = "", **changed: Any
) -> None:
    base = base or next((model.removesuffix(end) for end in _TASKS if model.endswith(end) and model != end), model)
    MODELS[name or base.lower()] = Entry(config or base, model, inputs, changed)


_TASKS = (
    "ForConditionalGeneration", "ForImageClassification", "ForObjectDetection", "ForSemanticSegmentation",
    "ForUniversalSegmentation", "ForInstanceSegmentation", "ForDepthEstimation", "ForCausalLM", "ForMaskedLM",
    "ForSequenceClassification", "ForQuestionAnswering", "ForCTC", "ForAudioClassification", "ForVideoClassification",
    "ForPrediction", "ForImageSuperResolution", "LMHeadModel", "EncoderModel", "VisionModel", "TextModel", "Model",
)  # fmt: skip

_HEARD: dict[str, Any] = {"conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_RESNET = hf.ResNetConfig(
    hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], embedding_size=16, out_features=["stage4"]
)
_SWIN = hf.SwinConfig(
    image_size=64,
    embed_dim=16,
    depths=[1, 1, 1, 1],
    num_heads=[1, 2, 2, 4],
    window_size=4,
    out_features=["stage1", "stage2", "stage3", "stage4"],
)

# Text, encoders.
_add("BertModel", masked)
_add("RobertaModel", masked)
_add("DistilBertModel", masked)
_add("AlbertModel", masked)
_add("ElectraModel", masked)
_add("MPNetModel", masked)
_add("DebertaModel", masked, relative_attention=True, pos_att_type=["c2p", "p2c"])
_add("DebertaV2Model", masked, relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8)
_add("ModernBertModel", masked, global_attn_every_n_layers=2, local_attention=8)
_add("XLMRobertaModel", masked)
_add("SqueezeBertModel", masked)
_add("MobileBertModel", masked, true_hidden_size=32, intra_bottleneck_size=32, hidden_size=64, embedding_size=32)
_add("ConvBertModel", masked)
_add("FNetModel", text)
_add("NystromformerModel", masked, num_landmarks=4, segment_means_seq_len=TOKENS)
_add("RoFormerModel", masked)
_add("RemBertModel", masked, input_embedding_size=32, output_embedding_size=64)
_add("ErnieModel", masked)
_add("XLNetModel", masked, d_inner=128)
_add("EsmModel", masked, position_embedding_type="rotary")
_add("BertForQuestionAnswering", masked, name="bert_questions")
_add("RobertaForSequenceClassification", masked, name="roberta_classes")
_add("NomicBertModel", masked)
# Text, decoders.
_add("GPT2LMHeadModel", text)
_add("GPTNeoForCausalLM", text, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=8)
_add("GPTNeoXForCausalLM", text)
_add("GPTJForCausalLM", text, rotary_dim=8)
_add("OPTForCausalLM", text)
_add("BloomForCausalLM", text)
_add("LlamaForCausalLM", text)
_add("MistralForCausalLM", text, sliding_window=8)
_add("MixtralForCausalLM", text, num_local_experts=4)
_add("Qwen2ForCausalLM", text)
_add("Qwen3ForCausalLM", text)
_add("Qwen2MoeForCausalLM", text, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32)
_add("GemmaForCausalLM", text)
_add("Gemma2ForCausalLM", text, sliding_window=8, query_pre_attn_scalar=16)
_add("Gemma3ForCausalLM", text, config="Gemma3Text", sliding_window=8, query_pre_attn_scalar=16)
_add("PhiForCausalLM", text)
_add("Phi3ForCausalLM", text, original_max_position_embeddings=64)
_add("FalconForCausalLM", text, num_kv_heads=2)
_add("MptForCausalLM", text)
_add("StableLmForCausalLM", text)
_add("Olmo2ForCausalLM", text)
_add("CohereForCausalLM", text)
_add("Starcoder2ForCausalLM", text)
_add("MambaForCausalLM", text, state_size=8, time_step_rank=4)
_add("Mamba2ForCausalLM", text, state_size=8, head_dim=16, num_heads=8, n_groups=1, chunk_size=8)
_add("CodeGenForCausalLM", text, rotary_dim=8)
_add("GraniteForCausalLM", text)
_add("SmolLM3ForCausalLM", text)
_add("GlmForCausalLM", text)
_add("NemotronForCausalLM", text)
_add("BioGptForCausalLM", text)
# Text to text.
_add("T5ForConditionalGeneration", pair)
_add("MT5EncoderModel", masked)
_add("BartModel", pair)
_add("MBartModel", pair)
_add("PegasusModel", pair)
_add("MarianModel", pair)
_add("M2M100Model", pair)
# Images, classified.
_add("ViTForImageClassification", image, patch_size=16)
_add("DeiTForImageClassification", image)
_add("BeitForImageClassification", image, use_relative_position_bias=True)
_add("SwinForImageClassification", image, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
_add("Swinv2ForImageClassification", image, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)
_add("ConvNextForImageClassification", image, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1])
_add("ConvNextV2ForImageClassification", image, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1])
_add("ResNetForImageClassification", image, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], embedding_size=16)
_add("RegNetForImageClassification", image, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], groups_width=8)
_add("EfficientNetForImageClassification", image, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320)
_add("MobileNetV1ForImageClassification", image, depth_multiplier=0.25)
_add("MobileNetV2ForImageClassification", image, depth_multiplier=0.25)
_add("MobileViTForImageClassification", image, hidden_sizes=[32, 48, 64], neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 96])
_add("MobileViTV2ForImageClassification", image, width_multiplier=0.5)
_add(
    "LevitForImageClassification",
    image,
    hidden_sizes=[32, 48, 64],
    num_attention_heads=[2, 3, 4],
    key_dim=[8, 8, 8],
    depths=[1, 1, 1],
)
_add("PoolFormerForImageClassification", image, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1])
_add(
    "PvtForImageClassification",
    image,
    hidden_sizes=[16, 32, 48, 64],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 3, 4],
)
_add(
    "PvtV2ForImageClassification",
    image,
    hidden_sizes=[16, 32, 48, 64],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 3, 4],
)
_add("CvtForImageClassification", image, embed_dim=[16, 32, 64], num_heads=[1, 2, 4], depth=[1, 1, 2])
_add("BitForImageClassification", image, hidden_sizes=[64, 64, 64, 64], depths=[1, 1, 2, 1], embedding_size=32)
_add("Dinov2ForImageClassification", image, patch_size=16, mlp_ratio=2)
_add(
    "FocalNetForImageClassification",
    image,
    embed_dim=16,
    hidden_sizes=[16, 32],
    depths=[1, 2],
    focal_levels=[2, 2],
    focal_windows=[3, 3],
)
_add("SwiftFormerForImageClassification", image, embed_dims=[16, 32, 48, 64], depths=[1, 1, 2, 1])
_add(
    "HieraForImageClassification",
    image,
    embed_dim=32,
    depths=[1, 1, 1, 1],
    num_heads=[1, 2, 2, 4],
    mlp_ratio=2.0,
    image_size=[64, 64],
)
_add("ViTMSNForImageClassification", image)
_add("Data2VecVisionForImageClassification", image)
_add("IJepaForImageClassification", image, patch_size=16)
_add("TextNetForImageClassification", image)
# Detection, segmentation, depth, super-resolution.
_add(
    "DetrForObjectDetection",
    image,
    num_queries=10,
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone_config=_RESNET,
)
_add(
    "ConditionalDetrForObjectDetection",
    image,
    num_queries=10,
    use_timm_backbone=False,
    use_pretrained_backbone=False,
    backbone_config=_RESNET,
)
_add("YolosForObjectDetection", image, image_size=[64, 64], num_detection_tokens=10)
_add(
    "SegformerForSemanticSegmentation",
    image,
    hidden_sizes=[16, 32, 48, 64],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 3, 4],
    decoder_hidden_size=32,
)
_add(
    "MaskFormerForInstanceSegmentation",
    image,
    config="MaskFormer",
    fpn_feature_size=32,
    mask_feature_size=32,
    backbone_config=_SWIN,
    decoder_config=hf.DetrConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        num_queries=10,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    ),
)
_add(
    "Mask2FormerForUniversalSegmentation",
    image,
    feature_size=32,
    mask_feature_size=32,
    hidden_dim=32,
    encoder_feedforward_dim=64,
    dim_feedforward=64,
    num_queries=10,
    encoder_layers=2,
    decoder_layers=3,
    backbone_config=_SWIN,
)
_add(
    "UperNetForSemanticSegmentation",
    image,
    hidden_size=32,
    pool_scales=[1, 2],
    auxiliary_channels=16,
    backbone_config=hf.ConvNextConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], out_features=["stage1", "stage2", "stage3", "stage4"]
    ),
)
_add(
    "MobileViTForSemanticSegmentation",
    image,
    name="mobilevit_deeplab",
    hidden_sizes=[32, 48, 64],
    neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 96],
    aspp_out_channels=32,
)
_add(
    "DPTForDepthEstimation",
    image,
    backbone_out_indices=[0, 1, 2, 3],
    num_hidden_layers=4,
    neck_hidden_sizes=[16, 24, 32, 48],
    fusion_hidden_size=16,
    patch_size=16,
)
_add(
    "GLPNForDepthEstimation",
    image,
    hidden_sizes=[16, 32, 48, 64],
    depths=[1, 1, 1, 1],
    num_attention_heads=[1, 2, 3, 4],
    decoder_hidden_size=16,
)
_add("Swin2SRForImageSuperResolution", image, embed_dim=24, depths=[2, 2], num_heads=[2, 2], window_size=8)
_add(
    "RTDetrForObjectDetection",
    image,
    d_model=32,
    encoder_hidden_dim=32,
    num_queries=10,
    decoder_layers=2,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    decoder_in_channels=[32, 32, 32],
    encoder_in_channels=[32, 48, 64],
    anchor_image_size=[64, 64],
    backbone_config=hf.RTDetrResNetConfig(
        hidden_sizes=[16, 32, 48, 64],
        depths=[1, 1, 1, 1],
        embedding_size=16,
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    ),
)
# Sound.
_add("WhisperModel", speech, num_mel_bins=80, max_source_positions=32, max_target_positions=16)
_add("Wav2Vec2ForCTC", sound, **_HEARD)
_add("HubertForCTC", sound, **_HEARD)
_add("WavLMModel", sound, **_HEARD)
_add("UniSpeechSatModel", sound, **_HEARD)
_add("SEWModel", sound, conv_dim=[32] * 13, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4)
_add("Data2VecAudioModel", sound, conv_dim=[32] * 7, num_conv_pos_embeddings=3, num_conv_pos_embedding_groups=4)
_add("ASTForAudioClassification", mel(64, 32, "input_values", bins_last=True), max_length=64, num_mel_bins=32)
_add("Wav2Vec2BertModel", mel(32, 160, bins_last=True))
_add("Wav2Vec2ConformerModel", sound, **_HEARD)
_add("EncodecModel", floats("input_values", 1, 3200), num_filters=8, hidden_size=32, codebook_dim=32)
# Images and text.
_SEEN = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": IMAGE,
    "patch_size": 16,
}
_READ = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
_add("CLIPModel", both, text_config=_READ, vision_config=_SEEN, projection_dim=32)
_add("CLIPVisionModel", image, name="clip_vision", config="CLIPVision", patch_size=16)
_add("SiglipModel", both, text_config=_READ, vision_config=_SEEN)
_add("ChineseCLIPModel", both, text_config=_READ, vision_config=_SEEN, projection_dim=32)
_add("AltCLIPModel", both, text_config={**_READ, "project_dim": 32}, vision_config=_SEEN, projection_dim=32)
_add(
    "CLIPSegForImageSegmentation",
    both,
    base="CLIPSeg",
    text_config=_READ,
    vision_config=_SEEN,
    projection_dim=64,
    reduce_dim=32,
    extract_layers=[0, 1],
    decoder_num_attention_heads=4,
    decoder_intermediate_size=64,
)
_add("BlipModel", both, text_config=_READ, vision_config=_SEEN, projection_dim=32)
_add("ViltModel", both, patch_size=16, max_image_length=-1)
# Time series, video, and others.
_add(
    "PatchTSTForPrediction",
    series,
    num_input_channels=2,
    context_length=32,
    patch_length=8,
    patch_stride=8,
    prediction_length=8,
)
_add(
    "PatchTSMixerForPrediction",
    series,
    num_input_channels=2,
    context_length=32,
    patch_length=8,
    patch_stride=8,
    prediction_length=8,
)
_add("VideoMAEForVideoClassification", video, num_frames=4, tubelet_size=2, patch_size=16)
_add("TimesformerForVideoClassification", video, num_frames=4, patch_size=16)
_add("VivitForVideoClassification", video, num_frames=4, tubelet_size=[2, 16, 16])
_add("SuperPointForKeypointDetection", image, base="SuperPoint", encoder_hidden_sizes=[16, 16, 32, 32])

_TORCHVISION = (
    "torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.transforms.v2",
    "torchvision.datasets", "torchvision.datasets.folder", "torchvision.ops", "torchvision.ops.misc",
    "torchvision.models", "torchvision.models.feature_extraction",
)  # fmt: skip
_TIMM = {
    "mobilenetv3_small_050": 64, "efficientnet_lite0": 64, "tinynet_e": 64, "lcnet_050": 64, "mnasnet_small": 64,
    "resnext26ts": 64, "seresnet18": 64, "densenet121": 64, "vgg11": 64, "inception_v3": 96,
    "xception41": 64,
    "ghostnet_050": 64, "hrnet_w18_small": 64, "coatnet_pico_rw_224": 224, "mixer_s32_224": 224,
    "convmixer_768_32": 64, "repvgg_a0": 64, "dla46_c": 64, "dm_nfnet_f0": 64, "cspresnet50": 64,
    "res2net50_14w_8s": 64,
    "edgenext_xx_small": 64,
    "fastvit_t8": 64, "efficientvit_b0": 64, "tiny_vit_5m_224": 224, "xcit_nano_12_p16_224": 224, "cait_xxs24_224": 224,
    "crossvit_tiny_240": 240, "pit_ti_224": 224, "mobileone_s0": 64, "visformer_tiny": 224, "gmlp_ti16_224": 224,
    "resmlp_12_224": 224, "poolformerv2_s12": 64, "shvit_s1": 224, "starnet_s1": 64, "repghostnet_050": 64,
    "selecsls42b": 64, "mambaout_femto": 64, "nextvit_small": 64,
}  # fmt: skip


def timm_models() -> dict[str, Entry]:
    """One of each kind of timm's, the smallest, at small images where it takes them."""
    return {
        f"timm_{name}": Entry(name, "timm", floats("x", 3, size, size), {}) for name, size in _TIMM.items()
    }  # fmt: skip


class Tensors(nn.Module):
    """A model that returns what it computes as a tuple of tensors of real numbers, or the first alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The first tensors of its result; hidden states, caches and losses are left out."""
        found = self.body(**inputs)
        values = found if isinstance(found, tuple) else found.to_tuple() if hasattr(found, "to_tuple") else (found,)
        tensors = tuple(value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point())
        return tensors[:2]


def make(name: str, batch: int, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """A model of the wall, and inputs of a batch; equal for equal seeds."""
    from architectures import prepared

    torch.manual_seed(seed)
    entry = (MODELS | timm_models())[name]
    model = timm_model(entry.config, num_classes=10) if entry.model == "timm" else _transformer(entry)
    return prepared(model, entry.inputs(batch))


def _transformer(entry: Entry) -> nn.Module:
    kind = getattr(hf, f"{entry.config}Config")
    known = inspect.signature(kind.__init__).parameters
    default = kind()
    is_staged = {"depths", "depth", "hidden_sizes", "width_coefficient"} & entry.changed.keys()  # sizes of its own
    small = {key: SMALL[key] for key in _FOR_ALL} if is_staged else SMALL
    taken = {key: value for key, value in small.items() if key in known or hasattr(default, key)}
    config = kind(**{**taken, **entry.changed})
    return Tensors(getattr(hf, entry.model)(config))


def timm_model(name: str, **options: Any) -> nn.Module:
    """A model of timm that takes one tensor, `x`."""
    for module in _TORCHVISION:  # which has no build for torch without CUDA; timm imports it to load images alone
        sys.modules.setdefault(module, MagicMock())
    import timm

    model = timm.create_model(name, **options)
    for module in _TORCHVISION:
        sys.modules.pop(module)  # torch's exporter looks whether it is there
    return Positional(model)


class Positional(nn.Module):
    """A model of one tensor, which gets a name."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        """Logits."""
        return (self.body(x),)


def batch_of(name: str) -> int:
    """1 or 4: every other model, in the order of their names."""
    return (1, 4)[sorted(MODELS | timm_models()).index(name) % 2]


def save(name: str, model: nn.Module, inputs: Inputs, folder: Path) -> None:
    """Write a model as `.onnx` and as `.pt2`, and beside them, as `.npz`, inputs and what torch makes of them.

    Raises:
        ValueError: It computes nothing that could be compared.
    """
    from architectures import save_onnx
    from files import whole

    with torch.no_grad():
        outputs = [output.numpy() for output in model(**inputs)]
    if not all(np.isfinite(output).all() and np.abs(output).max() > 1e-6 for output in outputs):
        raise ValueError("an output is not finite, or vanishes")
    program = torch.export.export(model, (), inputs)
    with whole(folder / f"{name}.npz") as path, path.open("wb") as file:
        named = {f"input_{key}": value.numpy() for key, value in inputs.items()}
        np.savez(file, **named, **{f"output_{n}": output for n, output in enumerate(outputs)})
    with whole(folder / f"{name}.pt2") as path:
        torch.export.save(program, path)
    with whole(folder / f"{name}.onnx") as path:
        save_onnx(program, path, n_outputs=len(outputs))


def main() -> None:
    """Make files, each in a process of its own, under a deadline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="names; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        warnings.simplefilter("ignore")  # of torch's exporter, about its own code
        save(options.one, *make(options.one, batch_of(options.one)), options.out)
        return
    make_each(Path(__file__), options.only or list(MODELS | timm_models()), options.out, options.jobs)


def make_each(script: Path, names: Sequence[str], folder: Path, jobs: int) -> None:
    """Have a script make each of these as its `--one`, in a process of its own, and print what came of it."""

    def made(name: str) -> bool:
        command = [sys.executable, str(script), "--out", str(folder), "--one", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
            told = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no word"])[-1]
        except subprocess.TimeoutExpired:
            told = f"not made in {_DEADLINE_S} s"
        print(f"{name:40} {told[:300] or 'made'}", flush=True)
        return not told

    with ThreadPoolExecutor(jobs) as executor:
        print(f"{sum(executor.map(made, names))} of {len(names)} made")


if __name__ == "__main__":
    main()
