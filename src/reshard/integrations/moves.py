"""Strided moves between flat memories, in integers: put one behind the other, and taken from each other.

A view of a tensor is an offset and a (size, stride) per dim in its storage. A copy between two views is therefore one
affine map, a ``Move``. To compose two moves, or to see what they share, both are written in digits: where the strides
of both form a chain in which each divides the next, an address has exactly one digit for each of them (as hours,
minutes and seconds do), a region that needs no carry is a box of digits, and boxes are intersected and subtracted dim
by dim. What needs a carry is cut at it; where the strides form no chain, one dim is unrolled until they do.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MOST_PARTS = 1 << 16
"""A move that would fall into more parts than this is not followed."""


class TooIrregularError(Exception):
    """Two regions share elements in a pattern of too many parts."""


class Dim(NamedTuple):
    """One index of a move: how often it steps, and how far on each side, in elements."""

    size: int
    dst: int
    src: int


class Move(NamedTuple):
    """For each index of ``dims``: the element at ``dst`` plus its steps becomes the one at ``src`` plus its steps."""

    dst: int
    src: int
    dims: tuple[Dim, ...]

    @property
    def dst_span(self) -> tuple[int, int]:
        """First written address and one past the last."""
        return self.dst, self.dst + sum((d.size - 1) * d.dst for d in self.dims) + 1

    @property
    def src_span(self) -> tuple[int, int]:
        """First read address and one past the last."""
        return self.src, self.src + sum((d.size - 1) * d.src for d in self.dims) + 1

    def flipped(self) -> Move:
        """The move back."""
        return Move(self.src, self.dst, tuple(Dim(d.size, d.src, d.dst) for d in self.dims))

    def shifted(self, dst: int, src: int = 0) -> Move:
        """The same move with both sides further on."""
        return self._replace(dst=self.dst + dst, src=self.src + src)

    def unrolled(self, index: int) -> Iterator[Move]:
        """The moves that are left when one dim takes its indices one by one."""
        dim, rest = self.dims[index], self.dims[:index] + self.dims[index + 1 :]
        for i in range(dim.size):
            yield Move(self.dst + i * dim.dst, self.src + i * dim.src, rest)


def move_of(
    sizes: Sequence[int], dst: int, dst_strides: Sequence[int], src: int, src_strides: Sequence[int]
) -> Move | None:
    """The move between two views of equal sizes, in its simplest form; None where they have no element."""
    if 0 in sizes:
        return None
    return simplify(Move(dst, src, tuple(Dim(*d) for d in zip(sizes, dst_strides, src_strides, strict=True))))


def simplify(move: Move) -> Move:
    """The same move with the fewest dims, the outermost first on the written side.

    >>> simplify(Move(0, 0, (Dim(4, 8, 8), Dim(1, 5, 5), Dim(8, 1, 1))))
    Move(dst=0, src=0, dims=(Dim(size=32, dst=1, src=1),))
    """
    dims: list[Dim] = []
    for dim in sorted((d for d in move.dims if d.size != 1), key=lambda d: (-d.dst, -d.src)):
        if dims and dims[-1].dst == dim.size * dim.dst and dims[-1].src == dim.size * dim.src:
            dims[-1] = Dim(dims[-1].size * dim.size, dim.dst, dim.src)
        else:
            dims.append(dim)
    return Move(move.dst, move.src, tuple(dims))


class Cell(NamedTuple):
    """A box of digits on the source side of a move: where it begins on the other side and how far each digit goes."""

    box: Box
    dst: int
    strides: tuple[int, ...]
    repeats: tuple[Dim, ...]
    """Dims that do not step on the source side."""

    def part(self, box: Box) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Where a smaller box begins on the other side, and (size, stride) for each digit."""
        begin = box.relative_to(self.box.start).start
        at = self.dst + sum(i * s for i, s in zip(begin, self.strides, strict=True))
        return at, tuple(zip(box.shape, self.strides, strict=True))


def through(read: Move, write: Move) -> tuple[list[Move], list[Move]]:
    """What a read takes of a write: ``read`` is (end <- middle), ``write`` is (middle <- beginning).

    Returns:
        The moves (end <- beginning), and the parts of ``read`` that the write did not write.

    Raises:
        TooIrregularError: More than ``MOST_PARTS`` parts.
    """
    (a_lo, a_hi), (b_lo, b_hi) = read.src_span, write.dst_span
    if a_hi <= b_lo or b_hi <= a_lo:
        return [], [read]
    back = write.flipped()  # now the middle is the source side of both
    strides = {d.src for d in (*read.dims, *back.dims) if d.src}
    clash = clash_of(strides)
    if clash is not None:
        return _through_unrolled(read, write, clash)
    basis = sorted(strides) or [1]
    if (read.src - back.src) % basis[0]:
        return [], [read]
    rest_of_base = read.src % basis[0]
    writes = list(cells_of(back.shifted(0, -rest_of_base), basis))
    found: list[Move] = []
    left: list[Move] = []
    for cell in cells_of(read.shifted(0, -rest_of_base), basis):
        boxes = [cell.box]
        for other in writes:
            shared = cell.box.intersect(other.box)
            if shared is None:
                continue
            dst, there = cell.part(shared)
            src, here = other.part(shared)
            dims = (Dim(n, a, b) for (n, a), (_, b) in zip(there, here, strict=True))
            found.append(simplify(Move(dst, src, (*dims, *cell.repeats))))
            boxes = [part for box in boxes for part in box.subtract(shared)]
        for box in boxes:
            dst, there = cell.part(box)
            src = rest_of_base + sum(i * b for i, b in zip(box.start, basis, strict=True))
            dims = (Dim(n, s, b) for (n, s), b in zip(there, basis, strict=True))
            left.append(simplify(Move(dst, src, (*dims, *cell.repeats))))
    return (found, left) if found else ([], [read])


