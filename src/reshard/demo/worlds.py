"""The layouts of the two worlds, as the user writes them, and which part of the model each engine rank serves.

A destination rank of ``tp 2`` with 9 query and 3 KV heads: heads go whole, KV heads as evenly as they can, and each
query head goes where its KV head is::

    KV heads      0        1        2
    query heads   0 1 2    3 4 5    6 7 8
                 '------- tp 0 ----' '-- tp 1 --'

With more ranks than KV heads (``tp 4``), rank ``t`` holds KV head ``t * kv_heads // tp``: some are held twice, and the
query heads of such a one are shared out among its ranks::

    KV heads      0        0        1        2
    query heads   0 1      2        3 4 5    6 7 8
                 '- tp 0 -' '- 1 -' '- 2 --' '- 3 --'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    from reshard.demo.architecture import Architecture

MAX_RANKS = 32
"""Processes that the demo starts at most: each takes a quarter of a GB for torch alone."""

VOCAB_MULTIPLE = 64
"""Rows of the embedding are padded to a multiple of this on every rank, as engines do for their kernels' sake."""


@dataclass(frozen=True, slots=True)
class SourceWorld:
    """The trainer's ranks: weights cut by ``tp``, then by ``fsdp``; rank ``r`` is at ``(r // tp, r % tp)``."""

    fsdp: int
    tp: int = 1

    @classmethod
    def parse(cls, text: str) -> SourceWorld:
        """Read ``"fsdp2"`` or ``"fsdp2 tp2"``.

        Raises:
            ConfigError: Another axis, an axis twice, or a size that is no positive number.
        """
        sizes = _parse("--source", text, ("fsdp", "tp"))
        return cls(sizes.get("fsdp", 1), sizes.get("tp", 1))

    @property
    def size(self) -> int:
        return self.fsdp * self.tp

    def __str__(self) -> str:
        return f"fsdp{self.fsdp}" + (f" tp{self.tp}" if self.tp > 1 else "")

    def check(self, architecture: Architecture) -> None:
        """Refuse a layout that the trainer cannot run.

        Raises:
            LayoutError: ``tp`` does not divide the rows of the MLP: torch's parallel styles would compute with
                columns that do not match.
        """
        if architecture.intermediate % self.tp:
            raise LayoutError(
                f"'model.layers.0.mlp.down_proj.weight': dim 1 has {architecture.intermediate} columns and the "
                f"source's mesh axis 'tp' (size {self.tp}) splits it, but torch's RowwiseParallel needs "
                f"{architecture.intermediate} to be divisible by {self.tp}. Use another tp in --source.",
                tensor="model.layers.0.mlp.down_proj.weight",
            )


@dataclass(frozen=True, slots=True)
class DestinationWorld:
    """The engine's ranks: ``dp`` replicas of ``tp`` ranks each; rank ``r`` is at ``(r // tp, r % tp)``."""

    tp: int
    dp: int = 1

    @classmethod
    def parse(cls, text: str) -> DestinationWorld:
        """Read ``"tp2"`` or ``"tp2 dp2"``.

        Raises:
            ConfigError: Another axis, an axis twice, or a size that is no positive number.
        """
        sizes = _parse("--destination", text, ("tp", "dp"))
        return cls(sizes.get("tp", 1), sizes.get("dp", 1))

    @property
    def size(self) -> int:
        return self.tp * self.dp

    def __str__(self) -> str:
        return f"tp{self.tp}" + (f" dp{self.dp}" if self.dp > 1 else "")

    def check(self, architecture: Architecture) -> None:
        """Refuse a layout that the engine cannot serve.

        Raises:
            LayoutError: A rank would have no head, or no row of the MLP.
        """
        for tp_rank in range(self.tp):
            Share.of(architecture, tp_rank, self.tp)


