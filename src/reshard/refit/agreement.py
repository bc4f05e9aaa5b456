"""Agreement: from what each rank declares to one plan that all ranks hold, or one error on every rank.

Nothing here moves weights. Each step is one exchange of small values; a rank that finds a fault says so in the next
exchange, so that every rank ends with an error that names it.
"""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import BindingError, DigestError, LayoutError, ManifestError, PeerError, ReshardError
from reshard.layouts.manifest import BoundPiece, Manifest, Pieces, Rule, bind_shards, bound_pieces
from reshard.layouts.piece import Piece
from reshard.plan.plan import check_match
from reshard.refit.casts import Cast, Settled, Wire, settle_dtypes
from reshard.refit.sides import Side, merge_side, unite, without_aliases
from reshard.transports.verify import box_sum
from reshard.transports.views import BoundMemory
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.layout import Layout
    from reshard.refit.group import Group
    from reshard.transports.base import Deadline


@dataclass(frozen=True)
class Options:
    """What all ranks must choose alike."""

    strategy: str = "reshard"
    transport: str = "auto"
    verify: str = "none"
    staging_nbytes: int = 64 << 20
    """The least of all ranks' limits counts."""

    bucket_nbytes: int | None = None
    depth: int | None = None
    casts: bool = False
    """Whether floating-point tensors that the two sides declare in different dtypes are cast, or refused."""

    commit: str = "in-place"
    """``"in-place"``, or ``"staged"``: bytes land beside the live weights until ``CompiledRefit.commit``."""


