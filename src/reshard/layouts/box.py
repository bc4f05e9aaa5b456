"""Box: a half-open region ``[start, stop)`` of a tensor, and the few operations that everything else is made of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The half-open region ``[start, stop)`` of a tensor, in elements.

    Coordinates are global: they count from the tensor's origin, not from the shard's. A box holds at least one
    element; ``None`` stands for "no box" wherever one may be missing. A scalar is the box with no dims.

    >>> left, right = Box((0, 0), (4, 8)), Box((2, 4), (6, 8))
    >>> left.intersect(right)
    Box(start=(2, 4), stop=(4, 8))
    >>> left.intersect(Box((4, 0), (6, 8))) is None  # they touch, but share no element
    True
    """

    start: tuple[int, ...]
    """First index on each dim."""

    stop: tuple[int, ...]
    """One past the last index on each dim; always greater than ``start``."""

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop):
            raise ValueError(f"start has {len(self.start)} dims, stop has {len(self.stop)}: {self!r}")
        if any(lo >= hi for lo, hi in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"a Box holds at least one element, got {self}; use None for 'no box'")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box | None:
        """The box of a whole tensor, or None where the tensor has no element.

        >>> Box.whole((4, 8)), Box.whole((0, 5)), Box.whole(())
        (Box(start=(0, 0), stop=(4, 8)), None, Box(start=(), stop=()))
        """
        return None if 0 in shape else cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(hi - lo for lo, hi in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The overlap with ``other``, or None where they share no element."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return None if any(lo >= hi for lo, hi in zip(start, stop, strict=True)) else Box(start, stop)

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        return all(map(int.__le__, self.start, other.start)) and all(map(int.__ge__, self.stop, other.stop))

    def shift(self, by: Sequence[int]) -> Box:
        """This box moved by ``by`` elements on each dim.

        >>> Box((2, 4), (3, 8)).shift((-2, 0))
        Box(start=(0, 4), stop=(1, 8))
        """
        return Box(
            tuple(lo + d for lo, d in zip(self.start, by, strict=True)),
            tuple(hi + d for hi, d in zip(self.stop, by, strict=True)),
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """This box in coordinates that count from ``origin``."""
        return self.shift(tuple(-o for o in origin))

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """What is left of this box without ``other``: disjoint boxes, at most two a dim.

        >>> Box((0, 0), (4, 4)).subtract(Box((1, 0), (2, 4)))
        (Box(start=(0, 0), stop=(1, 4)), Box(start=(2, 0), stop=(4, 4)))
        """
        shared = self.intersect(other)
        if shared is None:
            return (self,)
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for dim in range(self.ndim):
            for lo, hi in ((start[dim], shared.start[dim]), (shared.stop[dim], stop[dim])):
                if lo < hi:
                    rest.append(Box((*start[:dim], lo, *start[dim + 1 :]), (*stop[:dim], hi, *stop[dim + 1 :])))
            start[dim], stop[dim] = shared.start[dim], shared.stop[dim]
        return tuple(rest)

    def linear_range(self, lo: int, hi: int) -> tuple[Box, ...]:
        """The elements ``[lo, hi)`` of this box in C order, as at most ``2 * ndim - 1`` boxes in that order.

        >>> Box((0, 0), (3, 4)).linear_range(2, 9)
        (Box(start=(0, 2), stop=(1, 4)), Box(start=(1, 0), stop=(2, 4)), Box(start=(2, 0), stop=(3, 1)))
        """
        if not 0 <= lo < hi <= self.numel:
            raise ValueError(f"[{lo}, {hi}) is not a range of the {self.numel} elements of {self}")
        if lo == 0 and hi == self.numel:
            return (self,)
        row = prod(self.shape[1:])
        first, skip = divmod(lo, row)
        last, keep = divmod(hi, row)
        if first == last:  # inside one row
            return self._row(first).linear_range(skip, keep)
        head = self._row(first).linear_range(skip, row) if skip else ()
        tail = self._row(last).linear_range(0, keep) if keep else ()
        full_from = first + (1 if skip else 0)
        return head + ((self._rows(full_from, last),) if full_from < last else ()) + tail

    def _rows(self, lo: int, hi: int) -> Box:
        """Rows ``[lo, hi)`` of this box, counted from its start on dim 0."""
        at = self.start[0]
        return Box((at + lo, *self.start[1:]), (at + hi, *self.stop[1:]))

    def _row(self, index: int) -> _Row:
        return _Row(self._rows(index, index + 1))

    def __str__(self) -> str:
        """The box as in our messages: ``[0:4, 2:8)`` counts rows 0 to 3 and columns 2 to 7."""
        return "[" + ", ".join(f"{lo}:{hi}" for lo, hi in zip(self.start, self.stop, strict=True)) + ")"


@dataclass(frozen=True, slots=True)
class _Row:
    """A box whose first dim has one index; its C order is that of the other dims."""

    box: Box

    def linear_range(self, lo: int, hi: int) -> tuple[Box, ...]:
        inner = Box(self.box.start[1:], self.box.stop[1:])
        first_lo, first_hi = self.box.start[0], self.box.stop[0]
        return tuple(Box((first_lo, *b.start), (first_hi, *b.stop)) for b in inner.linear_range(lo, hi))
