"""Faults: what keeps a rank from taking part in a refit, told to all before anything begins."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from reshard.layouts.manifest import find_rebound

if TYPE_CHECKING:
    from reshard.refit.handed import Handed
    from reshard.refit.offers import Offer

MOVED = (
    "what the places of its tensors depend on (depends_on=) is not what it was when they were accepted; call "
    "session.accept again with the places of today"
)


def fault_of(offer: Offer | None, *, writes: bool) -> str:
    """What keeps a rank from taking part, in half a sentence; empty if nothing does.

    Args:
        offer: What it brings.
        writes: Whether it is a destination.
    """
    verb, call = ("accepted", "accept") if writes else ("offered", "offer")
    if offer is None:
        return f"it has {verb} nothing: call session.{call} before refit"
    name = find_rebound(offer.original)
    if name is not None:
        return (
            f"its module holds another tensor as {name!r} than when it was {verb}, so the bytes would go astray; "
            f"call session.{call} again, or update parameters in place (param.data.copy_)"
        )
    if offer.has_moved:
        return MOVED
    name = _find_freed(offer)
    if name is not None:
        return (
            f"{name!r} has no memory: it lies on the meta device, or was freed since it was {verb}; bring it back, or "
            f"call session.{call} with weights that are there"
        )
    held = held_by_somebody(offer.handed)
    if held:
        return (
            f"somebody keeps {held} as the last refit handed it out, in memory that this one writes again; keep a copy "
            f"instead (tensor.clone())"
        )
    return ""


def held_by_somebody(handed: Handed | None) -> str:
    """The names of what was handed out and somebody still holds; empty if there is none, or nobody looks."""
    held = () if handed is None else handed.held
    more = f" and {len(held) - 5} more" if len(held) > 5 else ""
    return f"{', '.join(map(repr, held[:5]))}{more}"


def _find_freed(offer: Offer) -> str | None:
    """The name of a tensor whose storage holds no memory: to read or write it would end the process."""
    seen: set[int] = set()
    for bound in chain(offer.manifest.local, *(one.pieces for one in offer.whole)):
        if bound.binding.buffer in seen or not bound.view.numel():
            continue
        seen.add(bound.binding.buffer)
        if not bound.view.untyped_storage().data_ptr():
            return offer.renamed.get(bound.piece.name, bound.piece.name)
    return None
