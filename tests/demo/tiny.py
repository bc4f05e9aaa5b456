"""Tiny random models that behave like the big ones: made with transformers, written as checkpoint folders."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config

SIZES = {
    "vocab_size": 200,  # no multiple of 64: every rank's last rows are padding
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True, "head_dim": 6}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama 3 positions": (LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": True, "head_dim": 8}),
}


def make_model(kind, **sizes):
    """A transformers model that computes in float32 with weights that bf16 can hold."""
    config_class, options = CONFIGS[kind]
    config = config_class(**{**SIZES, **options, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() > 1 else 0.1)
            parameter.copy_((spread + (1.0 if parameter.dim() == 1 else 0.0)).to(torch.bfloat16))
    return model


def weights_of(model):
    """The model's tensors in bf16, under all their names."""
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}


def write_folder(model, folder):
    """Write a checkpoint folder, tied weights once; its tokenizer knows the words w0 to w199 and no chat."""
    weights = weights_of(model)
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"))
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(str(folder))
    return folder
