"""Links: the ends that messages leave from, go through and arrive at, each one message at a time, and their rates.

Ports and fast links are ends, and so are the ways of a leaf switch to the spine and from it where these can be the
limit: messages that share one get a part of its rate each, bucket by bucket.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology


@dataclass(eq=False)
class End:
    """One direction of a port, a leaf or a rank's fast link; it carries one message after the other."""

    bytes_per_second: float
    free_at: float = 0.0

    def seconds(self, nbytes: int) -> float:
        return nbytes / self.bytes_per_second

    def take(self, at: float, nbytes: int) -> tuple[float, float]:
        """Carry a message from ``at`` on, or as soon as the ones before it are through: its start and stop."""
        start = max(at, self.free_at)
        self.free_at = start + self.seconds(nbytes)
        return start, self.free_at


@dataclass(frozen=True)
class Way:
    """What a message from one rank to another goes through."""

    out: End
    through: tuple[End, ...]
    """On the way, in order: each passes a message on while it comes in, at its own rate."""

    into: End
    latency_seconds: float
    is_network: bool


class Links:
    """All ends of a topology, found by the ranks that use them."""

    def __init__(self, topology: Topology, costs: Costs) -> None:
        self._topology = topology
        self._costs = costs
        self._ports = [(End(port.out_bytes_per_second), End(port.in_bytes_per_second)) for port in topology.ports]
        self._leaves = [(End(leaf.up_bytes_per_second), End(leaf.down_bytes_per_second)) for leaf in topology.leaves]
        self._local: dict[int, tuple[End, End]] = {}

    def way(self, sender: int, receiver: int) -> Way:
        """Over the fast link inside a domain; over both ranks' ports between domains, and the spine between leaves.

        Where the topology says so, first over the fast link to the rank whose port is at the receiver's leaf.

        Raises:
            ConfigError: The topology does not list a rank.
        """
        topology = self._topology
        if topology.domain_of(sender) == topology.domain_of(receiver):
            out, into = self._fast(sender)[0], self._fast(receiver)[1]
            return Way(out, (), into, self._costs.local_latency_seconds, is_network=False)
        sending = topology.sends_for(sender, receiver)
        out, into = self._ports[topology.port_of(sending)][0], self._ports[topology.port_of(receiver)][1]
        latency = topology.latency_seconds or self._costs.latency_seconds
        through: tuple[End, ...] = ()
        if topology.is_blocking and (leaves := topology.crosses(sending, receiver)):
            through = self._leaves[leaves[0]][0], self._leaves[leaves[1]][1]
        if sending == sender:
            return Way(out, through, into, latency, is_network=True)
        through = (self._fast(sending)[1], out, *through)
        return Way(self._fast(sender)[0], through, into, latency + self._costs.local_latency_seconds, is_network=True)

    def _fast(self, rank: int) -> tuple[End, End]:
        if rank not in self._local:
            rate = local_rate(rank, self._topology, self._costs)
            self._local[rank] = (End(rate), End(rate))
        return self._local[rank]


def local_rate(rank: int, topology: Topology, costs: Costs) -> float:
    """Bytes a second of a rank's fast link, each way."""
    if not topology.domains:
        return costs.local_bytes_per_second
    return topology.domains[topology.domain_of(rank)].bytes_per_second
