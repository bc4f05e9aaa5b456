"""Names and shapes of a model's tensors, from the values of its ``config.json``: a rule for each family.

Names are those of the checkpoint. Experts are single tensors (``mlp.experts.7.up_proj.weight``), as in the checkpoints
of all families here, or stacked ones (``mlp.experts.gate_up_proj``), as transformers has them in memory since its
version 5. Layers for multi-token prediction are left out: the engine's draft model has them, not the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError
from reshard.layouts.dtype import dtype_name
from reshard.layouts.piece import TensorSpec
from reshard.models.model import Heads, Model, StateSpace, Weight
from reshard.models.roles import role_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_BUFFER = "e_score_correction_bias"
_Named = tuple[str, tuple[int, ...]]
"""A name inside a layer (or a whole name), and a shape."""


@dataclass(frozen=True, slots=True)
class _Experts:
    """The routed experts of a layer: the projections of one of them, and what the stack of all is called."""

    prefix: str
    count: int
    single: tuple[_Named, ...]
    stacked: tuple[_Named, ...]


_Rows = list[_Named | _Experts]
_Family = tuple[str, list[_Named], list[_Rows]]
"""What layers are called, the tensors outside of layers, and those of each layer."""


def model_from_config(
    config: Mapping[str, Any], *, name: str = "model", stacked: bool = False, outline: bool = False
) -> Model:
    """The model that a ``config.json`` describes.

    Args:
        config: Its values; ``text_config`` inside counts where there is one.
        name: What the model is called.
        stacked: One tensor for all experts of a layer, not one for each.
        outline: Of the experts of a layer the last alone: enough to add up what all are (``summarize``).

    Raises:
        ConfigError: A family that is not known here, or a value that is missing.
    """
    values = config.get("text_config", config)
    family = str(values.get("model_type"))
    if family not in _FAMILIES:
        raise ConfigError(
            f"{name}: no rule gives the names and shapes of a model of the type {family!r}. Known: "
            f"{', '.join(sorted(_FAMILIES))}. Give a folder with safetensors files, or a JSON file of names and shapes."
        )
    try:
        prefix, outer, layers = _FAMILIES[family](values)
        heads = Heads(
            int(values["num_attention_heads"]),
            int(values.get("num_key_value_heads") or values["num_attention_heads"]),
        )
        is_tied = bool(values.get("tie_word_embeddings", False))
        dtype = dtype_name(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
        weights = tuple(_weights(prefix, outer, layers, dtype, stacked=stacked, outline=outline, is_tied=is_tied))
    except KeyError as error:
        raise ConfigError(
            f"{name}: the config of a {family!r} model must have {error.args[0]!r}. Take the whole "
            f"config.json of its checkpoint."
        ) from error
    return Model(name, weights, heads, state_space_of(values), is_tied)


def _weights(
    prefix: str,
    outer: Sequence[_Named],
    layers: Iterable[_Rows],
    dtype: str,
    *,
    stacked: bool,
    outline: bool,
    is_tied: bool,
) -> Iterator[Weight]:
    for name, shape in outer:
        if not (is_tied and name == "lm_head.weight"):
            yield Weight(TensorSpec(name, shape, dtype), role_of(name))
    for layer, rows in enumerate(layers):
        start = f"{prefix}layers.{layer}."
        for row in rows:
            if isinstance(row, _Experts):
                yield from _expert_weights(start + row.prefix, row, layer, dtype, stacked=stacked, outline=outline)
                continue
            name, shape = row
            is_buffer = name.endswith(_BUFFER)
            spec = TensorSpec(start + name, shape, "float32" if is_buffer else dtype)
            yield Weight(spec, role_of(start + name), layer, None, is_buffer)


def _expert_weights(
    start: str, experts: _Experts, layer: int, dtype: str, *, stacked: bool, outline: bool
) -> Iterator[Weight]:
    if stacked:
        for name, shape in experts.stacked:
            full = f"{start}{name}"
            yield Weight(TensorSpec(full, (experts.count, *shape), dtype), role_of(full), layer)
        return
    roles = [role_of(f"{start}0.{name}.weight") for name, _ in experts.single]
    for expert in range(experts.count - 1 if outline else 0, experts.count):
        for (name, shape), role in zip(experts.single, roles, strict=True):
            yield Weight(TensorSpec(f"{start}{expert}.{name}.weight", shape, dtype), role, layer, expert)


def _gated_experts(config: Mapping[str, Any], count: int) -> _Experts:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    return _Experts(
        "mlp.experts.",
        count,
        (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))),
        (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))),
    )


def _gated_mlp(start: str, hidden: int, inner: int) -> _Rows:
    return [
        (f"{start}gate_proj.weight", (inner, hidden)),
        (f"{start}up_proj.weight", (inner, hidden)),
        (f"{start}down_proj.weight", (hidden, inner)),
    ]


def _outer(config: Mapping[str, Any], embedding: str, norm: str) -> list[_Named]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    return [(embedding, (vocabulary, hidden)), (norm, (hidden,)), ("lm_head.weight", (vocabulary, hidden))]


def _norms(hidden: int) -> _Rows:
    return [("input_layernorm.weight", (hidden,)), ("post_attention_layernorm.weight", (hidden,))]


def _attention(config: Mapping[str, Any], start: str, *, bias: bool, norms: bool) -> _Rows:
    """Grouped-query attention: q, k, v and o, with biases of the first three and norms of q and k where asked."""
    hidden, query = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // query
    kv = config.get("num_key_value_heads") or query
    rows: _Rows = [
        (f"{start}q_proj.weight", (query * head, hidden)),
        (f"{start}k_proj.weight", (kv * head, hidden)),
        (f"{start}v_proj.weight", (kv * head, hidden)),
        (f"{start}o_proj.weight", (hidden, query * head)),
    ]
    if bias:
        rows += [(f"{start}{part}_proj.bias", (n * head,)) for part, n in (("q", query), ("k", kv), ("v", kv))]
    if norms:
        rows += [(f"{start}q_norm.weight", (head,)), (f"{start}k_norm.weight", (head,))]
    return rows


def _llama_like(config: Mapping[str, Any]) -> _Family:
    family, hidden = config["model_type"], config["hidden_size"]
    bias = family == "qwen2" or bool(config.get("attention_bias"))
    if config.get("mlp_bias") or (bias and family == "llama"):
        raise ConfigError(f"Biases in a {family!r} model are not known here; give its safetensors files.")
    attention = _attention(config, "self_attn.", bias=bias, norms=family.startswith("qwen3"))
    layer = [*_norms(hidden), *attention, *_gated_mlp("mlp.", hidden, config["intermediate_size"])]
    return (
        "model.",
        _outer(config, "model.embed_tokens.weight", "model.norm.weight"),
        [layer] * config["num_hidden_layers"],
    )


def _qwen3_moe(config: Mapping[str, Any]) -> _Family:
    hidden, count = config["hidden_size"], config["num_experts"]
    attention = _attention(config, "self_attn.", bias=bool(config.get("attention_bias")), norms=True)
    router = ("mlp.gate.weight", (count, hidden))
    sparse: _Rows = [*_norms(hidden), *attention, router, _gated_experts(config, count)]
    dense: _Rows = [*_norms(hidden), *attention, *_gated_mlp("mlp.", hidden, config["intermediate_size"])]
    step, only = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers", ())
    layers = [dense if at in only or (at + 1) % step else sparse for at in range(config["num_hidden_layers"])]
    return "model.", _outer(config, "model.embed_tokens.weight", "model.norm.weight"), layers


def _deepseek_v3(config: Mapping[str, Any]) -> _Family:
    """Multi-head latent attention; after some dense layers, experts with one or more that all tokens share."""
    hidden, heads, count = config["hidden_size"], config["num_attention_heads"], config["n_routed_experts"]
    rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
    lora, latent = config.get("q_lora_rank"), config["kv_lora_rank"]
    query: _Rows = [("self_attn.q_proj.weight", (heads * (nope + rope), hidden))]
    if lora:
        query = [
            ("self_attn.q_a_proj.weight", (lora, hidden)),
            ("self_attn.q_a_layernorm.weight", (lora,)),
            ("self_attn.q_b_proj.weight", (heads * (nope + rope), lora)),
        ]
    attention: _Rows = [
        *query,
        ("self_attn.kv_a_proj_with_mqa.weight", (latent + rope, hidden)),
        ("self_attn.kv_a_layernorm.weight", (latent,)),
        ("self_attn.kv_b_proj.weight", (heads * (nope + value), latent)),
        ("self_attn.o_proj.weight", (hidden, heads * value)),
    ]
    shared = config.get("n_shared_experts") or 0
    sparse: _Rows = [
        *_norms(hidden),
        *attention,
        ("mlp.gate.weight", (count, hidden)),
        (f"mlp.gate.{_BUFFER}", (count,)),
        *(_gated_mlp("mlp.shared_experts.", hidden, shared * config["moe_intermediate_size"]) if shared else ()),
        _gated_experts(config, count),
    ]
    dense: _Rows = [*_norms(hidden), *attention, *_gated_mlp("mlp.", hidden, config["intermediate_size"])]
    first = config.get("first_k_dense_replace", 0)
    layers = [dense if at < first else sparse for at in range(config["num_hidden_layers"])]
    return "model.", _outer(config, "model.embed_tokens.weight", "model.norm.weight"), layers


_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_BLOCK_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


def state_space_of(config: Mapping[str, Any]) -> StateSpace | None:
    """The sizes of a config's Mamba-2 layers; None where it has none."""
    keys = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    return StateSpace(*(int(config[key]) for key in keys)) if all(key in config for key in keys) else None


