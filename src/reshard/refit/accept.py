"""Accept: from what a destination rank names to an offer that is bound to memory, and to those who are called."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError
from reshard.refit.offers import make_offer
from reshard.refit.room import give_room
from reshard.refit.whole import chosen_whole, match_loaders, take_whole
from reshard.refit.windows import most_room
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.layouts.piece import TensorSpec
    from reshard.refit.call import Setup
    from reshard.refit.landed import Hooks
    from reshard.refit.names import Rename
    from reshard.refit.offers import Offer
    from reshard.refit.whole import Whole

logger = logging.getLogger("reshard.session")

GIVEN_TO_A_LOADER = "it is given to a loader"


def make_acceptance(
    what: Any,
    setup: Setup,
    hooks: Hooks,
    *,
    rename: Rename | None,
    groups: Mapping[str, str] | Callable[[str], str] | None,
    offered: Callable[[], Iterable[TensorSpec]],
) -> Offer:
    """What a rank of a destination accepts.

    Args:
        what: As ``make_offer``.
        setup: The session.
        hooks: Whom the rank calls; loaders by pattern of names.
        rename: As ``make_offer``.
        groups: As ``make_offer``.
        offered: Gives what the source offers.

    Raises:
        ConfigError: A hook that cannot be called, or an install hook where bytes land in the live weights.
        ManifestError, LayoutError, BindingError: What cannot be described.
    """
    hooks.check()
    if hooks.install is not None and setup.options.commit != "staged":
        raise ConfigError(
            f"install= takes what has landed beside the live weights, and this session was opened with "
            f"commit={setup.options.commit!r}. Open it with commit='staged'."
        )
    offer = make_offer(what, world=setup.me.world, rename=rename, groups=groups)
    manifest, loaders = match_loaders(offer.manifest, hooks.loaders or {}, offered)
    reasons = chosen_whole(manifest.names, setup.options.routes)
    reasons.update(dict.fromkeys(loaders, GIVEN_TO_A_LOADER))
    rank, live = setup.me.rank, hooks.install is None
    whole: tuple[Whole, ...] = ()
    rooms: list[Any] = []
    if reasons:
        limit = None if setup.options.commit == "staged" else most_room(setup.options.staging_nbytes)
        manifest, whole, room = take_whole(
            manifest, reasons, rank, setup.room_on, uncut=loaders, live=live, limit=limit
        )
        rooms.append(room)
        if limit is not None and room.numel() > limit:
            logger.warning(
                "%s: a tensor that goes whole takes %s of room, more than half of staging_nbytes (%s)",
                setup.me.member,
                format_nbytes(room.numel()),
                format_nbytes(setup.options.staging_nbytes),
            )
    if not live:
        manifest, room = give_room(manifest, rank, setup.room_on, besides=[one.name for one in whole])
        rooms.append(room)
    hooks = replace(hooks, loaders=loaders)
    return replace(offer, manifest=manifest, hooks=hooks, whole=whole, rooms=tuple(rooms))
