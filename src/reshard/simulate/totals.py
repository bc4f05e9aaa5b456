"""Totals: the time of a refit from what its busiest port, fast link and rank have to do, without any order.

For plans of which it would take long to simulate every bucket. A schedule's rounds keep the busiest end busy, so a
refit takes about as long as that end, and once more the way of the last bucket: packing, each hop, unpacking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from reshard.plan.cells import ranks_of
from reshard.simulate.links import local_rate

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.schedule.bucket import BucketSize
    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology

Key = TypeVar("Key", int, tuple[str, int])


@dataclass(frozen=True, slots=True)
class Totals:
    """The busiest end of each kind, in seconds, and the way of the last bucket."""

    port_seconds: float
    link_seconds: float
    copy_seconds: float
    message_seconds: float
    fill_seconds: float

    @property
    def busiest(self) -> str:
        """What takes longest."""
        by_name = {
            "ports": self.port_seconds,
            "fast links": self.link_seconds,
            "copies and messages": self.copy_seconds + self.message_seconds,
        }
        return max(by_name, key=lambda name: by_name[name])

    @property
    def seconds(self) -> float:
        """A rank that copies or handles a message does nothing else; ports and links move by themselves."""
        longest = max(self.port_seconds, self.link_seconds, self.copy_seconds + self.message_seconds)
        return longest + self.fill_seconds


def add_up(plan: Plan, size: BucketSize, topology: Topology, costs: Costs) -> Totals:
    """What ports, fast links and ranks have to do for a plan.

    Args:
        plan: Its routes are added up; no string is expanded.
        size: How large buckets are: how many messages there are.
        topology: What joins the ranks.
        costs: Of copies and messages.
    """
    ports: dict[tuple[str, int], float] = {}
    links: dict[tuple[str, int], float] = {}
    copies: dict[int, float] = {}
    messages: dict[int, float] = {}
    fill = 0.0
    holders = {at: frozenset(ranks_of(cls.holders)) for at, cls in enumerate(plan.classes)}
    for edges, nbytes, packers in _streams(plan, holders):
        buckets = max(1, -(-nbytes // size.nbytes))
        bucket = min(nbytes, size.nbytes)
        arrives: dict[int, float] = {}
        for rank in packers:
            _add(copies, rank, nbytes / costs.copy_bytes_per_second)
        for sender, receiver in edges:
            if sender == receiver:
                _add(copies, sender, nbytes / costs.copy_bytes_per_second)
                continue
            if topology.domain_of(sender) == topology.domain_of(receiver):
                out_rate, in_rate = (local_rate(rank, topology, costs) for rank in (sender, receiver))
                _add(links, ("out", sender), nbytes / out_rate)
                _add(links, ("in", receiver), nbytes / in_rate)
                latency = costs.local_latency_seconds
            else:
                out, into = topology.port_of(sender), topology.port_of(receiver)
                out_rate = topology.ports[out].out_bytes_per_second
                in_rate = topology.ports[into].in_bytes_per_second
                _add(ports, ("out", out), nbytes / out_rate)
                _add(ports, ("in", into), nbytes / in_rate)
                latency = topology.latency_seconds or costs.latency_seconds
            for rank in (sender, receiver):
                _add(messages, rank, buckets * costs.message_seconds)
            _add(copies, receiver, nbytes / costs.copy_bytes_per_second)
            hop = latency + 2 * costs.message_seconds + bucket / min(out_rate, in_rate)
            before = arrives.get(sender, bucket / costs.copy_bytes_per_second)
            arrives[receiver] = before + hop + bucket / costs.copy_bytes_per_second
        fill = max([fill, *arrives.values()])
    busy = {rank: copies.get(rank, 0.0) + messages.get(rank, 0.0) for rank in {*copies, *messages}}
    busiest = max(sorted(busy), key=lambda rank: busy[rank], default=-1)
    return Totals(
        max(ports.values(), default=0.0),
        max(links.values(), default=0.0),
        copies.get(busiest, 0.0),
        messages.get(busiest, 0.0),
        fill,
    )


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


def _add(sums: dict[Key, float], key: Key, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value
