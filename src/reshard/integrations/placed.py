"""Moves out of a C-ordered tensor, read as few boxes of it, each with the strided region that it lies in."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from reshard.integrations.moves import MOST_PARTS, TooIrregularError, cells_of, clash_of, unroll
from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.integrations.moves import Cell, Move


class Placed(NamedTuple):
    """A box of a tensor, and where its elements lie in a flat memory: per dim of the box (size, stride) pairs.

    The pairs of a dim refine it, the outermost first; a dim of one index has none.
    """

    box: Box
    offset: int
    groups: tuple[tuple[tuple[int, int], ...], ...]


def boxes_of(move: Move, shape: Sequence[int]) -> list[Placed]:
    """The boxes, in the coordinates of a C-ordered tensor, that a move reads, with where it writes them.

    Args:
        move: Its source side is the tensor's memory; no dim of it stands still there.
        shape: The tensor's.

    Raises:
        TooIrregularError: More than ``MOST_PARTS`` boxes.
    """
    axes: list[tuple[int, int]] = []  # (stride, axis), the least stride first
    step = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] > 1:
            axes.append((step, axis))
        step *= shape[axis]
    strides = {d.src for d in move.dims} | {s for s, _ in axes}
    clash = clash_of(strides)
    if clash is not None:
        _, index = min((d.size, i) for i, d in enumerate(move.dims) if d.src in clash)
        parts = [p for m in unroll(move, index) for p in boxes_of(m, shape)]
        return _few(coalesce(parts))
    basis = sorted(strides) or [1]
    places: list[Placed] = []
    for cell in cells_of(move, basis):
        places += _boxes_of_cell(cell, basis, axes, len(shape))
        _few(places)
    return places


def _few(places: list[Placed]) -> list[Placed]:
    if len(places) > MOST_PARTS:
        raise TooIrregularError
    return places


def _boxes_of_cell(cell: Cell, basis: Sequence[int], axes: Sequence[tuple[int, int]], ndim: int) -> Iterator[Placed]:
    """Digits that continue each other from the least on make a box; the others are taken one by one."""
    start, size = [0] * ndim, [1] * ndim
    groups: list[tuple[tuple[int, int], ...]] = [()] * ndim
    single: list[tuple[int, int, int, int]] = []  # (axis, step on it, size, stride on the other side)
    joined = [True] * ndim
    for digit, base in enumerate(basis):
        if not axes:
            break  # one element
        stride, axis = max(a for a in axes if a[0] <= base)
        begin, n = cell.box.start[digit], cell.box.shape[digit]
        start[axis] += begin * (base // stride)
        if n == 1:
            continue
        if joined[axis] and base // stride == size[axis]:
            size[axis] *= n
            groups[axis] = _joined((n, cell.strides[digit]), groups[axis])
        else:
            joined[axis] = False
            single.append((axis, base // stride, n, cell.strides[digit]))
    for indices in product(*(range(n) for _, _, n, _ in single)):
        at, offset = list(start), cell.dst
        for i, (axis, step, _, stride) in zip(indices, single, strict=True):
            at[axis] += i * step
            offset += i * stride
        box = Box(tuple(at), tuple(a + n for a, n in zip(at, size, strict=True)))
        yield Placed(box, offset, tuple(groups))


def _joined(outer: tuple[int, int], inner: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """One more (size, stride) around the others, in one with the first where they are collinear."""
    if inner and outer[1] == inner[0][0] * inner[0][1]:
        return ((outer[0] * inner[0][0], inner[0][1]), *inner[1:])
    return (outer, *inner)


def coalesce(places: Iterable[Placed]) -> list[Placed]:
    """Join boxes that are neighbours and lie at equal distances, until none are left that can be joined."""
    now = sorted(places)
    while now:
        before = len(now)
        for axis in reversed(range(now[0].box.ndim)):
            now = _coalesce_along(now, axis)
        if len(now) == before:
            break
    return sorted(now)


def _coalesce_along(places: Sequence[Placed], axis: int) -> list[Placed]:
    rows: dict[object, list[Placed]] = {}
    for place in places:
        box = place.box
        key = (box.start[:axis], box.start[axis + 1 :], box.stop[:axis], box.stop[axis + 1 :])
        rows.setdefault((key, place.groups[:axis], place.groups[axis + 1 :]), []).append(place)
    return [one for row in rows.values() for one in _join_row(_join_collinear(sorted(row), axis), axis)]


def _join_collinear(row: Sequence[Placed], axis: int) -> list[Placed]:
    """Neighbours of any length that lie at one stride."""
    done: list[Placed] = []
    for place in row:
        last = done[-1] if done else None
        joined = None
        if last is not None and last.box.stop[axis] == place.box.start[axis]:
            joined = _collinear(last, place, axis)
        if joined is None or last is None:
            done.append(place)
        else:
            done[-1] = _grown(last, place, axis, (joined,))
    return done


def _collinear(a: Placed, b: Placed, axis: int) -> tuple[int, int] | None:
    """The (size, stride) of two neighbours as one, or None where they are not at one stride."""
    if len(a.groups[axis]) > 1 or len(b.groups[axis]) > 1:
        return None
    n, m = a.box.shape[axis], b.box.shape[axis]
    strides = {g[0][1] for g in (a.groups[axis], b.groups[axis]) if g}
    apart = b.offset - a.offset
    stride = strides.pop() if strides else apart
    return None if strides or apart != n * stride or stride <= 0 else (n + m, stride)


def _join_row(row: Sequence[Placed], axis: int) -> list[Placed]:
    """Neighbours of one length at equal distances, as one more dim of the binding."""
    done: list[Placed] = []
    at = 0
    while at < len(row):
        first, end = row[at], at + 1
        apart = row[end].offset - first.offset if end < len(row) else 0
        while end < len(row) and _follows(row[end - 1], row[end], axis, apart):
            end += 1
        if end - at > 1:
            done.append(_grown(first, row[end - 1], axis, _joined((end - at, apart), first.groups[axis])))
        else:
            done.append(first)
        at = end
    return done


def _follows(a: Placed, b: Placed, axis: int, apart: int) -> bool:
    return (
        a.box.stop[axis] == b.box.start[axis]
        and a.box.shape[axis] == b.box.shape[axis]
        and a.groups[axis] == b.groups[axis]
        and b.offset - a.offset == apart > 0
    )


def _grown(first: Placed, last: Placed, axis: int, group: tuple[tuple[int, int], ...]) -> Placed:
    stop = (*first.box.stop[:axis], last.box.stop[axis], *first.box.stop[axis + 1 :])
    groups = (*first.groups[:axis], group, *first.groups[axis + 1 :])
    return Placed(Box(first.box.start, stop), first.offset, groups)
