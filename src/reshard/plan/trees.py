"""Trees: from amounts to edges. Which rank hands each byte of a class to which rank, in an order in which it can move.

A part of a class's string on which nothing changes (the same suppliers, the same stripes) has one tree over the domains
it enters; each entry of a domain is one edge over the network, and the rank that takes it in hands it to the other
needers of its domain.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.plan.entries import Entry

Edges = tuple[tuple[int, int], ...]


def parts_of(
    entry: Entry, suppliers: Sequence[tuple[int, int]], stripes: Sequence[Sequence[tuple[int, int]]]
) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Cut a class's string where suppliers or stripes change.

    Args:
        entry: The class and its domains.
        suppliers: (rank, bytes), holders first, in sum the bytes times the number of domains.
        stripes: For each domain (rank, bytes) along the string.

    Yields:
        (start, stop, the supplying ranks with repeats, the rank of each domain that takes this part in).
    """
    length = entry.nbytes
    line: list[tuple[int, int]] = []  # (end on the line, rank)
    at = 0
    for rank, nbytes in suppliers:
        at += nbytes
        line.append((at, rank))
    cuts = {0, length} | {end % length for end, _ in line}
    ends: list[list[tuple[int, int]]] = []
    for row in stripes:
        at, marks = 0, []
        for rank, nbytes in row:
            at += nbytes
            marks.append((at, rank))
        ends.append(marks)
        cuts |= {mark for mark, _ in marks}
    ordered = sorted(cuts)
    for start, stop in pairwise(ordered):
        supplying = [_at(line, start + copy * length) for copy in range(len(entry.domains))]
        yield start, stop, supplying, [_at(marks, start) for marks in ends]


def _at(line: Sequence[tuple[int, int]], offset: int) -> int:
    return next(rank for end, rank in line if offset < end)


def tree(entry: Entry, supplying: Sequence[int], takers: Sequence[int]) -> tuple[Edges, bool]:
    """The edges of one part, in an order in which the bytes can move, and whether any domain relays.

    Domains whose ranks supply are attached first: each of them brings as many places as it takes away later, and there
    is always a place left, since the first supplier is a holder.
    """
    home = {rank: at for at, (_, needers) in enumerate(entry.domains) for rank in needers}
    ready = [rank for rank in supplying if rank not in home]
    waiting: dict[int, list[int]] = {}
    for rank in supplying:
        if rank in home:
            waiting.setdefault(home[rank], []).append(rank)
    order = sorted(range(len(entry.domains)), key=lambda at: (at not in waiting, -len(waiting.get(at, ())), at))
    edges: list[tuple[int, int]] = []
    for at in order:
        sender, taker = ready.pop(0), takers[at]
        edges.append((sender, taker))
        _, needers = entry.domains[at]
        edges.extend((taker, needer) for needer in needers if needer != taker)
        ready.extend(waiting.get(at, ()))
    return tuple(edges), bool(waiting)
