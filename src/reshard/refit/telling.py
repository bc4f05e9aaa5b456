"""Telling: the error that a caller of a session sees: what happened, where, what is served now, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import (
    LayoutError,
    ManifestError,
    MembershipError,
    PeerError,
    ReshardError,
    TransportError,
    VerifyError,
)
from reshard.refit.machine import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.refit.machine import State

_MEET_ANEW = (
    "Call refit again on every rank; the members meet anew then, and one that died is restarted under the same world "
    "and rank."
)
_OF_OTHERS = (PeerError, TransportError, MembershipError, VerifyError)
"""Errors whose cause is not in what this rank declared."""
_OF_ONE_GROUP = (
    " The destination's tensors may hold a mix of old and new weights until a refit completes. The connections of this "
    "refit are closed: build a new process group, compile the refit again and run it.",
    " The destination is torn: refit again.",
    " This transport is over; make a new one before the next try.",
    " This transport is over; make a new one.",
    " The group's connections are closed; make a new group before the next try.",
    " Look at what was going on there; the next try needs a new scope.",
)
"""What is said of a refit over one group, and is said better here."""


@dataclass(frozen=True)
class Place:
    """Where an error happened."""

    session: str
    member: str
    phase: Phase
    version: int | None
    """None while connecting."""

    members: tuple[str, ...]
    """What the ranks of the refit are called; empty where no ranks are numbered yet."""


def error_for_caller(error: Exception, place: Place, state: State, *, began: bool) -> ReshardError:
    """The same error with its place, in the names of members, with what this rank serves and what to do.

    Args:
        error: What was raised.
        place: Where.
        state: The state after it.
        began: Whether the epoch is over; if not, the refit was refused and nothing has changed.
    """
    if not isinstance(error, ReshardError):
        wrapped = ReshardError(f"{type(error).__name__}: {error}.")
        wrapped.__cause__ = error
        error = wrapped
    message = error.message
    for text in _OF_ONE_GROUP:
        message = message.replace(text, "")
    message = re.sub(r"(?<!\.)\.\.(?!\.)", ".", message)  # a sentence that ends with what another rank said
    message += "" if message.endswith((".", "!", "?")) else "."
    if place.phase is not Phase.PLANNING or not isinstance(error, ManifestError | LayoutError):
        message = with_names(message, place.members)  # those count ranks in their own worlds
    facts: dict[str, Any] = {**error.facts, "session": place.session, "phase": place.phase.value}
    peer = facts.get("peer", facts.get("rank"))
    if isinstance(peer, int) and peer < len(place.members):
        facts["member"] = place.members[peer]
    what = "connect"
    if place.version is not None:
        what = f"refit to version {place.version}"
        facts.update(version=place.version, serving=state.serving.version)
    again = "Calling again is safe."
    if began:
        again = _MEET_ANEW if isinstance(error, _OF_OTHERS) else "Mend it and call refit again on every rank."
        if place.version is None:
            again = "Call connect again." if isinstance(error, _OF_OTHERS) else "Mend it and call connect again."
    serves = f" It serves {state.serving}." if state.writes else ""
    told = type(error)(
        f"Session {place.session!r}, {what}, {place.member}, {place.phase.value}: {message}{serves} {again}",
        **facts,
    )
    told.__cause__ = error.__cause__ or error
    return told


def with_names(message: str, members: Sequence[str]) -> str:
    """A message about ranks of the union, in the members' own names.

    >>> with_names("Rank 2 lost rank 0; gen0 rank 1 waits", ["trainer rank 0", "gen0 rank 0", "gen0 rank 1"])
    'gen0 rank 1 lost trainer rank 0; gen0 rank 1 waits'
    """
    worlds = {member.rsplit(" rank ", 1)[0] for member in members}

    def name(found: re.Match[str]) -> str:
        before, rank = found[1] or "", int(found[2])
        known = before.strip() in worlds or rank >= len(members)
        return found[0] if known else f"{before}{members[rank]}"

    return re.sub(r"(\S+ )?\b[Rr]ank (\d+)\b", name, message)


def text_of(error: BaseException | None) -> str:
    """An error in one line for those who are told of it by another rank."""
    return error.message if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
