"""Cells: the cut points of all boxes of a pattern make a grid; each cell has one set of holders and one of needers.

Sets of ranks are bit masks (bit r is rank r), so that a set union is one operation however many ranks there are.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

Claim = tuple[Box, int]
"""A box and the mask of the ranks that hold (or need) it."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A box in which every element has the same holders and the same needers."""

    box: Box
    holders: int
    needers: int


def find_cells(shape: Sequence[int], held: Sequence[Claim], needed: Sequence[Claim]) -> tuple[Cell, ...]:
    """The cells of one pattern, in order of their boxes; those that nobody holds and nobody needs are left out.

    Cost: the product over dims of the number of distinct cut points, independent of the tensor's size.
    """
    cuts = [_cut_points(dim, held, needed) for dim in range(len(shape))]
    index = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]
    counts = [len(edges) - 1 for edges in cuts]
    strides = [prod(counts[dim + 1 :]) for dim in range(len(counts))]
    holders, needers = [0] * prod(counts), [0] * prod(counts)
    for masks, claims in ((holders, held), (needers, needed)):
        for box, mask in claims:
            ranges = [
                range(index[d][lo] * strides[d], index[d][hi] * strides[d], strides[d])
                for d, (lo, hi) in enumerate(zip(box.start, box.stop, strict=True))
            ]
            for at in map(sum, product(*ranges)):
                masks[at] |= mask
    found = []
    for at, place in enumerate(product(*(range(n) for n in counts))):
        if holders[at] or needers[at]:
            start = tuple(edges[i] for edges, i in zip(cuts, place, strict=True))
            stop = tuple(edges[i + 1] for edges, i in zip(cuts, place, strict=True))
            found.append(Cell(Box(start, stop), holders[at], needers[at]))
    return _merge(found, len(shape))


def _cut_points(dim: int, *sides: Sequence[Claim]) -> list[int]:
    return sorted({edge for claims in sides for box, _ in claims for edge in (box.start[dim], box.stop[dim])})


def _merge(cells: list[Cell], ndim: int) -> tuple[Cell, ...]:
    """Join neighbours with equal holders and needers, last dim first, so that runs stay long."""
    for dim in reversed(range(ndim)):

        def line(cell: Cell, dim: int = dim) -> tuple[object, ...]:
            start, stop = cell.box.start, cell.box.stop
            others = (start[:dim], stop[:dim], start[dim + 1 :], stop[dim + 1 :])
            return (others, cell.holders, cell.needers, start[dim])

        joined: list[Cell] = []
        for cell in sorted(cells, key=line):
            last = joined[-1] if joined else None
            if last is not None and line(last)[:3] == line(cell)[:3] and last.box.stop[dim] == cell.box.start[dim]:
                joined[-1] = Cell(Box(last.box.start, cell.box.stop), cell.holders, cell.needers)
            else:
                joined.append(cell)
        cells = joined
    return tuple(sorted(cells, key=lambda cell: cell.box.start))


@lru_cache(maxsize=1 << 13)  # a plan asks for few masks, many times each
def ranks_of(mask: int) -> tuple[int, ...]:
    """The ranks of a mask, in order.

    >>> ranks_of(0b1011)
    (0, 1, 3)
    """
    ranks = []
    while mask:
        low = mask & -mask
        ranks.append(low.bit_length() - 1)
        mask ^= low
    return tuple(ranks)


def mask_of(ranks: Iterable[int]) -> int:
    """The mask of some ranks."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


class BoxIndex:
    """Boxes to be asked which of them overlap another box, sorted along the dim that tells them apart best."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        ndim = claims[0][0].ndim if claims else 0
        self._dim = max(range(ndim), key=lambda d: len({box.start[d] for box, _ in claims}), default=None)
        dim = self._dim
        self._claims = list(claims) if dim is None else sorted(claims, key=lambda c: c[0].start[dim])
        self._starts: list[int] = []
        self._reach: list[int] = []
        if dim is not None:
            for box, _ in self._claims:
                self._starts.append(box.start[dim])
                self._reach.append(max(box.stop[dim], self._reach[-1] if self._reach else 0))

    def overlapping(self, box: Box) -> Iterator[tuple[Box, Box, int]]:
        """(overlap, box, mask) of every box that shares an element with ``box``."""
        if self._dim is None:
            yield from ((other, other, mask) for other, mask in self._claims)
            return
        at = bisect_left(self._starts, box.stop[self._dim]) - 1
        while at >= 0 and self._reach[at] > box.start[self._dim]:
            other, mask = self._claims[at]
            shared = box.intersect(other)
            if shared is not None:
                yield shared, other, mask
            at -= 1
