"""Totals: what a plan costs as a whole, in a few lines for a terminal, and strategies side by side."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reshard.schedule.schedule import plan_schedule
from reshard.units import count, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.plan.plan import Plan
    from reshard.plan.proof import Proof


@dataclass(frozen=True, slots=True)
class Busiest:
    """The rank that sends (or receives) most."""

    rank: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What a plan costs under one strategy; bytes count payload."""

    strategy: str
    digest: str
    wire_nbytes: int
    local_nbytes: int
    needed_nbytes: int
    pairs: int
    route_classes: int
    routes: int
    busiest_sender: Busiest | None
    busiest_receiver: Busiest | None
    messages: int
    rounds: int
    least_rounds: int
    bucket_nbytes: int
    staging_nbytes: int
    """The most staging memory that any rank uses."""

    bound_seconds: float
    """What no plan of this kind can beat on the topology; 0 where all ranks are in one domain."""

    busiest_of_bound: float | None
    rounds_of_bound: float
    crossings: int
    crossing_nbytes: int
    relayed_nbytes: int
    copies_into: dict[str, float]

    proof: Proof

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def total(plan: Plan, *, staging_nbytes: int, proof: Proof | None = None) -> Totals:
    """Prove a plan, put it in order, and add it up.

    Args:
        plan: The plan.
        staging_nbytes: The most staging memory a rank may use.
        proof: The plan's, where it has been made already.

    Raises:
        ProofError: The plan does not deliver every wanted byte exactly once.
        ScheduleError: Its buckets do not fit into the staging memory.
    """
    proof = proof or plan.proof()
    schedule = plan_schedule(plan, staging_nbytes=staging_nbytes)
    return Totals(
        strategy=plan.strategy,
        digest=plan.digest,
        wire_nbytes=plan.wire_nbytes,
        local_nbytes=plan.local_nbytes,
        needed_nbytes=plan.needed_nbytes,
        pairs=len(plan.pair_nbytes()),
        route_classes=len(plan.classes),
        routes=len(plan.routes),
        busiest_sender=_busiest(plan, plan.sent_nbytes()),
        busiest_receiver=_busiest(plan, plan.received_nbytes()),
        messages=schedule.messages,
        rounds=schedule.rounds,
        least_rounds=schedule.least_rounds,
        bucket_nbytes=schedule.size.nbytes,
        staging_nbytes=max((schedule.staging_nbytes(rank) for rank in range(plan.size)), default=0),
        bound_seconds=float(plan.bound.seconds),
        busiest_of_bound=float(plan.reach.busiest_seconds / plan.bound.seconds) if plan.bound.seconds else None,
        rounds_of_bound=schedule.rounds / schedule.least_rounds if schedule.least_rounds else 1.0,
        crossings=plan.crossings,
        crossing_nbytes=plan.reach.crossing_nbytes,
        relayed_nbytes=plan.reach.relayed_nbytes,
        copies_into={name: float(copies) for name, copies in plan.reach.copies_into},
        proof=proof,
    )


def _busiest(plan: Plan, nbytes: dict[int, int]) -> Busiest | None:
    if not nbytes:
        return None
    rank = max(nbytes, key=lambda r: (nbytes[r], -r))
    return Busiest(plan.rank_name(rank), nbytes[rank])


def describe_plan(plan: Plan, totals: Totals) -> str:
    """A plan in a few lines: totals, order in time, proof."""
    lines = [
        plan.summary(),
        f"  {count(totals.messages, 'message')} of up to {format_nbytes(totals.bucket_nbytes)} in "
        f"{count(totals.rounds, 'round')} (no order needs fewer than {totals.least_rounds}), "
        f"staging at most {format_nbytes(totals.staging_nbytes)} a rank",
        str(totals.proof),
    ]
    return "\n".join(lines)


def compare_strategies(rows: Sequence[Totals]) -> str:
    """A table with one column a strategy, and the ratios to the first below it."""

    def busiest(which: Busiest | None) -> str:
        return "-" if which is None else f"{format_nbytes(which.nbytes)} ({which.rank})"

    table = [
        ("", [row.strategy for row in rows]),
        ("on the wire", [format_nbytes(row.wire_nbytes) for row in rows]),
        ("within ranks", [format_nbytes(row.local_nbytes) for row in rows]),
        ("busiest sender", [busiest(row.busiest_sender) for row in rows]),
        ("busiest receiver", [busiest(row.busiest_receiver) for row in rows]),
        ("pairs", [str(row.pairs) for row in rows]),
        ("messages", [str(row.messages) for row in rows]),
        ("rounds", [str(row.rounds) for row in rows]),
        ("staging a rank", [format_nbytes(row.staging_nbytes) for row in rows]),
        ("digest", [row.digest[:16] for row in rows]),
        ("proof", ["passed" for _ in rows]),
    ]
    if any(row.crossing_nbytes for row in rows):
        table[3:3] = [
            ("between domains", [f"{format_nbytes(row.crossing_nbytes)} ({row.crossings} boxes)" for row in rows]),
            ("relayed", [format_nbytes(row.relayed_nbytes) for row in rows]),
            (
                "busiest port of bound",
                ["-" if r.busiest_of_bound is None else f"{r.busiest_of_bound:.3f}" for r in rows],
            ),
        ]
    widths = [max(len(cells[at]) for _, cells in table) for at in range(len(rows))]
    head = max(len(name) for name, _ in table)
    return "\n".join(
        f"{name:<{head}}  " + "  ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip()
        for name, cells in table
    )
