"""Portions: from bytes by port, as flows decide them, to whole portions by rank, none so small that it is not worth it.

A port that had to take more or less than its share in whole portions is remembered, and gets less or more of the next.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.plan.entries import Entry
    from reshard.topology.topology import Topology

Portion = tuple[int, int]
"""(rank, bytes)"""

Suppliers = tuple[tuple[Portion, ...], tuple[Portion, ...]]
"""Who sends the first copy of a class, in sum its bytes; who the others, in sum its bytes times their number."""

STRIPES_A_PORT = 128
"""A stripe is at least this part of what its port takes in: where a port takes in many classes it takes some of them
whole, in place of a thin stripe of each, and has fewer messages and peers for it."""


def ports_of(ranks: Sequence[int], topology: Topology) -> dict[int, list[int]]:
    """The ports of some ranks, each with those of the ranks that are at it."""
    ports: dict[int, list[int]] = {}
    for rank in ranks:
        ports.setdefault(topology.port_of(rank), []).append(rank)
    return ports


def sending_ports(ranks: Sequence[int], entry: Entry, topology: Topology) -> dict[int, list[int]]:
    """The ports over which some ranks send an entry, each with those of the ranks that send over it.

    A rank's own port; with ``cross_rail="local"`` those of its domain at the leaves of the entry's needers.
    """
    if topology.cross_rail == "spine" or not topology.leaves:
        return ports_of(ranks, topology)
    at_leaf: dict[int, int] = {}
    for _, needers in entry.domains:
        for needer in needers:
            at_leaf.setdefault(topology.leaf_of(topology.port_of(needer)), needer)
    ports: dict[int, dict[int, None]] = {}
    for rank in ranks:
        for needer in at_leaf.values():
            ports.setdefault(topology.port_of(topology.sends_for(rank, needer)), {})[rank] = None
    return {port: list(senders) for port, senders in sorted(ports.items())}


class Portions:
    """Deals out the entries of a plan, one after the other.

    Args:
        topology: Ports and their rates.
        cut_nbytes: Strings shorter than two of these are not shared between ranks.
    """

    def __init__(self, topology: Topology, cut_nbytes: int) -> None:
        self._topology = topology
        self._least = max(cut_nbytes, 1)
        self._out = _Load({at: port.out_bytes_per_second for at, port in enumerate(topology.ports)})
        self._in = _Load({at: port.in_bytes_per_second for at, port in enumerate(topology.ports)})
        self._ports: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self._others_ports: dict[tuple[tuple[int, ...], int], dict[int, list[int]]] = {}
        self._alone: dict[tuple[int, int], tuple[tuple[Portion, ...], ...] | None] = {}
        self._thinnest: dict[int, int] = {}

    def _ports_of(self, ranks: tuple[int, ...]) -> dict[int, list[int]]:
        if ranks not in self._ports:
            self._ports[ranks] = ports_of(ranks, self._topology)
        return self._ports[ranks]

    def _sending(self, ranks: tuple[int, ...], entry: Entry) -> dict[int, list[int]]:
        key = ranks, entry.needers
        if self._topology.cross_rail == "spine":
            return self._ports_of(ranks)
        if key not in self._others_ports:
            self._others_ports[key] = sending_ports(ranks, entry, self._topology)
        return self._others_ports[key]

    # -- out -------------------------------------------------------------------------------------------------------

    def suppliers(self, entry: Entry, first: Mapping[int, int], others: Mapping[int, int]) -> Suppliers:
        """Who sends the copies of an entry: the shares of the flow, without crumbs.

        Args:
            entry: What is sent.
            first: Bytes of its first copy by port.
            others: Bytes of its other copies by port.
        """
        holders, relays = self._sending(entry.holders, entry), self._sending(entry.relays, entry)
        copies = len(entry.domains) - 1
        return (
            self._portions(first, holders, entry.nbytes, 1),
            self._portions(others, relays | holders, entry.nbytes, copies) if copies else (),
        )

    def _portions(
        self, share: Mapping[int, int], ports: Mapping[int, Sequence[int]], nbytes: int, copies: int
    ) -> tuple[Portion, ...]:
        self._out.owe(share)
        if nbytes < 2 * self._least:
            kept = {self._out.most_owed(ports): nbytes * copies}
        else:
            kept = {port: part for port, part in share.items() if part >= self._least * copies}
            if not kept:
                kept = {max(share, key=lambda port: (share[port], -port)): 0}
            largest = max(kept, key=lambda port: (kept[port], -port))
            kept[largest] += nbytes * copies - sum(kept.values())
        return tuple((self._out.give(port, ports[port], part), part) for port, part in kept.items())

    # -- in --------------------------------------------------------------------------------------------------------

    def stripes(
        self, entry: Entry, shares: Mapping[tuple[int, tuple[int, ...]], Mapping[int, int]]
    ) -> tuple[tuple[Portion, ...], ...]:
        """For each domain of an entry, every needer's part of the copy that comes in, in the order of its string.

        Args:
            entry: What comes in.
            shares: By domain and ports, the proportions that the flow decided for them.
        """
        key = (entry.needers, entry.nbytes)
        if key not in self._alone:
            self._alone[key] = self._without_choice(entry)
        alone = self._alone[key]
        if alone is not None:
            return alone
        if not self._thinnest:
            self._thinnest = self._find_thinnest(shares)
        rows = []
        for domain, needers in entry.domains:
            ports = self._ports_of(needers)
            share = scaled(shares[domain, tuple(ports)], entry.nbytes)
            rows.append(self._stripes(ports, entry.nbytes, share, self._thinnest[domain]))
        return tuple(rows)

    def _without_choice(self, entry: Entry) -> tuple[tuple[Portion, ...], ...] | None:
        """The stripes where every domain has one needer, alone at its port; None where there is something to choose."""
        for _, needers in entry.domains:
            if len(needers) > 1 or len(self._topology.ports[self._topology.port_of(needers[0])].ranks) > 1:
                return None
        return tuple(((needers[0], entry.nbytes),) for _, needers in entry.domains)

    def _find_thinnest(self, shares: Mapping[tuple[int, tuple[int, ...]], Mapping[int, int]]) -> dict[int, int]:
        loads: dict[int, dict[int, int]] = {}
        for (domain, _), share in shares.items():
            row = loads.setdefault(domain, {})
            for port, nbytes in share.items():
                row[port] = row.get(port, 0) + nbytes
        return {
            domain: max(self._least, sum(row.values()) // len(row) // STRIPES_A_PORT) for domain, row in loads.items()
        }

    def _stripes(
        self, ports: Mapping[int, Sequence[int]], nbytes: int, share: Mapping[int, int], least: int
    ) -> tuple[Portion, ...]:
        self._in.owe(share)
        count = nbytes // least
        if count < len(ports):  # too little for a stripe to each: to those that have been given least so far
            whole: dict[int, int] = {}
            for index in range(max(count, 1)):
                piece = nbytes * (index + 1) // max(count, 1) - nbytes * index // max(count, 1)
                port = self._in.most_owed(ports)
                rank = self._in.give(port, ports[port], piece)
                whole[rank] = whole.get(rank, 0) + piece
            return tuple(sorted(whole.items()))
        given: list[tuple[int, int, int]] = []
        for port, ranks in ports.items():
            part = share.get(port, 0)
            among = max(1, min(len(ranks), part // self._least))
            for index, rank in enumerate(ranks[:among]):
                given.append((port, rank, part * (index + 1) // among - part * index // among))
        kept = [row for row in given if row[2] >= self._least] or [max(given, key=lambda row: row[2])]
        port, rank, piece = kept[0]
        kept[0] = (port, rank, piece + nbytes - sum(piece for _, _, piece in kept))
        for port, rank, piece in kept:
            self._in.give(port, (rank,), piece)
        return tuple((rank, piece) for _, rank, piece in kept)


def scaled(share: Mapping[int, int], nbytes: int) -> dict[int, int]:
    """The same proportions for ``nbytes``, rounded so that they sum up to it."""
    total = sum(share.values())
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
        every = lcm(*rates.values())
        self._weight = {port: every // rate for port, rate in rates.items()}  # bytes to time, in integers
        self._owed = dict.fromkeys(rates, 0)
        self._ranks: dict[int, int] = {}

    def owe(self, share: Mapping[int, int]) -> None:
        for port, nbytes in share.items():
            self._owed[port] += nbytes

    def most_owed(self, ports: Mapping[int, Sequence[int]]) -> int:
        return max(ports, key=lambda port: (self._owed[port] * self._weight[port], -port))

    def give(self, port: int, ranks: Sequence[int], nbytes: int) -> int:
        """Charge a port and pick the rank at it that has carried least."""
        rank = min(ranks, key=lambda r: (self._ranks.get(r, 0), r))
        self._owed[port] -= nbytes
        self._ranks[rank] = self._ranks.get(rank, 0) + nbytes
        return rank
