"""Recorder: what one rank's program does when, on the machine's monotonic clock, for a trace of a real run.

Processes of one machine share that clock, so their events can be put on one line; those of several machines cannot.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from reshard.schedule.trace import Trace, TraceEvent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.schedule.trace import Kind

Row = tuple["Kind", int | None, int | None, float, float, int]
"""Kind, peer, round, start, stop, bytes: an event on the machine's clock."""


class Recorder:
    """Collects what a program does; a program without one takes no time for it."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def note(self, kind: Kind, began: float, nbytes: int, peer: int | None = None, round_: int | None = None) -> None:
        """Something that began at ``began`` (``time.perf_counter``) has ended now."""
        self.rows.append((kind, peer, round_, began, time.perf_counter(), nbytes))


def trace_of(rows: Mapping[int, Iterable[Row]], origin: str, plan_digest: str | None = None) -> Trace:
    """The trace of one run from what was recorded by rank; its zero is when the first event began.

    >>> trace_of({0: [("pack", None, 0, 5.0, 7.0, 8)], 1: [("wait", 0, 0, 4.0, 7.5, 0)]}, "measured").seconds
    3.5
    """
    zero = min((row[3] for events in rows.values() for row in events), default=0.0)
    events = tuple(
        TraceEvent(rank, kind, peer, round_, start - zero, stop - zero, nbytes)
        for rank, recorded in sorted(rows.items())
        for kind, peer, round_, start, stop, nbytes in recorded
    )
    return Trace(events, origin, plan_digest)
