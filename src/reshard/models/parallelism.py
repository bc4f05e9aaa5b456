"""Parallelism: how a trainer or an engine spreads a model, in a few numbers; ranks, pipeline stages, owners of experts.

Three styles, each with the order of ranks that its own launcher has:

- ``megatron``: a pipeline stage after the other; inside a stage copies, then context, then tensor parallel ranks.
- ``vllm``: a copy of the engine after the other; inside a copy the stages, then tensor parallel ranks.
- ``fsdp``: as ``megatron``, and shards in place of copies.

A stage of one copy takes ``max(tp * cp, ep * etp)`` ranks: the same ranks are numbered twice, once by tensor
parallelism for what all tokens use and once by expert parallelism for the experts. So ``ep16 pp4 dp2`` are 128 ranks:
4 stages of 2 copies of 16 ranks, of which each has all of the attention and a 16th of the experts. ``dp`` counts whole
copies.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Style = Literal["megatron", "fsdp", "vllm"]
STYLES: tuple[Style, ...] = ("megatron", "fsdp", "vllm")
ExpertOrder = Literal["linear", "round_robin"]
EXPERT_ORDERS: tuple[ExpertOrder, ...] = ("linear", "round_robin")

AXES: Mapping[Style, tuple[str, ...]] = {
    "megatron": ("dp", "pp", "vpp", "cp", "tp", "ep", "etp"),
    "fsdp": ("dp", "hsdp", "pp", "fsdp", "cp", "tp", "ep"),
    "vllm": ("dp", "pp", "tp", "ep", "etp"),
}
"""What each style knows; ``hsdp`` counts copies of the shards, as ``dp`` does."""


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How one world spreads a model.

    Args:
        style: Whose rules.
        tp: Tensor parallel size.
        cp: Context parallel size: ranks with equal weights (of ``fsdp``: more shards).
        pp: Pipeline stages.
        vpp: Chunks of layers that each stage has, dealt to the stages in turn.
        ep: Over how many ranks the experts are spread.
        etp: Over how many ranks each expert is cut.
        dp: Copies of all this.
        fsdp: Shards of dim 0.
        expert_order: Which experts an expert parallel rank has: a run of them, or every ``ep``-th.

    Raises:
        ConfigError: Sizes that do not go together.

    >>> Parallelism("megatron", ep=16, pp=4, dp=2).size
    128
    """

    style: Style
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 1
    fsdp: int = 1
    expert_order: ExpertOrder = "linear"

    def __post_init__(self) -> None:
        numbers = (self.tp, self.cp, self.pp, self.vpp, self.ep, self.etp, self.dp, self.fsdp)
        if min(numbers) < 1:
            raise ConfigError(f"{self}: every size must be at least 1.")
        dense, experts = self.tp * self.cp, self.ep * self.etp
        if self.style == "fsdp":
            if self.ep > 1 and (self.tp > 1 or self.shards % self.ep):
                raise ConfigError(
                    f"{self}: ep{self.ep} takes its ranks from the {self.shards} shards of fsdp. Use an ep that "
                    f"divides them, without tp."
                )
        elif max(dense, experts) % min(dense, experts):
            raise ConfigError(
                f"{self}: tp{self.tp} times cp{self.cp} are {dense} ranks and ep{self.ep} times etp{self.etp} are "
                f"{experts}, of the same stage. One must divide the other."
            )

    @classmethod
    def from_sizes(cls, style: Style, sizes: Mapping[str, int], expert_order: str = "linear") -> Parallelism:
        """The parallelism that some axes with their sizes say.

        Where ``etp`` is not given it is 1 if ``ep`` is, and ``tp`` if not: experts are then cut as all else is.

        Raises:
            ConfigError: An axis that the style lacks, or sizes that do not go together.
        """
        unknown = next((name for name in sizes if name not in AXES[style]), None)
        if unknown is not None:
            everywhere = dict.fromkeys(name for names in AXES.values() for name in names)
            close = [] if unknown in everywhere else difflib.get_close_matches(unknown, everywhere, n=1, cutoff=0.7)
            meant = f" Is {close[0]!r} meant?" if close else ""
            raise ConfigError(
                f"{unknown!r} is not an axis of a model in {_KINDS[style]}. Known: {', '.join(AXES[style])}.{meant}",
                value=unknown,
            )
        if "hsdp" in sizes and "dp" in sizes:
            raise ConfigError("hsdp and dp both count copies; give one of them.")
        given = {"dp" if name == "hsdp" else name: size for name, size in sizes.items()}
        made = cls(style, expert_order=cast("ExpertOrder", expert_order), **given)
        return made if style == "fsdp" or "ep" in given or "etp" in given else replace(made, etp=made.tp)

    def __str__(self) -> str:
        names = ("tp", "cp", "pp", "vpp", "ep", "etp", "fsdp", "dp")
        sizes = [f"{name}{getattr(self, name)}" for name in names if getattr(self, name) != 1]
        return " ".join((self.style, *sizes))

    @property
    def shards(self) -> int:
        """Over how many ranks fsdp cuts a tensor."""
        return self.fsdp * self.cp if self.style == "fsdp" else 1

    @property
    def copy_size(self) -> int:
        """Ranks of a stage of one copy."""
        return self.tp * self.shards if self.style == "fsdp" else max(self.tp * self.cp, self.ep * self.etp)

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.copy_size

    def stage_ranks(self, stage: int, first: int = 0) -> tuple[int, ...]:
        """The ranks of a pipeline stage, tensor parallel ranks side by side; the world's ranks count from ``first``."""
        width = self.copy_size
        if self.style != "vllm":
            start = first + stage * self.dp * width
            return tuple(range(start, start + self.dp * width))
        groups = self.dp * width // self.tp
        return tuple(
            first + (at * self.pp + stage) * self.tp + place for at in range(groups) for place in range(self.tp)
        )

    def stages(self, layers: int) -> tuple[int, ...]:
        """The pipeline stage of each layer. Where stages are uneven, the first ones have a layer more; with vLLM, those
        before the last.

        >>> Parallelism("megatron", pp=2, vpp=2).stages(8), Parallelism("vllm", pp=3).stages(7)
        ((0, 0, 1, 1, 0, 0, 1, 1), (0, 0, 1, 1, 1, 2, 2))

        Raises:
            ConfigError: More stages, or chunks, than layers.
        """
        chunks = self.pp * self.vpp
        if chunks > max(layers, 1):
            each = f"{chunks} stages" if self.vpp == 1 else f"{chunks} chunks of pp{self.pp} times vpp{self.vpp}"
            raise ConfigError(
                f"{self}: the model has {layers} layers for {each}, and each takes at least one. Take a smaller pp."
            )
        base, more = divmod(layers, chunks)
        longer = range(chunks - 1 - more, chunks - 1) if self.style == "vllm" and more else range(more)
        counts = [base + (chunk in longer) for chunk in range(chunks)]
        return tuple(chunk % self.pp for chunk, count in enumerate(counts) for _ in range(count))

    def expert_map(self, experts: int) -> tuple[tuple[int, ...], ...]:
        """For each expert parallel rank the experts that it has. Those left over: the first ranks have one more each.

        >>> Parallelism("vllm", ep=4).expert_map(6)
        ((0, 1), (2, 3), (4,), (5,))
        >>> Parallelism("vllm", ep=4, expert_order="round_robin").expert_map(6)
        ((0, 4), (1, 5), (2,), (3,))

        Raises:
            ConfigError: A trainer whose ``ep`` does not divide the experts.
        """
        base, more = divmod(experts, self.ep)
        if more and self.style != "vllm":
            raise ConfigError(
                f"{self}: the model has {experts} experts a layer, which ep{self.ep} does not divide. Take an ep that "
                f"divides them."
            )
        if self.expert_order == "round_robin":
            return tuple(tuple(range(rank, experts, self.ep)) for rank in range(self.ep))
        starts = [rank * base + min(rank, more) for rank in range(self.ep + 1)]
        return tuple(tuple(range(lo, hi)) for lo, hi in pairwise(starts))


