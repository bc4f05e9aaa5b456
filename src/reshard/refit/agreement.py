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
from reshard.layouts.manifest import BoundPiece, Manifest, Pieces, Rule, bind_shards, bound_pieces, merge
from reshard.layouts.piece import Piece
from reshard.plan.plan import check_match
from reshard.transports.verify import box_sum
from reshard.transports.views import BoundMemory
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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


@dataclass(frozen=True)
class Declared:
    """What one rank brings to a refit."""

    src: Manifest | None
    dst: Manifest | None
    options: Options


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

    merged: tuple[Manifest, Manifest]
    """Source and destination in the numbers of their own meshes."""

    skipped: frozenset[str]
    """Names that this rank does not write: second names of memory that it writes under the first."""

    def bind(self, declared: Declared) -> tuple[tuple[BoundPiece, ...], tuple[BoundPiece, ...]]:
        """This rank's source and destination pieces in the memory that ``declared`` names."""
        dst = tuple(b for b in _pieces_of(declared.dst, self.merged[1]) if b.piece.name not in self.skipped)
        return _pieces_of(declared.src, self.merged[0]), dst


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
    src, src_merged = _merge_side(told, "src", group.size)
    dst, dst_merged = _merge_side(told, "dst", group.size)
    if not src.entries:
        raise ManifestError(
            "No rank of the group holds a source tensor. Ranks of the source mesh pass src, ranks of the destination "
            "mesh pass dst, and at least one rank must be in the source mesh."
        )
    if not dst.entries:
        raise ManifestError("No rank of the group wants a tensor. Ranks of the destination mesh must pass dst.")
    wanted_names = set(dst.names)
    said = {rank: row["dst"]["manifest"]["aliases"] for rank, row in enumerate(told) if row["dst"]}
    dst, dropped = _drop_aliases(src, dst, said)
    wanted = set(dst.names)
    skipped = frozenset(name for name in wanted_names if group.rank in dropped.get(name, ()))
    with or_tell_peers(group, "contents"):
        src_pieces = _pieces_of(declared.src, src_merged)
        dst_pieces = tuple(b for b in _pieces_of(declared.dst, dst_merged) if b.piece.name not in skipped)
        kept = _nbytes_to_keep(src_pieces, dst_pieces, options.staging_nbytes // 2, group.rank)
        _check_memory("source", src, src_pieces, group.rank)
        _check_memory("destination", dst, dst_pieces, group.rank)
        _check_no_overlap(dst_pieces)
    kept = _check_replicas(group, src, dst, src_pieces, kept, deadline)
    options = replace(options, staging_nbytes=options.staging_nbytes - kept)
    not_covered = tuple(name for name in src.names if name not in wanted)
    return Agreed(
        src,
        dst,
        options,
        src_pieces,
        dst_pieces,
        not_covered,
        device or torch.device(kind),
        (src_merged, dst_merged),
        skipped,
    )


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
        return None if manifest is None else {"manifest": manifest.to_json(), "number": manifest.here}

    return {
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


def _merge_side(told: Sequence[Mapping[str, Any]], side: str, size: int) -> tuple[Manifest, Manifest]:
    """The merged manifest of one side, in the group's ranks and in the numbers that its ranks' meshes use."""
    parts: dict[int, Manifest] = {}
    manifests: dict[int, Manifest] = {}
    group_rank: dict[int, int] = {}
    for rank, row in enumerate(told):
        if row[side] is None:
            continue
        number = rank if row[side]["number"] is None else row[side]["number"]
        if number in group_rank:
            raise ManifestError(
                f"Ranks {group_rank[number]} and {rank} of the group both say that they are rank {number} of the "
                f"{_SIDES[side]} mesh. Each rank has its own number in the mesh.",
                ranks=(group_rank[number], rank),
            )
        group_rank[number] = rank
        if id(row) not in manifests:
            manifests[id(row)] = Manifest.from_json(row[side]["manifest"])
        parts[number] = manifests[id(row)]
    merged = merge(parts, world=side)
    for entry in merged.entries:
        for holding in entry.holdings:
            absent = [number for number in holding.ranks if number not in group_rank]
            if absent:
                raise ManifestError(
                    f"{entry.spec.name!r}: rank {absent[0]} is in the {_SIDES[side]} mesh but passed no tensor for it. "
                    f"Every rank of the mesh takes part (those that did: {sorted(group_rank)}).",
                    tensor=entry.spec.name,
                    rank=absent[0],
                )
    return merged.renumber(group_rank, world="group", size=size), merged


_SIDES = {"src": "source", "dst": "destination"}


def _pieces_of(part: Manifest | None, merged: Manifest) -> tuple[BoundPiece, ...]:
    return () if part is None else bound_pieces(part, merged)


def _drop_aliases(
    src: Manifest, dst: Manifest, said: Mapping[int, Sequence[Sequence[str]]]
) -> tuple[Manifest, dict[str, set[int]]]:
    """Let every rank write memory that has two names once, and refuse it where the source holds two tensors.

    Args:
        src: The source.
        dst: The destination, in the group's ranks.
        said: By rank of the group: (name, first name) of names that are one memory there.

    Returns:
        The destination without what is not written, and by name the ranks that do not write it.

    Raises:
        ManifestError: Two names are one buffer on the destination, and the source keeps a buffer for each.
    """
    tied, names = dict(src.aliases), set(src.names)
    dropped: dict[str, set[int]] = {}
    for rank, pairs in sorted(said.items()):
        for name, first in pairs:
            if name not in names:
                dropped.setdefault(name, set()).add(rank)
            elif first not in names:
                dropped.setdefault(first, set()).add(rank)
            elif tied.get(name, name) == tied.get(first, first):
                dropped.setdefault(name, set()).add(rank)
            else:
                raise ManifestError(
                    f"{first!r} and {name!r} are one buffer on destination rank {rank}, but two on the source, whose "
                    f"values may differ: one would overwrite the other. Tie them on the source, or give the "
                    f"destination two buffers, or leave one name out of the destination.",
                    tensors=(first, name),
                    rank=rank,
                )
    entries = []
    for entry in dst.entries:
        gone = dropped.get(entry.spec.name, set())
        holdings = tuple(h for h in (_without(h, gone) for h in entry.holdings) if h is not None)
        if holdings or not gone:
            entries.append(replace(entry, holdings=holdings))
    return replace(dst, entries=tuple(entries), aliases=()), dropped


def _without(holding: Rule | Pieces, ranks: set[int]) -> Rule | Pieces | None:
    """The holding without some ranks. A rule names all its ranks: it goes as a whole, or stays."""
    if isinstance(holding, Rule):
        return None if set(holding.ranks) <= ranks else holding
    held = tuple(row for row in holding.held if row[0] not in ranks)
    return Pieces(held) if held else None


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
    group: Group, src: Manifest, dst: Manifest, pieces: Sequence[BoundPiece], kept: int, deadline: Deadline
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
        check_match(src, [dst])
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
