"""Strategies side by side: what plans of one refit cost, as rows of a table with a share for each cell's bar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.report.leaf_loads import spine_nbytes
from reshard.report.ranks import short_rank
from reshard.schedule.bucket import size_buckets
from reshard.schedule.schedule import plan_schedule
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.plan.plan import Plan


MOST_MESSAGES = 20_000
"""Of plans with more, rounds are shown only where the caller asks for them."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of one plan in words; ``share`` of the largest in its row, 0 where the row has no bars."""

    text: str
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """One number of each plan."""

    label: str
    figures: tuple[Figure, ...]


def compare(plans: Sequence[Plan], *, staging_nbytes: int | None = None) -> tuple[Row, ...]:
    """The rows of the table, a figure for each plan.

    Args:
        plans: Of the same refit, each proved by the caller.
        staging_nbytes: Put the plans in order too, within this much staging memory a rank; None leaves rounds out.

    Raises:
        ScheduleError: The buckets do not fit into the staging memory.
    """
    rows = [
        _bytes("On the wire", plans, lambda plan: plan.wire_nbytes),
        _bytes("Within ranks", plans, lambda plan: plan.local_nbytes),
        _busiest("Busiest sender", plans, [plan.sent_nbytes() for plan in plans]),
        _busiest("Busiest receiver", plans, [plan.received_nbytes() for plan in plans]),
    ]
    if any(not plan.topology.is_flat for plan in plans):
        rows += [
            _bytes("Between domains", plans, lambda plan: plan.reach.crossing_nbytes),
            *([_bytes("Over the spine", plans, spine_nbytes)] if plans[0].topology.leaves else []),
            _bytes("Relayed", plans, lambda plan: plan.reach.relayed_nbytes),
            _bars(
                "Busiest port or leaf" if plans[0].topology.is_blocking else "Busiest port",
                [float(plan.reach.busiest_seconds) for plan in plans],
                format_seconds,
            ),
            Row("Of the bound", tuple(Figure(_of_bound(plan), 0.0) for plan in plans)),
        ]
    rows.append(_bars("Pairs", [len(plan.pair_nbytes()) for plan in plans], lambda n: f"{n:,}"))
    if staging_nbytes is not None:
        schedules = [plan_schedule(plan, staging_nbytes=staging_nbytes) for plan in plans]
        rows += [
            _bars("Messages", [s.messages for s in schedules], lambda n: f"{n:,}"),
            _bars("Rounds", [s.rounds for s in schedules], lambda n: f"{n:,}"),
            Row("No order needs fewer than", tuple(Figure(f"{s.least_rounds:,}", 0.0) for s in schedules)),
            _bars(
                "Staging a rank",
                [max(s.staging_nbytes(r) for r in range(s.plan.size)) for s in schedules],
                lambda n: format_nbytes(int(n)),
            ),
        ]
    return tuple(rows)


def are_ordered_quickly(plans: Sequence[Plan], staging_nbytes: int) -> bool:
    """Whether putting the plans in order takes no more than a second or two, judged by how many buckets they fill.

    Raises:
        ScheduleError: The buckets do not fit into the staging memory.
    """
    return all(_about_messages(plan, staging_nbytes) <= MOST_MESSAGES for plan in plans)


def _about_messages(plan: Plan, staging_nbytes: int) -> int:
    bucket = size_buckets(staging_nbytes, network=not plan.topology.is_flat)
    return plan.wire_nbytes // bucket.nbytes + sum(len(route.edges) for route in plan.routes)


def _bars(label: str, values: Sequence[float], text: Callable[[float], str]) -> Row:
    most = max(values) or 1
    return Row(label, tuple(Figure(text(value), value / most) for value in values))


def _bytes(label: str, plans: Sequence[Plan], of: Callable[[Plan], int]) -> Row:
    return _bars(label, [of(plan) for plan in plans], lambda n: format_nbytes(int(n)))


def _busiest(label: str, plans: Sequence[Plan], sums: Sequence[dict[int, int]]) -> Row:
    tops = [max(by_rank, key=lambda r: (by_rank[r], -r)) if by_rank else None for by_rank in sums]
    most = max([n for by_rank in sums for n in by_rank.values()], default=1)
    figures = [
        Figure("0 B", 0.0)
        if top is None
        else Figure(f"{format_nbytes(by_rank[top])} ({short_rank(plan, top)})", by_rank[top] / most)
        for plan, top, by_rank in zip(plans, tops, sums, strict=True)
    ]
    return Row(label, tuple(figures))


def _of_bound(plan: Plan) -> str:
    bound = plan.bound.seconds
    return f"{float(plan.reach.busiest_seconds / bound):.3f}" if bound else "no bound"
