"""The catalogue: public models by name, as the values of their published configurations that shapes follow from.

Sources: the ``config.json`` beside each model's weights. The dtype is the one that is refitted (bfloat16), whatever the
published checkpoint is quantised to. The generic models are no published ones: mixtures of experts of DeepSeek-V3's
family at sizes that the field reports refits of.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError
from reshard.models.families import model_from_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.models.model import Model

STACKED = ":stacked"
"""Put behind a name: one tensor for all experts of a layer."""


@dataclass(frozen=True)
class Published:
    """A model of the catalogue: what it is, and its configuration's values."""

    title: str
    config: Mapping[str, Any]
    note: str = ""


_LLAMA = {"model_type": "llama", "vocab_size": 128256, "tie_word_embeddings": False}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_experts": 128,
    "tie_word_embeddings": False,
}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "tie_word_embeddings": False,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
}

# 108 layers: Mamba-2 and experts take turns, with attention put in at these places.
_ULTRA_ATTENTION = (7, 14, 23, 32, 39, 48, 57, 64, 73, 82, 89, 98)


def _ultra_pattern() -> str:
    others = iter("ME" * 48)
    return "".join("*" if at in _ULTRA_ATTENTION else next(others) for at in range(108))


CATALOGUE: Mapping[str, Published] = {
    "llama-3-8b": Published(
        "Llama 3 8B",
        _LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "llama-3-70b": Published(
        "Llama 3 70B",
        _LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    "qwen3-0.6b": Published(
        "Qwen3 0.6B",
        _QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-4b": Published(
        "Qwen3 4B",
        _QWEN3
        | {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": Published(
        "Qwen3 30B-A3B",
        _QWEN3_MOE
        | {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
        },
    ),
    "qwen3-32b": Published(
        "Qwen3 32B",
        _QWEN3
        | {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-235b-a22b": Published(
        "Qwen3 235B-A22B",
        _QWEN3_MOE
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
        },
    ),
    "deepseek-v3": Published(
        "DeepSeek-V3 671B",
        _DEEPSEEK_V3
        | {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "num_attention_heads": 128,
            "n_routed_experts": 256,
        },
        "without the layer for multi-token prediction",
    ),
    "nemotron-3-ultra": Published(
        "Nemotron 3 Ultra 550B-A55B",
        {
            "model_type": "nemotron_h",
            "vocab_size": 131072,
            "tie_word_embeddings": False,
            "hidden_size": 8192,
            "intermediate_size": 5120,
            "hybrid_override_pattern": _ultra_pattern(),
            "num_attention_heads": 64,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 256,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": 512,
            "moe_intermediate_size": 5120,
            "moe_shared_expert_intermediate_size": 10240,
            "moe_latent_size": 2048,
        },
        "without the layers for multi-token prediction",
    ),
    "generic-1t": Published(
        "generic MoE, 1T",
        _DEEPSEEK_V3
        | {
            "vocab_size": 163840,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 1,
            "num_attention_heads": 64,
            "n_routed_experts": 384,
        },
        "no published model",
    ),
    "generic-2.4t": Published(
        "generic MoE, 2.4T",
        _DEEPSEEK_V3
        | {
            "vocab_size": 163840,
            "hidden_size": 8192,
            "intermediate_size": 20480,
            "moe_intermediate_size": 2560,
            "num_hidden_layers": 75,
            "first_k_dense_replace": 1,
            "num_attention_heads": 128,
            "n_routed_experts": 512,
        },
        "no published model",
    ),
    "generic-2.8t": Published(
        "generic MoE, 2.8T",
        _DEEPSEEK_V3
        | {
            "vocab_size": 163840,
            "hidden_size": 8192,
            "intermediate_size": 20480,
            "moe_intermediate_size": 2560,
            "num_hidden_layers": 87,
            "first_k_dense_replace": 1,
            "num_attention_heads": 128,
            "n_routed_experts": 512,
        },
        "no published model",
    ),
}


def published(name: str) -> Published:
    """What the catalogue says of a model, with or without ``:stacked`` behind its name.

    Raises:
        ConfigError: The catalogue has no such model; the message has the nearest names.
    """
    known = name.removesuffix(STACKED)
    if known not in CATALOGUE:
        close = difflib.get_close_matches(known, CATALOGUE, n=3, cutoff=0.4)
        which = (
            f"Nearest: {', '.join(close)}; 'reshard models' lists all." if close else f"Known: {', '.join(CATALOGUE)}."
        )
        raise ConfigError(
            f"{name!r} is no model of the catalogue. {which}",
            value=name,
        )
    return CATALOGUE[known]


@lru_cache(maxsize=4)
def find_model(name: str) -> Model:
    """A model of the catalogue; with ``:stacked`` behind its name its experts are stacked.

    Raises:
        ConfigError: The catalogue has no such model; the message has the nearest names.

    >>> find_model("deepseek-v3").parameters
    671026404352
    """
    return model_from_config(published(name).config, name=name, stacked=name.endswith(STACKED))
