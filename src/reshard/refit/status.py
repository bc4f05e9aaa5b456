"""Status: the small value that each member keeps in the store, and what all of them together say."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import RefitTimeout
from reshard.refit.machine import Phase

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from reshard.transports.base import Deadline

_LOOK_SECONDS = 0.05
SESSIONS = "reshard/sessions"
"""Where the names of the sessions of a store are listed."""


def prefix_of(session: str) -> str:
    """Where the keys of a session lie in its store."""
    return f"reshard/session/{session}"


@dataclass(frozen=True)
class MemberStatus:
    """One member, as it was when it last said so; times are seconds since 1970 on its own clock."""

    world: str
    rank: int
    role: str = ""
    version: int | None = None
    partial: bool = False
    torn: bool = False
    phase: str = "not here yet"
    since: float | None = None
    epoch: int = 0
    target: int | None = None
    to: tuple[str, ...] = ()
    """The worlds of the refit that is under way."""

    where: str = ""
    error: str = ""
    """The last refit's error, until one completes."""

    held_by: tuple[str, ...] = ()
    """Holders of leases that its commit waits for."""

    waiting_for: tuple[str, ...] = ()
    """Members that have not come as far; not said by the member, but found by comparing all."""

    not_ready: str = ""
    """Why it should not serve: nothing, if it serves what the newest of its session does."""

    @property
    def name(self) -> str:
        return f"{self.world} rank {self.rank}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


_ORDER = ("not here yet", "closed", *(phase.value for phase in Phase if phase is not Phase.CLOSED))
"""Phases as far as they have come."""
_WAITS = ("gathering", "planning", "moving", "landed", "draining", "confirming")
"""Phases of a refit in which a member waits for others."""


def write_status(store: dist.Store, status: MemberStatus) -> None:
    """Say what this member is doing; costs one message that nobody waits for."""
    store.set(f"status/{status.world}/{status.rank}", json.dumps(status.to_json()))


def read_status(store: dist.Store) -> tuple[MemberStatus, ...]:
    """What all members of a session are doing; ``store`` is the session's part of its store.

    Members that are expected and have not said anything are ``not here yet``.
    """
    if not store.check(["expect"]):
        return ()
    members = []
    for world, size in json.loads(store.get("expect")).items():
        for rank in range(size):
            key = f"status/{world}/{rank}"
            if store.check([key]):
                data = json.loads(store.get(key))
                members.append(
                    MemberStatus(
                        **{**data, "to": tuple(data["to"]), "held_by": tuple(data["held_by"]), "waiting_for": ()}
                    )
                )
            else:
                members.append(MemberStatus(world, rank))
    return compare(members)


def compare(members: Sequence[MemberStatus]) -> tuple[MemberStatus, ...]:
    """Find who waits for whom, and who serves less than the newest.

    A member that is meeting waits for those who are not; one in a refit waits for those of its worlds that are not as
    far in the same refit.
    """
    versions = [m.version for m in members if m.role == "destination" and m.version is not None]
    newest = max(versions, default=None)
    result = []
    for member in members:
        slow: list[str] = []
        if member.phase == "meeting":
            worlds = {*(member.to or (m.world for m in members)), *(m.world for m in members if m.role == "source")}
            slow = [m.name for m in members if m.phase != "meeting" and m.world in worlds]
        elif member.target is not None and member.phase in _WAITS:
            worlds = {*member.to, *(m.world for m in members if m.role == "source")}
            slow = [
                m.name
                for m in members
                if m.world in worlds and (m.target != member.target or _behind(m.phase, member.phase))
            ]
        slow += [f"lease of {holder}" for holder in member.held_by]
        result.append(
            MemberStatus(**{**asdict(member), "waiting_for": tuple(slow), "not_ready": _why_not_ready(member, newest)})
        )
    return tuple(result)


def _behind(phase: str, other: str) -> bool:
    return _ORDER.index(phase) < _ORDER.index(other)


def _why_not_ready(member: MemberStatus, newest: int | None) -> str:
    if member.role == "source":
        return ""
    if member.torn:
        return f"torn: a refit failed half-way; before it, it served {_version(member.version)}"
    if member.version is None:
        return "at no version" + (f", the newest is {newest}" if newest is not None else "")
    if newest is not None and member.version < newest:
        return f"at version {member.version}, the newest is {newest}"
    return ""


def _version(version: int | None) -> str:
    return "no version" if version is None else f"version {version}"


def list_sessions(store: dist.Store) -> tuple[str, ...]:
    """The names of all sessions that have met at a store, in the order in which they began."""
    names = (f"{SESSIONS}/{index}" for index in range(store.add(SESSIONS, 0)))
    return tuple(dict.fromkeys(store.get(key).decode() for key in names if store.check([key])))


def published(members: Sequence[MemberStatus]) -> int | None:
    """The newest version that the source serves or has called ``refit`` for; None before the first."""
    known = [v for m in members if m.role == "source" for v in (m.version, m.target) if v is not None]
    return max(known, default=None)


def wait_until_published(store: dist.Store | None, session: str, version: int, deadline: Deadline) -> int:
    """Wait until the source has come to a version, by looking at what it says of itself.

    Args:
        store: The session's part of its store; None where it is lost.
        session: Its name.
        version: The least one that will do.
        deadline: For the wait.

    Returns:
        The version that it has come to.

    Raises:
        RefitTimeout: It has not.
    """
    while True:
        newest = published(read_status(store)) if store is not None else None
        if newest is not None and newest >= version:
            return newest
        if deadline.expired:
            last = "no version" if newest is None else f"version {newest}"
            raise RefitTimeout(
                f"Session {session!r}: version {version} was not published within {deadline.seconds:g} s; the source "
                f"has come to {last}. Look what it waits for, or go on with that one.",
                session=session,
                version=version,
                published=newest,
            )
        time.sleep(min(_LOOK_SECONDS, deadline.remaining()))
