"""Calls: the refits of one rank, one after the other, in the thread that calls or in one beside it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.refit.collective import Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from reshard.refit.report import RefitReport


class Calls:
    """What keeps two refits of one rank apart.

    Args:
        session: Its name, for messages.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._beside: ThreadPoolExecutor | None = None
        self._last: Future[RefitReport] | None = None
        self._busy = threading.Lock()
        self._thread: int | None = None
        """In which a refit is under way."""

    def settle(self) -> None:
        """Wait until those beside this thread are over, whatever became of them; each has its deadline."""
        if self._last is not None and not self._last.done():
            self._last.exception()

    def make(self, refit: Callable[[], RefitReport]) -> RefitReport:
        """Make a refit here, once those beside this thread are over.

        Raises:
            ConfigError: Another one is under way in another thread.
        """
        self.settle()
        return self._alone(refit)

    def make_beside(self, refit: Callable[[], RefitReport]) -> Work[RefitReport]:
        """Make a refit after those that were asked for before, and return at once."""
        if self._beside is None:
            self._beside = ThreadPoolExecutor(1, thread_name_prefix="reshard-session")
        self._last = self._beside.submit(self._alone, refit)
        return Work(self._last)

    def check_outside(self, call: str, way_out: str) -> None:
        """Refuse a call that a hook makes, which would wait for the refit that waits for the hook.

        Raises:
            ConfigError: A hook makes it.
        """
        if self._thread == threading.get_ident():
            raise ConfigError(
                f"Session {self._session!r}: {call} was called in a hook, while the refit that calls the hook is under "
                f"way here. {way_out}"
            )

    def close(self) -> None:
        """Wait until none is under way, in whatever thread; each has its deadline."""
        if self._beside is not None:
            self._beside.shutdown(wait=True)
            self._beside = None
        with self._busy:
            pass

    def _alone(self, refit: Callable[[], RefitReport]) -> RefitReport:
        if not self._busy.acquire(blocking=False):
            raise ConfigError(
                f"Session {self._session!r}: refit was called while another call of it is under way here, in another "
                f"thread. Calls come one after the other, in the same order on all ranks: make them from one thread, "
                f"or with async_op=True."
            )
        self._thread = threading.get_ident()
        try:
            return refit()
        finally:
            self._thread = None
            self._busy.release()


__all__ = ["Calls"]
