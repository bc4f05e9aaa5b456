"""Snapshot: a source's tensors as they are at one moment, in copies that are made once and filled again and again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.layouts.bound import BoundPiece, binding_of

if TYPE_CHECKING:
    import torch

    from reshard.refit.offers import Offer


class Snapshot:
    """Copies of all that a rank offers; a refit reads them in place of the tensors.

    Args:
        offer: What is copied. Names of one memory share a copy.
    """

    def __init__(self, offer: Offer) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: dict[Any, torch.Tensor] = {}
        manifest = offer.manifest
        local = tuple(self._copied(bound) for bound in manifest.local)
        unread = tuple((name, rank, self._copy(view)) for name, rank, view in manifest.unread)
        self.offer = replace(offer, manifest=replace(manifest, local=local, unread=unread))
        """The same offer, bound to the copies; rebound parameters are still found in the original."""

    def take(self) -> None:
        """Fill the copies with what the tensors hold now."""
        for copy, view in self._pairs:
            copy.copy_(view)

    def _copied(self, bound: BoundPiece) -> BoundPiece:
        copy = self._copy(bound.view)
        return replace(bound, binding=binding_of(copy), view=copy)

    def _copy(self, view: torch.Tensor) -> torch.Tensor:
        key = binding_of(view)
        if key not in self._copies:
            detached = view.detach()
            self._copies[key] = detached.clone().contiguous()
            self._pairs.append((self._copies[key], detached))
        return self._copies[key]
