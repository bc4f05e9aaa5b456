"""Small models of each family, and their dense copies: every element of every tensor is a number of its own."""

from __future__ import annotations

from math import prod

import torch

from reshard.models.families import model_from_config

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 270,
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
}
MOE = DENSE | {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 8}
LATENT = {
    "model_type": "deepseek_v3",
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "q_lora_rank": 6,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 1,
    "v_head_dim": 3,
}
HYBRID = {
    "model_type": "nemotron_h",
    "vocab_size": 256,
    "hidden_size": 8,
    "intermediate_size": 8,
    "hybrid_override_pattern": "ME*-",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 3,
    "n_groups": 4,
    "ssm_state_size": 5,
    "conv_kernel": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 4,
}


def small(config, **more):
    return model_from_config(config, **more)


def dense_copy(model):
    """Tensors by name; no two elements of the model are equal."""
    tensors, at = {}, 0
    for spec in model.specs:
        numel = prod(spec.shape)
        tensors[spec.name] = torch.arange(at, at + numel).reshape(spec.shape)
        at += numel
    return tensors


def elements(manifest, tensors, rank):
    """The sorted elements that a rank has by its manifest, with repeats if there are any."""
    found = []
    for entry in manifest.entries:
        for holding in entry.holdings:
            for box, ranks in holding.boxes(entry.spec):
                if rank in ranks:
                    at = tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))
                    found.append(tensors[entry.spec.name][at].flatten())
    return torch.cat(found).sort().values if found else torch.empty(0, dtype=torch.int64)
