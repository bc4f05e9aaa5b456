"""What a traced load did: which boxes of which checkpoint tensors lie where in which buffers of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import BindingError, ManifestError
from reshard.layouts.box import Box
from reshard.layouts.dtype import dtype_name
from reshard.layouts.holding import HERE
from reshard.layouts.manifest import Manifest
from reshard.layouts.merge import merge
from reshard.layouts.piece import Piece, TensorSpec
from reshard.layouts.regroup import regroup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that the engine keeps, as the load leaves it; ``strides`` in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Region:
    """Elements of a buffer: ``offset`` counts from its first element, in elements as the strides."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffers: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The elements as a view."""
        whole = buffers[self.buffer].detach()
        return torch.as_strided(whole, self.shape, self.strides, whole.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A box of a checkpoint tensor, and where it lies. The region may have more dims than the box, see ``Binding``."""

    piece: Piece
    region: Region


@dataclass(frozen=True, slots=True)
class Fill:
    """Elements that always hold one number: the padding of a vocabulary, for example."""

    region: Region
    value: float | int | bool | complex


@dataclass(frozen=True, slots=True)
class LocalCopy:
    """Elements that equal others of this rank: a head tied by a copy, a scale that is repeated."""

    source: Region
    target: Region


@dataclass(frozen=True, slots=True)
class Opaque:
    """A checkpoint tensor whose place no pieces can say, because the loader does more than move it."""

    name: str
    reason: str
    is_unseen: bool = False
    """The loader was not given it while it was traced, so it is not known where it goes."""


@dataclass(frozen=True, slots=True)
class Unused:
    """A checkpoint tensor that this rank takes nothing of."""

    name: str
    reason: str


@dataclass(frozen=True)
class LoadTrace:
    """All that one load of one rank did; plain values, without a tensor.

    Args:
        tensors: The checkpoint's tensors, in the order in which they were loaded.
        buffers: The rank's buffers, each memory under the first of its names.
        pieces: What of the checkpoint lies where. No element of the checkpoint is in two of them, no element of a
            buffer either.
        fills: What always holds one number.
        copies: What equals a piece in another place; made after the pieces have landed, in this order.
        opaque: The tensors that must come whole and go through the loader again.
        hidden: Where opaque tensors, or numbers that the loader makes itself, go.
        unused: The tensors that this rank takes nothing of, with the reason. Every tensor is in ``pieces``, ``opaque``
            or here.
        aliases: (name, first name) of buffers that are one memory.
    """

    tensors: tuple[TensorSpec, ...]
    buffers: tuple[Buffer, ...]
    pieces: tuple[TracedPiece, ...]
    fills: tuple[Fill, ...] = ()
    copies: tuple[LocalCopy, ...] = ()
    opaque: tuple[Opaque, ...] = ()
    hidden: tuple[Region, ...] = ()
    unused: tuple[Unused, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The tensors that this rank wants, by name, in the dtype that it keeps them in."""
        dtypes = {buffer.name: buffer.dtype for buffer in self.buffers}
        kept = {traced.piece.name: dtypes[traced.region.buffer] for traced in self.pieces}
        kept |= {one.name: spec.dtype for one in self.opaque for spec in self.tensors if spec.name == one.name}
        return {
            spec.name: TensorSpec(spec.name, spec.shape, kept[spec.name], spec.granule, spec.group)
            for spec in self.tensors
            if spec.name in kept
        }

    @property
    def casts(self) -> dict[str, tuple[str, str]]:
        """(dtype in the checkpoint, dtype in the buffer) of the tensors where the two differ."""
        want = self.specs
        return {s.name: (s.dtype, want[s.name].dtype) for s in self.tensors if want.get(s.name, s).dtype != s.dtype}

    @property
    def direct_nbytes(self) -> int:
        """Bytes that this rank takes as pieces, in the dtype that it keeps them in."""
        specs = self.specs
        return sum(p.piece.box.numel * specs[p.piece.name].itemsize for p in self.pieces)

    @property
    def whole_nbytes(self) -> int:
        """Bytes that this rank takes as whole, opaque tensors."""
        specs = self.specs
        return sum(specs[one.name].nbytes for one in self.opaque)

    def landing(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """Memory for the opaque tensors, whole, by name: give it to ``views``, and after landing to the loader."""
        opaque = {one.name for one in self.opaque}
        return {
            s.name: torch.empty(s.shape, dtype=getattr(torch, s.dtype), device=device)
            for s in self.tensors
            if s.name in opaque
        }

    def views(
        self, buffers: Mapping[str, torch.Tensor], landing: Mapping[str, torch.Tensor] | None = None
    ) -> list[tuple[str, tuple[int, ...], Box, torch.Tensor]]:
        """The pieces in memory, as ``Manifest.from_views`` takes them.

        Args:
            buffers: The buffers by name; of the shapes, strides and dtypes that were traced.
            landing: Memory for the opaque tensors.

        Raises:
            BindingError: A buffer is missing or lies otherwise than it did; an opaque tensor has no memory.
        """
        self.check_buffers(buffers)
        specs = self.specs
        views = [(p.piece.name, specs[p.piece.name].shape, p.piece.box, p.region.of(buffers)) for p in self.pieces]
        for one in self.opaque:
            spec = specs[one.name]
            if landing is None or one.name not in landing:
                raise BindingError(
                    f"{one.name!r} is opaque ({one.reason}), so it lands whole, and there is no memory for it. Give "
                    f"landing=trace.landing(), and the landed tensors to the loader.",
                    tensor=one.name,
                )
            whole = Box.whole(spec.shape)
            if whole is not None:
                views.append((one.name, spec.shape, whole, landing[one.name]))
        return views

    def manifest(
        self,
        buffers: Mapping[str, torch.Tensor] | None = None,
        *,
        landing: Mapping[str, torch.Tensor] | None = None,
        world: str = "world",
        groups: Mapping[str, str] | None = None,
    ) -> Manifest:
        """What this rank wants; merge the manifests of all ranks to plan.

        Args:
            buffers: The memory, by name; without it the manifest is good for planning only.
            landing: Memory for the opaque tensors.
            world: The world's name.
            groups: Install group by tensor name.

        Raises:
            BindingError: As ``views``.
        """
        if buffers is not None:
            return Manifest.from_views(self.views(buffers, landing), world=world, groups=groups)
        specs = [
            TensorSpec(s.name, s.shape, s.dtype, s.granule, (groups or {}).get(s.name, s.group))
            for s in self.specs.values()
        ]
        pieces = [traced.piece for traced in self.pieces]
        for one in self.opaque:
            whole = Box.whole(self.specs[one.name].shape)
            pieces += [] if whole is None else [Piece(one.name, whole)]
        return Manifest.from_pieces(specs, {HERE: pieces}, world=world)

    def finish(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Write what no piece brings: the fills, and the copies of what has landed.

        Raises:
            BindingError: A buffer is missing or lies otherwise than it did.
        """
        self.check_buffers(buffers)
        with torch.no_grad():
            for fill in self.fills:
                fill.region.of(buffers).fill_(fill.value)
            for copy in self.copies:
                copy.target.of(buffers).copy_(copy.source.of(buffers))

    def check_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raise BindingError where a buffer is missing or has another shape, other strides or another dtype."""
        for want in self.buffers:
            have = buffers.get(want.name)
            if have is None:
                raise BindingError(f"Buffer {want.name!r} was traced and is not among those given.", tensor=want.name)
            now = describe(want.name, have)
            if (now.shape, now.dtype) != (want.shape, want.dtype) or not _same_strides(now, want):
                raise BindingError(
                    f"Buffer {want.name!r} is {_text(now)} and was {_text(want)} when it was traced. Trace again, or "
                    f"give the buffer as the loader leaves it, before any post-processing.",
                    tensor=want.name,
                )


def describe(name: str, tensor: Any) -> Buffer:
    """A tensor as a Buffer."""
    return Buffer(name, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))


def _same_strides(a: Buffer, b: Buffer) -> bool:
    return all(x == y for n, x, y in zip(a.shape, a.strides, b.strides, strict=True) if n > 1)


def _text(buffer: Buffer) -> str:
    return f"{buffer.dtype}{list(buffer.shape)} with strides {list(buffer.strides)}"


def world_manifest(traces: Mapping[int, LoadTrace], *, world: str = "world", ignored: Iterable[str] = ()) -> Manifest:
    """What a whole world wants, for planning: the traces of all its ranks, by rank.

    Args:
        traces: By rank.
        world: The world's name.
        ignored: Tensors that no rank needs to take (a tied head that the engine shares with the embedding).

    Raises:
        ManifestError: A tensor of the checkpoint that no rank takes anything of.
    """
    left = dict.fromkeys(_taken_by_none(traces.values()))
    for name in ignored:
        left.pop(name, None)
    if left:
        first = next(iter(left))
        reasons = {u.reason for trace in traces.values() for u in trace.unused if u.name == first}
        raise ManifestError(
            f"{first!r} is in the checkpoint and no rank takes anything of it ({'; '.join(sorted(reasons))})"
            f"{_and_more(left)}. Name it in ignored= if that is right.",
            tensor=first,
            tensors=tuple(left),
        )
    made = {id(trace): trace.manifest(world=world) for trace in traces.values()}  # replicas may share a trace
    parts = {rank: made[id(trace)] for rank, trace in traces.items()}
    return regroup(merge(parts, world=world, size=max(traces, default=-1) + 1))


def _taken_by_none(traces: Iterable[LoadTrace]) -> Iterator[str]:
    """Names that are unused in every trace, in the checkpoint's order."""
    unused: list[dict[str, None]] = [dict.fromkeys(u.name for u in trace.unused) for trace in traces]
    yield from (name for name in (unused[0] if unused else ()) if all(name in other for other in unused))


def _and_more(names: Mapping[str, object]) -> str:
    return f", and so {len(names) - 1} more" if len(names) > 1 else ""
