"""Tiny models for vLLM: a folder with a configuration, and the names and shapes of the checkpoint."""

from __future__ import annotations

import json

from reshard.layouts.piece import TensorSpec

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
QWEN3 = {**BASE, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32}
LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MOE = {
    **BASE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}


def write_config(folder, config, **changes):
    """Make a model's folder; returns the whole configuration."""
    config = {**config, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return config


def checkpoint(config, *, stacked_experts=False):
    """Names, shapes and dtypes of the checkpoint, experts one by one or stacked."""
    hidden, head = (
        config["hidden_size"],
        config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
    )
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if config.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, q)
        if config.get("attention_bias"):
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if config["model_type"].startswith("qwen3"):
            shapes |= {f"{at}.self_attn.{name}_norm.weight": (head,) for name in ("q", "k")}
        shapes |= _mlp(config, at, stacked_experts)
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return [TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()]


def _mlp(config, at, stacked_experts):
    hidden = config["hidden_size"]
    if "num_experts" not in config:
        wide = config["intermediate_size"]
        return _projections(f"{at}.mlp", wide, hidden)
    experts, wide = config["num_experts"], config["moe_intermediate_size"]
    shapes = {f"{at}.mlp.gate.weight": (experts, hidden)}
    if stacked_experts:
        shapes[f"{at}.mlp.experts.gate_up_proj"] = (experts, 2 * wide, hidden)
        shapes[f"{at}.mlp.experts.down_proj"] = (experts, hidden, wide)
        return shapes
    for expert in range(experts):
        shapes |= _projections(f"{at}.mlp.experts.{expert}", wide, hidden)
    return shapes


def _projections(at, wide, hidden):
    return {
        f"{at}.gate_proj.weight": (wide, hidden),
        f"{at}.up_proj.weight": (wide, hidden),
        f"{at}.down_proj.weight": (hidden, wide),
    }
