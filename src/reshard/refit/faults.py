"""Faults: what keeps a rank from taking part in a refit, told to all before anything begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.layouts.manifest import find_rebound

if TYPE_CHECKING:
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
    held = () if offer.handed is None else offer.handed.held
    if held:
        more = f" and {len(held) - 5} more" if len(held) > 5 else ""
        return (
            f"somebody keeps {', '.join(map(repr, held[:5]))}{more} as the last refit handed it out, in memory that "
            f"this one writes again; keep a copy instead (tensor.clone())"
        )
    return ""
