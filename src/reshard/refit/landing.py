"""Landing: the copies beside the live weights that a refit needs, made once: room to land in, sources in the way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from reshard.layouts.bound import BoundPiece, binding_of
from reshard.refit.contents import clashing
from reshard.refit.room import carve
from reshard.transports.views import aligned_word, copy_all, words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.refit.agreement import Agreed


class Copies:
    """The copies of one rank, each beside the memory that it stands for, in the dtype in which its tensor travels.

    A cast needs none: bytes are cast as they leave, and as they land in the live weights.

    Args:
        staged: Whether the destination's bytes land beside the live weights.
    """

    def __init__(self, staged: bool) -> None:
        self._staged = staged
        self._taken: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self._put: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.nbytes = 0
        self.clashing = False
        """Whether a source is copied since this rank's own destination would overwrite it."""

    def of_sources(self, agreed: Agreed) -> tuple[BoundPiece, ...]:
        """Source pieces as they are read: the live ones, and copies of those that the destination would overwrite."""
        clash = clashing(agreed.src_pieces, agreed.dst_pieces)
        self.clashing = bool(clash)
        dtypes = {entry.spec.name: entry.spec.dtype for entry in agreed.src.entries}
        chosen = {at: getattr(torch, dtypes[agreed.src_pieces[at].piece.name]) for at in clash}
        pieces, copies = self._copied(agreed.src_pieces, chosen)
        self._taken = _as_words(copies, [agreed.src_pieces[at].view for at in chosen])
        return pieces

    def of_targets(self, agreed: Agreed) -> tuple[BoundPiece, ...]:
        """Destination pieces as they are written: the live ones, or beside them where the commit is staged."""
        dtypes = {entry.spec.name: entry.spec.dtype for entry in agreed.dst.entries}
        chosen = {
            at: getattr(torch, dtypes[bound.piece.name])
            for at, bound in enumerate(agreed.dst_pieces)
            if self._staged and bound.binding.buffer not in agreed.rooms
        }
        pieces, copies = self._copied(agreed.dst_pieces, chosen, agreed.lands_on)
        pairs = _as_words([agreed.dst_pieces[at].view for at in chosen], copies)
        self._put = dict(zip(chosen, zip(*pairs, strict=True), strict=True)) if chosen else {}
        return pieces

    def take(self) -> None:
        """Copy what this rank's own destination is about to overwrite."""
        _copy(*self._taken)

    def put(self, some: Iterable[int] | None = None) -> None:
        """Copy what has landed into the live weights; casts likewise.

        Args:
            some: Places in the destination pieces; all of them if not given.
        """
        pairs = list(self._put.values()) if some is None else [self._put[at] for at in some if at in self._put]
        _copy([target for target, _ in pairs], [copy for _, copy in pairs])

    def _copied(
        self, pieces: Sequence[BoundPiece], chosen: dict[int, torch.dtype], device: torch.device | None = None
    ) -> tuple[tuple[BoundPiece, ...], list[torch.Tensor]]:
        """The pieces with those at ``chosen`` in memory of their own, in one buffer, on their device if not told."""
        if not sum(pieces[at].view.numel() for at in chosen):
            return tuple(pieces), []
        shapes = [(tuple(pieces[at].view.shape), dtype) for at, dtype in chosen.items()]
        live = pieces[next(iter(chosen))].view.device
        pinned = device is not None and device.type == "cpu" and live.type == "cuda"
        buffer, copies = carve(shapes, device or live, pinned=pinned)
        self.nbytes += buffer.numel()
        result = list(pieces)
        for at, copy in zip(chosen, copies, strict=True):
            result[at] = replace(pieces[at], binding=binding_of(copy), view=copy)
        return tuple(result), copies


def _as_words(
    targets: list[torch.Tensor], sources: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Pairs of equal dtype as plain words: every bit travels, and dtypes without a copy kernel do too."""
    for at, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if target.dtype == source.dtype:
            targets[at], sources[at] = _words(target), _words(source)
        else:
            targets[at], sources[at] = target.detach(), source.detach()
    return targets, sources


def _words(view: torch.Tensor) -> torch.Tensor:
    itemsize = view.element_size()
    at = int(view.storage_offset()) * itemsize
    return words(
        view.untyped_storage(), at, tuple(view.shape), tuple(view.stride()), itemsize, aligned_word(itemsize, 0)
    )


def copy_bits(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into the target of its dtype and shape."""
    _copy(*_as_words(list(targets), list(sources)))


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    with torch.no_grad():
        copy_all(targets, sources)
