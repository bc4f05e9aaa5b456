"""Patterns and route classes: all bytes of the model with the same holders, needers and audience, as one string.

Tensors of equal shape, dtype and holders on both sides are one pattern and are cut into cells once: a large
mixture-of-experts model has 45,395 tensors and 17 patterns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import CoverageError, LayoutError, ManifestError
from reshard.plan.cells import BoxIndex, Cell, Claim, find_cells, mask_of, ranks_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.holding import Holding
    from reshard.layouts.piece import TensorSpec

Holdings = tuple["Holding", ...]


@dataclass(frozen=True)
class Pattern:
    """What tensors of one kind have in common: their boxes on both sides, and the cells these make."""

    shape: tuple[int, ...]
    itemsize: int
    held: tuple[Claim, ...]
    needed: tuple[Claim, ...]
    cells: tuple[Cell, ...]
    tensors: tuple[int, ...]
    """Indices of the tensors in the plan, in order."""

    @property
    def audience(self) -> int:
        """All ranks that need any element of such a tensor."""
        mask = 0
        for _, ranks in self.needed:
            mask |= ranks
        return mask


@dataclass(frozen=True)
class RouteClass:
    """All cells of the model with the same holders, needers and audience; its bytes are one string in plan order.

    The audience are the ranks that the bytes are sent to. It is the needers, except where a strategy sends more than
    is needed (the conventional way sends every tensor whole).
    """

    holders: int
    needers: int
    audience: int
    parts: tuple[tuple[int, tuple[Box, ...]], ...]
    """(pattern, boxes): each tensor of the pattern contributes these boxes."""

    nbytes: int


def make_patterns(
    specs: Sequence[TensorSpec],
    src: Sequence[Holdings],
    dst: Sequence[Holdings],
    rank_name: Callable[[int], str] = str,
) -> tuple[Pattern, ...]:
    """Group the tensors by what decides their cells, and cut each group once.

    Args:
        specs: The tensors in plan order.
        src: Who holds each, in the plan's ranks.
        dst: Who wants each, in the plan's ranks.
        rank_name: What to call a rank of the plan in an error.

    Raises:
        CoverageError: A destination box, or a part of one, is held by no source rank.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    known = _Numbers()
    for index, (spec, held, wanted) in enumerate(zip(specs, src, dst, strict=True)):
        key = (spec.shape, spec.dtype, spec.granule, known.number(held), known.number(wanted))
        groups.setdefault(key, []).append(index)
    needs: dict[tuple[object, ...], tuple[Claim, ...]] = {}
    patterns = []
    for kind, tensors in groups.items():
        spec = specs[tensors[0]]
        holds = _claims(spec, src[tensors[0]])
        wants = (*kind[:3], kind[4])  # many patterns differ in their holders only
        if wants not in needs:
            needs[wants] = _claims(spec, dst[tensors[0]])
            _check_wanted_once(spec, needs[wants], rank_name)
        cells = find_cells(spec.shape, holds, needs[wants])
        _check_covered(spec, holds, cells, rank_name)
        _check_blocks(spec, cells)
        patterns.append(Pattern(spec.shape, spec.itemsize, holds, needs[wants], cells, tuple(tensors)))
    return tuple(patterns)


class _Numbers:
    """A number for each distinct tuple of holdings: by identity first, since hashing a mesh of many ranks is slow."""

    def __init__(self) -> None:
        self._by_identity: dict[tuple[int, ...], int] = {}
        self._by_value: dict[Holdings, int] = {}

    def number(self, holdings: Holdings) -> int:
        ids = tuple(map(id, holdings))
        found = self._by_identity.get(ids)
        if found is None:
            found = self._by_identity[ids] = self._by_value.setdefault(holdings, len(self._by_value))
        return found


def _claims(spec: TensorSpec, holdings: Holdings) -> tuple[Claim, ...]:
    masks: dict[Box, int] = {}
    for holding in holdings:
        for box, ranks in holding.boxes(spec):
            masks[box] = masks.get(box, 0) | mask_of(ranks)
    return tuple(sorted(masks.items()))


def _check_wanted_once(spec: TensorSpec, needed: Sequence[Claim], rank_name: Callable[[int], str]) -> None:
    """Refuse a rank that wants an element twice, through two layouts of one tensor."""
    index = BoxIndex(needed)
    for box, mask in needed:
        for shared, other, ranks in index.overlapping(box):
            if other != box and mask & ranks:
                raise ManifestError(
                    f"{spec.name!r}: {rank_name(ranks_of(mask & ranks)[0])} wants {shared} twice, in {box} and in "
                    f"{other}. A rank has one layout of a tensor; describe a second copy as another tensor.",
                    tensor=spec.name,
                    box=shared,
                )


def _check_covered(
    spec: TensorSpec, held: Sequence[Claim], cells: Sequence[Cell], rank_name: Callable[[int], str]
) -> None:
    gap = next((cell for cell in cells if cell.needers and not cell.holders), None)
    if gap is None:
        return
    ranks = ranks_of(gap.needers)
    names = ", ".join(rank_name(rank) for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    covered = sum(cell.box.numel for cell in cells if cell.holders)
    verb = "needs" if len(ranks) == 1 else "need"
    raise CoverageError(
        f"{spec.name!r}: {names} {verb} {gap.box} and no source rank holds it. The sources hold {covered} elements in "
        f"{len(held)} boxes of a tensor of shape {list(spec.shape)}. If this part is padding, leave it out of the "
        f"destination's pieces.",
        tensor=spec.name,
        ranks=ranks,
        box=gap.box,
    )


def _check_blocks(spec: TensorSpec, cells: Sequence[Cell]) -> None:
    """Refuse a cut of either side that falls inside a block which only the other side declares."""
    for cell in cells:
        for dim, granule in enumerate(spec.granule):
            for edge in (cell.box.start[dim], cell.box.stop[dim]):
                if edge % granule and edge != spec.shape[dim]:
                    raise LayoutError(
                        f"{spec.name!r}: a shard edge at index {edge} of dim {dim} cuts a block of {granule} (shape "
                        f"{list(spec.shape)}). Blocks travel whole: move the edge to a multiple of {granule} on the "
                        f"side that has it, or quantise again after the refit.",
                        tensor=spec.name,
                        dim=dim,
                        edge=edge,
                        granule=granule,
                    )


def make_classes(patterns: Sequence[Pattern], *, whole: bool = False) -> tuple[RouteClass, ...]:
    """Collect the cells of all patterns by (holders, needers, audience).

    Args:
        patterns: What ``make_patterns`` gave.
        whole: Send every byte of a tensor to every rank that needs a part of it (the conventional way).
    """
    parts: dict[tuple[int, int, int], dict[int, list[Box]]] = {}
    for at, pattern in enumerate(patterns):
        audience = pattern.audience
        for cell in pattern.cells:
            to = audience if whole else cell.needers
            if to and cell.holders:
                key = (cell.holders, cell.needers, to)
                parts.setdefault(key, {}).setdefault(at, []).append(cell.box)
    classes = []
    for (holders, needers, audience), by_pattern in sorted(parts.items()):
        rows = tuple((at, tuple(boxes)) for at, boxes in by_pattern.items())
        nbytes = sum(
            sum(box.numel for box in boxes) * patterns[at].itemsize * len(patterns[at].tensors) for at, boxes in rows
        )
        classes.append(RouteClass(holders, needers, audience, rows, nbytes))
    return tuple(classes)
