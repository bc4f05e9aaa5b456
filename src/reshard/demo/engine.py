"""Engine: a destination rank's model, kept and run as an inference engine keeps and runs it.

Weights lie fused in a few buffers per layer, in bf16, and only this rank's part of them::

    qkv      [q rows; k rows; v rows, hidden]      rows of this rank's heads
    o        [hidden, q columns]                   summed over the ranks
    gate_up  [gate rows; up rows, hidden]          rows of this rank's part of the MLP
    down     [hidden, mlp columns]                 summed over the ranks
    embed    [vocab rows, hidden]                  padded; also the output head where the model ties them

The engine never loads a checkpoint. It says where it wants which part of which tensor (``wanted_views``), and starts
out poisoned: every element that nobody writes is NaN, and so is every answer that reads it.

Arithmetic is float32 over bf16 weights, converted a block at a time: two parallel layouts add in different orders, and
in bf16 that alone moves a small model's best token. So equal weights give equal answers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from reshard.demo.worlds import Share

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import timedelta

    import torch.distributed as dist

    from reshard.demo.architecture import Architecture, Rope

WantedView = tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]
"""(tensor name, its global shape, where the view's first element lies in it, the view): for ``Manifest.from_views``."""

POISON = math.nan
_BLOCK_NUMEL = 1 << 19
"""Elements that are converted at a time: 2 MiB in float32, which stays in the cache."""


class Ranks:
    """The tensor-parallel ranks of one replica, and the two collectives that an engine needs.

    Args:
        group: A gloo group of these ranks, registered or not; None for a single rank.
        timeout: Of every collective.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up all ranks' tensors, in place; equal on all of them afterwards, bit for bit."""
        if self._group is not None and self.size > 1:
            self._group.allreduce([tensor]).wait(self._timeout)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Put all ranks' equally shaped tensors side by side on the last dim."""
        if self._group is None or self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self._group.allgather([parts], [tensor.contiguous()]).wait(self._timeout)
        return torch.cat(parts, dim=-1)


class Engine:
    """One tensor-parallel rank of a serving replica.

    Args:
        architecture: The model.
        ranks: This replica's ranks.
        max_positions: Tokens that a question and its answer have together at most.

    Raises:
        LayoutError: The model cannot be shared by so many ranks.
    """

    def __init__(self, architecture: Architecture, ranks: Ranks, *, max_positions: int = 512) -> None:
        self.architecture = architecture
        self.share = Share.of(architecture, ranks.rank, ranks.size)
        self._ranks = ranks
        a, share = architecture, self.share
        d = a.head_dim
        queries = (share.heads[1] - share.heads[0]) * d
        keys = (share.kv_heads[1] - share.kv_heads[0]) * d
        rows = share.mlp[1] - share.mlp[0]
        self.embed = _buffer(share.vocab_rows, a.hidden)
        self.head = self.embed if a.tied else _buffer(share.vocab_rows, a.hidden)
        self.norm = _buffer(a.hidden)
        self.layers = [_Layer(a, queries, keys, rows) for _ in range(a.layers)]
        self._cos, self._sin = _rotary(a.rope, d, max_positions)
        # Query head -> which of this rank's KV heads it attends with.
        heads = range(*share.heads)
        self._kv_of = torch.tensor([h // a.queries_per_kv - share.kv_heads[0] for h in heads], dtype=torch.long)
        self._keys = torch.zeros(a.layers, keys // d, max_positions, d)
        self._values = torch.zeros_like(self._keys)
        self.poison()

    # -- what the refit sees ---------------------------------------------------------------------------------------

    def wanted_views(self) -> list[WantedView]:
        """Every part of every tensor that this rank serves, as a view of the buffer where it belongs.

        The two names of a tied embedding are two entries with one view.
        """
        a, share = self.architecture, self.share
        views = list(self._vocab_views("model.embed_tokens.weight", self.embed))
        views += list(self._vocab_views("lm_head.weight", self.head))
        views.append(("model.norm.weight", (a.hidden,), (0,), self.norm))
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            views += [
                (f"{prefix}.{name}.weight", tuple(view.shape), (0,), view)
                for name, view in (
                    ("input_layernorm", layer.attention_norm),
                    ("post_attention_layernorm", layer.mlp_norm),
                )
            ]
            views += self._attention_views(f"{prefix}.self_attn", layer)
            at = share.mlp[0]
            rows = (a.intermediate, a.hidden)
            for name, view, bias in zip(
                ("gate_proj", "up_proj"), layer.gate_up.chunk(2), _halves(layer.gate_up_bias), strict=True
            ):
                views.append((f"{prefix}.mlp.{name}.weight", rows, (at, 0), view))
                if bias is not None:
                    views.append((f"{prefix}.mlp.{name}.bias", (a.intermediate,), (at,), bias))
            views.append((f"{prefix}.mlp.down_proj.weight", (a.hidden, a.intermediate), (0, at), layer.down))
            if layer.down_bias is not None:
                views.append((f"{prefix}.mlp.down_proj.bias", (a.hidden,), (0,), layer.down_bias))
        return views

    def _vocab_views(self, name: str, buffer: torch.Tensor) -> Iterator[WantedView]:
        lo, hi = self.share.vocab
        if lo < hi:  # else this rank has padding only
            yield name, (self.architecture.vocab, self.architecture.hidden), (lo, 0), buffer[: hi - lo]

    def _attention_views(self, prefix: str, layer: _Layer) -> Iterator[WantedView]:
        a, share, d = self.architecture, self.share, self.architecture.head_dim
        row = 0
        for name, (lo, hi), heads in (
            ("q_proj", share.heads, a.heads),
            ("k_proj", share.kv_heads, a.kv_heads),
            ("v_proj", share.kv_heads, a.kv_heads),
        ):
            end = row + (hi - lo) * d
            yield f"{prefix}.{name}.weight", (heads * d, a.hidden), (lo * d, 0), layer.qkv[row:end]
            if layer.qkv_bias is not None:
                yield f"{prefix}.{name}.bias", (heads * d,), (lo * d,), layer.qkv_bias[row:end]
            row = end
        yield f"{prefix}.o_proj.weight", (a.hidden, a.heads * d), (0, share.heads[0] * d), layer.o
        if layer.o_bias is not None:
            yield f"{prefix}.o_proj.bias", (a.hidden,), (0,), layer.o_bias
        if layer.q_norm is not None and layer.k_norm is not None:
            yield f"{prefix}.q_norm.weight", (d,), (0,), layer.q_norm
            yield f"{prefix}.k_norm.weight", (d,), (0,), layer.k_norm

    def buffers(self) -> list[torch.Tensor]:
        """Every weight buffer once, padding included."""
        found = [self.embed, self.norm] + ([] if self.head is self.embed else [self.head])
        return found + [buffer for layer in self.layers for buffer in layer.buffers()]

    @property
    def nbytes(self) -> int:
        """Bytes of all weight buffers of this rank."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())

    def poison(self) -> None:
        """Fill every buffer with NaN; the rows that only pad the vocabulary become zero, nobody ever sends them."""
        for buffer in self.buffers():
            buffer.fill_(POISON)
        real = self.share.vocab[1] - self.share.vocab[0]
        self.embed[real:].zero_()
        self.head[real:].zero_()

    # -- what a user of the engine sees ----------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], *, max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """Answer a prompt greedily; equal on all ranks of the replica.

        Args:
            prompt: Token ids.
            max_tokens: At most so many tokens of answer.
            stop: Tokens that end the answer; they are part of it.
        """
        answer: list[int] = []
        tokens = list(prompt)
        position = 0
        while len(answer) < max_tokens:
            logits = self._logits(torch.tensor(tokens), position, only_last=True)
            position += len(tokens)
            # The first of equal ones, and the first NaN, on every rank.
            tokens = [int(logits[-1].argmax())]
            answer += tokens
            if tokens[0] in stop:
                break
        return answer

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The scores of every next token after each prefix, float32 ``[tokens, vocab]``, equal on all ranks."""
        return self._logits(torch.tensor(list(tokens)), 0, only_last=False)

    def _logits(self, tokens: torch.Tensor, position: int, *, only_last: bool) -> torch.Tensor:
        x = self._embedded(tokens)
        for index, layer in enumerate(self.layers):
            x = x + self._attention(index, layer, _norm(x, layer.attention_norm, self.architecture.norm_eps), position)
            x = x + self._mlp(layer, _norm(x, layer.mlp_norm, self.architecture.norm_eps))
        x = _norm(x[-1:] if only_last else x, self.norm, self.architecture.norm_eps)
        return self._ranks.gather(project(x, self.head))[:, : self.architecture.vocab]

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding, ``[tokens, hidden]``: each lies on one rank, the others add zero."""
        lo, hi = self.share.vocab
        mine = (tokens >= lo) & (tokens < hi)
        rows = self.embed[torch.where(mine, tokens - lo, 0)].float()
        return self._ranks.sum(torch.where(mine[:, None], rows, 0.0))

    def _attention(self, index: int, layer: _Layer, x: torch.Tensor, position: int) -> torch.Tensor:
        d = self.architecture.head_dim
        count = x.shape[0]
        queries, keys = len(self._kv_of) * d, self._keys.shape[1] * d
        q, k, v = torch.split(project(x, layer.qkv, layer.qkv_bias), [queries, keys, keys], dim=1)
        q, k, v = (part.reshape(count, -1, d).transpose(0, 1) for part in (q, k, v))  # [heads, tokens, d]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = _norm(q, layer.q_norm, self.architecture.norm_eps)
            k = _norm(k, layer.k_norm, self.architecture.norm_eps)
        cos, sin = self._cos[position : position + count], self._sin[position : position + count]
        end = position + count
        self._keys[index, :, position:end] = _turn(k, cos, sin)
        self._values[index, :, position:end] = v
        seen_keys, seen_values = self._keys[index, self._kv_of, :end], self._values[index, self._kv_of, :end]
        # Tokens come either all at once, at position 0, or one by one.
        out = F.scaled_dot_product_attention(_turn(q, cos, sin), seen_keys, seen_values, is_causal=count > 1)
        out = project(out.transpose(0, 1).reshape(count, queries), layer.o)
        return _plus(self._ranks.sum(out), layer.o_bias)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = project(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=1)
        return _plus(self._ranks.sum(project(F.silu(gate) * up, layer.down)), layer.down_bias)


class _Layer:
    """The buffers of one layer on one rank."""

    def __init__(self, a: Architecture, queries: int, keys: int, rows: int) -> None:
        self.attention_norm = _buffer(a.hidden)
        self.mlp_norm = _buffer(a.hidden)
        self.qkv = _buffer(queries + 2 * keys, a.hidden)
        self.qkv_bias = _buffer(queries + 2 * keys) if a.qkv_bias else None
        self.o = _buffer(a.hidden, queries)
        self.o_bias = _buffer(a.hidden) if a.o_bias else None
        self.q_norm = _buffer(a.head_dim) if a.qk_norm else None
        self.k_norm = _buffer(a.head_dim) if a.qk_norm else None
        self.gate_up = _buffer(2 * rows, a.hidden)
        self.gate_up_bias = _buffer(2 * rows) if a.mlp_bias else None
        self.down = _buffer(a.hidden, rows)
        self.down_bias = _buffer(a.hidden) if a.mlp_bias else None

    def buffers(self) -> Iterator[torch.Tensor]:
        for buffer in vars(self).values():
            if buffer is not None:
                yield buffer


def _buffer(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _halves(tensor: torch.Tensor | None) -> tuple[torch.Tensor, ...] | tuple[None, None]:
    return (None, None) if tensor is None else tensor.chunk(2)


def _plus(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias.float()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply float32 ``[tokens, columns]`` with a bf16 weight ``[rows, columns]``, converted block by block.

    The weight is never held whole in float32, and the conversion is not slower than bf16 arithmetic on a CPU.
    """
    rows, columns = weight.shape
    out = x.new_empty(x.shape[0], rows)
    step = max(1, _BLOCK_NUMEL // columns)
    block = x.new_empty(min(step, rows), columns)
    for lo in range(0, rows, step):
        part = block[: min(step, rows - lo)].copy_(weight[lo : lo + step])
        torch.mm(x, part.t(), out=out[:, lo : lo + step])
    return _plus(out, bias)


def _rotary(rope: Rope, head_dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, ``[positions, head_dim]`` each, the second half of a head as the first."""
    frequency = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        # Long waves are stretched by the factor, short ones kept, those between blended.
        wave = 2 * math.pi / frequency
        blend = (rope.original_positions / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        frequency = (1 - blend) * frequency / rope.factor + blend * frequency
    angle = torch.outer(torch.arange(positions, dtype=torch.float32), frequency)
    return torch.cat([angle.cos()] * 2, dim=-1), torch.cat([angle.sin()] * 2, dim=-1)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``[heads, tokens, head_dim]`` by its positions: row i of a head turns with row i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
