"""Processor: cores that all ranks of one machine share, on a simulated clock; who works at once gets an equal part."""

from __future__ import annotations

import heapq
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Clock:
    """What is due, in order of time; equal times keep the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, then: Callable[[], None]) -> None:
        """Call ``then`` at a time, which is not before now."""
        self._count += 1
        heapq.heappush(self._due, (time, self._count, then))

    def run(self) -> None:
        """Go on until nothing is due."""
        while self._due:
            self.now, _, then = heapq.heappop(self._due)
            then()


class Processor:
    """Cores under work that is shared out evenly: of n pieces of work at once each goes on at ``min(1, cores / n)``.

    Args:
        clock: Whose time it is.
        cores: How many; infinite where every rank has its own.
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self._clock, self._cores = clock, cores
        self._done = 0.0  # seconds of work that each piece under way since the beginning would have got
        self._since = 0.0
        self._under_way: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._asked = 0
        self.busy_seconds = 0.0
        """Work that was begun so far, all cores together."""

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Begin some work now; ``then`` is called when it is done."""
        self.busy_seconds += seconds
        if self._cores == float("inf"):
            self._clock.at(self._clock.now + seconds, then)
            return
        self._advance()
        self._count += 1
        heapq.heappush(self._under_way, (self._done + seconds, self._count, then))
        self._ask()

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._under_way))

    def _advance(self) -> None:
        now = self._clock.now
        if self._under_way:
            self._done += (now - self._since) * self._rate()
        self._since = now

    def _ask(self) -> None:
        """Be called when the next piece is done, if no other begins before that."""
        self._asked += 1
        if self._under_way:
            left = max(0.0, self._under_way[0][0] - self._done)
            self._clock.at(self._clock.now + left / self._rate(), partial(self._next, self._asked))

    def _next(self, asked: int) -> None:
        if asked != self._asked:
            return  # something has begun or ended since then
        self._advance()
        until, _, then = heapq.heappop(self._under_way)
        self._done = until
        self._ask()
        then()


class Thread:
    """Does one piece of work after the other on a processor."""

    def __init__(self, processor: Processor) -> None:
        self._processor = processor
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False

    def work(self, seconds: float, then: Callable[[], None]) -> None:
        """Do this after all that was asked for before."""
        self._waiting.append((seconds, then))
        if not self._is_busy:
            self._go_on()

    def _go_on(self) -> None:
        self._is_busy = True
        seconds, then = self._waiting.popleft()
        self._processor.work(seconds, partial(self._end, then))

    def _end(self, then: Callable[[], None]) -> None:
        self._is_busy = False
        if self._waiting:
            self._go_on()
        then()
