"""Progress: one line on stderr while a refit runs: its phase, how much has landed, and who is waited for.

A thread looks at the session now and then. In a terminal the line is redrawn in place (by rich) and is gone afterwards;
elsewhere, where each line stays, one is written only every ten seconds of a refit.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from reshard.errors import ReshardError
from reshard.refit.status import prefix_of, read_status
from reshard.refit.store import open_store, prefixed
from reshard.transports.base import Deadline
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from rich.status import Status

    from reshard.refit.runner import Runner

_REDRAW_SECONDS = 0.2
_LINE_SECONDS = 10.0
_NAMED = 3
"""Members that are named as waited for; more are counted."""


@dataclass(frozen=True)
class Look:
    """What a session is doing on one rank."""

    member: str
    phase: str
    version: int | None
    """The version of the refit under way; None while members meet."""

    landed_nbytes: int = 0
    total_nbytes: int = 0
    """What has landed here, and what one run brings; both 0 where nothing lands, or before it begins."""


def line_of(look: Look, seconds: float, waits_for: Sequence[str] = ()) -> str:
    """One line of progress.

    >>> line_of(Look("gen0 rank 0", "moving", 7, 3 << 20, 12 << 20), 1.5, ["trainer rank 1"])
    'gen0 rank 0: version 7, moving, 3 MiB of 12 MiB landed, 1.5 s, waits for trainer rank 1'
    """
    parts = [] if look.version is None else [f"version {look.version}"]
    parts.append(look.phase)
    if look.total_nbytes:
        parts.append(f"{format_nbytes(look.landed_nbytes)} of {format_nbytes(look.total_nbytes)} landed")
    parts.append(format_seconds(seconds))
    if waits_for:
        more = f" and {len(waits_for) - _NAMED} more" if len(waits_for) > _NAMED else ""
        parts.append(f"waits for {', '.join(waits_for[:_NAMED])}{more}")
    return f"{look.member}: {', '.join(parts)}"


class Watch:
    """Looks at one rank of a session from another thread.

    Args:
        runner: The rank's.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._store: dist.Store | None = None  # one of its own: the session's is busy while it waits

    def look(self) -> Look:
        """What it is doing."""
        runner = self._runner
        return Look(str(runner.setup.me.member), runner.state.phase.value, runner.state.target, *runner.landed_nbytes)

    def waits_for(self) -> tuple[str, ...]:
        """The members that it waits for; none where the store has no address, or does not answer."""
        setup = self._runner.setup
        if not isinstance(setup.store, str):
            return ()
        try:
            if self._store is None:
                self._store = prefixed(
                    open_store(setup.store, Deadline.after(_REDRAW_SECONDS)), prefix_of(setup.session)
                )
            members = read_status(self._store)
        except (RuntimeError, ReshardError):
            self._store = None
            return ()
        me = str(setup.me.member)
        return next((member.waiting_for for member in members if member.name == me), ())

    def close(self) -> None:
        """Give back the connection."""
        self._store = None


class ProgressLine:
    """Shows what a watch sees while it is entered.

    Args:
        watch: Looked at from another thread.
        console: Where; stderr if not given.
        every: Seconds between two lines where each line stays.
    """

    def __init__(self, watch: Watch, console: Console | None = None, *, every: float = _LINE_SECONDS) -> None:
        self._watch = watch
        self._console = console or Console(stderr=True, highlight=False)
        self._every = every
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ProgressLine:
        self._done.clear()
        self._thread = threading.Thread(target=self._show, name="reshard-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(_LINE_SECONDS)
            self._thread = None

    def _show(self) -> None:
        began = time.monotonic()
        terminal = self._console.is_terminal
        pause = _REDRAW_SECONDS if terminal else self._every
        status: Status | None = None
        try:
            while not self._done.wait(pause):
                line = line_of(self._watch.look(), time.monotonic() - began, self._watch.waits_for())
                if not terminal:
                    self._console.print(line, markup=False, soft_wrap=True)
                elif status is None:
                    status = self._console.status(line)
                    status.start()
                else:
                    status.update(line)
        finally:
            if status is not None:
                status.stop()
