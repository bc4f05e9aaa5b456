"""Hops: the rounds of a plan over several domains, in which what has arrived is handed on.

A round lasts as long as the fastest port needs for one bucket. In a round every port sends and receives at most one
bucket, a slower one so much less often, however many ranks share it; so rounds count seconds on the network. Then come
a few steps inside the domains, as many as the fast link is faster: there every rank sends and receives one bucket a
step. A bucket is handed on inside its domain while the network brings the next one.

Ports with most seconds left are matched first. A round offers only what has arrived; what goes on over the network is
offered some rounds later (``LAG``), so that a port has something to send while a late bucket is still on its way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.schedule.rounds import Pair, lower, place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.topology.topology import Topology

LAG = 8
"""Rounds from a bucket's arrival to the round in which it is sent on over the network. It may be sent before."""

_TICKS = 1 << 10
"""In a round: costs are integers, so that every rank finds the same order."""


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


@dataclass(frozen=True)
class Ports:
    """Which port each rank sends from and receives at, and how many ticks each needs for a bucket."""

    of_rank: Mapping[int, int]
    out_ticks: tuple[int, ...]
    in_ticks: tuple[int, ...]

    @classmethod
    def of(cls, topology: Topology) -> Ports:
        """The ports of a topology, measured by the fastest."""
        ports = topology.ports
        fastest = max(max(port.out_bytes_per_second, port.in_bytes_per_second) for port in ports)
        return cls(
            {rank: at for at, port in enumerate(ports) for rank in port.ranks},
            tuple(-(-fastest * _TICKS // port.out_bytes_per_second) for port in ports),
            tuple(-(-fastest * _TICKS // port.in_bytes_per_second) for port in ports),
        )

    def least_rounds(self, counts: Mapping[Pair, int]) -> int:
        """The rounds in which the busiest port can do its share of ``counts`` buckets between ranks."""
        ticks: dict[tuple[str, int], int] = {}
        for (sender, receiver), count in counts.items():
            out, into = self.of_rank[sender], self.of_rank[receiver]
            ticks["out", out] = ticks.get(("out", out), 0) + count * self.out_ticks[out]
            ticks["in", into] = ticks.get(("in", into), 0) + count * self.in_ticks[into]
        return -(-max(ticks.values(), default=0) // _TICKS)


def flow_rounds(flows: Sequence[Flow], ports: Ports, local_steps: int) -> list[Hop]:
    """Put every bucket's every edge into a step of a round, after the one that brings it to the edge's sender.

    Args:
        flows: What takes which edges.
        ports: Where ranks attach to the network.
        local_steps: How many buckets a rank can hand on inside its domain while the network brings it one.

    Returns:
        Hops in order; in each step a rank sends at most one bucket and receives at most one.
    """
    wanted = _Flows(flows, ports)
    hops: list[Hop] = []
    number = 0
    while wanted.left:
        wanted.begin(number)
        hops.extend(wanted.match_network(number))
        for step in range(1, local_steps + 1):
            hops.extend(wanted.match_inside(number, step))
        number += 1
    return hops


class _Flows:
    """What is left to place, and what is ready: an edge of a bucket is ready once its sender has the bucket."""

    def __init__(self, flows: Sequence[Flow], ports: Ports) -> None:
        self._flows = flows
        self._ports = ports
        self.left = sum(flow.count * len(flow.edges) for flow in flows)
        self._after = [_followers(flow.edges) for flow in flows]
        self._network = _Ready(ports.of_rank.__getitem__, ports.out_ticks, ports.in_ticks)
        self._inside = _Ready(int, None, None)
        self._due: dict[int, list[tuple[int, int, int]]] = {}
        for flow in flows:
            for pair, inside in zip(flow.edges, flow.inside, strict=True):
                (self._inside if inside else self._network).expect(pair, flow.count)
        # what is relayed goes first; otherwise the buckets of all flows side by side, as the model's tensors come
        first = [
            (not _relays(flow), (bucket + 1) / flow.count, at, bucket, edge)
            for at, flow in enumerate(flows)
            for bucket in range(flow.count)
            for edge in self._after[at][-1]
        ]
        for hop in sorted(first):
            self._offer(hop[2:])

    def _offer(self, hop: tuple[int, int, int]) -> None:
        flow, _, edge = hop
        ready = self._inside if self._flows[flow].inside[edge] else self._network
        ready.add(self._flows[flow].edges[edge], hop)

    def begin(self, number: int) -> None:
        """Offer what is due in a round."""
        for hop in self._due.pop(number, ()):
            self._offer(hop)

    def match_network(self, number: int) -> list[Hop]:
        """The matching of a round over the network: free ports with most left to do first."""
        placed = self._network.take_matching(number * _TICKS)
        self.left -= len(placed)
        for flow, bucket, edge in placed:
            sender, receiver = self._flows[flow].edges[edge]
            out, into = self._ports.of_rank[sender], self._ports.of_rank[receiver]
            later = -(-max(self._ports.out_ticks[out], self._ports.in_ticks[into]) // _TICKS) - 1
            for follower in self._after[flow][edge]:
                self._expect((flow, bucket, follower), number, later)
        return [Hop(number, 0, *hop) for hop in placed]

    def match_inside(self, number: int, step: int) -> list[Hop]:
        """One step inside all domains; what it brings is ready for the next one."""
        placed = self._inside.take_matching()
        self.left -= len(placed)
        for flow, bucket, edge in placed:
            for follower in self._after[flow][edge]:
                self._expect((flow, bucket, follower), number)
        return [Hop(number, step, *hop) for hop in placed]

    def _expect(self, hop: tuple[int, int, int], number: int, later: int = 0) -> None:
        """Offer what a step of round ``number`` brings to its sender, ``later`` rounds after that."""
        flow, _, edge = hop
        if not self._flows[flow].inside[edge]:
            later += LAG
        if later:
            self._due.setdefault(number + later, []).append(hop)
        else:
            self._offer(hop)


class _Ready:
    """The buckets that are ready on one kind of link, and how much each end has left to do there in all.

    Args:
        end_of: What stands for a rank there: its port, or the rank itself.
        out_ticks: What a bucket costs each sending end; None where all cost the same and a step takes one.
        in_ticks: What it costs a receiving end.
    """

    def __init__(
        self, end_of: Callable[[int], int], out_ticks: Sequence[int] | None, in_ticks: Sequence[int] | None
    ) -> None:
        self._end_of = end_of
        self._ticks = (out_ticks, in_ticks)
        self._queues: dict[Pair, deque[tuple[int, int, int]]] = {}
        self._to: dict[int, set[int]] = {}
        self._from: dict[int, set[int]] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        self._out_busy: dict[int, int] = {}
        self._in_busy: dict[int, int] = {}

    def _ends(self, pair: Pair) -> Pair:
        return self._end_of(pair[0]), self._end_of(pair[1])

    def _cost(self, ends: Pair) -> Pair:
        out_ticks, in_ticks = self._ticks
        return (1 if out_ticks is None else out_ticks[ends[0]]), (1 if in_ticks is None else in_ticks[ends[1]])

    def expect(self, pair: Pair, count: int) -> None:
        """Count buckets that will be ready on a pair some time."""
        ends = self._ends(pair)
        out, into = self._cost(ends)
        self._out[ends[0]] = self._out.get(ends[0], 0) + count * out
        self._in[ends[1]] = self._in.get(ends[1], 0) + count * into

    def add(self, pair: Pair, hop: tuple[int, int, int]) -> None:
        """Make a bucket ready on a pair."""
        ends = self._ends(pair)
        self._queues.setdefault(ends, deque()).append(hop)
        self._to.setdefault(ends[0], set()).add(ends[1])
        self._from.setdefault(ends[1], set()).add(ends[0])

    def take_matching(self, now: int | None = None) -> list[tuple[int, int, int]]:
        """Match free ends with most left to do, then others, and take a bucket from each pair.

        Args:
            now: The tick at which ends must be free; None where all are.
        """
        if not self._queues:
            return []
        to, back_to = self._to, self._from
        if now is not None:
            busy_in = {end for end, until in self._in_busy.items() if until > now}
            busy_out = {end for end, until in self._out_busy.items() if until > now}
            if busy_in or busy_out:
                to = _without(to, busy_out, busy_in)
                back_to = _without(back_to, busy_in, busy_out)
        mate: dict[int, int] = {}
        back: dict[int, int] = {}
        most = max(max(self._out.values()), max(self._in.values()))
        for sender in sorted(to, key=lambda s: (-self._out[s], s)):
            free = [receiver for receiver in to[sender] if receiver not in back]
            if free:
                receiver = max(free, key=lambda r: (self._in[r], -r))
                mate[sender], back[receiver] = receiver, sender
        for sender in sorted(s for s in to if s not in mate and self._out[s] == most):
            place(sender, to, self._in, mate, back, lambda other: self._out[other] < most)
        for receiver in sorted(r for r in back_to if r not in back and self._in[r] == most):
            place(receiver, back_to, self._out, back, mate, lambda other: self._in[other] < most)
        return [self._take(ends, now) for ends in sorted(mate.items())]

    def _take(self, ends: Pair, now: int | None) -> tuple[int, int, int]:
        sender, receiver = ends
        queue = self._queues[ends]
        hop = queue.popleft()
        if not queue:
            del self._queues[ends]
            self._to[sender].discard(receiver)
            self._from[receiver].discard(sender)
            for index, end in ((self._to, sender), (self._from, receiver)):
                if not index[end]:
                    del index[end]
        out, into = self._cost(ends)
        if now is not None:
            # what an end waited less than a round for is made up, so that costs between whole rounds come out right
            self._out_busy[sender] = max(self._out_busy.get(sender, 0), now - _TICKS + 1) + out
            self._in_busy[receiver] = max(self._in_busy.get(receiver, 0), now - _TICKS + 1) + into
        lower(self._out, sender, out)
        lower(self._in, receiver, into)
        return hop


def _without(index: Mapping[int, set[int]], ends: set[int], others: set[int]) -> dict[int, set[int]]:
    """An index less some ends on either side."""
    left = {end: found - others for end, found in index.items() if end not in ends}
    return {end: found for end, found in left.items() if found}


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