def check_ranks(source: SourceWorld, destination: DestinationWorld) -> None:
    """Refuse worlds of more processes than one machine should be asked for.

    Raises:
        ConfigError: More than ``MAX_RANKS`` together.
    """
    total = source.size + destination.size
    if total > MAX_RANKS:
        raise ConfigError(
            f"--source '{source}' and --destination '{destination}' are {total} processes; the demo starts at most "
            f"{MAX_RANKS} on one machine. Use smaller worlds.",
            ranks=total,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """What one tensor-parallel rank of an engine serves; every pair is ``[lo, hi)``."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    mlp: tuple[int, int]
    """Rows of gate and up, columns of down."""
    vocab: tuple[int, int]
    """Rows of the embedding that exist; may be empty on the last ranks of a small vocabulary."""
    vocab_rows: int
    """Rows of this rank's buffer: equal on all ranks, the last ones padded."""

    @classmethod
    def of(cls, architecture: Architecture, tp_rank: int, tp: int) -> Share:
        """The share of rank ``tp_rank`` of ``tp``.

        Raises:
            LayoutError: There are more ranks than query heads, or than rows of the MLP.
        """
        for name, what, count in (
            ("self_attn.q_proj", "query heads", architecture.heads),
            ("mlp.gate_proj", "rows", architecture.intermediate),
        ):
            if tp > count:
                raise LayoutError(
                    f"'model.layers.0.{name}.weight': it has {count} {what} and the destination's tp is {tp}, but "
                    f"every rank needs at least one of them whole. Use tp{count} or less in --destination.",
                    tensor=f"model.layers.0.{name}.weight",
                )
        heads, kv_heads = _heads_of(architecture, tp_rank, tp)
        padded = -(-architecture.vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE
        rows = (min(architecture.vocab, tp_rank * padded), min(architecture.vocab, (tp_rank + 1) * padded))
        return cls(heads, kv_heads, balanced(architecture.intermediate, tp_rank, tp), rows, padded)


def _heads_of(architecture: Architecture, tp_rank: int, tp: int) -> tuple[tuple[int, int], tuple[int, int]]:
    kv_heads, queries = architecture.kv_heads, architecture.queries_per_kv
    if tp <= kv_heads:
        lo, hi = balanced(kv_heads, tp_rank, tp)
        return (lo * queries, hi * queries), (lo, hi)
    mine = tp_rank * kv_heads // tp
    holders = [t for t in range(tp) if t * kv_heads // tp == mine]
    lo, hi = balanced(queries, holders.index(tp_rank), len(holders))
    return (mine * queries + lo, mine * queries + hi), (mine, mine + 1)


def balanced(count: int, index: int, parts: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` runs of ``count`` things; the first runs get one more where it does not divide.

    >>> [balanced(10, i, 4) for i in range(4)]
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    size, more = divmod(count, parts)
    lo = index * size + min(index, more)
    return lo, lo + size + (index < more)


def chunked(count: int, index: int, parts: int) -> tuple[int, int]:
    """The ``index``-th of ``parts`` runs as ``torch.chunk`` cuts them: equal ones, the last may be short or empty.

    >>> [chunked(10, i, 4) for i in range(4)], chunked(5, 3, 4)
    ([(0, 3), (3, 6), (6, 9), (9, 10)], (5, 5))
    """
    size = -(-count // parts)
    return min(count, index * size), min(count, (index + 1) * size)


def _parse(option: str, text: str, axes: tuple[str, ...]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in text.split():
        match = re.fullmatch(r"([a-z]+)([0-9]+)", word.lower())
        if match is None or match.group(1) not in axes:
            raise ConfigError(
                f"{option} '{text}': {word!r} is not an axis and its size. Known axes: {', '.join(axes)}; "
                f"write e.g. '{axes[0]}2 {axes[1]}2'.",
                option=option,
                value=text,
            )
        if match.group(1) in sizes:
            raise ConfigError(f"{option} '{text}': axis {match.group(1)!r} is given twice.", option=option, value=text)
        sizes[match.group(1)] = int(match.group(2))
        if not sizes[match.group(1)]:
            raise ConfigError(f"{option} '{text}': axis {match.group(1)!r} has no rank.", option=option, value=text)
    if not sizes:
        raise ConfigError(
            f"{option} is empty: name at least one axis and its size, e.g. '{axes[0]}2'.", option=option, value=text
        )
    return sizes
