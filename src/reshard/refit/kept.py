"""Kept: fingerprints of the versions that this rank served, by which it can say which one each tensor is now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.refit import fingerprints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.refit.offers import Offer
    from reshard.refit.windowed import WindowedRefit

_KEPT_VERSIONS = 4
"""Versions whose fingerprints are remembered, to say which one a tensor is."""


class Kept:
    """What one rank remembers of its live weights."""

    def __init__(self) -> None:
        self._known: dict[str, dict[int, int]] = {}
        self._committed: dict[str, list[BoundPiece]] = {}

    def forget(self) -> None:
        """Forget all: it is of memory that is no longer the live one."""
        self._known.clear()
        self._committed.clear()

    def keep(self, offer: Offer, compiled: WindowedRefit, version: int) -> None:
        """Remember the weights that a refit has just made live."""
        whole = {one.name: list(one.pieces) for one in offer.whole}
        live = {bound.piece.name: whole.get(bound.piece.name, []) for bound in compiled.live}
        for bound in compiled.live:
            if bound.piece.name not in whole:
                live[bound.piece.name].append(bound)
        for name, value in _fingerprints(offer, live).items():
            known = self._known.setdefault(name, {})
            known.pop(version, None)
            known[version] = value
            while len(known) > _KEPT_VERSIONS:
                known.pop(next(iter(known)))
        self._committed.update(live)

    def versions(self, offer: Offer | None, verify: str) -> dict[str, int | None]:
        """By tensor: the version that its bytes are now; None where they are of none that is remembered.

        Args:
            offer: What the rank has; None before it has said so.
            verify: As the session was opened with.

        Raises:
            ConfigError: Nothing is remembered.
        """
        if offer is not None and offer.hooks.install is not None:
            raise ConfigError(
                "This rank hands what has landed to its install hook, and the session does not know the live weights. "
                "Compare there."
            )
        if verify != "fingerprint":
            raise ConfigError(
                f"This session was opened with verify={verify!r}, which keeps no fingerprints. Open it with "
                f"verify='fingerprint'."
            )
        if offer is None:
            return {}
        now = _fingerprints(offer, self._committed)
        found: dict[str, int | None] = {}
        for name, known in self._known.items():
            same = [version for version, value in known.items() if value == now.get(name)]
            found[name] = same[-1] if same else None
        for name, first in offer.manifest.aliases:  # of two names for one memory one is written
            both = found.get(name, found.get(first))
            found.update({name: both, first: both})
        return {name: found.get(name) for name in offer.manifest.names}


def _fingerprints(offer: Offer, live: Mapping[str, Sequence[BoundPiece]]) -> dict[str, int]:
    specs = {entry.spec.name: entry.spec for entry in offer.manifest.entries}
    return fingerprints.of_pieces((bound for pieces in live.values() for bound in pieces), specs)
