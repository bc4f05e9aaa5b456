"""Declared: what one rank brings to a refit, and in what form it tells the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from reshard.errors import BindingError, LayoutError
from reshard.layouts.bound import bind_shards
from reshard.layouts.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from reshard.layouts.layout import Layout
    from reshard.refit.options import Options


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

    rooms: tuple[torch.Tensor, ...] = field(default=(), compare=False)
    """Memory of the session in which destination pieces may land at any time; with an in-place commit one at most, in
    which tensors that go whole take turns."""

    whole: Mapping[str, str] = field(default_factory=dict)
    """Destination tensors that this rank takes whole, each with the reason."""

    loaded: tuple[str, ...] = ()
    """Those of them that a loader is given, after the other tensors of their install groups."""

    lands_on: torch.device | None = None
    """Where bytes land beside the live weights; on their device if not given."""

    @property
    def turns_in(self) -> torch.Tensor | None:
        """The room in which tensors that go whole take turns."""
        return self.rooms[0] if self.rooms and self.options.commit == "in-place" else None

    @property
    def buffers(self) -> frozenset[int]:
        """The buffers of the rooms."""
        return frozenset(room.untyped_storage().data_ptr() for room in self.rooms)


def device_of(declared: Declared) -> torch.device | None:
    """Where this rank's weights lie; None where it has none.

    Raises:
        BindingError: On more than one device, or in no memory.
    """
    parts = [part for part in (declared.src, declared.dst) if part is not None]
    for bound in (bound for part in parts for bound in part.local):
        if not bound.binding.buffer and bound.view.numel():
            raise BindingError(
                f"{bound.piece.name!r} has no memory (device {bound.view.device}, {type(bound.view).__name__}): it was "
                f"never given any, or has been freed. Offer and accept tensors whose weights are there.",
                tensor=bound.piece.name,
            )
    elsewhere = declared.buffers if declared.lands_on is not None else ()
    devices: dict[torch.device, str] = {}
    for part in parts:
        devices.update(
            {bound.view.device: bound.piece.name for bound in part.local if bound.binding.buffer not in elsewhere}
        )
        devices.update({local.device: name for name, _, local in part.unread})
    if len(devices) > 1:
        (a, name), (b, other) = list(devices.items())[:2]
        raise BindingError(
            f"{name!r} lies on {a} and {other!r} on {b}; the tensors of one rank lie on one device. Move them, or "
            f"refit those of each device on their own.",
            tensors=(name, other),
        )
    return next(iter(devices), None)


def same_kind_of_device(kinds: Sequence[str | None]) -> str:
    known = {kind: rank for rank, kind in enumerate(kinds) if kind is not None}
    if len(known) > 1:
        (a, rank), (b, other) = list(known.items())[:2]
        raise BindingError(
            f"Rank {rank} has its tensors on {a}, rank {other} on {b}. One refit moves between devices of one kind: "
            f"copy one side first.",
            ranks=(rank, other),
        )
    return next(iter(known), "cpu")


def to_wire(declared: Declared, device: torch.device | None) -> dict[str, Any]:
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
        "whole": dict(declared.whole),
        "loaded": list(declared.loaded),
    }


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
