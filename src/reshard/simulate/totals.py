"""Totals: the time of a refit from what its busiest port, leaf, fast link and rank have to do, without any order.

For plans of which it would take long to simulate every bucket. A schedule's rounds keep the busiest end busy, so a
refit takes about as long as that end, and once more the way of the last bucket: packing, each hop, unpacking.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.plan.cells import ranks_of
from reshard.simulate.links import local_rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.plan.plan import Plan
    from reshard.schedule.bucket import BucketSize
    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology

Loads = defaultdict[tuple[str, int], float]
"""Seconds by way and end."""


@dataclass(frozen=True, slots=True)
class Totals:
    """The busiest end of each kind, in seconds, and the way of the last bucket."""

    port_seconds: float
    link_seconds: float
    copy_seconds: float
    message_seconds: float
    fill_seconds: float
    spine_seconds: float = 0.0
    """Of the busiest way between a leaf and the spine; no more than of a port where the spine has full bisection."""

    busiest_leaf: str = ""
    """Which one, and which way; empty where nothing crosses a spine."""

    @property
    def busiest(self) -> str:
        """What takes longest."""
        by_name = {
            "ports": self.port_seconds,
            "spine": self.spine_seconds,
            "fast links": self.link_seconds,
            "copies and messages": self.copy_seconds + self.message_seconds,
        }
        return max(by_name, key=lambda name: by_name[name])

    @property
    def seconds(self) -> float:
        """A rank that copies or handles a message does nothing else; ports, links and leaves move by themselves."""
        busy = self.copy_seconds + self.message_seconds
        return max(self.port_seconds, self.spine_seconds, self.link_seconds, busy) + self.fill_seconds


def add_up(plan: Plan, size: BucketSize, topology: Topology, costs: Costs) -> Totals:
    """What ports, leaves, fast links and ranks have to do for a plan.

    Args:
        plan: Its routes are added up; no string is expanded.
        size: How large buckets are: how many messages there are.
        topology: What joins the ranks.
        costs: Of copies and messages.
    """
    copies: defaultdict[int, float] = defaultdict(float)
    hops: dict[tuple[int, int], _Hop] = {}
    fill = 0.0
    holders = {at: frozenset(ranks_of(cls.holders)) for at, cls in enumerate(plan.classes)}
    for edges, nbytes, packers in _streams(plan, holders):
        buckets = max(1, -(-nbytes // size.nbytes))
        bucket = min(nbytes, size.nbytes)
        copied, packed = nbytes / costs.copy_bytes_per_second, bucket / costs.copy_bytes_per_second
        arrives: dict[int, float] = {}
        for rank in packers:
            copies[rank] += copied
        for edge in edges:
            sender, receiver = edge
            if sender == receiver:
                copies[sender] += copied
                continue
            hop = hops.get(edge)
            if hop is None:
                hop = hops[edge] = _hop(sender, receiver, topology, costs)
            hop.nbytes += nbytes
            hop.buckets += buckets
            before = arrives.get(sender, packed)
            arrives[receiver] = before + hop.fixed_seconds + bucket / hop.bytes_per_second + packed
        if arrives:
            fill = max(fill, max(arrives.values()))
    messages: defaultdict[int, float] = defaultdict(float)
    loads: Loads = defaultdict(float)
    for (sender, receiver), hop in hops.items():
        for end, rate in hop.ends:
            loads[end] += hop.nbytes / rate
        for rank in (sender, receiver):
            messages[rank] += hop.buckets * costs.message_seconds
        copies[receiver] += hop.nbytes / costs.copy_bytes_per_second
    busy = {rank: copies.get(rank, 0.0) + messages.get(rank, 0.0) for rank in {*copies, *messages}}
    busiest = max(sorted(busy), key=lambda rank: busy[rank], default=-1)
    spine = {end: seconds for end, seconds in loads.items() if end[0] in _SPINE}
    leaf = max(sorted(spine), key=lambda end: spine[end], default=None)
    return Totals(
        _longest(loads, ("port out", "port in")),
        _longest(loads, ("link out", "link in")),
        copies.get(busiest, 0.0),
        messages.get(busiest, 0.0),
        fill,
        spine[leaf] if leaf else 0.0,
        f"{leaf[0]} {topology.leaves[leaf[1]].name}" if leaf else "",
    )


_SPINE = ("up from", "down to")


@dataclass
class _Hop:
    """What goes from one rank to another: the ends that it goes through, and how much, over all streams."""

    ends: tuple[tuple[tuple[str, int], float], ...]
    """(way, port, rank or leaf), bytes a second."""

    fixed_seconds: float
    bytes_per_second: float
    nbytes: int = 0
    buckets: int = 0


def _hop(sender: int, receiver: int, topology: Topology, costs: Costs) -> _Hop:
    def fast(way: str, rank: int) -> tuple[tuple[str, int], float]:
        return (way, rank), local_rate(rank, topology, costs)

    ends: list[tuple[tuple[str, int], float]]
    if topology.domain_of(sender) == topology.domain_of(receiver):
        latency, ends = costs.local_latency_seconds, [fast("link out", sender), fast("link in", receiver)]
    else:
        latency, sending = topology.latency_seconds or costs.latency_seconds, topology.sends_for(sender, receiver)
        out, into = topology.port_of(sending), topology.port_of(receiver)
        ends = [
            (("port out", out), topology.ports[out].out_bytes_per_second),
            (("port in", into), topology.ports[into].in_bytes_per_second),
        ]
        if leaves := topology.crosses(sending, receiver):
            ends.append((("up from", leaves[0]), topology.leaves[leaves[0]].up_bytes_per_second))
            ends.append((("down to", leaves[1]), topology.leaves[leaves[1]].down_bytes_per_second))
        if sending != sender:
            latency += costs.local_latency_seconds
            ends += [fast("link out", sender), fast("link in", sending)]
    return _Hop(tuple(ends), latency + 2 * costs.message_seconds, min(rate for _, rate in ends))


def _longest(loads: Loads, ways: Iterable[str]) -> float:
    return max((seconds for end, seconds in loads.items() if end[0] in ways), default=0.0)


def _streams(
    plan: Plan, holders: dict[int, frozenset[int]]
) -> list[tuple[tuple[tuple[int, int], ...], int, frozenset[int]]]:
    """Routes of equal edges together, as buckets are cut from them, with the ranks that pack: sources that send."""
    by_edges: dict[tuple[tuple[tuple[int, int], ...], frozenset[int]], int] = {}
    for route in plan.routes:
        senders = {sender for sender, receiver in route.edges if sender != receiver}
        key = route.edges, holders[route.route_class] & senders
        by_edges[key] = by_edges.get(key, 0) + route.nbytes
    return [(edges, nbytes, packers) for (edges, packers), nbytes in by_edges.items()]
