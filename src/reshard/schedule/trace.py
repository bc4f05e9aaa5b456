"""Trace: what moved when. A simulator and a real run both write one; people read it as a timeline.

Times are seconds from the trace's own zero, on one clock for all ranks. As JSON a trace is a table by columns, since a
large one has millions of events.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["send", "recv", "pack", "unpack", "copy", "wait"]
KINDS: tuple[Kind, ...] = get_args(Kind)

TRACE_FORMAT = "reshard-trace-1"

_COLUMNS = ("rank", "kind", "peer", "round", "start_seconds", "stop_seconds", "nbytes")


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that one rank did, from ``start_seconds`` to ``stop_seconds``.

    Args:
        rank: Who did it, in the plan's ranks.
        kind: ``send`` and ``recv`` go over a link; ``pack``, ``unpack`` and ``copy`` stay in the rank's memory; in
            ``wait`` nothing moved.
        peer: The other end of a send or recv, or who is waited for; None where there is no other end.
        round: The round of the schedule that it belongs to; None where it belongs to none.
        start_seconds: When it began.
        stop_seconds: When it ended, not before it began.
        nbytes: Payload that it moved.
    """

    rank: int
    kind: Kind
    peer: int | None
    round: int | None
    start_seconds: float
    stop_seconds: float
    nbytes: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"A trace event of kind {self.kind!r}: use one of {', '.join(KINDS)}.", kind=self.kind)
        if not 0 <= self.start_seconds <= self.stop_seconds < float("inf"):
            raise ConfigError(
                f"A trace event of rank {self.rank} runs from {self.start_seconds} s to {self.stop_seconds} s. Times "
                f"count from the trace's zero and an event does not end before it begins.",
                rank=self.rank,
            )
        if self.rank < 0 or self.nbytes < 0:
            raise ConfigError(
                f"A trace event of rank {self.rank} with {self.nbytes} bytes: neither is negative.", rank=self.rank
            )

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.stop_seconds - self.start_seconds


@dataclass(frozen=True)
class Trace:
    """What all ranks did in one refit.

    Args:
        events: In any order; they are kept by start, rank and stop.
        origin: Where the times come from, in words for people: ``"simulated on gb200-nvl72"``, ``"measured, gloo"``.
        plan_digest: The digest of the plan that was followed; None where it is not known.
    """

    events: tuple[TraceEvent, ...]
    origin: str = ""
    plan_digest: str | None = None

    def __post_init__(self) -> None:
        ordered = sorted(self.events, key=lambda e: (e.start_seconds, e.rank, e.stop_seconds, e.kind))
        object.__setattr__(self, "events", tuple(ordered))

    @property
    def seconds(self) -> float:
        """From the trace's zero to the end of its last event."""
        return max((event.stop_seconds for event in self.events), default=0.0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that did anything."""
        return tuple(sorted({event.rank for event in self.events}))

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back to an equal trace."""
        columns = {name: [getattr(event, name) for event in self.events] for name in _COLUMNS}
        return {"format": TRACE_FORMAT, "origin": self.origin, "plan_digest": self.plan_digest, "events": columns}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trace:
        """Read what ``to_json`` gave.

        Raises:
            ConfigError: It is not a trace of this format, its columns differ in length, or an event is impossible.
        """
        if data.get("format") != TRACE_FORMAT:
            raise ConfigError(f"This is not a trace: its format is {data.get('format')!r}, not {TRACE_FORMAT!r}.")
        columns = [data["events"][name] for name in _COLUMNS]
        lengths = {name: len(column) for name, column in zip(_COLUMNS, columns, strict=True)}
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"The columns of a trace are as long as each other; these are not: {lengths}.")
        events = tuple(TraceEvent(*row) for row in zip(*columns, strict=True))
        return cls(events, data.get("origin", ""), data.get("plan_digest"))
