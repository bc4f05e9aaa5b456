"""Engines: what a source asks of whoever drives the engines that are its destinations, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.transports.base import Deadline


@dataclass(frozen=True)
class SessionFacts:
    """What the processes of an engine need to know to join a session."""

    address: str
    """Of the store."""

    session: str
    source: str
    """The source world."""

    expect: Mapping[str, int]
    commit: str
    verify: str
    strategy: str
    transport: str
    staging_nbytes: int
    timeout_seconds: float
    to: tuple[str, ...]
    """The destination worlds that take part."""

    topology: Mapping[str, Any] | None = None
    """As ``Topology.to_json`` gives it; None if the session finds it out."""

    names: tuple[str, ...] | None = None
    """Patterns of the tensors that the refit brings; None for all."""

    allow_rollback: bool = False
    """Whether the refit may bring a lower version than the one served."""

    routes: Mapping[str, str] = field(default_factory=dict)
    """Which tensors go whole, as ``connect`` takes them."""

    def for_world(self, world: str) -> dict[str, Any]:
        """Plain data for one process of a world: arguments of ``connect`` but its role and rank."""
        return {
            "address": self.address,
            "world": world,
            "expect": dict(self.expect),
            "session": self.session,
            "commit": self.commit,
            "verify": self.verify,
            "strategy": self.strategy,
            "transport": self.transport,
            "staging_nbytes": self.staging_nbytes,
            "topology": None if self.topology is None else dict(self.topology),
            "timeout_seconds": self.timeout_seconds,
            **({"routes": dict(self.routes)} if self.routes else {}),
        }

    @property
    def asked(self) -> dict[str, Any]:
        """Plain data too: the arguments of ``refit`` but the version, which all its ranks pass alike."""
        names = None if self.names is None else list(self.names)
        return {"to": list(self.to), "names": names, "allow_rollback": self.allow_rollback}


class Engines(Protocol):
    """Drives engines through the refits of a session; the first rank of the source calls it, and no other.

    In a refit: ``begin``, then ``commit`` when all ranks have verified what landed, then ``done`` when all serve it. At
    any failure ``failed`` takes the place of what was to come. Every call ends by its deadline.
    """

    def begin(self, facts: SessionFacts, version: int | None, deadline: Deadline) -> None:
        """Make the engines' processes join the session and receive a version, both in the background.

        It comes before the members meet, and does not wait for what it has begun.

        Args:
            facts: The session; ``to`` says which worlds take part.
            version: What they are to receive; None while the source connects: they only join.
            deadline: Of the call of ``connect`` or ``refit``.
        """

    def commit(self, version: int, deadline: Deadline) -> None:
        """Stop the engines and let every process install; ends when all have installed.

        A process has installed when its hooks are through. Its ``refit`` is over later: when this call has ended and
        all ranks know.
        """

    def done(self, version: int) -> Mapping[str, float] | None:
        """Let the engines go on with the version, which every rank serves now.

        Returns:
            By engine: the seconds for which it stood still.
        """

    def failed(self, version: int, error: BaseException) -> str | None:
        """Let the engines go on if they have whole weights, and leave them stopped if not.

        Args:
            version: What was to be served.
            error: Why it is not. Its ``phase`` tells how far the source came: nothing was installed before
                ``"committing"``.

        Returns:
            What the engines answer requests with now, as sentences for the error's message.
        """
