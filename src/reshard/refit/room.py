"""Room: memory of the session in which bytes land, where the live weights are not theirs to write yet."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

import torch

from reshard.errors import ManifestError
from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.holding import HERE, Rule
from reshard.layouts.piece import Piece
from reshard.refit.windows import room_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.holding import Entry
    from reshard.layouts.manifest import Manifest

_ALIGNED = 64
"""Where a tensor begins in its buffer, in bytes: a cache line."""


def carve(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device | str, *, pinned: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer for tensors of these shapes and dtypes, and each of them in it, contiguous.

    The buffer may be moved into shared memory: its parts follow. ``pinned`` is for the host's memory that a GPU reads.
    """
    buffer = torch.zeros(sum(map(_nbytes, shapes)), dtype=torch.uint8, device=device, pin_memory=pinned)
    return buffer, _beside(buffer, shapes)


def carve_for_turns(
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device | str, limit: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """As ``carve``, for tensors that take turns: a buffer of at most ``limit`` bytes, or of the largest of them.

    Each tensor is given the beginning of the buffer, until it is known which ones are there at a time (``place``).
    """
    buffer = torch.zeros(room_nbytes([*map(_nbytes, shapes)], limit), dtype=torch.uint8, device=device)
    return buffer, [part for shape in shapes for part in _beside(buffer, [shape])]


def place(views: Sequence[torch.Tensor], room: torch.Tensor) -> list[torch.Tensor]:
    """Tensors of the shapes and dtypes of ``views``, beside each other in room that they have to themselves."""
    return _beside(room, [(tuple(view.shape), view.dtype) for view in views])


def _beside(buffer: torch.Tensor, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    starts = accumulate(map(_nbytes, shapes), initial=0)
    return [
        buffer[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for at, (shape, dtype) in zip(starts, shapes, strict=False)
    ]


def _nbytes(shape_and_dtype: tuple[tuple[int, ...], torch.dtype]) -> int:
    shape, dtype = shape_and_dtype
    return aligned(prod(shape) * dtype.itemsize)


def aligned(nbytes: int) -> int:
    """What a tensor of so many bytes takes in a buffer."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def nbytes_beside(manifest: Manifest, rooms: Sequence[torch.Tensor]) -> int:
    """Bytes that land beside the live memory of a manifest where the commit is staged, what is in room left out."""
    buffers = {room.untyped_storage().data_ptr() for room in rooms}
    beside = [bound.view for bound in manifest.local if bound.binding.buffer not in buffers]
    beside += [local for _, _, local in manifest.unread]
    return sum(aligned(view.numel() * view.element_size()) for view in beside)


def give_room(
    manifest: Manifest, rank: int, device: torch.device | str, *, besides: Iterable[str] = ()
) -> tuple[Manifest, torch.Tensor]:
    """Bind every piece of one rank to room of its own.

    Args:
        manifest: What the rank wants; memory that it may name is left alone.
        rank: Its number in its world.
        device: Where the room is.
        besides: Tensors that are bound to room already.

    Returns:
        The manifest bound to the room, and the room.

    Raises:
        ManifestError: A placement that has several readings.
    """
    number, bound = rank if manifest.here is None else manifest.here, set(besides)
    entries = [entry for entry in manifest.entries if entry.spec.name not in bound]
    pieces = [(entry, box) for entry in entries for box in boxes_of(entry, number)]
    shapes = [(box.shape, getattr(torch, entry.spec.dtype)) for entry, box in pieces]
    buffer, views = carve(shapes, device)
    local = [piece for piece in manifest.local if piece.piece.name in bound]
    local += [
        BoundPiece(Piece(entry.spec.name, box), binding_of(view), view)
        for (entry, box), view in zip(pieces, views, strict=True)
    ]
    return replace(manifest, local=tuple(local), unread=(), owner=None), buffer


def boxes_of(entry: Entry, rank: int) -> Iterator[Box]:
    """The boxes of a tensor that one rank of the world wants.

    Raises:
        ManifestError: A placement that has several readings.
    """
    if entry.alternatives:
        raise ManifestError(
            f"{entry.spec.name!r}: its placements have several readings, and which one holds is known only when all "
            f"ranks have met. Describe the tensor by pieces (Manifest.from_views, from_pieces).",
            tensor=entry.spec.name,
        )
    for holding in entry.holdings:
        if isinstance(holding, Rule):
            if rank in holding.ranks:
                yield from (shard.box for shard in holding.layout(entry.spec).shards(rank))
        else:
            yield from (box for at, boxes in holding.held if at in (HERE, rank) for box in boxes)