@dataclass(frozen=True)
class Declared:
    """What one rank brings to a refit."""

    src: Manifest | None
    dst: Manifest | None
    options: Options
    world: str = ""
    """The world that this rank belongs to, where the group joins several, each with numbers of its own."""

    number: int | None = None
    """This rank's number in its world where no DTensor tells; the group's if not given."""


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
        device = _device_of(declared)
        payload = zlib.compress(json.dumps(_to_wire(declared, device)).encode(), 1)
    payloads = group.meeting.exchange("declare", payload, deadline)
    # Ranks that declare by rules say the same: read it once.
    read = {value: json.loads(zlib.decompress(value)) for value in set(payloads)}
    told = [read[value] for value in payloads]
    options = _same_options([row["options"] for row in told])
    kind = _same_kind_of_device([row["device"] for row in told])
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
        kept = _nbytes_to_keep(src_pieces, dst_pieces, options.staging_nbytes // 2, group.rank)
        _check_memory("source", src, src_pieces, group.rank)
        _check_memory("destination", dst, dst_pieces, group.rank)
        _check_no_overlap(dst_pieces)
        uncast = _pieces_of(declared.src, source.own)
    kept = _check_replicas(
        group, source.group, lambda: _check_match(settled, source, destinations), uncast, kept, deadline
    )
    _check_match(settled, source, destinations)
    options = replace(options, staging_nbytes=options.staging_nbytes - kept)
    return Agreed(
        src,
        dst,
        options,
        src_pieces,
        dst_pieces,
        not_covered,
        device or torch.device(kind),
        local,
        settled.casts,
    )


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


def _device_of(declared: Declared) -> torch.device | None:
    """Where this rank's weights lie; None where it has none.

    Raises:
        BindingError: On more than one device.
    """
    parts = [part for part in (declared.src, declared.dst) if part is not None]
    devices: dict[torch.device, str] = {}
    for part in parts:
        devices.update({bound.view.device: bound.piece.name for bound in part.local})
        devices.update({local.device: name for name, _, local in part.unread})
    if len(devices) > 1:
        (a, name), (b, other) = list(devices.items())[:2]
        raise BindingError(
            f"{name!r} lies on {a} and {other!r} on {b}; the tensors of one rank lie on one device. Move them, or "
            f"refit those of each device on their own.",
            tensors=(name, other),
        )
    return next(iter(devices), None)


def _same_kind_of_device(kinds: Sequence[str | None]) -> str:
    known = {kind: rank for rank, kind in enumerate(kinds) if kind is not None}
    if len(known) > 1:
        (a, rank), (b, other) = list(known.items())[:2]
        raise ManifestError(
            f"Rank {rank} has its tensors on {a}, rank {other} on {b}. One refit moves between devices of one kind: "
            f"copy one side first.",
            ranks=(rank, other),
        )
    return next(iter(known), "cpu")


def _to_wire(declared: Declared, device: torch.device | None) -> dict[str, Any]:
    def side(manifest: Manifest | None) -> dict[str, Any] | None:
        if manifest is None:
            return None
        return {
            "manifest": manifest.to_json(),
            "number": declared.number if manifest.here is None else manifest.here,
        }

    return {
        "world": declared.world,
        "src": side(declared.src),
        "dst": side(declared.dst),
        "options": asdict(declared.options),
        "device": None if device is None else device.type,
    }


def _same_options(rows: Sequence[dict[str, Any]]) -> Options:
    staging = min(row["staging_nbytes"] for row in rows)
    for name in rows[0]:
        if name == "staging_nbytes":
            continue
        for rank, row in enumerate(rows):
            if row[name] != rows[0][name]:
                raise DigestError(
                    f"Rank 0 called with {name}={rows[0][name]!r} and rank {rank} with {name}={row[name]!r}. "
                    f"All ranks of a refit choose the same.",
                    rank=rank,
                    option=name,
                )
    return Options(**{**rows[0], "staging_nbytes": staging})


def _pieces_of(part: Manifest | None, merged: Manifest) -> tuple[BoundPiece, ...]:
    return () if part is None else bound_pieces(part, merged)


def clashing(src: Sequence[BoundPiece], dst: Sequence[BoundPiece]) -> list[int]:
    """Which source pieces the destination would overwrite while others still read them."""
    return [at for at, source in enumerate(src) if any(_clash(source, d) for d in dst)]


def _clash(source: BoundPiece, destination: BoundPiece) -> bool:
    same = source.binding == destination.binding and source.piece == destination.piece
    return not same and source.binding.may_overlap(destination.binding)


def _nbytes_to_keep(src: Sequence[BoundPiece], dst: Sequence[BoundPiece], limit: int, rank: int) -> int:
    """Bytes of the copies that a refit within shared memory needs first.

    Raises:
        BindingError: More than ``limit``.
    """
    kept = clashing(src, dst)
    nbytes = sum(src[at].binding.nbytes for at in kept)
    if nbytes > limit:
        piece = src[kept[0]].piece
        raise BindingError(
            f"{piece.name!r}: source and destination of rank {rank} share memory ({piece.box} among others), and a "
            f"copy of what would be overwritten takes {format_nbytes(nbytes)}; half of staging_nbytes is "
            f"{format_nbytes(limit)}. Give the destination its own memory, or raise staging_nbytes.",
            tensor=piece.name,
            rank=rank,
        )
    return nbytes


def _check_memory(side: str, manifest: Manifest, pieces: Sequence[BoundPiece], rank: int) -> None:
    """Check that this rank gave memory for every box that the merged manifest says it has."""
    memory: dict[str, int] = {}
    for bound in pieces:
        memory[bound.piece.name] = memory.get(bound.piece.name, 0) + bound.piece.box.numel
    for entry in manifest.entries:
        boxes = _boxes_of(entry.spec, entry.holdings, rank)
        have, need = memory.get(entry.spec.name, 0), sum(box.numel for box in boxes)
        if have != need:
            raise BindingError(
                f"{entry.spec.name!r}: by the {side} layout rank {rank} has {need} elements "
                f"({', '.join(map(str, boxes[:3])) or 'none'}), and it passed memory for {have}. Pass the local tensor "
                f"that belongs to the layout.",
                tensor=entry.spec.name,
                rank=rank,
            )


def _boxes_of(spec: Any, holdings: Sequence[Rule | Pieces], rank: int) -> list[Box]:
    """The distinct boxes of a rank."""
    boxes: set[Box] = set()
    for holding in holdings:
        if isinstance(holding, Rule):
            boxes.update(holding.layout(spec).boxes(rank) if rank in holding.ranks else ())
        else:
            boxes.update(box for at, held in holding.held if at == rank for box in held)
    return sorted(boxes)


def _check_no_overlap(pieces: Sequence[BoundPiece]) -> None:
    """Refuse destination memory that two pieces would both write."""
    ordered = sorted(pieces, key=lambda b: (b.binding.buffer, b.binding.span))
    for index, bound in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if other.binding.buffer != bound.binding.buffer or other.binding.span[0] >= bound.binding.span[1]:
                break
            if bound.binding.may_overlap(other.binding):
                raise BindingError(
                    f"{bound.piece.name!r} {bound.piece.box} and {other.piece.name!r} {other.piece.box} share memory "
                    f"of this rank, so one would overwrite the other. Give each its own memory; two names for one "
                    f"whole tensor are fine if both have the same boxes.",
                    tensors=(bound.piece.name, other.piece.name),
                )


def _check_replicas(
    group: Group,
    src: Manifest,
    check_rest: Callable[[], None],
    pieces: Sequence[BoundPiece],
    kept: int,
    deadline: Deadline,
) -> int:
    """Check that ranks which publish the same box by hand hold the same bytes; the most that any rank keeps aside.

    A mesh says that its replicas are replicas. Tensors that ranks publish one by one (plain tensors, views) may also be
    different tensors under one name, as when pipeline stages or expert ranks count from zero; their sums show it.

    Raises:
        ManifestError: Names every such tensor and its ranks, and what else does not match; equal on every rank.
    """
    shared = {name for name, _ in _published_twice(src)}
    sums = {
        f"{bound.piece.name} {bound.piece.box}": _content(bound, src) for bound in pieces if bound.piece.name in shared
    }
    payload = json.dumps([sums, kept]).encode()
    told = [json.loads(value) for value in group.meeting.exchange("contents", payload, deadline)]
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int, str]] = {}
    for rank, (row, _) in enumerate(told):
        for key, value in row.items():
            owner, content = first.setdefault(key, (rank, value))
            if content != value:
                name = key.rsplit(" [", 1)[0]
                differing.setdefault(name, (owner, rank, key[len(name) + 1 :]))
    if not differing:
        return max(int(nbytes) for _, nbytes in told)
    faults = [
        f"{name!r}: ranks {a} and {b} both publish {box}, with different bytes, so they are not replicas. If they "
        f"count layers or experts from zero, publish the global names; if one is stale, refit it first."
        for name, (a, b, box) in differing.items()
    ]
    try:
        check_rest()
    except ManifestError as error:
        faults.append(error.message)
    name, (a, b, _) = next(iter(differing.items()))
    raise ManifestError("\n".join(faults[:20]), tensor=name, ranks=(a, b), faults=tuple(faults))


