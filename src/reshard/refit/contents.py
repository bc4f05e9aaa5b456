"""Contents: what is checked of the ranks' memory before a refit: that it is there, disjoint, and equal in replicas."""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from reshard.errors import BindingError, ManifestError
from reshard.layouts.holding import Pieces, Rule
from reshard.transports.verify import box_sum
from reshard.transports.views import BoundMemory
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.layouts.box import Box
    from reshard.layouts.manifest import Manifest
    from reshard.refit.group import Group
    from reshard.transports.base import Deadline


def clashing(src: Sequence[BoundPiece], dst: Sequence[BoundPiece]) -> list[int]:
    """Which source pieces the destination would overwrite while others still read them."""
    by_buffer: dict[int, list[BoundPiece]] = {}
    for bound in sorted(dst, key=lambda bound: bound.binding.span):
        by_buffer.setdefault(bound.binding.buffer, []).append(bound)
    starts = {buffer: [b.binding.span[0] for b in row] for buffer, row in by_buffer.items()}
    # the furthest end so far: what lies before the first that is beyond a start ends before it
    ends = {buffer: list(accumulate((b.binding.span[1] for b in row), max)) for buffer, row in by_buffer.items()}
    found = []
    for at, source in enumerate(src):
        buffer, (start, end) = source.binding.buffer, source.binding.span
        if buffer in by_buffer:
            first, last = bisect_right(ends[buffer], start), bisect_left(starts[buffer], end)
            if any(_clash(source, destination) for destination in by_buffer[buffer][first:last]):
                found.append(at)
    return found


def _clash(source: BoundPiece, destination: BoundPiece) -> bool:
    same = source.binding == destination.binding and source.piece == destination.piece
    return not same and source.binding.may_overlap(destination.binding)


def nbytes_to_keep(src: Sequence[BoundPiece], dst: Sequence[BoundPiece], limit: int, rank: int) -> int:
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


def check_memory(side: str, manifest: Manifest, pieces: Sequence[BoundPiece], rank: int) -> None:
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


def check_no_overlap(pieces: Sequence[BoundPiece]) -> None:
    """Refuse destination memory that would be written twice, by two pieces or within one."""
    for bound in pieces:
        if bound.binding.overlaps_itself:
            raise BindingError(
                f"{bound.piece.name!r} {bound.piece.box}: elements of it share memory (shape "
                f"{list(bound.binding.shape)}, strides {list(bound.binding.strides)}), as in an expanded view, so one "
                f"would overwrite the other. Accept a tensor in which each has its own (tensor.clone()).",
                tensor=bound.piece.name,
            )
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


def neighbours(pieces: Sequence[BoundPiece], names: Iterable[str]) -> dict[str, list[str | None]]:
    """By tensor that lies in one buffer with others: whose memory comes before it and after it there."""
    wanted = set(names)
    found: dict[str, list[str | None]] = {}
    ordered = sorted(pieces, key=lambda bound: (bound.binding.buffer, bound.binding.span))
    for at, bound in enumerate(ordered):
        name = bound.piece.name
        if name in wanted and name not in found:
            beside = [_beside(ordered, at, step) for step in (-1, 1)]
            if any(beside):
                found[name] = beside
    return found


def _beside(ordered: Sequence[BoundPiece], at: int, step: int) -> str | None:
    """The next other name in the same buffer, in one direction."""
    name, buffer = ordered[at].piece.name, ordered[at].binding.buffer
    while 0 <= at < len(ordered) and ordered[at].binding.buffer == buffer:
        if ordered[at].piece.name != name:
            return ordered[at].piece.name
        at += step
    return None


def tell_neighbours(
    group: Group, error: ManifestError, pieces: Sequence[BoundPiece], members: Sequence[str], deadline: Deadline
) -> ManifestError:
    """The error with the fused tensors that its missing parts belong to; called by all ranks for the same error.

    Args:
        group: The ranks.
        error: Names under ``missing`` what the source lacks.
        pieces: This rank's destination pieces in the memory that it declared.
        members: What each rank is called.
        deadline: For the exchange.
    """
    payload = json.dumps(neighbours(pieces, getattr(error, "missing", ()))).encode()
    told = [json.loads(value) for value in group.meeting.exchange("fused", payload, deadline)]
    fused = {
        name: (members[rank], *beside) for rank, row in reversed(list(enumerate(told))) for name, beside in row.items()
    }
    lines = [f"{who} {_place(name, before, after)}" for name, (who, before, after) in sorted(fused.items())]
    if not lines:
        return error
    shown = lines[:20] + ([f"and {len(lines) - 20} more"] if len(lines) > 20 else [])
    parts = {name: tuple(other for other in row[1:] if other) for name, row in sorted(fused.items())}
    return ManifestError("\n".join([error.message, *shown]), **{**error.facts, "fused_with": parts})


def _place(name: str, before: str | None, after: str | None) -> str:
    where = f"between {before!r} and {after!r}" if before and after else f"beside {before or after!r}"
    return f"keeps {name!r} {where} in one buffer, as fused tensors are; all of it stays as it was."


def check_replicas(
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
