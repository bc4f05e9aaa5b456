"""Supply: how much of each class every port sends, and takes in, so that the busiest port is done as early as can be.

Two choices are left once it is known what enters where (``entries``), and both are flows over ports:

- **Out**: who sends each of the copies. The first copy of a class into any domain leaves a holder; the others leave
  holders or, once a domain has the class, its needers, who then relay. The busiest port's time is the least possible
  (an exact flow, raised from the average by minimum cuts); under that time, as much as possible is sent by holders,
  since a relayed byte is sent later. Where that would cross a spine that is too slow for it, relays that are at the
  leaves of those who need a class send its other copies.
- **In**: which needers of a domain take which part of the copy (its stripes), so that its ports are equally busy. A
  port belongs to one domain, so each domain is a flow of its own; domains that are alike are solved once.

Why any such choice of amounts is possible: let a class of L bytes enter n domains. Its first copy is L bytes of
holders' shares, one after the other along its string; the other copies are (n - 1) * L bytes of shares, of holders or
relays, each of which makes all n - 1 copies of as much of the string as it lasts for. So a part of the string goes from
a holder to the domain of the rank that makes the other copies, and from there to all: no byte is relayed twice.

Entries with the same holders and needers are one demand, and the ports of all needers one pool of the flow: its size
is that of the two layouts, whatever the number of domains that take a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from reshard.plan.balance import PortFlow, deal
from reshard.plan.portions import Portions, Suppliers, ports_of, scaled, sending_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.plan.entries import Entry
    from reshard.topology.topology import Topology

Shares = dict[int, int]
"""Bytes by port."""


@dataclass(frozen=True)
class Supply:
    """What the flows decided: who supplies how much of each entry, who takes it in, and the times of the two sides."""

    suppliers: tuple[Suppliers, ...]
    """For each entry who sends its first copy, and who the others."""

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
    taken = _TakenIn(entries, topology)
    out = _SentOut(entries, topology)
    shares = out.share(max(out.seconds, taken.seconds))
    portions = Portions(topology, cut_nbytes)
    suppliers = tuple(portions.suppliers(entry, *share) for entry, share in zip(entries, shares, strict=True))
    stripes = tuple(portions.stripes(entry, taken.shares) for entry in entries)
    return Supply(suppliers, stripes, out.seconds, taken.seconds)


def least_seconds(entries: Sequence[Entry], topology: Topology) -> tuple[Fraction, Fraction]:
    """The least times in which the ports can send everything that crosses, and take it in."""
    return _SentOut(entries, topology).seconds, _TakenIn(entries, topology).seconds


class _SentOut:
    """Bytes that each port sends for each entry; the least time of the busiest port, then the fewest relayed bytes."""

    def __init__(self, entries: Sequence[Entry], topology: Topology) -> None:
        self._entries = entries
        self._rates = {at: port.out_bytes_per_second for at, port in enumerate(topology.ports)}
        self._firsts: dict[tuple[int, ...], list[int]] = {}
        self._others: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._pools: dict[int, tuple[int, ...]] = {}  # ports of the ranks that have a class once it has come in
        pool_of: dict[tuple[int, ...], int] = {}
        relays_of: dict[int, tuple[int, ...]] = {}
        holders_of: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}
        crosses_first = topology.cross_rail == "local"  # then the ports that send depend on who needs it
        for at, entry in enumerate(entries):
            key = entry.holders, entry.needers if crosses_first else 0
            if key not in holders_of:
                holders_of[key] = tuple(sending_ports(entry.holders, entry, topology))
            holders = holders_of[key]
            self._firsts.setdefault(holders, []).append(at)
            if len(entry.domains) > 1:
                if entry.needers not in relays_of:
                    relays_of[entry.needers] = tuple(sending_ports(entry.relays, entry, topology))
                relays = relays_of[entry.needers]
                pool = pool_of.setdefault(relays, -1 - len(pool_of))
                self._pools[pool] = relays
                self._others.setdefault((holders, pool), []).append(at)
        self._first_nbytes = [sum(entries[at].nbytes for at in rows) for rows in self._firsts.values()]
        self._other_nbytes = [sum(map(self._more, rows)) for rows in self._others.values()]
        first = list(zip(self._first_nbytes, self._firsts, strict=True))
        other = [(n, (*holders, pool)) for n, (holders, pool) in zip(self._other_nbytes, self._others, strict=True)]
        self.seconds = PortFlow.least_seconds([*first, *other], self._rates, self._pools)
        keeps_near = topology.is_blocking and topology.cross_rail == "spine"
        self._near, self._crossing_seconds = self._relayed_near(topology) if keeps_near else ((), Fraction(0))

    def _relayed_near(self, topology: Topology) -> tuple[Sequence[int], Fraction]:
        """The demands whose relays are at leaves where no holder is: by relays they cross the spine once, not n times.

        Returns:
            Them, and the time that the busiest leaf needs if holders send all of these.
        """
        near: list[int] = []
        up: dict[tuple[int, ...], int] = {}
        down: dict[tuple[int, ...], int] = {}
        for at, ((holders, pool), nbytes) in enumerate(zip(self._others, self._other_nbytes, strict=True)):
            out, into = ({topology.leaf_of(port) for port in ports} for ports in (holders, self._pools[pool]))
            if out.isdisjoint(into):
                near.append(at)
                for sums, leaves in ((up, tuple(sorted(out))), (down, tuple(sorted(into)))):
                    sums[leaves] = sums.get(leaves, 0) + nbytes
        rates = (
            (up, {at: leaf.up_bytes_per_second for at, leaf in enumerate(topology.leaves)}),
            (down, {at: leaf.down_bytes_per_second for at, leaf in enumerate(topology.leaves)}),
        )
        return near, max(PortFlow.least_seconds([(n, key) for key, n in sums.items()], of) for sums, of in rates)

    def _more(self, at: int) -> int:
        """Bytes of an entry's copies behind the first."""
        return self._entries[at].nbytes * (len(self._entries[at].domains) - 1)

    def share(self, seconds: Fraction) -> list[tuple[Shares, Shares]]:
        """Bytes of each entry's first copy, and of its others, by port; each has ``seconds`` (>= ``self.seconds``)."""
        count = len(self._firsts)
        first = list(zip(self._first_nbytes, self._firsts, strict=True))
        other = [(n, ()) for n in self._other_nbytes]
        flow = PortFlow([*first, *other], self._rates, seconds, self._pools)
        flow.run()  # first copies come from holders, so they go first: what flows is never taken back
        near = frozenset(self._near if self._crossing_seconds > seconds else ())
        for kept in (near, frozenset[int]()):  # to relays if they can carry it all, else to holders as well
            for at, (holders, _) in enumerate(self._others):
                if at not in kept:
                    flow.open(count + at, holders)
            flow.run()
            rest = [n - sum(flow.share(count + at).values()) for at, n in enumerate(self._other_nbytes)]
            sending = {port for at in range(len(first) + len(other)) for port, n in flow.share(at).items() if n}
            relayed = self._relayed(rest, sending, seconds)
            if relayed is not None or not near:
                break
        if relayed is None:  # some relay's port sends for a holder too: let the flow find its way around that
            for at, (_, pool) in enumerate(self._others):
                flow.open(count + at, (pool,))
            flow.run()
            relayed = {pool: flow.share_of_pool(pool) for pool in self._pools}
            by_holder = [flow.share(count + at) for at in range(len(other))]
        else:
            pools = [pool for _, pool in self._others]
            by_holder = [flow.share(count + at) | {pools[at]: left} for at, left in enumerate(rest)]
        return self._by_entry([flow.share(at) for at in range(count)], by_holder, relayed)

    def _relayed(self, rest: Sequence[int], sending: set[int], seconds: Fraction) -> dict[int, Shares] | None:
        """Spread what holders cannot send over the relays, as evenly as can be: a relay that is busy starts late.

        Returns:
            Bytes by pool and port; None where ports that do not send for holders cannot relay all of it in time.
        """
        by_pool = dict.fromkeys(self._pools, 0)
        for (_, pool), nbytes in zip(self._others, rest, strict=True):
            by_pool[pool] += nbytes
        demands = [(n, tuple(p for p in self._pools[pool] if p not in sending)) for pool, n in by_pool.items()]
        if any(nbytes and not ports for nbytes, ports in demands):
            return None
        least = PortFlow.least_seconds(demands, self._rates)
        if least > seconds:
            return None
        flow = PortFlow(demands, self._rates, least)
        flow.run()
        return {pool: flow.share(at) for at, pool in enumerate(by_pool)}

    def _by_entry(
        self, firsts: Sequence[Shares], others: Sequence[Shares], relayed: Mapping[int, Shares]
    ) -> list[tuple[Shares, Shares]]:
        """Deal what the flow decided for demands to the entries that make them up."""
        shares: list[tuple[Shares, Shares]] = [({}, {}) for _ in self._entries]
        for rows, share in zip(self._firsts.values(), firsts, strict=True):
            for at, part in zip(rows, deal([self._entries[at].nbytes for at in rows], share), strict=True):
                shares[at][0].update(part)
        by_relays: dict[int, list[tuple[int, int]]] = {}
        for ((_, pool), rows), share in zip(self._others.items(), others, strict=True):
            for at, part in zip(rows, deal([self._more(at) for at in rows], share), strict=True):
                by_relays.setdefault(pool, []).append((at, part.pop(pool, 0)))
                shares[at][1].update(part)
        for pool, wanted in by_relays.items():
            wanted.sort()
            for (at, _), part in zip(wanted, _spread([n for _, n in wanted], relayed[pool]), strict=True):
                for port, nbytes in part.items():
                    shares[at][1][port] = shares[at][1].get(port, 0) + nbytes
        return shares