def _published_twice(src: Manifest) -> Iterator[tuple[str, Box]]:
    for entry in src.entries:
        seen: dict[Box, int] = {}
        for holding in entry.holdings:
            if isinstance(holding, Pieces):
                for _, boxes in holding.held:
                    for box in boxes:
                        seen[box] = seen.get(box, 0) + 1
        yield from ((entry.spec.name, box) for box, count in seen.items() if count > 1)


def _content(bound: BoundPiece, src: Manifest) -> str:
    spec = src.entry(bound.piece.name).spec
    return format(int(box_sum(bound.piece.box, spec, BoundMemory([bound]), "fingerprint")) & (2**64 - 1), "x")


def lay_out(name: str, layout: Layout, rank: int, tensor: torch.Tensor | None, side: str) -> Manifest:
    """The manifest of one tensor with a layout, and this rank's local tensor.

    Raises:
        LayoutError: The local tensor has another shape or dtype than the layout gives this rank.
    """
    manifest = Manifest.from_layouts({name: layout}, world=side)
    if tensor is None or rank not in layout.mesh.ranks:
        if tensor is not None and tensor.numel():
            raise LayoutError(
                f"{name!r}: rank {rank} passed a {side} tensor of shape {list(tensor.shape)} but is not in the {side} "
                f"mesh {layout.mesh.ranks}. Pass None there.",
                tensor=name,
                rank=rank,
            )
        return manifest
    expected = layout.local_shape(rank)
    if tuple(tensor.shape) != expected or str(tensor.dtype).removeprefix("torch.") != layout.dtype:
        raise LayoutError(
            f"{name!r}: rank {rank} passed a {side} tensor {str(tensor.dtype).removeprefix('torch.')} "
            f"{list(tensor.shape)}, but the layout gives it {layout.dtype} {list(expected)} of {list(layout.shape)}. "
            f"Pass the local shard, or correct the layout.",
            tensor=name,
            rank=rank,
        )
    local = tuple(bind_shards(name, layout, rank, tensor.detach()))
    return Manifest(manifest.entries, side, 0, (), local)


__all__ = ["Agreed", "Declared", "Options", "Piece", "agree", "lay_out", "or_tell_peers"]
