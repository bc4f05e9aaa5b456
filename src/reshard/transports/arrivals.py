"""Arrivals: which of many open messages is done first, where a library can only wait for one: a thread a pair waits."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Waits for things of many pairs at once; those of one pair are done in the order in which they are watched.

    The threads end with ``close``, each once its last wait has.
    """

    def __init__(self) -> None:
        self._to_watch: dict[Hashable, SimpleQueue[tuple[T, Callable[[], object]] | None]] = {}
        self._done: SimpleQueue[tuple[T, RuntimeError | None] | None] = SimpleQueue()

    def watch(self, pair: Hashable, item: T, wait: Callable[[], object]) -> None:
        """Call ``wait`` in the pair's thread; ``next`` returns ``item`` after that, with what was raised."""
        queue = self._to_watch.get(pair)
        if queue is None:
            queue = self._to_watch[pair] = SimpleQueue()
            # It holds the queues and not this object, whose end is also that of the threads.
            threading.Thread(
                target=_serve, args=(queue, self._done), name=f"reshard waits for {pair}", daemon=True
            ).start()
        queue.put((item, wait))

    def next(self, seconds: float) -> list[tuple[T, RuntimeError | None]]:
        """Whatever is done, with what its wait raised; waits up to so many seconds for the first, or for ``wake``."""
        found = []
        try:
            item = self._done.get(timeout=seconds)
            while True:
                if item is not None:
                    found.append(item)
                item = self._done.get_nowait()
        except Empty:
            return found

    def wake(self) -> None:
        """Let ``next`` return at once; may be called from another thread."""
        self._done.put(None)

    def close(self) -> None:
        """End the threads."""
        for queue in self._to_watch.values():
            queue.put(None)
        self._to_watch.clear()

    def __del__(self) -> None:
        self.close()


def _serve(
    queue: SimpleQueue[tuple[T, Callable[[], object]] | None], done: SimpleQueue[tuple[T, RuntimeError | None] | None]
) -> None:
    """Wait for one thing after another: the whole life of a pair's thread."""
    while (watched := queue.get()) is not None:
        item, wait = watched
        try:
            wait()
        except RuntimeError as error:
            done.put((item, error))
        else:
            done.put((item, None))
        del item, wait, watched  # what was waited for must not live until the next one comes
