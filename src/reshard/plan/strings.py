"""ByteString: boxes laid end to end, each in C order, that can be cut at byte offsets which fall on granules.

A route class is one such string over the whole model, and so is what one stream carries; both are cut by offset, so
that shares are exact whatever the number of tensors. Cuts prefer the ends of boxes and of rows, as far as a slack
allows, since a cut inside a row makes three boxes of one.
"""

from __future__ import annotations

from bisect import bisect_right
from math import prod
from typing import TYPE_CHECKING

from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.piece import TensorSpec

Item = tuple[int, Box]
"""(index of the tensor in the plan, box)."""


class ByteString:
    """``items`` end to end in the given order; offsets count bytes from its start."""

    def __init__(self, items: Sequence[Item], specs: Sequence[TensorSpec]) -> None:
        self.items = items
        self._specs = specs
        self._starts = [0]
        for tensor, box in items:
            self._starts.append(self._starts[-1] + box.numel * specs[tensor].itemsize)

    @property
    def nbytes(self) -> int:
        return self._starts[-1]

    def floor(self, offset: int, slack: int = 0) -> int:
        """The last place at or before ``offset`` where a cut may be; a coarser one where one lies within ``slack``."""
        if offset >= self.nbytes:
            return self.nbytes
        index = bisect_right(self._starts, offset) - 1
        best = self._starts[index]
        if best == offset or best > offset - slack:
            return best
        tensor, box = self.items[index]
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
        found: list[Item] = []
        index = bisect_right(self._starts, lo) - 1
        while index < len(self.items) and self._starts[index] < hi:
            tensor, box = self.items[index]
            start, stop = self._starts[index], self._starts[index + 1]
            if lo <= start and stop <= hi:
                found.append((tensor, box))
            else:
                size = self._specs[tensor].itemsize
                first, last = (max(lo, start) - start) // size, (min(hi, stop) - start) // size
                found.extend((tensor, part) for part in box.linear_range(first, last))
            index += 1
        return found


def unit_nbytes(box: Box, spec: TensorSpec) -> int:
    """Bytes of the largest part of a box that no cut may divide: an element, a block, or a row of blocks."""
    for dim, size in enumerate(box.shape):
        if spec.granule and spec.granule[dim] > 1 and size > 1:
            return prod(box.shape[dim + 1 :]) * spec.itemsize * min(size, spec.granule[dim])
    return spec.itemsize
