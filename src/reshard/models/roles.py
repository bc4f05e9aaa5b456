"""Role: what a tensor is for, read from its name in a Hugging Face checkpoint; how it may be cut follows from that."""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache


class Role(Enum):
    """What a tensor is for; dims are named as in the checkpoint, ``[out, in]``."""

    VOCABULARY = "rows are tokens"
    QUERY = "rows are query heads"
    KEY = "rows are key heads"
    VALUE = "rows are value heads"
    HEAD_ROWS = "rows belong to query heads (what multi-head latent attention expands)"
    HEAD_COLUMNS = "columns belong to query heads (the attention's output projection)"
    FFN_ROWS = "rows are hidden units of a feed-forward block (gate, up)"
    FFN_COLUMNS = "columns are hidden units of a feed-forward block (down)"
    EXPERT_ROWS = "as FFN_ROWS, of one expert"
    EXPERT_COLUMNS = "as FFN_COLUMNS, of one expert"
    STACK_GATE_UP = "[expert, gate rows then up rows, in]"
    STACK_ROWS = "[expert, hidden unit, in]"
    STACK_COLUMNS = "[expert, out, hidden unit]"
    MAMBA_IN = "rows are z, x, B, C and dt, one after the other"
    MAMBA_CONV = "rows are x, B and C, one after the other"
    MAMBA_ROWS = "rows belong to state-space heads"
    MAMBA_COLUMNS = "columns belong to state-space heads"
    WHOLE = "every rank of a tensor-parallel group has all of it"

    @property
    def is_stack(self) -> bool:
        """Whether dim 0 counts experts."""
        return self in (Role.STACK_GATE_UP, Role.STACK_ROWS, Role.STACK_COLUMNS)

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism decides who has it."""
        return self.is_stack or self in (Role.EXPERT_ROWS, Role.EXPERT_COLUMNS)

    @property
    def is_feed_forward(self) -> bool:
        """Whether it is a projection of a feed-forward block, of an expert or not."""
        return self.is_expert or self in (Role.FFN_ROWS, Role.FFN_COLUMNS)


_IN_LAYER = re.compile(r"(?:(?:model|language_model|backbone)\.)*(?:layers\.(?P<layer>[0-9]+)\.)?")
_EXPERT = re.compile(r"(?<=\bexperts\.)[0-9]+(?=\.)")

# What follows the layer in a name, with N for the number of an expert; the first that matches counts.
_NAMES: tuple[tuple[str, Role], ...] = (
    (r"(embed_tokens|embeddings|lm_head)\.weight", Role.VOCABULARY),
    (r"(self_attn|mixer)\.q_proj\.(weight|bias)", Role.QUERY),
    (r"(self_attn|mixer)\.k_proj\.(weight|bias)", Role.KEY),
    (r"(self_attn|mixer)\.v_proj\.(weight|bias)", Role.VALUE),
    (r"self_attn\.(q_b|kv_b)_proj\.weight", Role.HEAD_ROWS),
    (r"(self_attn|mixer)\.o_proj\.weight", Role.HEAD_COLUMNS),
    (r"(mlp|mixer)\.(shared_experts?\.)?(gate|up)_proj\.(weight|bias)", Role.FFN_ROWS),
    (r"(mlp|mixer)\.(shared_experts?\.)?down_proj\.weight", Role.FFN_COLUMNS),
    (r"(mlp|mixer|block_sparse_moe)\.experts\.N\.(gate_proj|up_proj|w1|w3)\.weight", Role.EXPERT_ROWS),
    (r"(mlp|mixer|block_sparse_moe)\.experts\.N\.(down_proj|w2)\.weight", Role.EXPERT_COLUMNS),
    (r"(mlp|mixer)\.experts\.gate_up_proj", Role.STACK_GATE_UP),
    (r"(mlp|mixer)\.experts\.up_proj", Role.STACK_ROWS),
    (r"(mlp|mixer)\.experts\.down_proj", Role.STACK_COLUMNS),
    (r"mixer\.in_proj\.weight", Role.MAMBA_IN),
    (r"mixer\.conv1d\.(weight|bias)", Role.MAMBA_CONV),
    (r"mixer\.(A_log|D|dt_bias|norm\.weight)", Role.MAMBA_ROWS),
    (r"mixer\.out_proj\.weight", Role.MAMBA_COLUMNS),
    (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.(weight|bias)", Role.WHOLE),
    (r"(self_attn\.o_proj|(mlp|mixer)\.(shared_experts?\.)?down_proj)\.bias", Role.WHOLE),
    (r"(mlp|mixer|block_sparse_moe)\.(gate|shared_expert_gate)\.(weight|bias|e_score_correction_bias)", Role.WHOLE),
    (r"mixer\.fc[12]_latent_proj\.weight", Role.WHOLE),
    (r"(self_attn\.)?\w*norm(_f)?\.(weight|bias)", Role.WHOLE),
    (r"(self_attn\.)?rotary_emb\.inv_freq", Role.WHOLE),
)
_COMPILED = tuple((re.compile(pattern), role) for pattern, role in _NAMES)


def role_of(name: str) -> Role | None:
    """What the tensor called ``name`` is for; None where the name says nothing.

    >>> role_of("model.layers.3.mlp.experts.7.up_proj.weight"), role_of("adapter.lora_A")
    (<Role.EXPERT_ROWS: 'as FFN_ROWS, of one expert'>, None)
    """
    match = _IN_LAYER.match(name)
    return _role(_EXPERT.sub("N", name[match.end() if match else 0 :]))


@lru_cache(maxsize=1 << 12)
def _role(rest: str) -> Role | None:
    return next((role for pattern, role in _COMPILED if pattern.fullmatch(rest)), None)


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to; None for embeddings, the last norm and the output head."""
    match = _IN_LAYER.match(name)
    return None if match is None or match["layer"] is None else int(match["layer"])


def expert_of(name: str) -> int | None:
    """The expert that a tensor belongs to, where its name counts experts."""
    match = _EXPERT.search(name)
    return None if match is None else int(match[0])


def is_input_embedding(name: str) -> bool:
    """Whether it is the table that turns tokens into vectors: the first pipeline stage has it."""
    return re.search(r"\b(embed_tokens|embeddings)\.weight$", name) is not None