def clash_of(strides: Iterable[int]) -> tuple[int, int] | None:
    """Two neighbouring strides of which one does not divide the other, or None where they form a chain."""
    return next(((a, b) for a, b in pairwise(sorted(strides)) if b % a), None)


def _through_unrolled(read: Move, write: Move, clash: tuple[int, int]) -> tuple[list[Move], list[Move]]:
    """As ``through``, with the smallest of the dims that clash taken one index at a time."""
    mine = [(d.size, 0, i) for i, d in enumerate(read.dims) if d.src in clash]
    theirs = [(d.size, 1, i) for i, d in enumerate(write.dims) if d.dst in clash]
    size, side, index = min(mine + theirs)
    if size > MOST_PARTS:
        raise TooIrregularError
    found: list[Move] = []
    left: list[Move] = []
    if side == 0:
        for part in read.unrolled(index):
            more, rest = through(part, write)
            found += more
            left += rest
    else:
        left = [read]
        for part in write.unrolled(index):
            more, left = through_all(left, part)
            found += more
    if len(found) + len(left) > MOST_PARTS:
        raise TooIrregularError
    return (found, left) if found else ([], [read])


def through_all(reads: Iterable[Move], write: Move) -> tuple[list[Move], list[Move]]:
    """As ``through``, for several reads."""
    found: list[Move] = []
    left: list[Move] = []
    for read in reads:
        more, rest = through(read, write)
        found += more
        left += rest
    return found, left


def cells_of(move: Move, basis: Sequence[int]) -> Iterator[Cell]:
    """The source side of a move as boxes of digits; ``basis`` is a chain that holds each of its strides."""
    digits: list[tuple[int, int]] = [(1, 0)] * len(basis)
    for index, dim in enumerate(move.dims):
        if not dim.src or dim.size == 1:
            continue
        digit = basis.index(dim.src)
        if digits[digit][0] > 1:  # two dims step equally far: one of them is taken index by index
            for part in unroll(move, index):
                yield from cells_of(part, basis)
            return
        digits[digit] = (dim.size, dim.dst)
    repeats = tuple(d for d in move.dims if not d.src and d.size > 1)
    for dst, src, parts in _without_carry(move.dst, move.src, tuple(digits), basis):
        start = _digits_of(src, basis)
        stop = tuple(i + n for i, (n, _) in zip(start, parts, strict=True))
        yield Cell(Box(start, stop), dst, tuple(s for _, s in parts), repeats)


def unroll(move: Move, index: int) -> Iterator[Move]:
    """As ``Move.unrolled``; TooIrregularError where that would be too many."""
    if move.dims[index].size > MOST_PARTS:
        raise TooIrregularError
    return move.unrolled(index)


def _digits_of(address: int, basis: Sequence[int]) -> tuple[int, ...]:
    """The digits of an address; the last one is not bounded."""
    inner = [address // b % (above // b) for b, above in pairwise(basis)]
    return (*inner, address // basis[-1])


Digits = tuple[tuple[int, int], ...]
"""(size, stride on the other side) by digit, the least digit first."""


def _without_carry(dst: int, src: int, digits: Digits, basis: Sequence[int]) -> Iterator[tuple[int, int, Digits]]:
    """Cut a region so that no part of it carries from one digit into the next."""
    for at, (base, above) in enumerate(pairwise(basis)):
        (size, stride), radix = digits[at], above // base
        begin = src // base % radix
        if begin + size <= radix:
            continue
        if begin:  # up to the first carry
            head = radix - begin
            yield from _without_carry(dst, src, _with(digits, at, (head, stride)), basis)
            dst, src, size = dst + head * stride, src + head * base, size - head
        whole, tail = divmod(size, radix)
        if whole:
            yield from _with_rows(dst, src, _with(digits, at, (radix, stride)), basis, at + 1, (whole, radix * stride))
        if tail:
            dst, src = dst + whole * radix * stride, src + whole * above
            yield from _without_carry(dst, src, _with(digits, at, (tail, stride)), basis)
        return
    yield dst, src, digits


def _with(digits: Digits, at: int, value: tuple[int, int]) -> Digits:
    return (*digits[:at], value, *digits[at + 1 :])


def _with_rows(
    dst: int, src: int, digits: Digits, basis: Sequence[int], at: int, rows: tuple[int, int]
) -> Iterator[tuple[int, int, Digits]]:
    """As ``_without_carry``, with one more dim at digit ``at``, where there may be one already."""
    first, second = sorted((digits[at], rows))
    if first[0] > MOST_PARTS:
        raise TooIrregularError
    for i in range(first[0]):
        step = i * basis[at]
        yield from _without_carry(dst + i * first[1], src + step, _with(digits, at, second), basis)
