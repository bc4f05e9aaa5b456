"""Published: refits of which others have said how long they take, as data: who, on what, which layouts, which figures.

A layout is published, or it is a candidate: one that fits the machine and that the same project uses elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A time that somebody published: from ``low_seconds`` to ``high_seconds``, of what."""

    what: str
    low_seconds: float
    high_seconds: float


@dataclass(frozen=True, slots=True)
class PublishedRefit:
    """One refit of one layout on one machine.

    Args:
        title: Model and machine, for people.
        model: Its name in the catalogue.
        cluster: Its topology's name.
        source: The trainer's parallelism, Megatron-like.
        destination: The engine's, vLLM-like.
        is_layout_published: Whether whoever published the figures said so; else it is a candidate of ours.
        figures: What was published.
        where: By whom.
        remark: What else must be known to compare.
        bulk_fraction: The part of the bytes that went shard to shard, as published; None where it was not.
    """

    title: str
    model: str
    cluster: str
    source: str
    destination: str
    is_layout_published: bool
    figures: tuple[Figure, ...]
    where: str
    remark: str = ""
    bulk_fraction: float | None = None


_NEMO = "NeMo RL, design document of the NCCL reshard refit"
_ANNOUNCED = "NeMo RL, announcement of the reshard refit"
_M2N = "NCCL M2N, read-me"
_PARTLY = "the feed-forward part goes shard to shard, the rest is gathered and broadcast"

PUBLISHED: tuple[PublishedRefit, ...] = (
    PublishedRefit(
        "DeepSeek-V3 on H100",
        "deepseek-v3",
        "dgx-h100",
        "pp16 ep16",
        "tp32 dp8",
        True,
        (Figure("reshard", 2.39, 2.83),),
        _NEMO,
        f"{_PARTLY}; the announcement has 14.9 s before and 2.6 s after, without a layout",
        0.976,
    ),
    PublishedRefit(
        "DeepSeek-V3 on H100",
        "deepseek-v3",
        "dgx-h100",
        "pp16 ep16",
        "tp32 dp8",
        False,
        (Figure("usual way", 14.9, 14.9), Figure("reshard", 2.6, 2.6)),
        _ANNOUNCED,
        "candidate: the layout of the same project's table; one with 8 ranks a replica does not fit 80 GB a GPU",
        0.976,
    ),
    PublishedRefit(
        "DeepSeek-V3 on GB200",
        "deepseek-v3",
        "gb200-nvl72",
        "pp16 ep16",
        "tp32 dp8",
        True,
        (Figure("reshard", 1.93, 2.59),),
        _NEMO,
        _PARTLY,
        0.976,
    ),
    PublishedRefit(
        "DeepSeek-V3 on GB200",
        "deepseek-v3",
        "gb200-nvl72",
        "pp16 ep16",
        "tp32 dp8",
        False,
        (Figure("usual way", 6.1, 6.1), Figure("reshard", 2.3, 2.3)),
        _ANNOUNCED,
        "candidate: the layout of the same project's table",
        0.976,
    ),
    PublishedRefit(
        "DeepSeek-V3 on GB200",
        "deepseek-v3",
        "gb200-nvl72",
        "ep16 pp4 dp2",
        "tp8 dp16",
        False,
        (Figure("usual way", 6.1, 6.1), Figure("reshard", 2.3, 2.3)),
        _ANNOUNCED,
        "candidate: the layout that NCCL M2N published for this model",
    ),
    PublishedRefit(
        "DeepSeek-V3 on GB200",
        "deepseek-v3",
        "gb200-nvl72",
        "ep16 pp4 dp2",
        "tp8 dp16",
        True,
        (Figure("reshard", 1.44744, 1.44744), Figure("point-to-point", 3.83774, 3.83774)),
        _M2N,
        "the data type was not said; in fp8 half of the bytes that are predicted here would move",
    ),
    PublishedRefit(
        "Qwen3-235B on H100",
        "qwen3-235b-a22b",
        "dgx-h100",
        "tp2 cp2 ep16 pp4",
        "tp8 dp8",
        False,
        (Figure("usual way", 6.4, 6.4), Figure("reshard", 1.9, 1.9)),
        _ANNOUNCED,
        "candidate: the layout that NCCL M2N published for this model on GB200",
    ),
    PublishedRefit(
        "Qwen3-235B on H100",
        "qwen3-235b-a22b",
        "dgx-h100",
        "tp4 pp8 ep16",
        "tp8 dp16",
        False,
        (Figure("usual way", 6.4, 6.4), Figure("reshard", 1.9, 1.9)),
        _ANNOUNCED,
        "candidate: the layout of an earlier prototype of the same project, which took 4.56 to 4.85 s",
    ),
    PublishedRefit(
        "Qwen3-235B on GB200",
        "qwen3-235b-a22b",
        "gb200-nvl72",
        "tp2 cp2 ep16 pp4",
        "tp8 dp8",
        True,
        (Figure("reshard", 0.98875, 0.98875), Figure("point-to-point", 2.17516, 2.17516)),
        _M2N,
        "the data type was not said",
    ),
    PublishedRefit(
        "Nemotron Ultra v3 on GB200",
        "nemotron-3-ultra",
        "gb200-nvl72",
        "tp8 ep32 pp2",
        "tp8 dp8",
        True,
        (Figure("reshard", 2.32, 2.32),),
        _NEMO,
        f"{_PARTLY}; the catalogue's model has no layers for multi-token prediction",
        0.938,
    ),
    PublishedRefit(
        "Qwen3-30B on H100",
        "qwen3-30b-a3b",
        "dgx-h100",
        "ep8 pp2",
        "tp8 dp2",
        True,
        (Figure("reshard", 0.74, 1.00),),
        _NEMO,
        "elsewhere the project lists these times under its fallback in Python",
        0.95,
    ),
    PublishedRefit(
        "Qwen3-32B on H100",
        "qwen3-32b",
        "dgx-h100",
        "tp8 dp2",
        "tp8 dp2",
        False,
        (),
        "",
        "no time of this model is known to us; candidate: the ranks of the 30B row",
    ),
    PublishedRefit(
        "2.4T on GB200",
        "generic-2.4t",
        "gb200-nvl72",
        "ep32 pp8",
        "tp32 dp8",
        False,
        (Figure("reshard", 4.3, 4.3),),
        _ANNOUNCED,
        "neither machine nor layout was said, and the model's configuration is a generic one of that size",
    ),
)
