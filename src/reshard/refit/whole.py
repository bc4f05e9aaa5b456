"""Whole: tensors that a rank takes whole, because it hands them to a loader or because a route says so.

They travel as everything does, packed and once into each domain; here one more destination layout asks for them. They
land in room of the session, and a rank then cuts its own pieces out of them, or gives them to the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import BindingError, ConfigError, ManifestError
from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.box import Box
from reshard.layouts.holding import HERE, Entry, Pieces
from reshard.layouts.piece import Piece
from reshard.refit.room import boxes_of, carve, carve_for_turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.layouts.manifest import Manifest
    from reshard.layouts.piece import TensorSpec

WAYS = ("direct", "whole")


@dataclass(frozen=True, eq=False)
class Whole:
    """One tensor that a rank takes whole."""

    name: str
    reason: str
    pieces: tuple[BoundPiece, ...]
    """What is cut out of it into live memory."""

    boxes: tuple[Box, ...]
    """What is cut out of it for whoever installs."""

    def cuts(self, tensor: Any) -> tuple[tuple[Any, Any], ...]:
        """(live memory, the same elements of the tensor as it landed) of each piece."""
        return tuple((bound.view, _cut(tensor, bound.piece.box).reshape(bound.view.shape)) for bound in self.pieces)

    def landed(self, name: str, tensor: Any) -> tuple[tuple[Piece, Any], ...]:
        """The boxes of the tensor as it landed, contiguous, under a name of the caller's."""
        return tuple((Piece(name, box), _cut(tensor, box).contiguous()) for box in self.boxes)


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))]


