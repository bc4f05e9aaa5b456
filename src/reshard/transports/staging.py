"""Staging: how much of it one rank's part of a schedule needs, and for which of its operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.transports.operations import align, key_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.schedule.schedule import Operation, Schedule
    from reshard.transports.operations import Link, When
    from reshard.transports.verify import Verify


@dataclass(frozen=True)
class StagingNeed:
    """Bytes of staging that one rank's part of a schedule needs, by what it is for."""

    send_nbytes: int
    receive_nbytes: int


def staging_need(
    schedule: Schedule,
    rank: int,
    links: Mapping[int, Link],
    *,
    borrowed: Iterable[int] = (),
    lent_to: Iterable[int] = (),
    verify: Verify = "none",
    casts: Mapping[str, str] | None = None,
) -> StagingNeed:
    """How much staging ``Program`` will want: slots for buckets in flight, and room for the sums of a verification."""
    size, in_place = schedule.size, InPlace(borrowed, lent_to)
    whole = schedule.plan.strategy == "gather-broadcast"
    operations = [op for op in schedule.for_rank(rank) if not in_place.covers(op)]
    kept_for_later = handed_on(operations)
    sends = sum(op.kind == "send" for op in operations)
    receives = sum(
        links[op.peer].transport.lands == "caller" or whole or key_of(op.bucket) in kept_for_later
        for op in operations
        if op.kind == "recv"
    )
    checks = 0
    if verify != "none":
        for route in schedule.plan.routes:
            edges = sum(1 for edge in route.edges if edge[0] == rank and edge[1] != rank)
            if edges:
                checks += edges * (8 * len(schedule.plan.route_items(route)) + 16)
        specs, cast = schedule.plan.specs, casts or {}
        portions = [
            (op.peer, item)
            for op in operations
            for item in op.bucket.items
            if op.kind == "send"
            if cast.get(specs[item[0]].name) == "source"
        ]
        checks += 8 * len(portions) + 16 * len({peer for peer, _ in portions})
    slot = align(size.slot_nbytes)
    return StagingNeed(max(min(sends, size.depth) * slot, align(checks)), min(receives, size.depth) * slot)


class InPlace:
    """Which operations are not messages, since the receiver reads the sender's weights where they lie."""

    def __init__(self, borrowed: Iterable[int], lent_to: Iterable[int]) -> None:
        self._peers = {"recv": frozenset(borrowed), "send": frozenset(lent_to)}

    def covers(self, op: Operation) -> bool:
        return not op.forwarded and op.peer in self._peers[op.kind]


def handed_on(operations: Sequence[Operation]) -> dict[tuple[int, int], When]:
    """The buckets that this rank hands on, each with the step in which it does so for the last time."""
    return {key_of(op.bucket): (op.round, op.step) for op in operations if op.kind == "send" and op.forwarded}
