"""BoundPiece: a piece with the memory of this rank that it lies in, and how tensors and shards become such pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.layouts.binding import Binding
from reshard.layouts.piece import Piece

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.layout import Layout


@dataclass(frozen=True)
class BoundPiece:
    """A piece of this rank, where it lies, and the view itself (an object with torch's tensor attributes)."""

    piece: Piece
    binding: Binding
    view: Any


def binding_of(view: Any) -> Binding:
    """Where a tensor lies, read by its attributes: its storage, offset, shape and strides."""
    itemsize = view.element_size()
    return Binding(
        buffer=view.untyped_storage().data_ptr(),
        offset_nbytes=view.storage_offset() * itemsize,
        shape=tuple(view.shape),
        strides=tuple(view.stride()),
        itemsize=itemsize,
    )


def bind_shards(name: str, layout: Layout, rank: int, local: Any) -> list[BoundPiece]:
    """The pieces that ``rank`` holds under ``layout``, as views of its local tensor."""
    bound = []
    for shard in layout.shards(rank):
        view = local
        for dim, (lo, size) in enumerate(zip(shard.local_start, shard.box.shape, strict=True)):
            view = view.narrow(dim, lo, size)
        bound.append(BoundPiece(Piece(name, shard.box), binding_of(view), view))
    return bound


def refine(coarse: Sequence[int], fine: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """For each coarse dim the sizes of the fine dims whose product it is, in order; None where they do not fit.

    >>> refine((8, 3), (2, 4, 3)), refine((8, 3), (4, 6))
    (((2, 4), (3,)), None)
    """
    if tuple(coarse) == tuple(fine):
        return tuple((n,) for n in fine)
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in coarse:
        run: list[int] = []
        product = 1
        while product < size or not run:
            if at == len(fine):
                return None
            product *= fine[at]
            run.append(fine[at])
            at += 1
        if product != size:
            return None
        groups.append(tuple(run))
    while at < len(fine) and groups and fine[at] == 1:
        groups[-1] = (*groups[-1], 1)
        at += 1
    return tuple(groups) if at == len(fine) else None


def find_aliases(bound: Sequence[BoundPiece]) -> tuple[tuple[str, str], ...]:
    """Names whose pieces are the same boxes in the same memory, each with the first name of that memory."""
    where: dict[str, list[tuple[Box, Binding]]] = {}
    for item in bound:
        where.setdefault(item.piece.name, []).append((item.piece.box, item.binding))
    first: dict[tuple[tuple[Box, Binding], ...], str] = {}
    pairs = []
    for name, places in sorted(where.items()):
        known = first.setdefault(tuple(sorted(places, key=lambda p: p[0])), name)
        if known != name:
            pairs.append((name, known))
    return tuple(pairs)