_KINDS: Mapping[Style, str] = {
    "megatron": "a Megatron-like trainer",
    "fsdp": "an FSDP-like trainer",
    "vllm": "a vLLM-like engine",
}


def describe(parallelism: Parallelism, layers: int, experts: int) -> str:
    """One line for a reader: how a shorthand was understood.

    >>> describe(Parallelism("megatron", ep=16, pp=4, dp=2), 61, 256)
    'a Megatron-like trainer on 128 ranks: 4 stages of 16, 15, 15 and 15 layers, experts over 16 ranks, 2 copies'
    """
    parts = []
    if parallelism.pp > 1:
        stages = parallelism.stages(layers)
        parts.append(f"{parallelism.pp} stages of {_listed([stages.count(at) for at in range(parallelism.pp)])} layers")
    if parallelism.shards > 1:
        parts.append(f"{parallelism.shards} shards")
    if parallelism.tp > 1:
        parts.append(f"tensors over {parallelism.tp}")
    if experts and parallelism.ep > 1:
        parts.append(f"experts over {parallelism.ep} ranks")
    if parallelism.dp > 1:
        parts.append(f"{parallelism.dp} copies")
    inside = f": {', '.join(parts)}" if parts else ""
    ranks = "1 rank" if parallelism.size == 1 else f"{parallelism.size} ranks"
    return f"{_KINDS[parallelism.style]} on {ranks}{inside}"


def _listed(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return str(counts[0])
    return f"{', '.join(map(str, counts[:-1]))} and {counts[-1]}"
