"""Entries: how each class of bytes gets into each domain that needs it, once, and from whom.

Only what crosses between domains costs. A domain with a holder inside is served there. Every other domain that needs a
class takes exactly one copy in. Two choices are left, and both are flows over ports:

- **Out**: who sends each of the copies. The first copy of a class into any domain leaves a holder; the others leave
  holders or, once a domain has the class, its needers, who then relay. The busiest port's time is the least possible
  (an exact flow, raised from the average by minimum cuts); under that time, as much as possible is sent by holders,
  since a relayed byte is sent later.
- **In**: which needers of a domain take which part of the copy (its stripes), so that its ports are equally busy.

Why any such choice of amounts is possible: let a class of L bytes enter n domains, and write its suppliers' shares one
after the other on a line of n * L bytes, holders first. At offset t of the class the suppliers are those at t, t + L,
t + 2L ... of the line: n of them, with repeats, and the first is a holder. A tree over the domains in which every
supplier has as many children as it has places always exists: attach the domains that supply first, then the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from reshard.plan.balance import PortFlow
from reshard.plan.cells import ranks_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.plan.classes import RouteClass
    from reshard.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Entry:
    """A class and the domains that it must be brought into from outside."""

    route_class: int
    nbytes: int
    holders: tuple[int, ...]
    domains: tuple[tuple[int, tuple[int, ...]], ...]
    """(domain, its needers)"""

    @property
    def relays(self) -> tuple[int, ...]:
        """Ranks that have the class once it has come in."""
        return tuple(rank for _, needers in self.domains for rank in needers) if len(self.domains) > 1 else ()


def find_entries(classes: Sequence[RouteClass], topology: Topology) -> list[Entry]:
    """The classes that cross into a domain, with the domains they cross into."""
    entries = []
    for at, cls in enumerate(classes):
        holders = ranks_of(cls.holders)
        homes = {topology.domain_of(rank) for rank in holders}
        needers: dict[int, list[int]] = {}
        for rank in ranks_of(cls.needers & ~cls.holders):
            domain = topology.domain_of(rank)
            if domain not in homes:
                needers.setdefault(domain, []).append(rank)
        if needers:
            rows = tuple((domain, tuple(ranks)) for domain, ranks in sorted(needers.items()))
            entries.append(Entry(at, cls.nbytes, holders, rows))
    return entries


@dataclass(frozen=True)
class Supply:
    """What the flows decided: who supplies how much of each entry, who takes it in, and the times of the two sides."""

    suppliers: tuple[tuple[tuple[int, int], ...], ...]
    """For each entry (rank, bytes), holders first; they sum up to its bytes times the number of its domains."""

    stripes: tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
    """For each entry and domain (rank, bytes): who takes how much of the copy from the network."""

    out_seconds: Fraction
    in_seconds: Fraction

    @property
    def seconds(self) -> Fraction:
        """The time of the busiest port: no plan in which every domain takes one copy is faster."""
        return max(self.out_seconds, self.in_seconds)


def balance_entries(entries: Sequence[Entry], topology: Topology, *, cut_nbytes: int) -> Supply:
    """Choose suppliers and stripes of every entry.

    Args:
        entries: What crosses.
        topology: Ports and their rates.
        cut_nbytes: Strings shorter than two of these are not shared between ranks.
    """
    out_rates = {at: port.out_bytes_per_second for at, port in enumerate(topology.ports)}
    in_rates = {at: port.in_bytes_per_second for at, port in enumerate(topology.ports)}
    stripes, in_seconds = _share_in(entries, topology, in_rates)
    shares, out_seconds = _share_out(entries, topology, out_rates, in_seconds)
    out_load = _Load(out_rates)
    in_load = _Load(in_rates)
    suppliers = tuple(
        _suppliers(entry, share, topology, out_load, cut_nbytes) for entry, share in zip(entries, shares, strict=True)
    )
    taken = tuple(
        tuple(
            _stripes(needers, entry.nbytes, share, topology, in_load, cut_nbytes)
            for (_, needers), share in zip(entry.domains, per_domain, strict=True)
        )
        for entry, per_domain in zip(entries, stripes, strict=True)
    )
    return Supply(suppliers, taken, out_seconds, in_seconds)


def _at_ports(ranks: Sequence[int], topology: Topology) -> dict[int, list[int]]:
    ports: dict[int, list[int]] = {}
    for rank in ranks:
        ports.setdefault(topology.port_of(rank), []).append(rank)
    return ports


def _share_out(
    entries: Sequence[Entry], topology: Topology, rates: Mapping[int, int], at_least: Fraction
) -> tuple[list[dict[int, int]], Fraction]:
    """Bytes that each port sends for each entry; the least time of the busiest port, then the fewest relayed bytes.

    The ports that take in need ``at_least`` some time anyway, so those that send have it too.
    """
    firsts, others = [], []
    for entry in entries:
        holders = tuple(_at_ports(entry.holders, topology))
        firsts.append((entry.nbytes, holders))
        more = entry.nbytes * (len(entry.domains) - 1)
        others.append((more, tuple(dict.fromkeys((*holders, *_at_ports(entry.relays, topology))))))
    demands = firsts + others
    seconds = PortFlow.least_seconds(demands, rates)
    allowed = max(seconds, at_least)
    flow = PortFlow([*firsts, *((more, firsts[at][1]) for at, (more, _) in enumerate(others))], rates, allowed)
    flow.run()
    by_holders = [flow.share(len(firsts) + at) for at in range(len(others))]
    rest = [more - sum(share.values()) for (more, _), share in zip(others, by_holders, strict=True)]
    relayed = _share_relays(entries, rest, topology, rates, by_holders)
    if relayed is None:  # some relay's port sends for a holder too: let the flow find its way around that
        for at, (_, ports) in enumerate(others):
            flow.open(len(firsts) + at, ports)
        flow.run()
        by_holders = [flow.share(len(firsts) + at) for at in range(len(others))]
        relayed = [{} for _ in others]
    shares = []
    for at in range(len(entries)):
        share: dict[int, int] = {}
        for part in (flow.share(at), by_holders[at], relayed[at]):
            for port, nbytes in part.items():
                share[port] = share.get(port, 0) + nbytes
        shares.append(share)
    return shares, seconds


def _share_relays(
    entries: Sequence[Entry],
    rest: Sequence[int],
    topology: Topology,
    rates: Mapping[int, int],
    by_holders: Sequence[Mapping[int, int]],
) -> list[dict[int, int]] | None:
    """Spread what holders cannot send over the relays, as evenly as can be: a relay that is busy starts late.

    Returns:
        Bytes by port for each entry; None where a class can only be relayed by ports that send for holders too.
    """
    sending = {port for share in by_holders for port, nbytes in share.items() if nbytes}
    demands = []
    for entry, nbytes in zip(entries, rest, strict=True):
        ports = tuple(port for port in _at_ports(entry.relays, topology) if port not in sending) if nbytes else ()
        if nbytes and not ports:
            return None
        demands.append((nbytes, ports))
    flow = PortFlow(demands, rates, PortFlow.least_seconds(demands, rates))
    flow.run()
    return [flow.share(at) for at in range(len(demands))]


def _share_in(
    entries: Sequence[Entry], topology: Topology, rates: Mapping[int, int]
) -> tuple[list[list[dict[int, int]]], Fraction]:
    """Bytes that each port takes in for each entry and domain: in every domain its ports are equally busy."""
    totals: dict[tuple[int, ...], int] = {}
    keys = []
    for entry in entries:
        row = []
        for _, needers in entry.domains:
            key = tuple(_at_ports(needers, topology))
            totals[key] = totals.get(key, 0) + entry.nbytes
            row.append(key)
        keys.append(row)
    demands = [(nbytes, key) for key, nbytes in totals.items()]
    seconds = PortFlow.least_seconds(demands, rates)
    flow = PortFlow(demands, rates, seconds)
    flow.run()
    whole = {key: (flow.share(at), nbytes) for at, (nbytes, key) in enumerate(demands)}
    stripes = []
    for entry, row in zip(entries, keys, strict=True):
        stripes.append([_scaled(*whole[key], entry.nbytes) for key in row])
    return stripes, seconds


def _scaled(share: Mapping[int, int], total: int, nbytes: int) -> dict[int, int]:
    """The same proportions for ``nbytes``, rounded so that they sum up to it."""
    scaled, given, seen = {}, 0, 0
    for port, part in share.items():
        seen += part
        upto = seen * nbytes // total
        scaled[port] = upto - given
        given = upto
    return scaled


class _Load:
    """What each port should have carried so far by the flow, against what it was given in whole portions."""

    def __init__(self, rates: Mapping[int, int]) -> None:
        self._rates = rates
        self._owed = dict.fromkeys(rates, 0)
        self._ranks: dict[int, int] = {}

    def owe(self, share: Mapping[int, int]) -> None:
        for port, nbytes in share.items():
            self._owed[port] += nbytes

    def most_owed(self, ports: Mapping[int, Sequence[int]]) -> int:
        return max(ports, key=lambda port: (Fraction(self._owed[port], self._rates[port]), -port))

    def give(self, port: int, ranks: Sequence[int], nbytes: int) -> int:
        """Charge a port and pick the rank at it that has carried least."""
        rank = min(ranks, key=lambda r: (self._ranks.get(r, 0), r))
        self._owed[port] -= nbytes
        self._ranks[rank] = self._ranks.get(rank, 0) + nbytes
        return rank


def _suppliers(
    entry: Entry, share: Mapping[int, int], topology: Topology, load: _Load, cut_nbytes: int
) -> tuple[tuple[int, int], ...]:
    """(rank, bytes), holders first: the shares of the flow, without portions below ``cut_nbytes``."""
    holders, relays = _at_ports(entry.holders, topology), _at_ports(entry.relays, topology)
    load.owe(share)
    copies = len(entry.domains)
    if entry.nbytes < 2 * cut_nbytes:
        given: dict[int, int] = {}
        for copy in range(copies):
            ports = holders if copy == 0 else {**relays, **holders}
            port = load.most_owed(ports)
            rank = load.give(port, ports[port], entry.nbytes)
            given[rank] = given.get(rank, 0) + entry.nbytes
    else:
        given = _without_crumbs(share, holders, relays, entry.nbytes, load, cut_nbytes)
    first = [(rank, nbytes) for rank, nbytes in given.items() if rank in entry.holders]
    return (*first, *((rank, nbytes) for rank, nbytes in given.items() if rank not in entry.holders))


def _without_crumbs(
    share: Mapping[int, int],
    holders: Mapping[int, Sequence[int]],
    relays: Mapping[int, Sequence[int]],
    nbytes: int,
    load: _Load,
    cut_nbytes: int,
) -> dict[int, int]:
    kept = {port: part for port, part in share.items() if part >= cut_nbytes}
    if sum(part for port, part in kept.items() if port in holders) < nbytes:
        kept = dict(share)  # the first copy must come from holders, whatever their portions
    left = sum(share.values()) - sum(kept.values())
    for port in sorted(kept, key=lambda p: (-kept[p], p))[:1]:
        kept[port] += left
    given: dict[int, int] = {}
    for port, part in kept.items():
        if part:
            rank = load.give(port, holders.get(port) or relays[port], part)
            given[rank] = given.get(rank, 0) + part
    return given


def _stripes(
    needers: Sequence[int], nbytes: int, share: Mapping[int, int], topology: Topology, load: _Load, cut_nbytes: int
) -> tuple[tuple[int, int], ...]:
    """(rank, bytes) in the order of the class's string: every needer's part of the copy that comes in."""
    ports = _at_ports(needers, topology)
    load.owe(share)
    if nbytes < 2 * cut_nbytes:
        port = load.most_owed(ports)
        return ((load.give(port, ports[port], nbytes), nbytes),)
    given: list[tuple[int, int]] = []
    for port, ranks in ports.items():
        part = share.get(port, 0)
        count = max(1, min(len(ranks), part // max(cut_nbytes, 1)))
        for index, rank in enumerate(ranks[:count]):
            piece = part * (index + 1) // count - part * index // count
            given.append((rank, piece))
        load.give(port, ranks[:1], part)
    kept = [(rank, piece) for rank, piece in given if piece >= cut_nbytes] or [max(given, key=lambda g: g[1])]
    spare = nbytes - sum(piece for _, piece in kept)
    kept[0] = (kept[0][0], kept[0][1] + spare)
    return tuple(kept)
