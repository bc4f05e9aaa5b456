"""Which holder sends how much, so that the busiest sender sends as little as any choice allows: exact, in integers.

Demands with the same holders are one node, so the graph is tiny whatever the number of tensors. The least possible
load of the busiest sender is found as a flow: start from the average, and as long as the flow cannot carry everything,
the minimum cut shows a set of demands that only few holders can serve; their average is the next, higher, start. Each
step is a proof that less cannot do, so the last one is exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def share_out(demands: Mapping[tuple[int, ...], int]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Split every demand over its holders so that the busiest holder carries as little as possible.

    Args:
        demands: Bytes by holders (the ranks that can serve them).

    Returns:
        Bytes of each holder, in the order of the key's ranks; they sum up to the demand.

    >>> share_out({(0, 1): 90, (1,): 50})
    {(0, 1): (70, 20), (1,): (50,)}
    """
    shares: dict[tuple[int, ...], tuple[int, ...]] = {}
    for keys in _connected(sorted(demands)):
        if len(keys) == 1:
            shares[keys[0]] = _evenly(demands[keys[0]], len(keys[0]))
        else:
            shares.update(_least_busiest({key: demands[key] for key in keys}))
    return {key: shares[key] for key in demands}


def _evenly(total: int, parts: int) -> tuple[int, ...]:
    base, more = divmod(total, parts)
    return tuple(base + (1 if i < more else 0) for i in range(parts))