RELAYED_A_PORT = 2
"""Where a port relays more classes than this it relays some of them alone, in place of a part of every one: as many
bytes in fewer and longer streams."""


def _spread(amounts: Sequence[int], share: Mapping[int, int]) -> list[Shares]:
    """Bytes by port of each amount: large ones a part from every port, so that all relay at once; small ones dealt."""
    left = dict(share)
    thinnest = sum(share.values()) // RELAYED_A_PORT
    spread: list[Shares] = []
    for amount in amounts:
        row = scaled(share, amount) if amount and amount >= thinnest else {}
        spread.append(row)
        for port, nbytes in row.items():
            left[port] -= nbytes
    small = [0 if row else amount for row, amount in zip(spread, amounts, strict=True)]
    dealt = deal(small, {port: nbytes for port, nbytes in left.items() if nbytes > 0})
    return [row or part for row, part in zip(spread, dealt, strict=True)]


class _TakenIn:
    """Bytes that each port takes in for each domain and set of needers; in every domain its ports are equally busy."""

    def __init__(self, entries: Sequence[Entry], topology: Topology) -> None:
        wanted: dict[int, int] = {}
        domains: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
        for entry in entries:
            wanted[entry.needers] = wanted.get(entry.needers, 0) + entry.nbytes
            domains[entry.needers] = entry.domains
        into: dict[int, dict[tuple[int, ...], int]] = {}  # by domain and ports
        for mask, nbytes in wanted.items():
            for domain, needers in domains[mask]:
                key = tuple(ports_of(needers, topology))
                row = into.setdefault(domain, {})
                row[key] = row.get(key, 0) + nbytes
        self.seconds = Fraction(0)
        self.shares: dict[tuple[int, tuple[int, ...]], Shares] = {}
        """By domain and ports: the proportions in which these ports take in what all of them can."""

        solved: dict[object, tuple[Fraction, list[Shares]]] = {}
        for domain, row in into.items():
            ports = sorted({port for key in row for port in key})
            number = {port: at for at, port in enumerate(ports)}
            rates = {at: topology.ports[port].in_bytes_per_second for port, at in number.items()}
            demands = [(nbytes, tuple(number[port] for port in key)) for key, nbytes in row.items()]
            alike = (tuple(rates.values()), tuple(demands))
            if alike not in solved:
                seconds = PortFlow.least_seconds(demands, rates)
                flow = PortFlow(demands, rates, seconds)
                flow.run()
                solved[alike] = seconds, [flow.share(at) for at in range(len(demands))]
            seconds, parts = solved[alike]
            self.seconds = max(self.seconds, seconds)
            for key, part in zip(row, parts, strict=True):
                self.shares[domain, key] = {ports[at]: nbytes for at, nbytes in part.items()}
