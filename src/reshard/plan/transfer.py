"""Transfer: one box on its way from a rank to a rank, and all that one rank does; what a plan is expanded to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.layouts.box import Box


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box of a tensor with its sender and receiver, in the plan's ranks."""

    name: str
    box: Box
    src: int
    dst: int
    rule: str
    nbytes: int


@dataclass(frozen=True)
class RankPlan:
    """What one rank does: (peer, tensor index, box) to send and to receive, and the boxes it copies to itself."""

    rank: int
    sends: tuple[tuple[int, int, Box], ...]
    receives: tuple[tuple[int, int, Box], ...]
    copies: tuple[tuple[int, Box], ...]
