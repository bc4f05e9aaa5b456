"""What is given by hand, tensors and boxes of them, checked before it becomes pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import LayoutError, ManifestError
from reshard.layouts.bound import refine
from reshard.layouts.box import Box
from reshard.layouts.holding import HERE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.piece import TensorSpec


def check_dense(name: str, tensor: Any) -> None:
    """Refuse what is no tensor of plain elements, each where the strides say.

    Args:
        name: What it is called.
        tensor: Read by its attributes; a DTensor stands for its local tensor.

    Raises:
        ManifestError: It is something else, and what to give instead.
    """
    nested = getattr(tensor, "is_nested", False)
    try:
        is_tensor = nested or all(hasattr(tensor, attribute) for attribute in ("dtype", "shape", "untyped_storage"))
    except RuntimeError as error:  # a lazy module's
        raise ManifestError(f"{name!r} has no shape yet: run the module once first. ({error})", tensor=name) from error
    if not is_tensor:
        raise ManifestError(
            f"{name!r} is a {type(tensor).__name__}, not a tensor. Give the tensors that are to travel, by name.",
            tensor=name,
        )
    layout = "nested" if nested else str(tensor.layout).removeprefix("torch.")
    if layout != "strided":
        raise ManifestError(
            f"{name!r} is of layout {layout}; tensors travel as dense elements. Give it dense, or give the tensors "
            f"that it is made of, each under a name of its own.",
            tensor=name,
        )
    try:
        if not hasattr(tensor, "to_local"):
            tensor.untyped_storage().data_ptr()
    except RuntimeError as error:
        raise ManifestError(
            f"{name!r} is a {type(tensor).__name__} without memory of its own. Give the tensors that it is made of, "
            f"each under a name of its own.",
            tensor=name,
        ) from error
    if tensor.is_quantized:
        raise ManifestError(
            f"{name!r} is quantised ({tensor.dtype}), and its scales would stay behind. Give tensor.int_repr() and the "
            f"scales as tensors of their own.",
            tensor=name,
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ManifestError(
            f"{name!r} is a lazy view whose values are not those in its memory. Give "
            f"tensor.resolve_conj().resolve_neg().",
            tensor=name,
        )


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
