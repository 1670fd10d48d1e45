"""Small models of the types that transformers knows, made without a thought for any of them: what nobody prepared.

    python benchmarks/wall_zoo.py --out FOLDER [--only TYPE ...] [--sample N] [--seed S] [--jobs 2]

A type's base model, with the sizes of its configuration, and of those within it, cut to `SMALL`; it is fed what its
`forward` has names for. What cannot be built, fed, exported, or is too large for it, is named and left out. The files
are those of `wall_models.py`, for `wall.py --quick`.
"""

import argparse
import inspect
import itertools
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
import wall_models
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from wall_models import IMAGE, SMALL, Inputs, Tensors

_MOST_PARAMETERS = 60_000_000
# Of mixtures of experts, latent attention, windows and convolutions of sound, beside what `SMALL` has.
_SMALL: dict[str, Any] = SMALL | {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "sliding_window": 8, "conv_dim": [32] * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "num_queries": 10, "depth": 2, "state_size": 8, "chunk_size": 8,
}  # fmt: skip
# Sizes that another one may be a product of: left out one group after the other until a model can be built and run.
_DOUBTFUL: tuple[tuple[str, ...], ...] = (
    (),
    ("head_dim", "num_key_value_heads"),
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    ("head_dim", "num_key_value_heads", "hidden_size", "d_model", "num_attention_heads"),
    ("head_dim", "num_key_value_heads", "hidden_dim", "dim", "embed_dim", "num_heads", "depth"),
    ("image_size", "depth"),
    tuple(key for key in _SMALL if "layers" not in key and key not in ("vocab_size", "_attn_implementation")),
)


def types() -> dict[str, type]:
    """Configurations by their type, of all that have a base model; those of `wall_models.py` are left out."""
    known = {f"{entry.config}Config" for entry in wall_models.MODELS.values()}
    return {
        name: CONFIG_MAPPING[name]
        for name in CONFIG_MAPPING
        if CONFIG_MAPPING[name] in MODEL_MAPPING and CONFIG_MAPPING[name].__name__ not in known
    }


def make(name: str, batch: int, seed: int = 0) -> tuple[nn.Module, Inputs]:
    """A small model of a type, and inputs of a batch on which it runs; equal for equal seeds.

    Raises:
        ValueError: None was found; says what was tried.
    """
    from architectures import prepared

    tried = []
    for left_out in _DOUBTFUL:
        torch.manual_seed(seed)
        try:
            model = _model(name, {key: value for key, value in _SMALL.items() if key not in left_out})
        except Exception as error:  # any: of a library, which wants other sizes
            tried.append(f"built: {type(error).__name__}: {error}")
            continue
        for inputs in _feeds(model.body, batch):
            try:
                with torch.no_grad():
                    if model(**inputs):
                        return prepared(model, inputs)
            except Exception as error:
                tried.append(f"fed {', '.join(inputs)}: {type(error).__name__}: {error}")
    raise ValueError(" | ".join(dict.fromkeys(each.splitlines()[0][:120] for each in tried)))


def _model(name: str, sizes: Mapping[str, Any]) -> Tensors:
    config = shrunk(CONFIG_MAPPING[name], sizes)
    found = MODEL_MAPPING[type(config)]
    kind = found[0] if isinstance(found, tuple) else found
    with torch.device("meta"):
        n_parameters = sum(each.numel() for each in kind(config).parameters())
    if n_parameters > _MOST_PARAMETERS:
        raise ValueError(f"{n_parameters:,} parameters")
    return Tensors(kind(config).eval())


def shrunk(kind: type, sizes: Mapping[str, Any]) -> Any:
    """A configuration of these sizes, as far as it has them and they are one number each; so are those within it."""
    default = kind()
    known = {*vars(default), *inspect.signature(kind).parameters}
    taken: dict[str, Any] = {}
    for key, value in vars(default).items():
        if isinstance(value, hf.PreTrainedConfig):
            taken[key] = shrunk(type(value), sizes)
    for key, value in sizes.items():
        if (key in known or hasattr(default, key)) and _alike(getattr(default, key, None), value):
            taken[key] = value
    return kind(**taken)


def _alike(default: object, value: object) -> bool:
    """Whether a size may take the place of a default: lists are sizes of stages, each its own."""
    return default is None or isinstance(default, (list, tuple)) == isinstance(value, list)


def _feeds(model: nn.Module, batch: int) -> Iterator[Inputs]:
    """What may be fed, the richest first."""
    known = inspect.signature(model.forward).parameters
    config = model.config
    size, channels = _found(config, "image_size", IMAGE), _found(config, "num_channels", 3)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    text = wall_models.masked(batch)
    for bins, frames in itertools.product((_found(config, "num_mel_bins", 80), 80, 128), (64, 128, 3000)):
        heard = torch.randn(batch, bins, frames)
        seen = torch.randn(batch, channels, height, width)
        every = {
            **text, "decoder_input_ids": text["input_ids"][:, : wall_models.TOKENS // 2], "pixel_values": seen,
            "input_features": heard, "input_values": torch.randn(batch, wall_models.SAMPLES),
            "past_values": torch.randn(batch, 32, 2), "bbox": torch.randint(0, 50, (batch, wall_models.TOKENS, 4)),
        }  # fmt: skip
        groups = (
            ("input_ids", "attention_mask", "decoder_input_ids"), ("input_ids", "attention_mask", "bbox"),
            ("input_ids", "attention_mask", "pixel_values"), ("input_ids", "attention_mask"), ("input_ids",),
            ("pixel_values",), ("input_features", "decoder_input_ids"), ("input_features",),
            ("input_values", "decoder_input_ids"), ("input_values",), ("past_values",),
        )  # fmt: skip
        for group in groups:
            if set(group) <= known.keys():
                yield {key: every[key] for key in group}
        if "input_features" in known:
            yield {"input_features": heard.transpose(1, 2).contiguous()}
        if "pixel_values" in known:
            yield {"pixel_values": torch.randn(batch, 4, channels, height, width)}
        if "input_features" not in known:
            return


def _found(config: Any, key: str, default: Any) -> Any:
    """A size of a configuration, or of one within it."""
    value = getattr(config, key, None)
    if value is not None:
        return value
    within = [each for each in vars(config).values() if isinstance(each, hf.PreTrainedConfig)]
    return next((found for each in within if (found := _found(each, key, None)) is not None), default)


def main() -> None:
    """Make files, each in a process of its own, under a deadline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="types; default: all")
    parser.add_argument("--sample", type=int, help="so many of them, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        warnings.simplefilter("ignore")
        batch = (1, 4)[len(options.one) % 2]
        wall_models.save(options.one, *make(options.one, batch), options.out)
        return
    names = sorted(options.only or types())
    if options.sample:
        names = random.Random(options.seed).sample(names, min(options.sample, len(names)))
    wall_models.make_each(Path(__file__), names, options.out, options.jobs)


if __name__ == "__main__":
    main()
