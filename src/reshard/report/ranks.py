"""Ranks in few characters: ``trainer 0-7``, ``0-120 step 8``, as a plan's worlds count them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.plan.plan import Plan


def named_ranks(plan: Plan, ranks: Sequence[int], *, most: int = 4) -> str:
    """Ranks in running text: ``rank 3`` or ``ranks 0-7`` where there is one world, ``trainer 0-7`` where more."""
    text = short_ranks(plan, ranks, most=most)
    if len(plan.worlds) > 1:
        return text
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def short_rank(plan: Plan, rank: int) -> str:
    """A rank as briefly as it is clear: its number, with its world in front where there are several."""
    return str(rank) if len(plan.worlds) == 1 else plan.rank_name(rank).replace(" rank ", " ")


def short_ranks(plan: Plan, ranks: Iterable[int], *, most: int = 4) -> str:
    """Several ranks by world, with runs and even steps drawn together; after ``most`` of those, how many more."""
    wanted = sorted(set(ranks))
    texts: list[str] = []
    for world in plan.worlds:
        mine = [rank - world.first for rank in wanted if world.first <= rank < world.first + world.size]
        if mine:
            texts.append(("" if len(plan.worlds) == 1 else f"{world.name} ") + number_runs(mine, most=most))
    return "; ".join(texts)


def number_runs(numbers: Sequence[int], *, most: int = 4) -> str:
    """Sorted distinct numbers in few characters.

    >>> number_runs([0, 1, 2, 3]), number_runs([0, 8, 16, 24]), number_runs([0, 1, 5]), number_runs([7])
    ('0-3', '0-24 step 8', '0, 1, 5', '7')
    >>> number_runs([1, 3, 4, 9, 11, 20], most=2)
    '1, 3 and 4 more'
    """
    found: list[tuple[str, int]] = []
    at = 0
    while at < len(numbers):
        stop = at + 1
        step = numbers[stop] - numbers[at] if stop < len(numbers) else 0
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        if stop - at < 3 or (step > 1 and stop - at < 4):
            found.append((str(numbers[at]), 1))
            at += 1
            continue
        tail = "" if step == 1 else f" step {step}"
        found.append((f"{numbers[at]}-{numbers[stop - 1]}{tail}", stop - at))
        at = stop
    shown = ", ".join(text for text, _ in found[:most])
    left = sum(count for _, count in found[most:])
    return f"{shown} and {left} more" if left else shown
