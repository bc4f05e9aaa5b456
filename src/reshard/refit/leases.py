"""Leases: holds on the version that a rank serves: a commit waits for them, and they say what a request has read."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import RefitTimeout, VersionError
from reshard.refit.options import whole_number
from reshard.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.refit.machine import Serving
    from reshard.transports.base import Deadline


@dataclass(eq=False)
class Lease:
    """What one request reads: made by ``Session.lease``, over at the end of its ``with`` block or by ``release``."""

    holder: str
    """Who has it, for messages."""

    version: int
    """The version that was served when it began."""

    in_flight: bool
    """Whether commits go on in the meantime."""

    _leases: Leases
    _since: float
    _seen: tuple[int, int]

    @property
    def versions(self) -> tuple[int, int]:
        """The lowest and the highest version of which bytes were live while it lasted; equal where it held one."""
        return self._seen

    def release(self) -> None:
        """End it; a second time has no effect."""
        self._leases._release(self)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Leases:
    """The leases of one rank; requests take them in any thread.

    While a commit waits for those that are held, and until its refit is over, no new one is given: who asks for one
    waits, and gets it of the new version.

    Args:
        serving: What this rank serves now.
    """

    def __init__(self, serving: Callable[[], Serving]) -> None:
        self._serving = serving
        self._changed = threading.Condition()
        self._given: list[Lease] = []
        self._closed_for: int | None = None
        self._writing: int | None = None
        self.used = False
        """Whether any was taken that a commit must wait for."""

    @property
    def holders(self) -> tuple[str, ...]:
        """Who has leases that a commit must wait for."""
        return tuple(lease.holder for lease in self._given if not lease.in_flight)

    def take(self, holder: str, deadline: Deadline, *, version: int | None = None, in_flight: bool = False) -> Lease:
        """Begin a lease.

        Args:
            holder: As ``Lease.holder``.
            deadline: For a commit that is under way.
            version: The one that it must be; any if not given.
            in_flight: As ``Lease.in_flight``.

        Raises:
            RefitTimeout: A commit is still under way at the deadline.
            VersionError: This rank serves no version, or another, or is torn.
        """
        version = None if version is None else whole_number("version", version)
        with self._changed:
            self.used = self.used or not in_flight
            if not in_flight and not self._changed.wait_for(lambda: self._closed_for is None, deadline.remaining()):
                raise RefitTimeout(
                    f"Lease of {holder!r}: version {self._closed_for} is about to be committed, and was not within "
                    f"{deadline.seconds:g} s. session.status() says what it waits for; or wait longer (timeout=).",
                    holder=holder,
                    version=self._closed_for,
                )
            serving = self._serving()
            served = serving.version
            if serving.torn or served is None or version not in (None, served):
                asked = "a version" if version is None else f"version {version}"
                raise VersionError(
                    f"Lease of {holder!r}: {asked} cannot be read here, which serves {serving}. A version is served "
                    f"from its refit to the next one; versions before it are not kept.",
                    holder=holder,
                    version=version,
                    served=served,
                )
            highest = served if self._writing is None else max(served, self._writing)
            lowest = served if self._writing is None else min(served, self._writing)
            lease = Lease(holder, served, in_flight, self, time.monotonic(), (lowest, highest))
            self._given.append(lease)
            return lease

    def drain(self, version: int, deadline: Deadline) -> None:
        """Give no new lease until ``open``, and wait until those that are held have ended.

        Args:
            version: Which is to be committed.
            deadline: For the wait.

        Raises:
            RefitTimeout: Names who still has one.
        """
        with self._changed:
            self._closed_for = version
            if self._changed.wait_for(lambda: not self.holders, deadline.remaining()):
                return
            now = time.monotonic()
            held = [lease for lease in self._given if not lease.in_flight]
            listed = ", ".join(f"{lease.holder!r} for {format_seconds(now - lease._since)}" for lease in held[:5])
            more = f" and {len(held) - 5} more" if len(held) > 5 else ""
            raise RefitTimeout(
                f"Leases are still held by {listed}{more}, so nothing was committed. End them, or take them with "
                f"in_flight=True if requests may read a version that changes.",
                holders=tuple(lease.holder for lease in held),
            )

    def writes(self, version: int) -> None:
        """Bytes of a version are about to be written to the live weights."""
        with self._changed:
            self._writing = version
            for lease in self._given:
                lease._seen = (min(lease._seen[0], version), max(lease._seen[1], version))

    def open(self) -> None:
        """The refit is over; leases are of what is served now."""
        with self._changed:
            self._closed_for = self._writing = None
            self._changed.notify_all()

    def _release(self, lease: Lease) -> None:
        with self._changed:
            if lease in self._given:
                self._given.remove(lease)
                self._changed.notify_all()
