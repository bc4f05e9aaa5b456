"""Proof: replay labels and check that a plan does what it must. Independent of how the plan was made.

Two halves. Geometry, for each pattern: the cells of a needer make up its boxes exactly and nothing else, and every
holder of a cell really holds it. Routes, for each class: every needer gets each byte of the string exactly once, and
every sender holds what it sends at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import ProofError
from reshard.plan.cells import BoxIndex, ranks_of
from reshard.plan.strings import ClassString
from reshard.units import count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec
    from reshard.plan.classes import Pattern, RouteClass
    from reshard.plan.routes import Route


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked; a plan that fails raises ProofError instead."""

    tensors: int
    patterns: int
    cells: int
    classes: int
    routes: int
    delivered_nbytes: int
    """Bytes that arrive at ranks that need them, copies inside a rank included."""

    needed_nbytes: int
    """Bytes that all destination boxes hold; equal to ``delivered_nbytes`` in every plan that passes."""

    def __str__(self) -> str:
        return (
            f"proven: {count(self.tensors, 'tensor')} in {count(self.patterns, 'pattern')}, "
            f"{count(self.cells, 'cell')}, {count(self.classes, 'class', 'classes')}, {count(self.routes, 'route')}; "
            f"{self.delivered_nbytes:,} byte{'' if self.delivered_nbytes == 1 else 's'} delivered exactly once"
        )


def prove(
    specs: Sequence[TensorSpec],
    patterns: Sequence[Pattern],
    classes: Sequence[RouteClass],
    routes: Sequence[Route],
    rank_name: Callable[[int], str] = str,
) -> Proof:
    """Check the geometry of every pattern and replay every route.

    Raises:
        ProofError: An element that is missed, written twice, written where nobody asked, or sent by a rank that does
            not hold it; names the tensor (or class) and the rank.
    """
    needed = 0
    for pattern in patterns:
        _prove_geometry(specs[pattern.tensors[0]].name, pattern, rank_name)
        per_tensor = sum(box.numel * mask.bit_count() for box, mask in pattern.needed)
        needed += per_tensor * pattern.itemsize * len(pattern.tensors)
    _prove_classes(specs, patterns, classes)
    by_class: dict[int, list[Route]] = {at: [] for at in range(len(classes))}
    for route in routes:
        if route.route_class not in by_class:
            raise ProofError(f"A route names class {route.route_class}; the plan has {len(classes)}.")
        by_class[route.route_class].append(route)
    delivered = sum(
        _replay(_label(specs, patterns, classes[at]), classes[at], members, rank_name)
        for at, members in by_class.items()
    )
    for at, members in by_class.items():
        _check_cuts(specs, patterns, classes[at], members)
    if delivered != needed:
        raise ProofError(f"The routes deliver {delivered} bytes, the destination boxes hold {needed}.")
    cells = sum(len(pattern.cells) for pattern in patterns)
    tensors = sum(len(pattern.tensors) for pattern in patterns)
    return Proof(tensors, len(patterns), cells, len(classes), len(routes), delivered, needed)


def _label(specs: Sequence[TensorSpec], patterns: Sequence[Pattern], cls: RouteClass) -> str:
    return specs[patterns[cls.parts[0][0]].tensors[0]].name


def _prove_geometry(name: str, pattern: Pattern, rank_name: Callable[[int], str]) -> None:
    cells = BoxIndex([(cell.box, at) for at, cell in enumerate(pattern.cells)])
    _check_disjoint(name, pattern, cells)
    for box, ranks in pattern.needed:
        covered = 0
        for shared, _, at in cells.overlapping(box):
            missed = ranks & ~pattern.cells[at].needers
            if missed:
                raise ProofError(
                    f"{name!r}: {shared} of {rank_name(ranks_of(missed)[0])} is not among its cell's needers."
                )
            covered += shared.numel
        if covered != box.numel:
            raise ProofError(f"{name!r}: {covered} of {box.numel} elements of {box} are in a cell; all must be.")
    needed, held = BoxIndex(pattern.needed), BoxIndex(pattern.held)
    for cell in pattern.cells:
        wanted = sum(shared.numel * (m & cell.needers).bit_count() for shared, _, m in needed.overlapping(cell.box))
        if wanted != cell.box.numel * cell.needers.bit_count():
            raise ProofError(f"{name!r}: cell {cell.box} would be written where no destination asked for it.")
        _check_held(name, cell.box, cell.holders, held, rank_name)


def _check_disjoint(name: str, pattern: Pattern, cells: BoxIndex) -> None:
    for cell in pattern.cells:
        if sum(1 for _ in cells.overlapping(cell.box)) != 1:
            raise ProofError(f"{name!r}: cell {cell.box} overlaps another cell; an element would be written twice.")


