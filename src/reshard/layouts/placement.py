"""Placement: per tensor dim, the mesh axes that split it, outermost first, and the rule for sizes that do not divide.

A dim's entry is a chain of steps. Each step takes the rows that are left (a list of intervals, read as one string) and
keeps a part:

    "tp"               cut the rows into as many runs as the axis has places, keep the run of my coordinate
    Strided("dp", 2)   cut the rows into 2 runs, cut each by the axis "dp", keep my part of every run

FSDP2 over TP is ``("tp", "dp")``: tensor parallelism cut first, then FSDP cut what TP had left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

Split = Literal["even", "ceil", "balanced"]
"""``even`` must divide; ``ceil`` as torch.chunk (the last may be short or empty); ``balanced``: first ones get more."""

SPLITS: tuple[Split, ...] = ("even", "ceil", "balanced")
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, order=True)
class Strided:
    """One step that cuts the rows into ``factor`` runs, each run by ``axis``, and keeps this place's part of each."""

    axis: str
    factor: int


Step = str | Strided
Steps = tuple[Step, ...]


def cut(total: int, parts: int, index: int, split: Split) -> Interval:
    """Rows ``[lo, hi)`` of ``total`` that part ``index`` of ``parts`` gets.

    >>> [cut(10, 4, i, "ceil") for i in range(4)], [cut(10, 4, i, "balanced") for i in range(4)]
    ([(0, 3), (3, 6), (6, 9), (9, 10)], [(0, 3), (3, 6), (6, 8), (8, 10)])
    """
    if split == "balanced":
        base, more = divmod(total, parts)
        lo = index * base + min(index, more)
        return lo, lo + base + (1 if index < more else 0)
    size = -(-total // parts)
    return min(total, index * size), min(total, (index + 1) * size)


def take(rows: Sequence[Interval], lo: int, hi: int) -> tuple[Interval, ...]:
    """The part ``[lo, hi)`` of the string that the intervals make when read one after the other.

    >>> take([(0, 2), (4, 6)], 1, 3)
    ((1, 2), (4, 5))
    """
    kept, at = [], 0
    for start, stop in rows:
        first, last = max(lo, at), min(hi, at + stop - start)
        if first < last:
            kept.append((start + first - at, start + last - at))
        at += stop - start
    return join(kept)


def join(rows: Sequence[Interval]) -> tuple[Interval, ...]:
    """The same rows in the same order, with intervals that touch made one."""
    joined: list[Interval] = []
    for start, stop in rows:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def apply_step(rows: tuple[Interval, ...], step: Step, parts: int, index: int, split: Split) -> tuple[Interval, ...]:
    """What one step leaves of ``rows`` at place ``index`` of ``parts``."""
    total = sum(stop - start for start, stop in rows)
    if not isinstance(step, Strided):
        return take(rows, *cut(total, parts, index, split))
    kept: list[Interval] = []
    for run in range(step.factor):
        lo, hi = cut(total, step.factor, run, split)
        first, last = cut(hi - lo, parts, index, split)
        kept.extend(take(rows, lo + first, lo + last))
    return join(kept)


def axis_of(step: Step) -> str:
    return step.axis if isinstance(step, Strided) else step


def normalize_steps(entry: object) -> Steps:
    """A dim's entry as a tuple of steps: None, an axis name, a Strided, or a sequence of those."""
    if entry is None:
        return ()
    if isinstance(entry, (str, Strided)):
        return (entry,)
    steps = tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)
    for step in steps:
        if not isinstance(step, (str, Strided)):
            raise LayoutError(
                f"{step!r} is not a step of a placement. Use an axis name, Strided(axis, factor) or None."
            )
    return steps
