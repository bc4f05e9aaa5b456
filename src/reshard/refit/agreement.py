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
from reshard.layouts.bound import binding_of
from reshard.layouts.merge import bound_pieces
from reshard.layouts.piece import Piece, natural_key
from reshard.layouts.regroup import regroup
from reshard.plan.plan import check_match
from reshard.refit.casts import Cast, Settled, Wire, settle_dtypes
from reshard.refit.contents import check_memory, check_no_overlap, check_replicas, nbytes_to_keep, tell_neighbours
from reshard.refit.declared import Declared, device_of, same_kind_of_device, to_wire
from reshard.refit.options import Options, same_options
from reshard.refit.room import aligned, place
from reshard.refit.sides import Side, merge_side, unite, without_aliases
from reshard.refit.windows import by_window, cut_windows, most_room
from reshard.units import format_nbytes

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
    """As ``Declared.buffers``."""

    whole: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By tensor of the plan that a rank takes whole: by its world the reason."""

    room: torch.Tensor | None = None
    """Where the tensors that this rank takes whole take turns; None where each has room of its own."""

    windows: tuple[tuple[str, ...], ...] = ((),)
    """Which tensors of the plan have their turn together; those that are not named, in the first window."""

    lands_on: torch.device | None = None
    """As ``Declared.lands_on``."""

    kept_nbytes: int = 0
    """What of ``staging_nbytes`` is not left in the options: room for turns, or copies of what would be overwritten."""

    @property
    def kept_text(self) -> str:
        """What an error about the staging limit adds where the limit is not all that the user gave."""
        if not self.kept_nbytes:
            return ""
        return (
            f" The limit is what staging_nbytes leaves beside {format_nbytes(self.kept_nbytes)} for whole tensors to "
            f"land in, or for what would be overwritten."
        )

    @property
    def parts(self) -> tuple[Agreed, ...]:
        """What moves one after the other, each part of the plan with its place in the room."""
        if len(self.windows) == 1:
            return (replace(self, dst_pieces=self._placed(self.dst_pieces)),)
        srcs, dsts = (by_window(side.entries, lambda e: e.spec.name, self.windows) for side in (self.src, self.dst))
        held, wanted = (
            by_window(pieces, lambda bound: bound.piece.name, self.windows)
            for pieces in (self.src_pieces, self.dst_pieces)
        )
        return tuple(
            replace(
                self,
                src=replace(self.src, entries=tuple(src)),
                dst=replace(self.dst, entries=tuple(dst)),
                src_pieces=tuple(held_here),
                dst_pieces=self._placed(wanted_here),
            )
            for src, dst, held_here, wanted_here in zip(srcs, dsts, held, wanted, strict=True)
        )

    def _placed(self, pieces: Sequence[BoundPiece]) -> tuple[BoundPiece, ...]:
        if self.room is None:
            return tuple(pieces)
        whole = [at for at, bound in enumerate(pieces) if bound.binding.buffer in self.rooms]
        placed = list(pieces)
        for at, view in zip(whole, place([pieces[at].view for at in whole], self.room), strict=True):
            placed[at] = replace(pieces[at], binding=binding_of(view), view=view)
        return tuple(placed)

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
            "No rank of the source holds a tensor. Ranks of the source pass what they have (src, or a session's "
            "offer), and at least one of them has something."
        )
    if not any(side.group.entries for side in destinations):
        raise ManifestError(
            "No rank of a destination wants a tensor. Ranks of the destination pass where they want theirs (dst, or a "
            "session's accept)."
        )
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
        room, buffers = declared.turns_in, declared.buffers
        if room is not None:
            kept += min(room.numel(), most_room(options.staging_nbytes))
        check_memory("source", src, src_pieces, group.rank)
        check_memory("destination", dst, dst_pieces, group.rank)
        check_no_overlap([b for b in dst_pieces if b.binding.buffer not in buffers])
        uncast = _pieces_of(declared.src, source.own)
    kept = check_replicas(
        group, source.group, lambda: _check_match(settled, source, destinations), uncast, kept, deadline
    )
    try:
        _check_match(settled, source, destinations)
    except ManifestError as error:
        live = [b for b in _pieces_of(declared.dst, own) if b.binding.buffer not in buffers]
        raise tell_neighbours(group, error, live, _called(destinations, group.size), deadline) from None
    return Agreed(
        regroup(src),
        regroup(dst),
        replace(options, staging_nbytes=options.staging_nbytes - kept),
        src_pieces,
        dst_pieces,
        not_covered,
        device or torch.device(kind),
        local,
        settled.casts,
        settled.cast_at,
        buffers,
        _taken_whole(told, destinations, settled),
        room,
        _windows(told, destinations, settled, dst, options),
        declared.lands_on,
        kept,
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
            taken.setdefault(_as_planned(name, forms[row["world"]]), {}).setdefault(row["world"], reason)
    return taken


def _windows(
    told: Sequence[Mapping[str, Any]], destinations: Sequence[Side], settled: Settled, dst: Manifest, options: Options
) -> tuple[tuple[str, ...], ...]:
    """Which tensors of the plan move together, so that those which go whole fit into every rank's room.

    They move in the order of the plan, those for a loader after the others of their install group.
    """
    forms = {side.world: wanted for side, wanted in zip(destinations, settled.wanted, strict=True)}
    nbytes = {side.world: {e.spec.name: e.spec.nbytes for e in side.own.entries} for side in destinations}
    taken = [
        {_as_planned(name, forms[world]): aligned(nbytes[world][name]) for name in names}
        for world, names in dict.fromkeys((row["world"], tuple(row["whole"])) for row in told if row["whole"])
    ]
    loaded = {_as_planned(name, forms[row["world"]]) for row in told for name in row["loaded"]}
    whole = {name for each in taken for name in each}
    specs = [entry.spec for entry in dst.entries if entry.spec.name in whole]
    specs.sort(key=lambda spec: (natural_key(spec.group), spec.name in loaded, natural_key(spec.name)))
    limit = most_room(options.staging_nbytes) if options.commit == "in-place" else None
    return cut_windows((spec.name for spec in specs), taken, limit)


def _as_planned(name: str, forms: Mapping[str, Wire]) -> str:
    """What the plan calls a tensor of a destination world."""
    return forms[name].name if name in forms else name


def _settle(
    told: Sequence[Mapping[str, Any]], source: Side, destinations: Sequence[Side], options: Options
) -> tuple[Settled, dict[str, set[int]]]:
    """Both sides as they travel: second names of one memory dropped, dtypes those of the wire."""
    dropped: dict[str, set[int]] = {}
    written = []
    for side in destinations:
        said = {rank: told[rank]["dst"]["manifest"]["aliases"] for rank in side.numbers}
        manifest, gone = without_aliases(source.group, side.group, said, _called(destinations, len(told)))
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
