"""Journal: the last events of a session on one rank, for its log, a JSONL file, and whoever looks after a failure."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from reshard.refit import last_events

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch.distributed as dist

    from reshard.errors import ReshardError
    from reshard.refit.events import Event
    from reshard.refit.machine import State

KEPT = 1000
"""Events that are kept in memory, and written down when a refit fails."""

logger = logging.getLogger("reshard.session")


class Journal:
    """Notes what happens.

    Args:
        session: The session's name.
        member: Who notes it.
        file: Where every event is appended as one line of JSON; None to keep only the last ones in memory.
    """

    def __init__(self, session: str, member: str, file: str | Path | None = None) -> None:
        self.session = session
        self.member = member
        self._kept: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._file = None if file is None else os.fspath(file)

    def note(self, event: Event, before: State, after: State) -> None:
        """Note an event and the phase that it led to."""
        error = getattr(event, "error", None)
        row = {
            "time": time.time(),
            "session": self.session,
            "member": self.member,
            "event": type(event).__name__,
            "from": before.phase.value,
            "to": after.phase.value,
            "epoch": after.epoch,
            "version": after.target if after.target is not None else before.target,
            "serving": after.serving.version,
            "torn": after.serving.torn,
        }
        if error is not None:
            row["error"] = f"{type(error).__name__}: {error}"
        self._kept.append(row)
        level = logging.WARNING if error is not None else logging.DEBUG
        logger.log(
            level, "%s%s: %s, now %s", self.member, _version(row), row["event"], row["to"], extra={"reshard": row}
        )
        if self._file is not None:
            self._append(self._file, [row])

    def returned(self, store: dist.Store, epoch: int) -> None:
        """Leave the events of a call that completed in the store, for whoever looks after a failure of others."""
        rows = list(self._kept)
        first = max((at for at, row in enumerate(rows) if row["event"] in ("Called", "Joined")), default=0)
        _quietly(lambda: last_events.leave(store, self.member, epoch, rows[first:], failed=False))

    def failed(
        self, error: ReshardError, store: dist.Store | None = None, members: Sequence[str] = (), epoch: int = 0
    ) -> None:
        """Say that a refit failed, and write the last events of every rank that can be reached beside the log.

        Args:
            error: As the caller sees it.
            store: The session's part of the store, if it answers.
            members: All that are expected.
            epoch: Of the call that failed.
        """
        logger.error("%s", error.message)
        if store is not None:
            _quietly(lambda: last_events.leave(store, self.member, epoch, list(self._kept), failed=True))
        if self._file is None:
            return
        others: list[dict[str, Any]] = []
        if store is not None:
            _quietly(lambda: others.extend(last_events.collect(store, [m for m in members if m != self.member], epoch)))
        self._append(f"{self._file}.failed", [*self._kept, *others])

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """The last events, oldest first."""
        return tuple(self._kept)

    def _append(self, file: str, rows: Any) -> None:
        try:
            with open(file, "a", encoding="utf-8") as log:
                log.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as error:
            logger.warning("%s cannot write events to %s: %s", self.member, file, error)


def _version(row: dict[str, Any]) -> str:
    return "" if row["version"] is None else f", version {row['version']}"


def _quietly(call: Callable[[], None]) -> None:
    """What is left for others must not change what the caller is told."""
    try:
        call()
    except (RuntimeError, OSError, ValueError) as error:
        logger.debug("events cannot be exchanged: %s", error)
