"""Hops: the rounds of a plan over several domains, in which what has arrived is handed on.

A round lasts as long as the fastest port needs for one bucket. In a round every port sends and receives at most one
bucket, a slower one so much less often, however many ranks share it; so rounds count seconds on the network. Then come
a few steps inside the domains, as many as the fast link is faster: there every rank sends and receives one bucket a
step. A bucket is handed on inside its domain while the network brings the next one.

What will be relayed is sent first, then by ports with most seconds left: a relay that gets its buckets late would end
after all others. A round offers only what has arrived; what goes on over the network is offered some rounds later
(``LAG``), so that a port has something to send while a late bucket is still on its way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.schedule.rounds import Pair, lower, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reshard.topology.topology import Topology

LAG = 8
"""Rounds from a bucket's arrival to the round in which it is sent on over the network. It may be sent before."""

_TICKS = 1 << 10
"""In a round, or a step inside: costs are integers, so that every rank finds the same order."""


@dataclass(frozen=True, slots=True)
class Flow:
    """``count`` buckets that take the same edges, in an order in which they can move; ``inside``: which are local."""

    edges: tuple[Pair, ...]
    inside: tuple[bool, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Hop:
    """Bucket ``bucket`` of flow ``flow`` goes over the flow's edge ``edge``; step 0 of a round is the network's.

    The ``count - 1`` buckets after it follow over the same edge: one a round over the network, one a step inside.
    """

    round: int
    step: int
    flow: int
    bucket: int
    edge: int
    count: int = 1

    def when(self, at: int, local_steps: int) -> tuple[int, int]:
        """Round and step in which the bucket moves that comes ``at`` buckets after the first one."""
        if self.step == 0:
            return self.round + at, 0
        steps = self.round * local_steps + self.step - 1 + at
        return steps // local_steps, steps % local_steps + 1


@dataclass(frozen=True)
class Ports:
    """Which port each rank sends from and receives at, and how many ticks each needs for a bucket."""

    of_rank: Mapping[int, int]
    out_ticks: tuple[int, ...]
    in_ticks: tuple[int, ...]
    sends_for: Callable[[int, int], int] | None = None
    """By sender and receiver the rank whose port sends; None where it is always the sender's own."""

    @classmethod
    def of(cls, topology: Topology) -> Ports:
        """The ports of a topology, measured by the fastest."""
        ports = topology.ports
        fastest = max(max(port.out_bytes_per_second, port.in_bytes_per_second) for port in ports)
        return cls(
            {rank: at for at, port in enumerate(ports) for rank in port.ranks},
            tuple(-(-fastest * _TICKS // port.out_bytes_per_second) for port in ports),
            tuple(-(-fastest * _TICKS // port.in_bytes_per_second) for port in ports),
            topology.sends_for if topology.cross_rail == "local" else None,
        )

    def ends_of(self, pair: Pair) -> Pair:
        """The ports that a bucket between two ranks leaves and comes in by."""
        sender = pair[0] if self.sends_for is None else self.sends_for(*pair)
        return self.of_rank[sender], self.of_rank[pair[1]]

    def least_rounds(self, counts: Mapping[Pair, int]) -> int:
        """The rounds in which the busiest port can do its share of ``counts`` buckets between ranks."""
        ticks: dict[tuple[str, int], int] = {}
        for pair, count in counts.items():
            out, into = self.ends_of(pair)
            ticks["out", out] = ticks.get(("out", out), 0) + count * self.out_ticks[out]
            ticks["in", into] = ticks.get(("in", into), 0) + count * self.in_ticks[into]
        return -(-max(ticks.values(), default=0) // _TICKS)


def flow_rounds(flows: Sequence[Flow], ports: Ports, local_steps: int, run: int = 1) -> list[Hop]:
    """Put every bucket's every edge into a step of a round, after the one that brings it to the edge's sender.

    Args:
        flows: What takes which edges.
        ports: Where ranks attach to the network.
        local_steps: How many buckets a rank can hand on inside its domain while the network brings it one.
        run: How many buckets in a row are placed as one, over as many rounds: a larger plan takes no longer then.

    Returns:
        Hops in the order in which they were placed; in each round a port sends at most one bucket and receives at most
        one, and so does a rank in each step inside.
    """
    wanted = _Flows(flows, ports, local_steps, run)
    hops: list[Hop] = []
    number = 0
    while wanted.left:
        hops.extend(wanted.place_window(number))
        number += 1
    return hops


Run = tuple[int, int, int]
"""Flow, first bucket, edge."""


class _Flows:
    """What is left to place, and what is ready: an edge of a run is ready once its sender has the run.

    Rounds are taken ``run`` at a time: a window. Time on the network counts rounds, time inside domains counts steps.
    """

    def __init__(self, flows: Sequence[Flow], ports: Ports, local_steps: int, run: int) -> None:
        self._flows = flows
        self._run = run
        self._local_steps = local_steps
        self.left = sum(-(-flow.count // run) * len(flow.edges) for flow in flows)
        self._after = [_followers(flow.edges) for flow in flows]
        self._network = _Ready(ports.ends_of, ports.out_ticks, ports.in_ticks)
        self._inside = _Ready(lambda pair: pair, None, None)
        self._due: dict[int, list[tuple[Run, int]]] = {}
        for flow in flows:
            for pair, inside in zip(flow.edges, flow.inside, strict=True):
                (self._inside if inside else self._network).expect(pair, flow.count)
        # what is relayed goes first; otherwise the buckets of all flows side by side, as the model's tensors come
        first = [
            (not _relays(flow), (bucket + run) / flow.count, at, bucket, edge)
            for at, flow in enumerate(flows)
            for bucket in range(0, flow.count, run)
            for edge in self._after[at][-1]
        ]
        for _, _, *hop in sorted(first):
            self._offer((hop[0], hop[1], hop[2]), 0)

    def _count(self, hop: Run) -> int:
        """How many buckets a run has."""
        return min(self._run, self._flows[hop[0]].count - hop[1])

    def _offer(self, hop: Run, ready: int) -> None:
        flow, _, edge = hop
        inside = self._flows[flow].inside
        relayed = not all(inside[follower] for follower in self._after[flow][edge])
        links = self._inside if inside[edge] else self._network
        links.add(self._flows[flow].edges[edge], hop, self._count(hop), ready, relayed=relayed)

    def place_window(self, number: int) -> list[Hop]:
        """Place what begins in a window: over the network, then inside the domains."""
        first, steps, hops = number * self._run, self._local_steps, []
        for run, ready in self._due.pop(number, ()):
            self._offer(run, ready)
        while placed := self._network.take_matching(first, first + self._run):
            for run, begins, last in placed:
                hops.append(Hop(begins, 0, *run, self._count(run)))
                self._hand_on(run, number, last * steps, last + LAG)
        while placed := self._inside.take_matching(first * steps, (first + self._run) * steps):
            for run, begins, last in placed:
                hops.append(Hop(begins // steps, begins % steps + 1, *run, self._count(run)))
                self._hand_on(run, number, last + 1, last // steps + LAG)
        self.left -= len(hops)
        return hops

    def _hand_on(self, run: Run, number: int, step: int, round_: int) -> None:
        """Offer what a run's receiver hands on: inside from a step on, over the network from a round on."""
        flow, bucket, edge = run
        for follower in self._after[flow][edge]:
            inside = self._flows[flow].inside[follower]
            ready = step if inside else round_
            window = ready // (self._run * self._local_steps) if inside else ready // self._run
            if window > number:
                self._due.setdefault(window, []).append(((flow, bucket, follower), ready))
            else:
                self._offer((flow, bucket, follower), ready)


class _Ready:
    """The buckets that are ready on one kind of link, and how much each end has left to do there in all.

    Args:
        ends_of: What stands for two ranks there: the ports between them, or the ranks themselves.
        out_ticks: What a bucket costs each sending end; None where it costs one unit of time everywhere.
        in_ticks: What it costs a receiving end.
    """

    def __init__(
        self, ends_of: Callable[[Pair], Pair], out_ticks: Sequence[int] | None, in_ticks: Sequence[int] | None
    ) -> None:
        self._ends_of = ends_of
        self._ticks = (out_ticks, in_ticks)
        self._queues: dict[Pair, deque[tuple[Run, int, int, bool]]] = {}
        self._relayed: dict[int, set[int]] = {}
        """By sending end: the ends for which what it sends next will be relayed."""
        self._waiting: dict[int, int] = {}
        """By sending end: the buckets that are ready there."""
        self._to: dict[int, set[int]] = {}
        self._from: dict[int, set[int]] = {}
        self._out: dict[int, int] = {}
        self._in: dict[int, int] = {}
        self._out_busy: dict[int, int] = {}
        self._in_busy: dict[int, int] = {}

    def _cost(self, ends: Pair, count: int) -> Pair:
        out_ticks, in_ticks = self._ticks
        return (
            count * (_TICKS if out_ticks is None else out_ticks[ends[0]]),
            count * (_TICKS if in_ticks is None else in_ticks[ends[1]]),
        )

    def expect(self, pair: Pair, count: int) -> None:
        """Count buckets that will be ready on a pair some time."""
        ends = self._ends_of(pair)
        out, into = self._cost(ends, count)
        self._out[ends[0]] = self._out.get(ends[0], 0) + out
        self._in[ends[1]] = self._in.get(ends[1], 0) + into

    def add(self, pair: Pair, hop: Run, count: int, ready: int, *, relayed: bool) -> None:
        """Make a run of ``count`` buckets ready on a pair from a time on."""
        ends = self._ends_of(pair)
        queue = self._queues.setdefault(ends, deque())
        queue.append((hop, count, ready, relayed))
        self._waiting[ends[0]] = self._waiting.get(ends[0], 0) + count
        if relayed and len(queue) == 1:
            self._mark(ends, relayed)
        self._to.setdefault(ends[0], set()).add(ends[1])
        self._from.setdefault(ends[1], set()).add(ends[0])

    def take_matching(self, now: int, end: int) -> list[tuple[Run, int, int]]:
        """Match free ends with most left to do, then others, and take a run from each pair.

        Args:
            now: The time from which on runs may begin.
            end: The time before which an end must be free.

        Returns:
            For each run, when it begins, and when its last bucket does.
        """
        if not self._queues:
            return []
        busy_in = {port for port, until in self._in_busy.items() if until > (end - 1) * _TICKS}
        busy_out = {port for port, until in self._out_busy.items() if until > (end - 1) * _TICKS}
        to, back_to = self._to, self._from
        if busy_in or busy_out:
            to = _without(to, busy_out, busy_in)
            back_to = _without(back_to, busy_in, busy_out)
        mate: dict[int, int] = {}
        back: dict[int, int] = {}
        most = max(max(self._out.values()), max(self._in.values()))
        free_from = {receiver: max(now * _TICKS, self._in_busy.get(receiver, 0)) for receiver in back_to}
        for sender in sorted(to, key=lambda s: (s not in self._relayed, -self._out[s], s)):
            out = max(now * _TICKS, self._out_busy.get(sender, 0))
            found = self._best_receiver(sender, to[sender], back, out, free_from)
            if found is not None:
                mate[sender], back[found] = found, sender
        for sender in sorted(s for s in to if s not in mate and self._out[s] == most):
            place(sender, to, self._in, mate, back, lambda other: self._out[other] < most)
        for receiver in sorted(r for r in back_to if r not in back and self._in[r] == most):
            place(receiver, back_to, self._out, back, mate, lambda other: self._in[other] < most)
        return [self._take(ends, now) for ends in sorted(mate.items())]

    def _best_receiver(
        self, sender: int, receivers: Iterable[int], taken: Mapping[int, int], out: int, free_from: Mapping[int, int]
    ) -> int | None:
        """Whom a sender that is free from tick ``out`` on serves: who will relay, then whoever is ready when it is.

        Called millions of times for a large plan, so it is one loop.
        """
        best, best_key = None, (False, 0, 0, 0, 0)
        first, queues, load, waiting = self._relayed.get(sender, ()), self._queues, self._in, self._waiting
        for receiver in receivers:
            if receiver in taken:
                continue
            into = free_from[receiver]
            begins = queues[sender, receiver][0][2] * _TICKS
            if begins < into:
                begins = into
            if begins < out:
                begins = out
            # less than 0 by how long both would have to do nothing, together, until the run between them begins
            idle = (out + into - 2 * begins) // _TICKS
            relays = receiver in first
            # of those who will relay, the one who has least to go on with
            key = (relays, idle, -waiting.get(receiver, 0) if relays else 0, load[receiver], -receiver)
            if best is None or key > best_key:
                best, best_key = receiver, key
        return best

    def _take(self, ends: Pair, now: int) -> tuple[Run, int, int]:
        sender, receiver = ends
        queue = self._queues[ends]
        hop, count, ready, relayed = queue.popleft()
        self._waiting[sender] -= count
        if relayed != bool(queue and queue[0][3]):
            self._mark(ends, not relayed)
        if not queue:
            del self._queues[ends]
            self._to[sender].discard(receiver)
            self._from[receiver].discard(sender)
            for index, end in ((self._to, sender), (self._from, receiver)):
                if not index[end]:
                    del index[end]
        out, into = self._cost(ends, count)
        lower(self._out, sender, out)
        lower(self._in, receiver, into)
        out_busy, in_busy = self._out_busy.get(sender, 0), self._in_busy.get(receiver, 0)
        begins = max(now, ready, -(-max(out_busy, in_busy) // _TICKS))
        # what an end waited less than a round for is made up, so that costs between whole rounds come out right
        made_up = (begins - 1) * _TICKS + 1
        self._out_busy[sender] = max(out_busy, made_up) + out
        self._in_busy[receiver] = max(in_busy, made_up) + into
        return hop, begins, begins + -(-max(out, into) // _TICKS) - 1

    def _mark(self, ends: Pair, relayed: bool) -> None:
        """Note whether what an end sends next to another one will be relayed."""
        sender, receiver = ends
        if relayed:
            self._relayed.setdefault(sender, set()).add(receiver)
        else:
            self._relayed[sender].discard(receiver)
            if not self._relayed[sender]:
                del self._relayed[sender]


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
