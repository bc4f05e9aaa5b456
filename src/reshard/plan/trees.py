"""Trees: from amounts to edges. Which rank hands each byte of a class to which rank, in an order in which it can move.

A part of a class's string on which nothing changes (the same suppliers, the same stripes) has one tree over the domains
it enters; each entry of a domain is one edge over the network, and the rank that takes it in hands it to the other
needers of its domain.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.plan.entries import Entry
    from reshard.plan.portions import Portion, Suppliers

Edges = tuple[tuple[int, int], ...]


def parts_of(
    entry: Entry, suppliers: Suppliers, stripes: Sequence[Sequence[Portion]]
) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Cut a class's string where suppliers or stripes change.

    Args:
        entry: The class and its domains.
        suppliers: Who sends its first copy, and who the others.
        stripes: For each domain (rank, bytes) along the string.

    Yields:
        (start, stop, who sends the first copy, who the others, the rank of each domain that takes this part in).
    """
    first, others = suppliers
    senders = _ends(first, 1)
    others_of = _ends(others, len(entry.domains) - 1) if others else senders
    takers = [row[0][0] for row in stripes]
    shared = {at: _ends(row, 1) for at, row in enumerate(stripes) if len(row) > 1}
    cuts = sorted({0, *(end for row in (senders, others_of, *shared.values()) for end, _ in row)})
    for start, stop in pairwise(cuts):
        for at, row in shared.items():
            takers[at] = _at(row, start)
        yield start, stop, _at(senders, start), _at(others_of, start), list(takers)


def _at(row: Sequence[tuple[int, int]], offset: int) -> int:
    return row[bisect_right(row, offset, key=itemgetter(0))][1]


def _ends(portions: Sequence[Portion], copies: int) -> list[tuple[int, int]]:
    """Where along the string each rank's portion ends, when it is for so many copies of it."""
    ends = accumulate(nbytes for _, nbytes in portions)
    return [(end // copies, rank) for end, (rank, _) in zip(ends, portions, strict=True)]


class Forest:
    """Makes the trees of entries that are brought to the same needers."""

    def __init__(self, entry: Entry) -> None:
        self._domains = entry.domains
        self._home = {rank: at for at, (_, needers) in enumerate(entry.domains) for rank in needers}
        self._inside: dict[int, Edges] = {}

    def tree(self, sender: int, other: int, takers: Sequence[int]) -> tuple[Edges, bool]:
        """The edges of one part, in an order in which the bytes can move, and whether a domain relays it.

        Args:
            sender: The holder that sends the first copy.
            other: The rank that sends the others: it relays where it is in a domain that the part is brought into.
            takers: The rank of each domain that takes this part in.
        """
        relay = self._home.get(other)
        order = list(range(len(takers)))
        if relay:
            order[0], order[relay] = relay, 0
        edges: list[tuple[int, int]] = []
        for at in order:
            edges.append((other if edges else sender, takers[at]))
            edges += self._hand_on(takers[at])
        return tuple(edges), relay is not None and len(takers) > 1

    def _hand_on(self, taker: int) -> Edges:
        if taker not in self._inside:
            _, needers = self._domains[self._home[taker]]
            self._inside[taker] = tuple((taker, needer) for needer in needers if needer != taker)
        return self._inside[taker]
