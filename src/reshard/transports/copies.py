"""Copies: pairs of views of equal shape over the memory on either side of a copy, found once and copied many times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import BindingError
from reshard.transports.views import BoundMemory, Region, aligned_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from reshard.layouts.box import Box
    from reshard.transports.operations import Copies


def wire_copies(placed: Sequence[tuple[Box, int, Region]], wire: torch.Tensor, base: int, *, pack: bool) -> Copies:
    """Copies between regions and a bucket that begins at byte ``base`` of the wire memory's storage."""
    storage = wire.untyped_storage()
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for outer, offset, region in placed:
        local, remote = region.pair(outer, storage, base + offset)
        targets.append(remote if pack else local)
        sources.append(local if pack else remote)
    return targets, sources


def common_regions(name: str, box: Box, a: BoundMemory, b: BoundMemory) -> Iterator[tuple[Region, Region]]:
    """Regions of two memories that hold the same boxes and together what both hold of ``box``."""
    for mine in a.regions(name, box):
        for theirs in b.regions(name, mine.box):
            if theirs.box == mine.box:
                yield mine, theirs
            else:
                yield from common_regions(name, theirs.box, a, b)


def same_shape(want: Region, have: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of two regions of one box as words of equal size and shape."""
    word = min(aligned_word(want.itemsize, want.offset_nbytes), aligned_word(have.itemsize, have.offset_nbytes))
    a, b = want.words(word), have.words(word)
    if a.shape == b.shape:
        return a, b
    return _refined(a, b)


def _refined(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split dims of both views until their shapes agree: each shape is a refinement of the same box.

    Raises:
        BindingError: The two shapes cut one dim in ways that no common grid refines.
    """
    a, b = a.squeeze(), b.squeeze()
    left, right = list(a.shape), list(b.shape)
    shape: list[int] = []
    while left or right:
        step = min(left[-1], right[-1])
        if left[-1] % step or right[-1] % step:
            raise BindingError(
                f"Views of shape {tuple(a.shape)} and {tuple(b.shape)} interleave one box in ways that have no "
                f"common grid. Describe one of them by more pieces."
            )
        shape.insert(0, step)
        for sizes in (left, right):
            sizes[-1] //= step
            if sizes[-1] == 1:
                sizes.pop()
    return a.view(shape), b.view(shape)
