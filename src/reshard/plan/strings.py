"""ByteString: boxes laid end to end, each in C order, that can be cut at byte offsets which fall on granules.

A route class is one such string over the whole model, and so is what one stream carries; both are cut by offset, so
that shares are exact whatever the number of tensors. Cuts prefer the ends of boxes and of rows, as far as a slack
allows, since a cut inside a row makes three boxes of one.

A class's string is not listed box by box to find a place in it (those of a large model have some hundred thousand boxes
in sum): all tensors of a pattern have the same boxes and so the same size.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.piece import TensorSpec
    from reshard.plan.classes import Pattern, RouteClass

Item = tuple[int, Box]
"""(index of the tensor in the plan, box)."""


class ByteString:
    """``items`` end to end in the given order; offsets count bytes from its start."""

    def __init__(self, items: Sequence[Item], specs: Sequence[TensorSpec]) -> None:
        self._listed = items
        self._specs = specs
        sizes = (prod(box.shape) * specs[tensor].itemsize for tensor, box in items)
        self._starts = list(accumulate(sizes, initial=0))

    @property
    def items(self) -> Sequence[Item]:
        return self._listed

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def floor(self, offset: int, slack: int = 0) -> int:
        """The last place at or before ``offset`` where a cut may be; a coarser one where one lies within ``slack``."""
        if offset >= self.nbytes:
            return self.nbytes
        best, (tensor, box) = self._at(offset)
        if best == offset or best > offset - slack:
            return best
        spec = self._specs[tensor]
        for dim, size in enumerate(box.shape):
            granule = spec.granule[dim] if spec.granule else 1
            step = prod(box.shape[dim + 1 :]) * spec.itemsize * granule
            best += (offset - best) // step * step
            if best > offset - slack or (granule > 1 and size > 1):
                return best  # blocks of several rows do not lie one after the other: no cut inside a row of blocks
        return best

    def between(self, lo: int, hi: int) -> list[Item]:
        """The items of the part ``[lo, hi)``; both must be places that ``floor`` gave."""
        index = bisect_right(self._starts, lo) - 1
        upto = bisect_left(self._starts, hi, index)
        return self._cut(self._listed[index:upto], self._starts[index], lo, hi)

    def _at(self, offset: int) -> tuple[int, Item]:
        """Where the item begins that has the byte at ``offset``, and the item."""
        index = bisect_right(self._starts, offset) - 1
        return self._starts[index], self._listed[index]

    def _cut(self, items: Sequence[Item], start: int, lo: int, hi: int) -> list[Item]:
        """Those parts of ``items``, of which the first begins at ``start``, that lie in ``[lo, hi)``."""
        found: list[Item] = []
        for tensor, box in items:
            size = self._specs[tensor].itemsize
            stop = start + prod(box.shape) * size
            if lo <= start and stop <= hi:
                found.append((tensor, box))
            elif start < hi and lo < stop:
                first, last = (max(lo, start) - start) // size, (min(hi, stop) - start) // size
                found.extend((tensor, part) for part in box.linear_range(first, last))
            start = stop
        return found


class ClassString(ByteString):
    """The string of a route class: by tensor in plan order, then by box. Listed only as far as it is asked for."""

    def __init__(self, cls: RouteClass, patterns: Sequence[Pattern], specs: Sequence[TensorSpec]) -> None:
        self._specs = specs
        self._nbytes = cls.nbytes
        self._parts = [patterns[at].tensors for at, _ in cls.parts]
        self._boxes = [sorted(boxes, key=lambda box: box.start) for _, boxes in cls.parts]
        self._sizes = [sum(box.numel for box in boxes) * patterns[at].itemsize for at, boxes in cls.parts]

    @cached_property
    def _rows(self) -> tuple[Sequence[int], Sequence[int], dict[int, int]]:
        """The tensors in order, where each begins (and the last ends), and the part of the class that each is in."""
        if len(self._parts) == 1:
            (tensors,), (size,) = self._parts, self._sizes
            return tensors, range(0, (len(tensors) + 1) * size, size), {}
        part_of = {tensor: at for at, tensors in enumerate(self._parts) for tensor in tensors}
        ordered = sorted(part_of)
        starts = accumulate((self._sizes[part_of[tensor]] for tensor in ordered), initial=0)
        return ordered, list(starts), part_of

    @cached_property
    def _every(self) -> list[Item]:
        return self._list(0, len(self._rows[0]))

    @property
    def items(self) -> Sequence[Item]:
        return self._every

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def between(self, lo: int, hi: int) -> list[Item]:
        starts = self._rows[1]
        first = bisect_right(starts, lo) - 1
        return self._cut(self._list(first, bisect_left(starts, hi, first)), starts[first], lo, hi)

    def _at(self, offset: int) -> tuple[int, Item]:
        row = bisect_right(self._rows[1], offset) - 1
        start = self._rows[1][row]
        for tensor, box in self._list(row, row + 1):
            stop = start + box.numel * self._specs[tensor].itemsize
            if offset < stop:
                break
            start = stop
        return start, (tensor, box)

    def _list(self, first: int, stop: int) -> list[Item]:
        """The items of the rows ``[first, stop)``."""
        tensors, _, part_of = self._rows
        return [(tensor, box) for tensor in tensors[first:stop] for box in self._boxes[part_of.get(tensor, 0)]]


def unit_nbytes(box: Box, spec: TensorSpec) -> int:
    """Bytes of the largest part of a box that no cut may divide: an element, a block, or a row of blocks."""
    for dim, size in enumerate(box.shape):
        if spec.granule and spec.granule[dim] > 1 and size > 1:
            return prod(box.shape[dim + 1 :]) * spec.itemsize * min(size, spec.granule[dim])
    return spec.itemsize
