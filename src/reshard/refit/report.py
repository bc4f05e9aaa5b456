"""RefitReport: what one rank can say of one refit, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.refit.casts import Cast


@dataclass(frozen=True)
class RefitReport:
    """A refit that completed: every rank of the worlds named serves the version now. Bytes count payload."""

    session: str
    member: str
    version: int
    epoch: int
    to: tuple[str, ...]
    """Destination worlds."""

    seconds: float
    """From the call to its end on this rank, the wait for others included."""

    phases: Mapping[str, float]
    """Seconds in each phase; ``gathering`` is the wait for the others to call."""

    commit: str
    verify: str
    partial: bool
    """Whether only some tensors were refitted, so that the others are of older versions."""

    tensors: int
    """Tensors refitted."""

    untouched: int
    """Destination tensors that this refit left as they are; 0 on a rank that has none."""

    sent_nbytes: int
    received_nbytes: int
    """What reached this rank from others, over whatever link."""

    local_nbytes: int
    link_nbytes: Mapping[str, int]
    """Bytes that this rank received or sent, by kind of link."""

    links: Mapping[str, str]
    """By peer: the transport, how many copies the bytes take there, and why."""

    staging_nbytes: int
    """All memory that this rank keeps for refits: staging, and room to land in."""

    copies_nbytes: int
    """The part of it that landing room takes: with a staged commit all that the rank's weights take, else what tensors
    that go whole take a few at a time."""

    paths: Mapping[str, str]
    """By tensor: the rules by which its bytes travel; before them whether it goes whole, where to and why."""

    casts: tuple[Cast, ...]
    renamed: Mapping[str, str]
    """By new name: what this rank's model calls it."""

    left_out: tuple[str, ...]
    """What this rank's model has and a rule leaves out; it stays as it is."""

    not_covered: tuple[str, ...]
    """Source tensors that no destination wants."""

    unchanged: tuple[str, ...] | None
    """Tensors whose fingerprints are those of the version before; None where none are kept."""

    bound_seconds: float | None
    """The least time of any plan over the ports of the topology that was given; None without one."""

    bound_fraction: float | None
    """The plan's busiest port over that bound, window after window; 1.0 is the best."""

    digest: str = ""
    """Of the fingerprints of all tensors; empty where none are kept."""

    direct_fraction: float = 1.0
    """The share of the bytes of all tensors, each once, that every destination takes by its pieces; others go whole."""

    pause_seconds: float | None = None
    """For how long engines stood still, the longest of them; None on ranks that drive none."""

    engine_seconds: Mapping[str, float] = field(default_factory=dict)
    """By engine that this rank drives: for how long it stood still."""

    copies_into: Mapping[str, float] = field(default_factory=dict)
    """By domain: how many copies of what its ranks want enter it over the network; empty where there is one domain."""

    windows: int = 1
    """In how many parts it moved, one after the other, so that tensors that go whole share the room to land in."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, for logs."""
        return asdict(self)

    def __str__(self) -> str:
        changed = ""
        if self.unchanged is not None:
            changed = (
                ", nothing changed" if len(self.unchanged) == self.tensors else f", {len(self.unchanged)} unchanged"
            )
        part = f" in part ({self.untouched} untouched)" if self.partial else ""
        phases = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.phases.items())
        casts = f", {len(self.casts)} cast" if self.casts else ""
        direct = f", {self.direct_fraction:.0%} of bytes direct" if self.direct_fraction < 1 else ""
        windows = f" in {self.windows} windows" if self.windows > 1 else ""
        stood = "" if self.pause_seconds is None else f", engines stood still for {format_seconds(self.pause_seconds)}"
        return (
            f"{self.member}: version {self.version}{part} to {', '.join(self.to)}: "
            f"{self.tensors} tensors{windows}{casts}{changed}{direct}, "
            f"{format_nbytes(self.sent_nbytes)} out, {format_nbytes(self.received_nbytes)} in, "
            f"{format_seconds(self.seconds)} ({phases}){stood}"
        )
