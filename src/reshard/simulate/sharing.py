"""Sharing: streams that go over the same ends at once, as TCP connections do; each end's rate is shared out evenly.

A connection carries one message after the other. At any moment the rates of all are max-min fair: the end that has
least for each of its streams gives each as much, and what these leave over at other ends goes to the others there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.simulate.links import End
    from reshard.simulate.processor import Clock

Pair = tuple[int, int]
Span = tuple[float, float]

_LEFT_OVER = 1e-3
"""Of a byte: less is what rounding leaves."""


@dataclass(eq=False)
class _Stream:
    ends: Sequence[End]
    left_nbytes: float
    done: Callable[[Span], None]
    began: float = 0.0
    bytes_per_second: float = 0.0


class Sharing:
    """Connections between pairs of ranks on a simulated clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._under_way: dict[Pair, _Stream] = {}
        self._waiting: dict[Pair, deque[_Stream]] = {}
        self._since = 0.0
        self._asked = 0
        self._is_due = False

    def send(self, pair: Pair, ends: Sequence[End], nbytes: int, done: Callable[[Span], None]) -> None:
        """Put a message on a pair's connection; ``done`` is called when all of it is through, with its time."""
        stream = _Stream(ends, nbytes, done)
        if pair in self._under_way:
            self._waiting.setdefault(pair, deque()).append(stream)
        else:
            self._begin(pair, stream)

    def _begin(self, pair: Pair, stream: _Stream) -> None:
        self._advance()
        stream.began = self._clock.now
        self._under_way[pair] = stream
        if not self._is_due:  # once for all that begins now
            self._is_due = True
            self._clock.at(self._clock.now, self._share)

    def _advance(self) -> None:
        now = self._clock.now
        for stream in self._under_way.values():
            stream.left_nbytes -= stream.bytes_per_second * (now - self._since)
        self._since = now

    def _share(self) -> None:
        """Set all rates anew, and be called when the first message is through at these."""
        self._is_due = False
        self._advance()
        open_at: dict[End, dict[Pair, _Stream]] = {}
        for pair, stream in self._under_way.items():
            for end in stream.ends:
                open_at.setdefault(end, {})[pair] = stream
        rates = {end: end.bytes_per_second for end in open_at}
        while open_at:
            least = min(open_at, key=lambda end: rates[end] / len(open_at[end]))
            rate = rates[least] / len(open_at[least])
            for pair, stream in tuple(open_at[least].items()):
                stream.bytes_per_second = rate
                for end in stream.ends:
                    del open_at[end][pair]
                    rates[end] -= rate
            for end in [end for end, streams in open_at.items() if not streams]:
                del open_at[end]
        self._asked += 1
        if self._under_way:
            seconds = min(s.left_nbytes / s.bytes_per_second for s in self._under_way.values())
            self._clock.at(self._clock.now + max(0.0, seconds), partial(self._end, self._asked))

    def _end(self, asked: int) -> None:
        if asked != self._asked or self._is_due:
            return  # rates are others by now, or will be in a moment
        self._advance()
        least = min(stream.left_nbytes for stream in self._under_way.values())
        through = [p for p, s in self._under_way.items() if s.left_nbytes <= max(least, 0.0) + _LEFT_OVER]
        ended = [(pair, self._under_way.pop(pair)) for pair in through]
        for pair, _ in ended:
            if self._waiting.get(pair):
                self._begin(pair, self._waiting[pair].popleft())
        if self._under_way and not self._is_due:
            self._is_due = True
            self._clock.at(self._clock.now, self._share)
        for _, stream in ended:
            stream.done((stream.began, self._clock.now))
