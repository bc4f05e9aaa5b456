"""Rounds: an edge colouring of the buckets that go from rank to rank.

In a round every rank sends at most one bucket over the network and receives at most one, so both ends of a pair always
agree on what comes next, and a rank never has more than its share open. Ranks with most left to do are matched in every
round (Koenig: a bipartite multigraph needs exactly as many colours as its busiest rank has edges), so the number of
rounds is the least possible as long as nothing has to be received before it is sent.

Rounds order operations; they are not barriers. Where buckets are forwarded, or ports differ, see ``hops``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class RoundBlock:
    """``repeat`` rounds in a row, from number ``first`` on, in which the same pairs each move their next bucket."""

    first: int
    repeat: int
    pairs: tuple[Pair, ...]


def colour_rounds(counts: Mapping[Pair, int]) -> tuple[RoundBlock, ...]:
    """Put every bucket of every pair into a round.

    Args:
        counts: How many buckets go over each (sender, receiver).

    Returns:
        Blocks whose rounds add up to the most that any rank sends or receives.

    >>> blocks = colour_rounds({(0, 2): 2, (0, 3): 1, (1, 3): 1})
    >>> sum(block.repeat for block in blocks)
    3
    """
    graph = _Graph(counts)
    blocks: list[RoundBlock] = []
    first = 0
    while graph.left:
        matching = graph.match_busiest()
        repeat = graph.how_often(matching)
        blocks.append(RoundBlock(first, repeat, tuple(sorted(matching.items()))))
        graph.take(matching, repeat)
        first += repeat
    return tuple(blocks)


class _Graph:
    """What is left to place: senders and receivers with the buckets between them."""

    def __init__(self, counts: Mapping[Pair, int]) -> None:
        self.left: dict[int, dict[int, int]] = {}
        self._back: dict[int, set[int]] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        for (sender, receiver), count in sorted(counts.items()):
            if count:
                self.left.setdefault(sender, {})[receiver] = count
                self._back.setdefault(receiver, set()).add(sender)
                self._out[sender] = self._out.get(sender, 0) + count
                self._in[receiver] = self._in.get(receiver, 0) + count

    def match_busiest(self) -> dict[int, int]:
        """A matching (sender -> receiver) that holds every rank with the most left to do, and many others."""
        to: dict[int, int] = {}
        by: dict[int, int] = {}
        most = max(max(self._out.values()), max(self._in.values()))
        for sender in sorted(self.left, key=lambda s: (-self._out[s], s)):
            free = [r for r in self.left[sender] if r not in by]
            if free:
                receiver = max(free, key=lambda r: (self._in[r], self.left[sender][r], -r))
                to[sender], by[receiver] = receiver, sender
        for sender in sorted(self.left):
            if self._out[sender] == most and sender not in to:
                place(sender, self.left, self._in, to, by, lambda other: self._out[other] < most)
        for receiver in sorted(self._back):
            if self._in[receiver] == most and receiver not in by:
                place(receiver, self._back, self._out, by, to, lambda other: self._in[other] < most)
        return to

    def how_often(self, matching: Mapping[int, int]) -> int:
        """How many rounds in a row the matching stays as good: until a pair runs out, or one left out catches up."""
        most = max(max(self._out.values()), max(self._in.values()))
        served = set(matching.values())
        waiting = [n for s, n in self._out.items() if s not in matching]
        waiting += [n for r, n in self._in.items() if r not in served]
        runs_out = min(self.left[s][r] for s, r in matching.items())
        return max(1, min(runs_out, most - max(waiting, default=0)))

    def take(self, matching: Mapping[int, int], repeat: int) -> None:
        """Remove ``repeat`` buckets of every pair in the matching."""
        for sender, receiver in matching.items():
            self.left[sender][receiver] -= repeat
            if not self.left[sender][receiver]:
                del self.left[sender][receiver]
                self._back[receiver].discard(sender)
                if not self._back[receiver]:
                    del self._back[receiver]
            if not self.left[sender]:
                del self.left[sender]
            lower(self._out, sender, repeat)
            lower(self._in, receiver, repeat)


def place(
    start: int,
    neighbours: Mapping[int, Iterable[int]],
    load: Mapping[int, int],
    mate: dict[int, int],
    mate_back: dict[int, int],
    can_wait: Callable[[int], bool],
) -> None:
    """Match ``start`` along an alternating path: to a free neighbour, or to one whose mate can wait or finds another.

    All that were matched on the other side stay matched.
    """
    came_from: dict[int, int] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for other in sorted(neighbours[node], key=lambda n: (-load[n], n)):
            if other in came_from:
                continue
            came_from[other] = node
            holder = mate_back.get(other)
            if holder is not None and not can_wait(holder):
                queue.append(holder)
                continue
            if holder is not None:
                del mate[holder]
            while True:
                node = came_from[other]
                before = mate.get(node)
                mate[node], mate_back[other] = other, node
                if node == start:
                    return
                assert before is not None
                other = before


def lower(degree: dict[int, int], node: int, by: int) -> None:
    degree[node] -= by
    if not degree[node]:
        del degree[node]


def busiest(counts: Mapping[Pair, int]) -> int:
    """The most buckets that one rank sends or receives: no schedule has fewer rounds."""
    load: dict[tuple[str, int], int] = {}
    for (sender, receiver), count in counts.items():
        load["out", sender] = load.get(("out", sender), 0) + count
        load["in", receiver] = load.get(("in", receiver), 0) + count
    return max(load.values(), default=0)
