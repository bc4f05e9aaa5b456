"""Agreement: from what each rank declares to one plan that all ranks hold, or one error on every rank.

Nothing here moves weights. Each step is one exchange of small values; a rank that finds a fault says so in the next
exchange, so that every rank ends with an error that names it.
"""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import ManifestError, PeerError, ReshardError
from reshard.layouts.merge import bound_pieces
from reshard.layouts.piece import Piece
from reshard.layouts.regroup import regroup
from reshard.plan.plan import check_match
from reshard.refit.casts import Cast, Settled, Wire, settle_dtypes
from reshard.refit.contents import check_memory, check_no_overlap, check_replicas, nbytes_to_keep, tell_neighbours
from reshard.refit.declared import Declared, device_of, same_kind_of_device, to_wire
from reshard.refit.options import Options, same_options
from reshard.refit.sides import Side, merge_side, unite, without_aliases

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.layouts.manifest import Manifest
    from reshard.refit.group import Group
    from reshard.transports.base import Deadline


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the agreement: both manifests in the group's ranks, and this rank's memory."""

    src: Manifest
    dst: Manifest
    options: Options
    src_pieces: tuple[BoundPiece, ...]
    dst_pieces: tuple[BoundPiece, ...]
    not_covered: tuple[str, ...]
    """Source tensors that no destination wants."""

    device: torch.device
    """Where this rank's weights lie; on a rank without any, the kind of device of the others."""

    local: Local
    """How this rank's memory is found from what it declares."""

    casts: tuple[Cast, ...] = ()
    """Every tensor whose two sides declare different dtypes."""

    cast_at: Mapping[str, str] = field(default_factory=dict)
    """The same by the plan's tensors: on which side it is cast."""

    rooms: frozenset[int] = frozenset()
    """As ``Declared.rooms``."""

    whole: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By tensor of the plan that a rank takes whole: by its world the reason."""

    def bind(self, declared: Declared) -> tuple[tuple[BoundPiece, ...], tuple[BoundPiece, ...]]:
        """This rank's source and destination pieces in the memory that ``declared`` names."""
        return self.local.bind(declared)


@dataclass(frozen=True)
class Local:
    """What turns a rank's declaration into its pieces, under the names that the plan uses."""

    src: Manifest
    """The source in the numbers of its own meshes."""

    dst: Manifest
    """This rank's destination world in the numbers of its own meshes."""

    skipped: frozenset[str]
    """Names that this rank does not write: second names of memory that it writes under the first."""

    forms: Mapping[str, tuple[Wire, ...]]
    wanted: Mapping[str, Wire]

    def bind(self, declared: Declared) -> tuple[tuple[BoundPiece, ...], tuple[BoundPiece, ...]]:
        """Source and destination pieces; their views are the live memory, in whatever dtype that is."""
        src = [
            replace(b, piece=replace(b.piece, name=form.name)) if form else b
            for b in _pieces_of(declared.src, self.src)
            for form in self.forms.get(b.piece.name, (None,))
        ]
        dst = [
            replace(b, piece=replace(b.piece, name=self.wanted[b.piece.name].name))
            if b.piece.name in self.wanted
            else b
            for b in _pieces_of(declared.dst, self.dst)
            if b.piece.name not in self.skipped
        ]
        return tuple(src), tuple(dst)


@contextmanager
def or_tell_peers(group: Group, label: str) -> Iterator[None]:
    """If the block raises, say so in the exchange ``label``, so that the other ranks raise too instead of waiting."""
    try:
        yield
    except PeerError:
        raise
    except ReshardError as error:
        group.meeting.fail(label, error.message)
        raise
    except Exception as error:
        group.meeting.fail(label, f"{type(error).__name__}: {error}")
        raise