def _connected(keys: Sequence[tuple[int, ...]]) -> list[list[tuple[int, ...]]]:
    """Groups of keys that share holders, directly or through others."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        while parent.setdefault(rank, rank) != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    for key in keys:
        for rank in key:
            parent[root(rank)] = root(key[0])
    groups: dict[int, list[tuple[int, ...]]] = {}
    for key in keys:
        groups.setdefault(root(key[0]), []).append(key)
    return list(groups.values())


def _least_busiest(demands: dict[tuple[int, ...], int]) -> dict[tuple[int, ...], tuple[int, ...]]:
    rates = dict.fromkeys(sorted({rank for key in demands for rank in key}), 1)
    rows = [(nbytes, key) for key, nbytes in demands.items()]
    flow = PortFlow(rows, rates, PortFlow.least_seconds(rows, rates))
    flow.run()
    return {key: tuple(flow.share(at).get(rank, 0) for rank in key) for at, (_, key) in enumerate(rows)}


Demand = tuple[int, Sequence[int]]
"""Bytes, and the ports (or pools of ports) that can carry them."""


class PortFlow:
    """Maximum flow source -> demand -> port -> sink, every port up to its rate times ``seconds`` (Dinic's algorithm).

    Args:
        demands: What is to be carried, and by which ports it can be.
        rates: Bytes a second of each port.
        seconds: The time that each port has.
        pools: Ports that many demands share, by a name that is no port's (a negative number): a demand that lists the
            pool can be carried by any of them, and the flow has an edge for the pool in place of one for each port.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        rates: Mapping[int, int],
        seconds: Fraction,
        pools: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._demands = demands
        places = [*rates, *(pools or ())]
        self._place = {place: 1 + len(demands) + at for at, place in enumerate(places)}
        self._name = {node: place for place, node in self._place.items()}
        self._sink = 1 + len(demands) + len(places)
        self._to: list[int] = []
        self._left: list[int] = []  # what an edge can still carry; the reverse of edge e is e ^ 1
        self._out: list[list[int]] = [[] for _ in range(self._sink + 1)]
        self._carried = 0
        for at, (nbytes, listed) in enumerate(demands):
            self._add(0, 1 + at, nbytes)
            self.open(at, listed)
        most = sum(nbytes for nbytes, _ in demands)
        for pool, ports in (pools or {}).items():
            for port in ports:
                self._add(self._place[pool], self._place[port], most)
        for port, rate in rates.items():
            self._add(self._place[port], self._sink, ceil(rate * seconds))

    @staticmethod
    def least_seconds(
        demands: Sequence[Demand], rates: Mapping[int, int], pools: Mapping[int, Sequence[int]] | None = None
    ) -> Fraction:
        """The least time in which the ports can carry everything; exact.

        Starts from the average and follows minimum cuts: the demands on the source's side of a cut can only be carried
        by few ports, whose average is the next, higher, start; and a proof that less cannot do.
        """

        def ports_of(chosen: Iterable[int]) -> set[int]:
            listed = {place for at in chosen if demands[at][0] for place in demands[at][1]}
            return {port for place in listed for port in (pools[place] if pools and place in pools else (place,))}

        total = sum(nbytes for nbytes, _ in demands)
        usable = ports_of(range(len(demands)))
        seconds = Fraction(total, sum(rates[port] for port in usable)) if usable else Fraction(0)
        while True:
            flow = PortFlow(demands, rates, seconds, pools)
            if flow.run() == total:
                return seconds
            tight = flow.tight()
            seconds = Fraction(sum(demands[at][0] for at in tight), sum(rates[port] for port in ports_of(tight)))

    def open(self, demand: int, places: Sequence[int]) -> None:
        """Let more ports or pools carry a demand; what already flows goes on flowing out of the same ports in sum."""
        have = {self._to[edge] for edge in self._out[1 + demand]}
        for place in places:
            node = self._place[place]
            if node not in have:
                self._add(1 + demand, node, self._demands[demand][0])

    def _add(self, a: int, b: int, capacity: int) -> None:
        edge = len(self._to)
        self._to += (b, a)
        self._left += (capacity, 0)
        self._out[a].append(edge)
        self._out[b].append(edge + 1)

    def _levels(self) -> list[int]:
        to, left, out = self._to, self._left, self._out
        level = [-1] * len(out)
        level[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for edge in out[node]:
                if left[edge] and level[to[edge]] < 0:
                    level[to[edge]] = level[node] + 1
                    queue.append(to[edge])
        return level

    def run(self) -> int:
        """Send as much as possible; the bytes that flow in all."""
        while (level := self._levels())[self._sink] >= 0:
            tried = [0] * len(self._out)
            while pushed := self._push(level, tried):
                self._carried += pushed
        return self._carried

    def _push(self, level: list[int], tried: list[int]) -> int:
        """Send flow along one shortest path; 0 where none is left."""
        to, left, out = self._to, self._left, self._out
        path: list[int] = []
        node = 0
        while node != self._sink:
            edges = out[node]
            while tried[node] < len(edges):
                edge = edges[tried[node]]
                if left[edge] and level[to[edge]] == level[node] + 1:
                    break
                tried[node] += 1
            else:
                if not path:
                    return 0
                node = to[path.pop() ^ 1]
                tried[node] += 1
                continue
            path.append(edge)
            node = to[edge]
        amount = min(left[edge] for edge in path)
        for edge in path:
            left[edge] -= amount
            left[edge ^ 1] += amount
        return amount

    def share(self, demand: int) -> dict[int, int]:
        """Bytes of a demand by the port or pool that carries them; those that could and do not are listed with 0."""
        return self._flowing_from(1 + demand)

    def share_of_pool(self, pool: int) -> dict[int, int]:
        """Bytes that come through a pool by the port that carries them."""
        return self._flowing_from(self._place[pool])

    def _flowing_from(self, node: int) -> dict[int, int]:
        return {self._name[self._to[edge]]: self._left[edge ^ 1] for edge in self._out[node] if not edge & 1}

    def tight(self) -> list[int]:
        """The demands on the source's side of the minimum cut: their ports cannot carry them in this time."""
        level = self._levels()
        return [at for at in range(len(self._demands)) if level[1 + at] >= 0]


def deal(amounts: Sequence[int], shares: Mapping[int, int]) -> list[dict[int, int]]:
    """Lay amounts one after the other and cut the line at the shares, so that most amounts come from one place.

    Args:
        amounts: Bytes each; in sum what the shares are in sum.
        shares: Bytes by place.

    Returns:
        For each amount the bytes by place; places that give nothing are left out.

    >>> deal([4, 4], {7: 3, 8: 5})
    [{7: 3, 8: 1}, {8: 4}]
    """
    places = iter([(place, nbytes) for place, nbytes in shares.items() if nbytes])
    place, left = -1, 0
    dealt: list[dict[int, int]] = []
    for amount in amounts:
        row: dict[int, int] = {}
        while amount:
            if not left:
                place, left = next(places)
            part = min(amount, left)
            row[place] = part
            amount -= part
            left -= part
        dealt.append(row)
    return dealt
