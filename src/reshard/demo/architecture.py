"""Architecture: what the config of a checkpoint says about a model, as far as the demo's engine needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

KNOWN = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Architectures that the engine can serve, with the model type that their configs carry."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: the base, and how long contexts are reached (``kind``: "default", "linear" or "llama3")."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder-only model with grouped-query attention and a gated MLP.

    Query head ``h`` attends with KV head ``h // (heads // kv_heads)``.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    rope: Rope
    tied: bool
    """Whether the output head is the embedding: two names, one memory."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether each query and key head is normalised by itself (``q_norm``, ``k_norm``)."""
    stop_tokens: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
        """Read a Hugging Face config.

        Args:
            config: The content of ``config.json``; ``stop_tokens`` come from its ``eos_token_id``.
            where: How messages call the config.

        Raises:
            ConfigError: A model that the engine does not know, or an option of a known one that it lacks.
        """
        name = _name_of(config, where)
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        _refuse_unknown_options(config, where)
        biased = bool(config.get("attention_bias", False))
        return cls(
            name=name,
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope_of(config, where),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=biased or name == "Qwen2ForCausalLM",
            o_bias=biased and name != "Qwen2ForCausalLM",
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=name == "Qwen3ForCausalLM",
            stop_tokens=stop_tokens_of(config),
        )

    @property
    def queries_per_kv(self) -> int:
        return self.heads // self.kv_heads


def stop_tokens_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end an answer, from a config's ``eos_token_id`` (a number, a list, or nothing).

    >>> stop_tokens_of({"eos_token_id": 2}), stop_tokens_of({"eos_token_id": [2, 0]}), stop_tokens_of({})
    ((2,), (2, 0), ())
    """
    stop = config.get("eos_token_id")
    if stop is None:
        return ()
    return tuple(int(token) for token in stop) if isinstance(stop, list) else (int(stop),)


def _name_of(config: Mapping[str, Any], where: str) -> str:
    named = list(config.get("architectures") or ())
    by_type = [name for name, model_type in KNOWN.items() if model_type == config.get("model_type")]
    for name in named or by_type:
        if name in KNOWN:
            return str(name)
    raise ConfigError(
        f"{where}: the model is {named or config.get('model_type')!r}, which the demo's engine cannot serve. "
        f"It knows {', '.join(KNOWN)}.",
        architectures=tuple(named),
    )


def _refuse_unknown_options(config: Mapping[str, Any], where: str) -> None:
    sliding = "sliding_attention" in (config.get("layer_types") or ()) or bool(config.get("use_sliding_window"))
    if config.get("model_type") == "mistral":
        sliding = sliding or config.get("sliding_window") is not None
    lacking = {
        "an activation other than silu": config.get("hidden_act", "silu") != "silu",
        "sliding-window attention": sliding,
        "rotary positions on a part of a head": config.get("partial_rotary_factor", 1.0) != 1.0,
        "quantised weights": config.get("quantization_config") is not None,
        "query heads that KV heads do not divide": int(config["num_attention_heads"])
        % int(config.get("num_key_value_heads") or config["num_attention_heads"])
        != 0,
    }
    for what, present in lacking.items():
        if present:
            raise ConfigError(f"{where}: the model has {what}, which the demo's engine lacks. Use another --model.")


def _rope_of(config: Mapping[str, Any], where: str) -> Rope:
    """Read both forms: transformers 5 has one ``rope_parameters``, earlier ones ``rope_theta`` and ``rope_scaling``."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, float(given["factor"]))
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            float(given["factor"]),
            float(given["low_freq_factor"]),
            float(given["high_freq_factor"]),
            int(given["original_max_position_embeddings"]),
        )
    raise ConfigError(
        f"{where}: rotary positions of kind {kind!r}; the demo's engine knows default, linear and llama3. "
        "Use another --model."
    )
