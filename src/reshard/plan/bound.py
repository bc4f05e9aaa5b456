"""Bound: the time that no plan can beat in which each domain takes each slice in once; and what a plan reaches of it.

Four things take at least their time, whatever the order:

- **Ports that take in.** A domain without a holder of a class takes its bytes in once, through the ports of its
  needers. Shared out as evenly as ports and needers allow (an exact flow), the busiest port needs ``in_seconds``.
- **Ports that send.** The first copy of a class leaves a holder, every other copy a holder or a rank that needs the
  class too. Shared out likewise, the busiest port needs ``out_seconds``.
- **Ranks.** What a rank needs and does not hold comes through its port or over the fast link, and both have a rate.
- **Spine.** Where leaf switches have less than full bisection: what comes to a leaf without a holder (``spine``).

No plan of the class is faster than the largest of these. Left out of the class: a rank that needs nothing could
lend its port, and a domain could take a slice in twice to spare its fast link.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from reshard.plan.cells import ranks_of
from reshard.plan.entries import find_entries
from reshard.plan.spine import least_spine_seconds
from reshard.plan.supply import least_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.plan.classes import RouteClass
    from reshard.plan.routes import Route
    from reshard.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Bound:
    """The least seconds of a refit on a topology, by what needs them."""

    out_seconds: Fraction
    in_seconds: Fraction
    rank_seconds: Fraction
    spine_seconds: Fraction = Fraction(0)
    """0 where the spine has full bisection."""

    @property
    def seconds(self) -> Fraction:
        return max(self.out_seconds, self.in_seconds, self.rank_seconds, self.spine_seconds)


@dataclass(frozen=True, slots=True)
class Reach:
    """What the ports carry under a plan, and the leaves where these can be the limit. Bytes count payload."""

    busiest_seconds: Fraction
    busiest_port: str
    """Which port and way; or which leaf, where the spine has less than full bisection."""
    crossing_nbytes: int
    """Bytes that go from one domain into another."""

    relayed_nbytes: int
    """The part of them that a rank sends which is no source of these bytes."""

    copies_into: tuple[tuple[str, Fraction], ...]
    """By domain: bytes that come in, as a multiple of the distinct bytes that its ranks need from outside."""

    @property
    def busiest_kind(self) -> Literal["port", "leaf"]:
        """Whether a port is busiest, or a leaf's way to the spine or from it."""
        return "leaf" if self.busiest_port.startswith(("up from ", "down to ")) else "port"

    def to_json(self) -> dict[str, Any]:
        return {
            "busiest_seconds": float(self.busiest_seconds),
            "busiest_port": self.busiest_port,
            "crossing_nbytes": self.crossing_nbytes,
            "relayed_nbytes": self.relayed_nbytes,
            "copies_into": {name: float(copies) for name, copies in self.copies_into},
        }


def find_bound(classes: Sequence[RouteClass], topology: Topology) -> Bound:
    """The bound for what ``classes`` say is held and needed; all zero where one domain holds everybody."""
    if topology.is_flat:
        return Bound(Fraction(0), Fraction(0), Fraction(0))
    entries = find_entries(classes, topology)
    out_seconds, in_seconds = least_seconds(entries, topology)
    by_mask: dict[int, int] = {}
    for cls in classes:
        needers = cls.needers & ~cls.holders
        by_mask[needers] = by_mask.get(needers, 0) + cls.nbytes
    needed: dict[int, int] = {}
    for mask, nbytes in by_mask.items():
        for rank in ranks_of(mask):
            needed[rank] = needed.get(rank, 0) + nbytes
    slowest = Fraction(0)
    for rank, nbytes in needed.items():
        port = topology.ports[topology.port_of(rank)]
        domain = topology.domains[topology.domain_of(rank)]
        slowest = max(slowest, Fraction(nbytes, port.in_bytes_per_second + domain.bytes_per_second))
    return Bound(out_seconds, in_seconds, slowest, least_spine_seconds(entries, topology))


def measure_reach(classes: Sequence[RouteClass], routes: Sequence[Route], topology: Topology) -> Reach:
    """Add up what every port carries, and every leaf where the spine has less than full bisection."""
    by_edge: dict[tuple[int, int], int] = {}
    relayed = 0
    holders = {cls.holders: frozenset(ranks_of(cls.holders)) for cls in classes}
    for route, edge in _crossings(routes, topology):
        by_edge[edge] = by_edge.get(edge, 0) + route.nbytes
        relayed += 0 if edge[0] in holders[classes[route.route_class].holders] else route.nbytes
    sent: dict[int, int] = {}
    taken: dict[int, int] = {}
    into: dict[int, int] = {}
    up: dict[int, int] = {}
    down: dict[int, int] = {}
    for (sender, receiver), nbytes in by_edge.items():
        sending = topology.sends_for(sender, receiver)
        out, inn, domain = topology.port_of(sending), topology.port_of(receiver), topology.domain_of(receiver)
        if topology.is_blocking and (leaves := topology.crosses(sending, receiver)):
            up[leaves[0]] = up.get(leaves[0], 0) + nbytes
            down[leaves[1]] = down.get(leaves[1], 0) + nbytes
        sent[out] = sent.get(out, 0) + nbytes
        taken[inn] = taken.get(inn, 0) + nbytes
        into[domain] = into.get(domain, 0) + nbytes
    times = [
        (Fraction(n, topology.ports[at].out_bytes_per_second), f"out of {topology.ports[at].name}")
        for at, n in sent.items()
    ]
    times += [
        (Fraction(n, topology.ports[at].in_bytes_per_second), f"into {topology.ports[at].name}")
        for at, n in taken.items()
    ]
    times += [
        (Fraction(n, topology.leaves[at].up_bytes_per_second), f"up from {topology.leaves[at].name}")
        for at, n in up.items()
    ]
    times += [
        (Fraction(n, topology.leaves[at].down_bytes_per_second), f"down to {topology.leaves[at].name}")
        for at, n in down.items()
    ]
    seconds, name = max(times, default=(Fraction(0), ""))
    distinct: dict[int, int] = {}
    if not topology.is_flat:
        for entry in find_entries(classes, topology):
            for domain, _ in entry.domains:
                distinct[domain] = distinct.get(domain, 0) + entry.nbytes
    copies = tuple(
        (topology.domains[domain].name, Fraction(into.get(domain, 0), nbytes))
        for domain, nbytes in sorted(distinct.items())
    )
    return Reach(seconds, name, sum(into.values()), relayed, copies)


def _crossings(routes: Sequence[Route], topology: Topology) -> Iterator[tuple[Route, tuple[int, int]]]:
    if topology.is_flat:
        return
    home = {
        rank: topology.domain_of(rank) for rank in {rank for route in routes for edge in route.edges for rank in edge}
    }
    for route in routes:
        for edge in route.edges:
            if home[edge[0]] != home[edge[1]]:
                yield route, edge