def _check_held(name: str, box: Box, holders: int, held: BoxIndex, rank_name: Callable[[int], str]) -> None:
    left = holders
    overlaps = list(held.overlapping(box))
    for shared, _, ranks in overlaps:
        if shared == box:
            left &= ~ranks
    for rank in ranks_of(left):  # a cell that spans several boxes of one rank
        parts = [shared for shared, _, ranks in overlaps if ranks >> rank & 1]
        disjoint = all(a.intersect(b) is None for i, a in enumerate(parts) for b in parts[i + 1 :])
        if not disjoint or sum(part.numel for part in parts) != box.numel:
            raise ProofError(f"{name!r}: {rank_name(rank)} is named as a holder of {box} but does not hold all of it.")


def _prove_classes(specs: Sequence[TensorSpec], patterns: Sequence[Pattern], classes: Sequence[RouteClass]) -> None:
    """Every cell is in exactly one class, that of its holders and needers."""
    filed: dict[tuple[int, object], int] = {}
    for cls in classes:
        total = 0
        for at, boxes in cls.parts:
            for box in boxes:
                filed[at, box] = filed.get((at, box), 0) + 1
            total += sum(b.numel for b in boxes) * patterns[at].itemsize * len(patterns[at].tensors)
        members = {(at, box) for at, boxes in cls.parts for box in boxes}
        cells = {
            (at, cell.box)
            for at in {at for at, _ in cls.parts}
            for cell in patterns[at].cells
            if cell.holders == cls.holders and cell.needers == cls.needers
        }
        if not members <= cells or total != cls.nbytes or cls.needers & ~cls.audience:
            raise ProofError(f"{_label(specs, patterns, cls)!r}: its class does not consist of its cells.")
    for at, pattern in enumerate(patterns):
        for cell in pattern.cells:
            if cell.needers and filed.get((at, cell.box), 0) != 1:
                name = specs[pattern.tensors[0]].name
                raise ProofError(f"{name!r}: cell {cell.box} is in {filed.get((at, cell.box), 0)} classes, not in one.")


def _check_cuts(
    specs: Sequence[TensorSpec], patterns: Sequence[Pattern], cls: RouteClass, routes: Sequence[Route]
) -> None:
    """Check that no route begins or ends inside an element or a granule."""
    edges = {edge for route in routes for edge in (route.start, route.stop)} - {0, cls.nbytes}
    if not edges:
        return
    string = ClassString(cls, patterns, specs)
    for edge in sorted(edges):
        if string.floor(edge) != edge:
            label = _label(specs, patterns, cls)
            raise ProofError(f"{label!r}: a route is cut at byte {edge} of its class, inside an element or a granule.")


def _replay(label: str, cls: RouteClass, routes: Sequence[Route], rank_name: Callable[[int], str]) -> int:
    """Run a class's routes in order on labels; the bytes that arrive where they are needed."""
    landed: dict[int, list[tuple[int, int]]] = {}
    holders, audience = frozenset(ranks_of(cls.holders)), frozenset(ranks_of(cls.audience))
    for route in routes:
        if not 0 <= route.start < route.stop <= cls.nbytes:
            raise ProofError(f"{label!r}: a route carries bytes [{route.start}, {route.stop}) of {cls.nbytes}.")
        part = (route.start, route.stop)
        for sender, receiver in route.edges:
            if sender < 0 or receiver < 0:
                raise ProofError(f"{label!r}: a route names rank {min(sender, receiver)}.")
            if sender not in holders and not _covers(landed.get(sender, []), *part):
                raise ProofError(
                    f"{label!r}: {rank_name(sender)} sends bytes [{route.start}, {route.stop}) of a class of "
                    f"{cls.nbytes} bytes that it does not hold at that moment."
                )
            if sender == receiver and sender not in holders:
                raise ProofError(f"{label!r}: {rank_name(sender)} copies to itself what it does not hold.")
            if receiver not in audience:
                raise ProofError(f"{label!r}: {rank_name(receiver)} receives what it never asked for.")
            landed.setdefault(receiver, []).append(part)
    for rank in ranks_of(cls.needers):
        at = 0
        for start, stop in sorted(landed.get(rank, [])):
            if start != at:
                what = "twice" if start < at else "never"
                lo, hi = min(start, at), max(start, at)
                raise ProofError(f"{label!r}: {rank_name(rank)} gets bytes [{lo}, {hi}) of its class {what}.")
            at = stop
        if at != cls.nbytes:
            raise ProofError(f"{label!r}: {rank_name(rank)} never gets bytes [{at}, {cls.nbytes}) of its class.")
    return cls.nbytes * cls.needers.bit_count()


def _covers(intervals: Sequence[tuple[int, int]], lo: int, hi: int) -> bool:
    if intervals and intervals[-1][0] <= lo and hi <= intervals[-1][1]:
        return True  # what came last is what is handed on, nearly always
    for start, stop in sorted(intervals):
        if start <= lo < stop:
            lo = stop
    return lo >= hi
