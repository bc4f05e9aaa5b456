"""Events: what can happen to a session on one rank; the only input of the state machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.errors import ReshardError


@dataclass(frozen=True)
class Joined:
    """``connect`` was called."""


@dataclass(frozen=True)
class Called:
    """``refit`` was called."""

    version: int
    partial: bool = False
    """Whether it names only some of the tensors."""


@dataclass(frozen=True)
class Met:
    """All expected members are here, and are connected."""

    epoch: int


@dataclass(frozen=True)
class Outdated:
    """A member left or came since: this epoch is over, and nothing of this refit has begun."""

    reason: str


@dataclass(frozen=True)
class Gathered:
    """All ranks of the refit have called with the same arguments, and the version may be served."""


@dataclass(frozen=True)
class Planned:
    """The plan is agreed, proved and bound to memory."""


@dataclass(frozen=True)
class Moved:
    """This rank's bytes have left and landed, and equal those sent as far as that is verified."""


@dataclass(frozen=True)
class AllLanded:
    """Every rank of the refit has said so."""

    leased: bool = False
    """Whether leases are taken on one of them, so that the commit waits until none is held."""


@dataclass(frozen=True)
class Drained:
    """No rank of the refit holds a lease, and none is given before it is over."""


@dataclass(frozen=True)
class Committed:
    """This rank's live weights are the new version."""


@dataclass(frozen=True)
class AllCommitted:
    """Those of every rank are."""


@dataclass(frozen=True)
class Refused:
    """The refit cannot be done as it was asked for; every rank knows, and no byte has moved."""

    error: ReshardError


@dataclass(frozen=True)
class Failed:
    """Something went wrong here or elsewhere; connections may be gone."""

    error: BaseException
    untouched: bool = False
    """Whether it happened while committing, before anything was written to the live weights of this rank."""


@dataclass(frozen=True)
class Closed:
    """``close`` was called."""


Event = (
    Joined
    | Called
    | Met
    | Outdated
    | Gathered
    | Planned
    | Moved
    | AllLanded
    | Drained
    | Committed
    | AllCommitted
    | Refused
    | Failed
    | Closed
)
