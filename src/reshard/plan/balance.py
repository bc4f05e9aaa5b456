"""Which holder sends how much, so that the busiest sender sends as little as any choice allows: exact, in integers.

Demands with the same holders are one node, so the graph is tiny whatever the number of tensors. The least possible
load of the busiest sender is found as a flow: start from the average, and as long as the flow cannot carry everything,
the minimum cut shows a set of demands that only few holders can serve; their average is the next, higher, start. Each
step is a proof that less cannot do, so the last one is exact.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    holders = sorted({rank for key in demands for rank in key})
    limit = -(-sum(demands.values()) // len(holders))
    while True:
        flow = _Flow(demands, holders, limit)
        if flow.value == sum(demands.values()):
            return {key: flow.shares(key) for key in demands}
        tight = flow.tight_demands()
        served_by = {rank for key in tight for rank in key}
        limit = -(-sum(demands[key] for key in tight) // len(served_by))


class _Flow:
    """Maximum flow source -> demand -> holder -> sink, every holder up to ``limit`` (Dinic's algorithm)."""

    def __init__(self, demands: Mapping[tuple[int, ...], int], holders: Sequence[int], limit: int) -> None:
        self._keys = list(demands)
        self._first_holder = 1 + len(self._keys)
        self._place = {rank: self._first_holder + i for i, rank in enumerate(holders)}
        self._sink = self._first_holder + len(holders)
        self._edges: list[list[int]] = []  # [to, capacity left]; the reverse of edge e is e ^ 1
        self._out: list[list[int]] = [[] for _ in range(self._sink + 1)]
        for at, key in enumerate(self._keys, start=1):
            self._add(0, at, demands[key])
            for rank in key:
                self._add(at, self._place[rank], demands[key])
        for rank in holders:
            self._add(self._place[rank], self._sink, limit)
        self.value = self._run()

    def _add(self, a: int, b: int, capacity: int) -> None:
        self._out[a].append(len(self._edges))
        self._edges.append([b, capacity])
        self._out[b].append(len(self._edges))
        self._edges.append([a, 0])

    def _levels(self) -> list[int]:
        level = [-1] * len(self._out)
        level[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for edge in self._out[node]:
                to, left = self._edges[edge]
                if left and level[to] < 0:
                    level[to] = level[node] + 1
                    queue.append(to)
        return level

    def _run(self) -> int:
        total = 0
        while (level := self._levels())[self._sink] >= 0:
            tried = [0] * len(self._out)
            while pushed := self._push(level, tried):
                total += pushed
        return total

    def _push(self, level: list[int], tried: list[int]) -> int:
        """Send flow along one shortest path; 0 where none is left."""
        path: list[int] = []
        node = 0
        while node != self._sink:
            while tried[node] < len(self._out[node]):
                edge = self._out[node][tried[node]]
                to, left = self._edges[edge]
                if left and level[to] == level[node] + 1:
                    break
                tried[node] += 1
            else:
                if not path:
                    return 0
                node = self._edges[path.pop() ^ 1][0]
                tried[node] += 1
                continue
            path.append(edge)
            node = to
        amount = min(self._edges[edge][1] for edge in path)
        for edge in path:
            self._edges[edge][1] -= amount
            self._edges[edge ^ 1][1] += amount
        return amount

    def shares(self, key: tuple[int, ...]) -> tuple[int, ...]:
        at = 1 + self._keys.index(key)
        sent = {self._edges[edge][0]: self._edges[edge ^ 1][1] for edge in self._out[at] if not edge & 1}
        return tuple(sent[self._place[rank]] for rank in key)

    def tight_demands(self) -> list[tuple[int, ...]]:
        """The demands on the source's side of the minimum cut: their holders cannot carry them at this limit."""
        level = self._levels()
        return [key for at, key in enumerate(self._keys, start=1) if level[at] >= 0]
