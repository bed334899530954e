"""Build transformers models at the size of a published checkpoint, and describe their inputs.

For most types, the defaults of a configuration are the published base model. Where the defaults have another
size, or one that was never published, this module lists the values of the smallest well-known checkpoint.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from upriver.errors import ModelError
from upriver.program.capture.input_spec import InputSpec, ModelInputs

TOKENS = 128
"""Tokens of the text that a language model is captured with."""

WAVE_SAMPLES = 16_000
"""One second of sound, as long as the commands that audio classifiers are tuned on."""

IMAGE_SIZE = 224
"""Image size of a vision model whose configuration names none."""

_BASE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
"""Widths of BERT's base model, which others have too."""

SIZES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "albert": ("albert-base-v2", _BASE | {"hidden_act": "gelu_new"}),
    "bart": (
        "bart-base",
        {"d_model": 768}
        | dict.fromkeys(("encoder_layers", "decoder_layers"), 6)
        | dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12)
        | dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
    ),
    "bloom": ("bloom-560m", {"hidden_size": 1024, "n_layer": 24, "n_head": 16}),
    "deberta-v2": (
        "deberta-v3-base",
        _BASE
        | {
            "num_hidden_layers": 12,
            "relative_attention": True,
            "position_buckets": 256,
            "share_att_key": True,
        }
        | {"norm_rel_ebd": "layer_norm", "pos_att_type": ["p2c", "c2p"], "type_vocab_size": 0}
        | {"position_biased_input": False},
    ),
    "gpt_neo": (
        "gpt-neo-125m",
        {
            "hidden_size": 768,
            "num_layers": 12,
            "num_heads": 12,
            "attention_types": [[["global", "local"], 6]],
        },
    ),
    "gpt_neox": (
        "pythia-160m",
        _BASE | {"num_hidden_layers": 12, "vocab_size": 50304, "max_position_embeddings": 2048},
    ),
    "llama": (
        "SmolLM-135M",
        {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
        | {"intermediate_size": 1536, "vocab_size": 49152, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
    "qwen2": (
        "Qwen2-0.5B",
        {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
        | {"intermediate_size": 4864, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    ),
    "xlnet": ("xlnet-base-cased", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
}
"""Maps a model type to the checkpoint of its size, and to that checkpoint's configuration values."""

_FAMILIES = (
    "AutoModelForSequenceClassification",
    "AutoModelForImageClassification",
    "AutoModelForAudioClassification",
    "AutoModel",
)


def build(transformers: Any, name: str) -> nn.Module | None:
    """Return a model of that class, or a classifier of that model type. None if the name is unknown.

    Raises:
        ModelError: If it is not a model, or its configuration's defaults are invalid.
    """
    if name in transformers.CONFIG_MAPPING:
        make = _of_type(transformers, name)
    else:
        model_class = _class_named(transformers, name)
        if model_class is None:
            return None
        config_class = getattr(model_class, "config_class", None)
        if config_class is None:
            raise ModelError(f"transformers:{name} is no model with its own configuration class")
        make = lambda: model_class(_prepared(_sized(config_class)))  # noqa: E731
    try:
        return make()
    except (TypeError, ValueError, AttributeError, ImportError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ModelError(
            f"transformers:{name} cannot be built from its configuration's defaults ({reason}); give it as "
            "package.module:callable"
        ) from error


def _of_type(transformers: Any, model_type: str) -> Callable[[], nn.Module]:
    config_class = transformers.CONFIG_MAPPING[model_type]
    for family in _FAMILIES:
        auto = getattr(transformers, family)
        if config_class in auto._model_mapping:
            return lambda: auto.from_config(_prepared(_sized(config_class)))
    raise ModelError(f"transformers has no model to build for model type {model_type!r}")


def _class_named(transformers: Any, name: str) -> Any:
    """Return a model class: one that the package exports, or an inner one such as WhisperEncoder."""
    found = getattr(transformers, name, None)
    if isinstance(found, type):
        return found
    squeezed = name.lower()
    types = [
        t for t in transformers.CONFIG_MAPPING if squeezed.startswith(t.replace("_", "").replace("-", ""))
    ]
    for model_type in sorted(types, key=len, reverse=True):
        module = transformers.CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError:
            continue
        if isinstance(found, type):
            return found
    return None


def _sized(config_class: Any) -> Any:
    _checkpoint, values = SIZES.get(config_class.model_type, ("", {}))
    return config_class(**values)


def _prepared(config: Any) -> Any:
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # otherwise GPT-2 and similar models refuse a batch of more than one
    config.use_cache = False  # a cache is state that a cut would have to carry
    return config


def inputs_of(model: Any, name: str) -> ModelInputs:
    """Return a transformers model's inputs, from its configuration and the parameters of its forward.

    Raises:
        ModelError: If the kind of its main input is unknown.
    """
    main = model.main_input_name
    kinds: dict[str, Callable[[Any, list[str]], ModelInputs]] = {
        "input_ids": _text,
        "pixel_values": _pixels,
        "input_values": _sound,
        "input_features": _sound,
    }
    if main not in kinds:
        raise ModelError(f"transformers:{name} takes {main!r}; known are {', '.join(kinds)}")
    return kinds[main](model.config, list(inspect.signature(model.forward).parameters))


def _text(config: Any, accepted: list[str]) -> ModelInputs:
    text = getattr(config, "text_config", config)
    ids = InputSpec(
        shape=(TOKENS,),
        dtype=torch.int64,
        below=text.vocab_size,
        pad=getattr(text, "pad_token_id", None) or 0,
        end=getattr(text, "eos_token_id", None),
    )
    named = {"input_ids": ids}
    if "pixel_values" in accepted:
        named["pixel_values"] = _pixels(config, accepted).positional[0]
    if "attention_mask" in accepted:
        named["attention_mask"] = InputSpec(shape=(TOKENS,), dtype=torch.int64, mask=True)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        named["decoder_input_ids"] = ids
    return ModelInputs(named=named)


def _pixels(config: Any, _accepted: list[str]) -> ModelInputs:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    return ModelInputs(positional=(InputSpec(shape=(getattr(vision, "num_channels", 3), height, width)),))


def _sound(config: Any, _accepted: list[str]) -> ModelInputs:
    bins = getattr(config, "num_mel_bins", None)
    if bins is None:
        shape: tuple[int, ...] = (WAVE_SAMPLES,)
    elif hasattr(config, "max_source_positions"):  # Whisper: two frames per position
        shape = (bins, 2 * config.max_source_positions)
    else:
        shape = (getattr(config, "max_length", 1024), bins)
    return ModelInputs(positional=(InputSpec(shape=shape),))