def _nemotron_h(config: Mapping[str, Any]) -> _Family:
    """One block a layer: Mamba-2, attention, a plain feed-forward block, or experts that work in a latent space."""
    hidden, sizes = config["hidden_size"], state_space_of(config)
    if sizes is None:
        raise KeyError("mamba_num_heads, mamba_head_dim, n_groups, ssm_state_size")
    norm: _Rows = [("norm.weight", (hidden,))]
    conv = sum(sizes.conv_sections)
    mamba: _Rows = [
        ("mixer.in_proj.weight", (sum(sizes.in_sections), hidden)),
        ("mixer.conv1d.weight", (conv, 1, config["conv_kernel"])),
        *([("mixer.conv1d.bias", (conv,))] if config.get("use_conv_bias", True) else []),
        *((f"mixer.{vector}", (sizes.heads,)) for vector in ("A_log", "D", "dt_bias")),
        ("mixer.norm.weight", (sizes.inner,)),
        ("mixer.out_proj.weight", (hidden, sizes.inner)),
    ]
    blocks: dict[str, _Rows] = {
        "mamba": mamba,
        "attention": _attention(config, "mixer.", bias=False, norms=False),
        "mlp": [
            ("mixer.up_proj.weight", (config["intermediate_size"], hidden)),
            ("mixer.down_proj.weight", (hidden, config["intermediate_size"])),
        ],
        "moe": _latent_experts(config) if config.get("n_routed_experts") else [],
    }
    kinds = config.get("layers_block_type") or [_BLOCKS[letter] for letter in config["hybrid_override_pattern"]]
    layers = [[*norm, *blocks[_BLOCK_NAMES.get(kind, kind)]] for kind in kinds]
    return "backbone.", _outer(config, "backbone.embeddings.weight", "backbone.norm_f.weight"), layers


def _latent_experts(config: Mapping[str, Any]) -> _Rows:
    hidden, count, inner = config["hidden_size"], config["n_routed_experts"], config["moe_intermediate_size"]
    latent, shared = config.get("moe_latent_size"), config["moe_shared_expert_intermediate_size"]
    width = latent or hidden
    projections = (("up_proj", (inner, width)), ("down_proj", (width, inner)))
    return [
        ("mixer.gate.weight", (count, hidden)),
        (f"mixer.gate.{_BUFFER}", (count,)),
        ("mixer.shared_experts.up_proj.weight", (shared, hidden)),
        ("mixer.shared_experts.down_proj.weight", (hidden, shared)),
        *(
            [("mixer.fc1_latent_proj.weight", (latent, hidden)), ("mixer.fc2_latent_proj.weight", (hidden, latent))]
            if latent
            else []
        ),
        _Experts("mixer.experts.", count, projections, projections),
    ]


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], _Family]] = {
    "llama": _llama_like,
    "mistral": _llama_like,
    "qwen2": _llama_like,
    "qwen3": _llama_like,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "nemotron_h": _nemotron_h,
}
FAMILIES: tuple[str, ...] = tuple(_FAMILIES)
"""The values of ``model_type`` that have a rule here."""
