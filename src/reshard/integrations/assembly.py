"""Put together what a watched load wrote: moves by checkpoint tensor become pieces, fills and local copies."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from reshard.errors import ManifestError
from reshard.integrations.moves import Dim, Move, TooIrregularError, simplify, through
from reshard.integrations.placed import Placed, boxes_of, coalesce
from reshard.integrations.traced import Buffer, Fill, LoadTrace, LocalCopy, Opaque, Region, TracedPiece, Unused
from reshard.integrations.watching import Number, Root, Unknown
from reshard.layouts.dtype import dtype_name
from reshard.layouts.piece import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from reshard.integrations.watching import Write
    from reshard.layouts.piece import TensorSpec


class FinalBuffer(NamedTuple):
    """A buffer as the loader left it: what lies in it, by addresses from its first element, and its other names."""

    buffer: Buffer
    writes: tuple[Write, ...]
    other_names: Sequence[str]


class _Landing(NamedTuple):
    """A move from a checkpoint tensor into a buffer."""

    buffer: str
    move: Move
    dtypes: tuple[torch.dtype, ...]


def assemble(
    specs: Sequence[TensorSpec], final: Iterable[FinalBuffer], opaque: Mapping[str, str], *, strays: frozenset[str]
) -> LoadTrace:
    """Make the trace of one load.

    Args:
        specs: The checkpoint.
        final: The rank's buffers.
        opaque: Reasons, by name, for the tensors that the loader was not given.
        strays: Tensors of which something went into memory that is none of the buffers.

    Raises:
        ManifestError: A stray tensor that is nowhere else.
    """
    reasons = dict(opaque)
    landings: dict[str, list[_Landing]] = {}
    fills: list[Fill] = []
    hidden: list[Region] = []
    buffers: list[Buffer] = []
    aliases: list[tuple[str, str]] = []
    for buffer, writes, other_names in final:
        buffers.append(buffer)
        aliases += ((name, buffer.name) for name in other_names)
        for write in writes:
            if isinstance(write.source, Root):
                landings.setdefault(write.source.name, []).append(_Landing(buffer.name, write.move, write.dtypes))
            elif isinstance(write.source, Number):
                fills.append(Fill(_region(buffer.name, write.move), write.source.value))
            else:
                hidden.append(_region(buffer.name, write.move))
                for name in sorted(write.source.names):
                    reasons.setdefault(name, _because(write.source, write.source.names - {name}))
    dtypes = {buffer.name: buffer.dtype for buffer in buffers}
    pieces: list[TracedPiece] = []
    copies: list[LocalCopy] = []
    for spec in specs:
        given = landings.get(spec.name, [])
        if spec.name not in reasons and given:
            result = _place(spec, given, dtypes)
            if isinstance(result, str):
                reasons[spec.name] = result
            else:
                pieces += result[0]
                copies += result[1]
        if spec.name in reasons:
            hidden += (_region(landing.buffer, landing.move) for landing in given)
    unused = [s.name for s in specs if s.name not in reasons and s.name not in landings]
    lost = [name for name in unused if name in strays]
    if lost:
        raise ManifestError(
            f"{lost[0]!r} is copied into memory that is none of the buffers given, so that its bytes would be lost. "
            f"Give that memory too, as a buffer by name.",
            tensor=lost[0],
            tensors=tuple(lost),
        )
    return LoadTrace(
        tuple(specs),
        tuple(buffers),
        tuple(pieces),
        tuple(fills),
        tuple(copies),
        tuple(Opaque(s.name, reasons[s.name], s.name in opaque) for s in specs if s.name in reasons),
        tuple(hidden),
        tuple(Unused(name, "no buffer of this rank holds anything of it") for name in unused),
        tuple(aliases),
    )


def _because(source: Unknown, others: frozenset[str]) -> str:
    return source.reason + (f", together with {', '.join(map(repr, sorted(others)))}" if others else "")


def _place(
    spec: TensorSpec, landings: Sequence[_Landing], dtypes: Mapping[str, str]
) -> tuple[list[TracedPiece], list[LocalCopy]] | str:
    """The pieces and local copies of one tensor, or why there are none."""
    kept = sorted({dtypes[landing.buffer] for landing in landings})
    if len(kept) > 1:
        return f"this rank keeps it in two dtypes, {kept[0]} and {kept[1]}"
    for landing in landings:
        path = [dtype_name(dtype) for dtype in landing.dtypes]
        if len(path) > 2 or path[0] != spec.dtype or path[-1] != kept[0]:
            return f"it goes through several dtypes ({' -> '.join(path)}, kept as {kept[0]})"
    try:
        firsts, copies = _first_and_copies(landings)
        places: dict[str, list[Placed]] = {}
        for buffer, move in firsts:
            places.setdefault(buffer, []).extend(boxes_of(move, spec.shape))
        placed = [(buffer, place) for buffer, many in places.items() for place in coalesce(many)]
    except TooIrregularError:
        return "it is moved in a pattern of too many parts"
    if sum(place.box.numel for _, place in placed) != _numel_covered([p for _, p in placed]):
        return "the loader reads windows of it that overlap"
    pieces = [TracedPiece(Piece(spec.name, place.box), _region_of_box(buffer, place)) for buffer, place in placed]
    return pieces, copies


def _numel_covered(places: Sequence[Placed]) -> int:
    """Elements of a tensor in at least one of the boxes."""
    boxes = sorted(place.box for place in places)
    numel = 0
    for index, box in enumerate(boxes):
        left = [box]
        for other in boxes[index + 1 :]:
            if box.ndim and other.start[0] >= box.stop[0]:
                break
            left = [part for one in left for part in one.subtract(other)]
        numel += sum(part.numel for part in left)
    return numel


def _first_and_copies(landings: Sequence[_Landing]) -> tuple[list[tuple[str, Move]], list[LocalCopy]]:
    """Each element of the checkpoint in its first place, and what other places copy from there."""
    firsts: list[tuple[str, Move]] = []
    copies: list[LocalCopy] = []
    many = _may_repeat([landing.move for landing in landings])
    for buffer, whole, _ in landings:
        move = simplify(whole._replace(dims=tuple(d for d in whole.dims if d.src)))
        left = [move]
        for home, first in tuple(firsts) if many else ():
            back = first.flipped()  # (checkpoint <- buffer): reading it gives (this place <- that place)
            parts = [through(one, back) for one in left]
            copies += (_local_copy(buffer, home, found) for founds, _ in parts for found in founds)
            left = [one for _, rest in parts for one in rest]
        firsts += ((buffer, one) for one in left)
        done = move  # what expand repeats: from what is there already, one repeated dim after the other
        for dim in whole.dims:
            if not dim.src:
                more = Dim(dim.size - 1, dim.dst, 0)
                dims = (*(Dim(d.size, d.dst, d.dst) for d in done.dims), more)
                copies.append(_local_copy(buffer, buffer, Move(done.dst + dim.dst, done.dst, dims)))
                done = Move(done.dst, done.src, (*done.dims, dim))
    return firsts, copies


def _may_repeat(moves: Sequence[Move]) -> bool:
    """Whether two moves may read the same element; cheap, and right for moves whose spans are apart."""
    spans = sorted(move.src_span for move in moves)
    return any(b[0] < a[1] for a, b in pairwise(spans))


def _region(buffer: str, move: Move) -> Region:
    return Region(buffer, move.dst, tuple(d.size for d in move.dims), tuple(d.dst for d in move.dims))


def _local_copy(target: str, source: str, move: Move) -> LocalCopy:
    shape = tuple(d.size for d in move.dims)
    return LocalCopy(
        Region(source, move.src, shape, tuple(d.src for d in move.dims)),
        Region(target, move.dst, shape, tuple(d.dst for d in move.dims)),
    )


def _region_of_box(buffer: str, place: Placed) -> Region:
    pairs = [pair for group in place.groups for pair in group or ((1, 1),)]
    return Region(buffer, place.offset, tuple(n for n, _ in pairs), tuple(s for _, s in pairs))