def agree(group: Group, declared: Declared, deadline: Deadline) -> Agreed:
    """Exchange declarations and make them one source and one destination manifest.

    Raises:
        ManifestError, LayoutError, CoverageError: What does not fit; equal on every rank.
        DigestError: The ranks chose different options.
        PeerError: Another rank found a fault in its own declaration.
    """
    with or_tell_peers(group, "declare"):
        device = device_of(declared)
        payload = zlib.compress(json.dumps(to_wire(declared, device)).encode(), 1)
    payloads = group.meeting.exchange("declare", payload, deadline)
    # Ranks that declare by rules say the same: read it once.
    read = {value: json.loads(zlib.decompress(value)) for value in set(payloads)}
    told = [read[value] for value in payloads]
    options = same_options([row["options"] for row in told])
    kind = same_kind_of_device([row["device"] for row in told])
    sources, destinations = merge_side(told, "src", group.size), merge_side(told, "dst", group.size)
    if not any(side.group.entries for side in sources):
        raise ManifestError(
            "No rank of the group holds a source tensor. Ranks of the source mesh pass src, ranks of the destination "
            "mesh pass dst, and at least one rank must be in the source mesh."
        )
    if not any(side.group.entries for side in destinations):
        raise ManifestError("No rank of the group wants a tensor. Ranks of the destination mesh must pass dst.")
    if len(sources) > 1:
        raise ManifestError(
            f"Worlds {sources[0].world!r} and {sources[1].world!r} both offer tensors; a refit has one source world."
        )
    source = sources[0]
    wanted_names = {name for side in destinations for name in side.own.names}
    not_covered = tuple(name for name in source.group.names if name not in wanted_names)
    settled, dropped = _settle(told, source, destinations, options)
    src, dst = settled.src, unite(settled.dst, group.size)
    at = next((i for i, side in enumerate(destinations) if group.rank in side.numbers), None)
    own, forms = (destinations[0].own, {}) if at is None else (destinations[at].own, settled.wanted[at])
    skipped = frozenset(name for name, ranks in dropped.items() if group.rank in ranks)
    local = Local(source.own, own, skipped, settled.forms, forms)
    with or_tell_peers(group, "contents"):
        src_pieces, dst_pieces = local.bind(declared)
        kept = nbytes_to_keep(src_pieces, dst_pieces, options.staging_nbytes // 2, group.rank)
        check_memory("source", src, src_pieces, group.rank)
        check_memory("destination", dst, dst_pieces, group.rank)
        check_no_overlap(dst_pieces)
        uncast = _pieces_of(declared.src, source.own)
    kept = check_replicas(
        group, source.group, lambda: _check_match(settled, source, destinations), uncast, kept, deadline
    )
    try:
        _check_match(settled, source, destinations)
    except ManifestError as error:
        live = [b for b in _pieces_of(declared.dst, own) if b.binding.buffer not in declared.rooms]
        raise tell_neighbours(group, error, live, _called(destinations, group.size), deadline) from None
    options = replace(options, staging_nbytes=options.staging_nbytes - kept)
    return Agreed(
        regroup(src),
        regroup(dst),
        options,
        src_pieces,
        dst_pieces,
        not_covered,
        device or torch.device(kind),
        local,
        settled.casts,
        settled.cast_at,
        declared.rooms,
        _taken_whole(told, destinations, settled),
    )


def _called(sides: Sequence[Side], size: int) -> list[str]:
    """What each rank of the group is called in its world."""
    called = [f"rank {rank}" for rank in range(size)]
    for side in sides:
        for rank, number in side.numbers.items() if side.world else ():
            called[rank] = f"{side.world} rank {number}"
    return called


def _taken_whole(
    told: Sequence[Mapping[str, Any]], destinations: Sequence[Side], settled: Settled
) -> dict[str, dict[str, str]]:
    """By tensor of the plan that a rank takes whole: by its world the reason."""
    forms = {side.world: wanted for side, wanted in zip(destinations, settled.wanted, strict=True)}
    taken: dict[str, dict[str, str]] = {}
    for row in told:
        for name, reason in row["whole"].items():
            form = forms[row["world"]].get(name)
            taken.setdefault(name if form is None else form.name, {}).setdefault(row["world"], reason)
    return taken


def _settle(
    told: Sequence[Mapping[str, Any]], source: Side, destinations: Sequence[Side], options: Options
) -> tuple[Settled, dict[str, set[int]]]:
    """Both sides as they travel: second names of one memory dropped, dtypes those of the wire."""
    dropped: dict[str, set[int]] = {}
    written = []
    for side in destinations:
        said = {rank: told[rank]["dst"]["manifest"]["aliases"] for rank in side.numbers}
        manifest, gone = without_aliases(source.group, side.group, said)
        written.append(manifest)
        for name, ranks in gone.items():
            dropped.setdefault(name, set()).update(ranks)
    if not options.casts:
        return Settled(source.group, tuple(written), (), {}, tuple({} for _ in written)), dropped
    return settle_dtypes(source.group, written, [side.world for side in destinations]), dropped


def _check_match(settled: Settled, source: Side, destinations: Sequence[Side]) -> None:
    """Check names, shapes and dtypes; one error lists all that does not fit, on either side.

    Raises:
        ManifestError: As ``check_match``, with what the source holds and nobody wants.
    """
    named = [
        manifest.renumber(side.numbers, world=side.world) if side.world else manifest
        for manifest, side in zip(settled.dst, destinations, strict=True)
    ]
    try:
        check_match(settled.src, named)
    except ManifestError as error:
        wanted = [name for manifest in settled.dst for name in manifest.names]
        spare = [name for name in source.own.names if name not in set(wanted)]
        missing = [name for name in getattr(error, "missing", ()) if name in set(wanted)]
        if not spare or not missing:
            raise
        shown = ", ".join(map(repr, spare[:20])) + (f" and {len(spare) - 20} more" if len(spare) > 20 else "")
        raise ManifestError(
            f"{error.message}\nThe source holds {len(spare)} that nobody wants: {shown}. If these are the same tensors "
            f"under other names, give a session's offer or accept the rule in rename=.",
            **{**error.facts, "not_wanted": tuple(spare)},
        ) from None


def _pieces_of(part: Manifest | None, merged: Manifest) -> tuple[BoundPiece, ...]:
    return () if part is None else bound_pieces(part, merged)


__all__ = ["Agreed", "Piece", "agree", "or_tell_peers"]
