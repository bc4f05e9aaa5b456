"""Rounds: an edge colouring of the buckets that go from rank to rank.

In a round every rank sends at most one bucket over the network and receives at most one, so both ends of a pair always
agree on what comes next, and a rank never has more than its share open. Ranks with most left to do are matched in every
round (Koenig: a bipartite multigraph needs exactly as many colours as its busiest rank has edges), so the number of
rounds is the least possible as long as nothing has to be received before it is sent.

Where buckets are forwarded, a round offers only what has arrived before (``flow_rounds``). A round then has steps:
first the matching over the network, then a few matchings inside the domains, as many as the fast link is faster. A
bucket is handed on inside its domain while the network brings the next one.

Rounds order operations; they are not barriers.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

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
                _place(sender, self.left, self._in, to, by, lambda other: self._out[other] < most)
        for receiver in sorted(self._back):
            if self._in[receiver] == most and receiver not in by:
                _place(receiver, self._back, self._out, by, to, lambda other: self._in[other] < most)
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
            _lower(self._out, sender, repeat)
            _lower(self._in, receiver, repeat)


def _place(
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


def _lower(degree: dict[int, int], node: int, by: int) -> None:
    degree[node] -= by
    if not degree[node]:
        del degree[node]


@dataclass(frozen=True, slots=True)
class Flow:
    """``count`` buckets that take the same edges, in an order in which they can move; ``inside``: which are local."""

    edges: tuple[Pair, ...]
    inside: tuple[bool, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Hop:
    """Bucket ``bucket`` of flow ``flow`` goes over the flow's edge ``edge``; step 0 of a round is the network's."""

    round: int
    step: int
    flow: int
    bucket: int
    edge: int


def flow_rounds(flows: Sequence[Flow], local_steps: int) -> list[Hop]:
    """Put every bucket's every edge into a step of a round, after the one that brings it to the edge's sender.

    Args:
        flows: What takes which edges.
        local_steps: How many buckets a rank can hand on inside its domain while the network brings it one.

    Returns:
        Hops in order; in each step a rank sends at most one bucket and receives at most one.
    """
    wanted = _Flows(flows)
    hops: list[Hop] = []
    number = 0
    while wanted.left:
        hops.extend(wanted.match(number, 0, inside=False))
        for step in range(1, local_steps + 1):
            hops.extend(wanted.match(number, step, inside=True))
        number += 1
    return hops


class _Flows:
    """What is left to place, and what is ready: an edge of a bucket is ready once its sender has the bucket."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._flows = flows
        self.left = sum(flow.count * len(flow.edges) for flow in flows)
        self._after = [_followers(flow.edges) for flow in flows]
        self._links = {False: _Ready(), True: _Ready()}
        for flow in flows:
            for pair, inside in zip(flow.edges, flow.inside, strict=True):
                self._links[inside].expect(pair, flow.count)
        # what is relayed goes first; otherwise the buckets of all flows side by side, as the model's tensors come
        first = [
            (not _relays(flow), (bucket + 1) / flow.count, at, bucket, edge)
            for at, flow in enumerate(flows)
            for bucket in range(flow.count)
            for edge in self._after[at][-1]
        ]
        self._arrive(hop[2:] for hop in sorted(first))

    def _arrive(self, hops: Iterable[tuple[int, int, int]]) -> None:
        for flow, bucket, edge in hops:
            self._links[self._flows[flow].inside[edge]].add(self._flows[flow].edges[edge], (flow, bucket, edge))

    def match(self, number: int, step: int, *, inside: bool) -> list[Hop]:
        """One step: a matching of what is ready, ranks with most left to do first."""
        placed = [Hop(number, step, *hop) for hop in self._links[inside].take_matching()]
        self.left -= len(placed)
        for hop in placed:  # what this step brings is ready for the next one
            self._arrive((hop.flow, hop.bucket, edge) for edge in self._after[hop.flow][hop.edge])
        return placed


class _Ready:
    """The buckets that are ready on one kind of link, by pair, and how much each rank has left to do there in all."""

    def __init__(self) -> None:
        self._queues: dict[Pair, deque[tuple[int, int, int]]] = {}
        self._to: dict[int, set[int]] = {}
        self._from: dict[int, set[int]] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}

    def expect(self, pair: Pair, count: int) -> None:
        """Count buckets that will be ready on a pair some time."""
        self._out[pair[0]] = self._out.get(pair[0], 0) + count
        self._in[pair[1]] = self._in.get(pair[1], 0) + count

    def add(self, pair: Pair, hop: tuple[int, int, int]) -> None:
        """Make a bucket ready on a pair."""
        self._queues.setdefault(pair, deque()).append(hop)
        self._to.setdefault(pair[0], set()).add(pair[1])
        self._from.setdefault(pair[1], set()).add(pair[0])

    def take_matching(self) -> list[tuple[int, int, int]]:
        """Match ranks with most left to do, then others, and take a bucket from each pair."""
        if not self._queues:
            return []
        mate: dict[int, int] = {}
        back: dict[int, int] = {}
        most = max(max(self._out.values()), max(self._in.values()))
        for sender in sorted(self._to, key=lambda s: (-self._out[s], s)):
            free = [receiver for receiver in self._to[sender] if receiver not in back]
            if free:
                receiver = max(free, key=lambda r: (self._in[r], -r))
                mate[sender], back[receiver] = receiver, sender
        for sender in sorted(s for s in self._to if s not in mate and self._out[s] == most):
            _place(sender, self._to, self._in, mate, back, lambda other: self._out[other] < most)
        for receiver in sorted(r for r in self._from if r not in back and self._in[r] == most):
            _place(receiver, self._from, self._out, back, mate, lambda other: self._in[other] < most)
        return [self._take(pair) for pair in sorted(mate.items())]

    def _take(self, pair: Pair) -> tuple[int, int, int]:
        sender, receiver = pair
        queue = self._queues[pair]
        hop = queue.popleft()
        if not queue:
            del self._queues[pair]
            self._to[sender].discard(receiver)
            self._from[receiver].discard(sender)
            for index, rank in ((self._to, sender), (self._from, receiver)):
                if not index[rank]:
                    del index[rank]
        _lower(self._out, sender, 1)
        _lower(self._in, receiver, 1)
        return hop


def _relays(flow: Flow) -> bool:
    """Whether any rank that takes buckets in over the network sends them on over the network."""
    taken = {receiver for (_, receiver), inside in zip(flow.edges, flow.inside, strict=True) if not inside}
    return any(sender in taken for (sender, _), inside in zip(flow.edges, flow.inside, strict=True) if not inside)


def _followers(edges: Sequence[Pair]) -> list[list[int]]:
    """For each edge the edges that start where it ends; last, those that start at a rank that has the bucket anyway."""
    brings = {receiver: at for at, (_, receiver) in enumerate(edges)}
    after: list[list[int]] = [[] for _ in range(len(edges) + 1)]
    for at, (sender, _) in enumerate(edges):
        after[brings.get(sender, -1)].append(at)
    return after


def busiest(counts: Mapping[Pair, int]) -> int:
    """The most buckets that one rank sends or receives: no schedule has fewer rounds."""
    load: dict[tuple[str, int], int] = {}
    for (sender, receiver), count in counts.items():
        load["out", sender] = load.get(("out", sender), 0) + count
        load["in", receiver] = load.get(("in", receiver), 0) + count
    return max(load.values(), default=0)