def check_routes(routes: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Routes as they are agreed: (pattern, way), in order.

    Raises:
        ConfigError: A way that is unknown, or no patterns.
    """
    if routes is not None and not isinstance(routes, Mapping):
        raise ConfigError(f"routes={routes!r}: give a way for each pattern of names, as in {{'*.mlp.*': 'whole'}}.")
    rows = tuple((routes or {}).items())
    for pattern, way in rows:
        if way not in WAYS:
            raise ConfigError(f"routes={{{pattern!r}: {way!r}}}: a tensor goes one of {', '.join(map(repr, WAYS))}.")
    return rows


def chosen_whole(names: Iterable[str], routes: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The names that are to go whole, each with the reason; the first pattern that matches decides.

    >>> chosen_whole(["a.mlp.w", "a.w"], [("*.mlp.*", "direct"), ("*", "whole")])
    {'a.w': "routes= says so for '*'"}
    """
    chosen = {}
    for name in names:
        pattern, way = next(((p, w) for p, w in routes if fnmatchcase(name, p)), ("", "direct"))
        if way == "whole":
            chosen[name] = f"routes= says so for {pattern!r}"
    return chosen


def path_text(rules: Sequence[str], whole: Mapping[str, str]) -> str:
    """How a tensor travels, in one line: whole and why, or direct; and the rules of its routes.

    >>> path_text(["local", "striped"], {}), path_text(["striped"], {"gen0": "it is given to a loader"})
    ('local, striped', 'whole for gen0, since it is given to a loader: striped')
    """
    text = ", ".join(rules)
    by_reason: dict[str, list[str]] = {}
    for world, reason in sorted(whole.items()):
        by_reason.setdefault(reason, []).append(world)
    said = " and ".join(f"for {', '.join(worlds)}, since {reason}" for reason, worlds in by_reason.items())
    return f"whole {said}: {text}" if said else text


def match_loaders(
    manifest: Manifest, loaders: Mapping[str, Any], offered: Callable[[], Iterable[TensorSpec]]
) -> tuple[Manifest, dict[str, Any]]:
    """Find the tensors of each loader, and add those to a manifest that only the source has.

    Args:
        manifest: What the rank wants, under the names that both sides use.
        loaders: By pattern of names.
        offered: Gives what the source offers, asked only for patterns that match nothing of the manifest.

    Returns:
        The manifest, and by tensor its loader.

    Raises:
        ManifestError: A pattern that matches nothing on either side.
    """
    of: dict[str, Any] = {}
    more: dict[str, TensorSpec] = {}
    for pattern, loader in loaders.items():
        found = [name for name in manifest.names if fnmatchcase(name, pattern)]
        if not found:
            theirs = [spec for spec in offered() if fnmatchcase(spec.name, pattern)]
            more.update({spec.name: spec for spec in theirs})
            found = [spec.name for spec in theirs]
        if not found:
            raise ManifestError(
                f"loaders= has the pattern {pattern!r}, which matches no tensor of this rank, nor one that the source "
                f"offers. Give names as the source has them; '*' stands for any text.",
                pattern=pattern,
            )
        for name in found:
            of.setdefault(name, loader)
    if not more:
        return manifest, of
    entries = [Entry(spec, (Pieces(((HERE, _whole(spec)),)),)) for spec in more.values()]
    return replace(manifest, entries=(*manifest.entries, *entries)), of


def take_whole(
    manifest: Manifest,
    reasons: Mapping[str, str],
    rank: int,
    device: torch.device | str,
    *,
    uncut: Iterable[str] = (),
    live: bool = True,
    limit: int | None = None,
) -> tuple[Manifest, tuple[Whole, ...], torch.Tensor]:
    """Ask for some tensors whole, in room for them.

    Args:
        manifest: What the rank wants. A tensor of which it wants nothing stays as it is.
        reasons: By tensor that is taken whole.
        rank: The rank's number in its world.
        device: Where the room is.
        uncut: Those of them that are not cut into the rank's pieces.
        live: Whether the others are cut into the memory that the manifest names, or for whoever installs.
        limit: Bytes of room in which they take turns; the largest has room if that is more. None for room for all.

    Returns:
        The manifest bound to the room, what lands there, and the room.

    Raises:
        ManifestError: A placement that has several readings.
        BindingError: A piece that has no memory.
    """
    number, left = rank if manifest.here is None else manifest.here, set(uncut)
    wanted = {
        entry.spec.name: (entry.spec, tuple(boxes_of(entry, number)))
        for entry in manifest.entries
        if entry.spec.name in reasons
    }
    wanted = {name: row for name, row in wanted.items() if row[1]}
    shapes = [(spec.shape, getattr(torch, spec.dtype)) for spec, _ in wanted.values()]
    buffer, views = carve(shapes, device) if limit is None else carve_for_turns(shapes, device, limit)
    bound: dict[str, list[BoundPiece]] = {}
    for piece in manifest.local:
        bound.setdefault(piece.piece.name, []).append(piece)
    taken = []
    for name, (_, boxes) in wanted.items():
        pieces = tuple(bound.get(name, ())) if live and name not in left else ()
        if live and name not in left and sum(piece.piece.box.numel for piece in pieces) != sum(b.numel for b in boxes):
            raise BindingError(
                f"{name!r} is to be taken whole and cut into this rank's pieces, and not all of these have memory. "
                f"Describe the tensor by views (Manifest.from_views), give it to a loader, or let it go 'direct'.",
                tensor=name,
            )
        taken.append(Whole(name, reasons[name], pieces, () if live or name in left else boxes))
    entries = tuple(
        replace(entry, holdings=(Pieces(((HERE, _whole(entry.spec)),)),), fits=())
        if entry.spec.name in wanted
        else entry
        for entry in manifest.entries
    )
    local = [piece for piece in manifest.local if piece.piece.name not in wanted]
    local += [
        BoundPiece(Piece(name, box), binding_of(view), view)
        for (name, (spec, _)), view in zip(wanted.items(), views, strict=True)
        for box in _whole(spec)
    ]
    return replace(manifest, entries=entries, local=tuple(local)), tuple(taken), buffer


def _whole(spec: TensorSpec) -> tuple[Box, ...]:
    box = Box.whole(spec.shape)
    return () if box is None else (box,)
