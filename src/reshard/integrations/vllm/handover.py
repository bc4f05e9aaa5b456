"""Handover: groups that have landed pass from the thread that receives to the worker's own thread, which installs."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from reshard.errors import InstallError, RefitTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.refit.landed import Landed


class Handover:
    """Where the two threads of one refit meet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[_Handed] = deque()
        self._ended: list[BaseException | None] = []
        self._left = ""
        self.installed = 0
        """Groups that were installed whole."""
        self.touched = False
        """Whether a group was left half done."""

    # -- the thread that receives -------------------------------------------------------------------------------------

    def give(self, landed: Landed) -> None:
        """Wait until the worker's thread has installed a group; an install hook of ``Session.accept``.

        Raises:
            InstallError: Nobody came for it: the worker was not told to install in time, or it has left. It says
                ``untouched``: nothing of this group was written.
            Exception: What the install raised.
        """
        handed = _Handed(landed)
        with self._changed:
            self._waiting.append(handed)
            self._changed.notify_all()
            expiry = time.monotonic() + landed.timeout_seconds
            while not handed.taken:
                left = expiry - time.monotonic()
                if self._left or left <= 0:
                    self._waiting.remove(handed)
                    why = self._left or f"nobody told the worker to install within {landed.timeout_seconds:.3g} s"
                    raise InstallError(f"Install group {landed.group!r} has landed, and {why}.", untouched=True)
                self._changed.wait(left)
            while not handed.done:  # the worker's own thread is at it, and nothing there waits for others
                self._changed.wait()
        if handed.error is not None:
            raise handed.error

    def end(self, error: BaseException | None) -> None:
        """Say that nothing more comes: all groups are installed here (None), or the refit has failed. The first counts.

        Whether all other ranks have installed too is known later, and the worker must not wait for it: its engine's
        trainer waits for the worker.
        """
        with self._changed:
            self._ended.append(error)
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes, or nobody would take it."""
        return bool(self._ended or self._left)

    # -- the worker's own thread --------------------------------------------------------------------------------------

    def serve(self, install: Callable[[Landed], None], timeout_seconds: float) -> None:
        """Install what comes, up to the last group.

        Raises:
            RefitTimeout: Not all has come within the time.
            Exception: What made the refit fail, here or anywhere else.
        """
        expiry = time.monotonic() + timeout_seconds
        while True:
            with self._changed:
                while not self._waiting and not self._ended:
                    left = expiry - time.monotonic()
                    if left <= 0:
                        raise RefitTimeout(
                            f"Not all groups had landed {timeout_seconds:.3g} s after this worker was told to install "
                            f"them. Look what its session's members wait for (reshard status)."
                        )
                    self._changed.wait(left)
                handed = self._waiting.popleft() if self._waiting else None
                if handed is not None:
                    handed.taken = True
            if handed is None:
                break
            try:
                install(handed.landed)
                self.installed += 1
            except Exception as error:
                handed.error = error
                self.touched = getattr(error, "untouched", False) is not True
            with self._changed:
                handed.done = True
                self._changed.notify_all()
        if self._ended[0] is not None:
            raise self._ended[0]

    def leave(self, reason: str) -> None:
        """Say that nobody will come to install any more."""
        with self._changed:
            self._left = self._left or reason
            self._changed.notify_all()


class _Handed:
    """A group on its way."""

    def __init__(self, landed: Landed) -> None:
        self.landed = landed
        self.taken = False
        self.done = False
        self.error: BaseException | None = None
