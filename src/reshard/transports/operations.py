"""Operations: what one rank does in a run, bound to memory: sends, receives, reads in place, and the slots they use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from reshard.layouts.box import Box
    from reshard.schedule.bucket import Bucket
    from reshard.transports.base import Ticket, Transport
    from reshard.transports.copies import Copies
    from reshard.transports.recorder import Recorder
    from reshard.transports.views import Region


@dataclass(frozen=True)
class Link:
    """How this rank reaches one peer: a transport, and the peer's number in it."""

    transport: Transport
    peer: int


When = tuple[int, int]
"""A step of a round."""


@dataclass(eq=False)
class Slot:
    """A place in staging memory and the tickets that still use it."""

    arena: torch.Tensor
    offset: int
    holds: tuple[int, int] | None = None
    busy_until: When = (-1, 0)
    """While compiling: when what has landed here is needed last."""
    tickets: list[tuple[Transport, Ticket]] = field(default_factory=list)


@dataclass
class Send:
    peer: int
    link: Link
    payload: torch.Tensor
    bucket: Bucket
    slot: Slot | None
    pack: Copies | None
    """What to copy into the slot first, cast on the way if need be; None where the payload is the weights themselves or
    the slot holds it."""

    due: When
    """Its round and step."""

    when: When
    """When it is posted, which may be before that."""

    forwards: bool = False


@dataclass
class Receive:
    peer: int
    link: Link
    bucket: Bucket
    nbytes: int
    into: torch.Tensor | None
    slot: Slot | None
    regions: list[tuple[Box, int, Region]]
    """(outer box, its offset in the bucket, where a part of it goes): what unpacking writes."""

    when: When
    """Its round and step."""

    after: When = (-1, 0)
    """When its slot is needed last by what landed there before; it may be posted in any later step."""
    shown: dict[int, Copies] = field(default_factory=dict)
    """Views for unpacking, by the address at which the transport shows the bytes."""


@dataclass
class Pull:
    """Reads from one peer's memory in place."""

    peer: int
    link: Link
    copies: Copies


@dataclass
class Account:
    """What a run has done so far; other threads may look."""

    landed_nbytes: int = 0
    """Of the run under way, or of the last one."""

    network_done: float = 0.0
    """On the clock of ``time.perf_counter``: when the last bucket came of the first step of a round, which is the
    network's where there are several domains."""

    recorder: Recorder | None = None
    """Told what a run does when; None to spare the time."""


def key_of(bucket: Bucket) -> tuple[int, int]:
    """What tells a bucket from all others of a schedule."""
    return bucket.stream, bucket.index


def due_of(op: Send | Receive) -> When:
    """The round and step of an operation."""
    return op.due if isinstance(op, Send) else op.when


def align(nbytes: int) -> int:
    """Round a slot's size up so that the next slot begins at a multiple of 16 bytes."""
    return -(-nbytes // 16) * 16
