"""Waiting: one wait for a key of a store, which an interrupt of the process ends at once.

torch's stores wait in C++ and hear no interrupt meanwhile. A wait in short pieces would hear it, but torch writes two
lines to stderr whenever a piece ends. So the main thread, the only one that interrupts come to, lets another one wait,
over a connection of its own::

    main thread                             waiter: a thread and a clone of the store, kept as long as the store
    wait_for_key ----- key, seconds ----->  store.wait
                 <---- None or its error -
    after an interrupt this waiter is left to its wait, and the next wait makes another one
"""

from __future__ import annotations

import os
import re
import socket
import threading
import weakref
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from reshard.transports.base import Deadline

_END_SECONDS = 0.2
"""For a waiter to end: by itself, where what it waits for is there by now, and once its connection is shut down."""


def wait_for_key(store: dist.Store, key: str, deadline: Deadline) -> bool:
    """Wait until a key is in a store.

    Returns:
        Whether it is there; False at the deadline.

    Raises:
        RuntimeError: The store is lost.
    """
    waiter = _waiter_of(store)
    seconds = max(0.001, deadline.remaining())
    try:
        if waiter is None:
            store.wait([key], timedelta(seconds=seconds))
        else:
            waiter.wait(key, seconds)
    except RuntimeError:
        # Not there, or the store is lost; in the second case the next question fails too.
        return store.check([key])
    except BaseException:  # an interrupt
        _waiters.pop(store, None)
        if waiter is not None:
            waiter.leave()
        raise
    return True


class _Waiter:
    """A thread that waits in the place of another one.

    Args:
        store: What it waits at, and nobody else uses.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store: dist.Store | None = store
        self._asked: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
        self._answered: SimpleQueue[RuntimeError | None] = SimpleQueue()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._serve, args=(store,), name="reshard-waiter", daemon=True)
        self._thread.start()

    def wait(self, key: str, seconds: float) -> None:
        """Wait as a store does.

        Raises:
            RuntimeError: As a store does.
        """
        self._asked.put((key, seconds))
        error = self._answered.get()
        if error is not None:
            raise error

    def _serve(self, store: dist.Store) -> None:
        while (asked := self._asked.get()) is not None:
            key, seconds = asked
            try:
                store.wait([key], timedelta(seconds=seconds))
            except RuntimeError as error:
                self._answered.put(error)
            else:
                self._answered.put(None)
        self._store = None

    def leave(self) -> None:
        """Let the thread end after the wait that it is in."""
        self._asked.put(None)

    def end(self) -> None:
        """Let it end now: come back from a wait while the interpreter ends, it would take the process down."""
        if self._pid != os.getpid():
            return  # a fork, which has the connection and not the thread
        self.leave()
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_END_SECONDS)
        if (store := self._store) is not None:
            _shut_down(store)
            self._thread.join(_END_SECONDS)


_waiters: weakref.WeakKeyDictionary[dist.Store, _Waiter] = weakref.WeakKeyDictionary()
os.register_at_fork(after_in_child=_waiters.clear)


def _waiter_of(store: dist.Store) -> _Waiter | None:
    """Who waits at a store for this thread; None where that makes no difference, or this torch does not allow it."""
    if threading.current_thread() is not threading.main_thread():
        return None
    waiter = _waiters.get(store)
    if waiter is None and hasattr(store, "clone") and _descriptor_of(store) is not None:
        waiter = _waiters[store] = _Waiter(store.clone())
        weakref.finalize(store, waiter.end)
    return waiter


def _descriptor_of(store: dist.Store) -> int | None:
    """The socket over which a store speaks to its host; None for other kinds of store, or where torch does not say."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    found = re.search(r"fd=(\d+)", repr(store)) if isinstance(store, dist.TCPStore) else None
    return None if found is None else int(found[1])


def _shut_down(store: dist.Store) -> None:
    """End the wait that a store is in."""
    descriptor = _descriptor_of(store)
    assert descriptor is not None
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.shutdown(socket.SHUT_RDWR)


__all__ = ["wait_for_key"]
