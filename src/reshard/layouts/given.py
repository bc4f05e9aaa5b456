"""Boxes as they are given by hand, checked against their tensor before they become pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import LayoutError, ManifestError
from reshard.layouts.bound import refine
from reshard.layouts.box import Box
from reshard.layouts.holding import HERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.piece import TensorSpec


def check_boxes(spec: TensorSpec, rank: int, boxes: Sequence[Box]) -> None:
    whole = Box.whole(spec.shape)
    who = "this rank" if rank == HERE else f"rank {rank}"
    for box in boxes:
        if whole is None or box.ndim != len(spec.shape) or not whole.contains(box):
            raise ManifestError(
                f"{spec.name!r}: {who} has box {box}, which is not inside the tensor's shape {list(spec.shape)}. "
                f"If the rest is padding, leave it out of the piece.",
                tensor=spec.name,
                rank=rank,
                box=box,
            )
        _check_granule(spec, who, box)
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.ndim and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other) is not None:
                raise ManifestError(
                    f"{spec.name!r}: {who} has two pieces that overlap, {box} and {other}. Give each element once.",
                    tensor=spec.name,
                    rank=rank,
                )


def _check_granule(spec: TensorSpec, who: str, box: Box) -> None:
    for dim, granule in enumerate(spec.granule):
        for edge in (box.start[dim], box.stop[dim]):
            if edge % granule and edge != spec.shape[dim]:
                raise LayoutError(
                    f"{spec.name!r}: {who} has box {box}, whose edge {edge} on dim {dim} cuts a block of {granule}. "
                    f"Blocks travel whole: move the edge to a multiple of {granule}.",
                    tensor=spec.name,
                    dim=dim,
                    edge=edge,
                    granule=granule,
                )


def box_of_view(spec: TensorSpec, at: Sequence[int] | Box, view_shape: tuple[int, ...]) -> Box:
    if isinstance(at, Box):
        if refine(at.shape, view_shape) is None:
            raise ManifestError(
                f"{spec.name!r}: a view of shape {list(view_shape)} cannot hold box {at} of shape {list(at.shape)}: "
                f"the view's dims must refine the box's, each box dim the product of a run of view dims.",
                tensor=spec.name,
            )
        return at
    if len(at) != len(view_shape) or len(at) != len(spec.shape):
        raise ManifestError(
            f"{spec.name!r}: start {tuple(at)} and a view of shape {list(view_shape)} for a tensor of shape "
            f"{list(spec.shape)}. Give one start index a dim; for an interleaved view give the Box instead.",
            tensor=spec.name,
        )
    return Box(tuple(at), tuple(lo + n for lo, n in zip(at, view_shape, strict=True)))
