"""Adopted: landed memory that is a whole buffer as the loaders know it, so that an open layer can take it uncopied.

An install copies what has landed into buffers of the loaders' form, which vLLM then packs for its kernels on CPUs.
Where the landed pieces of a buffer already lie as the buffer would, they are packed from where they are. The next refit
writes to that memory while requests run, so nothing of the model may keep it: ``Adopted.is_kept`` tells.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from reshard.transports.views import contiguous_strides

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from reshard.integrations.traced import Buffer, TracedPiece
    from reshard.layouts.box import Box


class Adopted:
    """Landed memory of a CPU under a storage of its own, which lives as long as somebody keeps a tensor of it.

    Args:
        landed: Contiguous.
    """

    def __init__(self, landed: torch.Tensor) -> None:
        self._shape, self._dtype = tuple(landed.shape), landed.dtype
        self._memory: Any = landed.reshape(-1).view(torch.uint8).numpy()
        self._lives = weakref.ref(self._memory)

    def take(self) -> torch.Tensor:
        """The tensor; may be called once."""
        memory, self._memory = self._memory, None
        return torch.from_numpy(memory).view(self._dtype).view(self._shape)

    @property
    def is_kept(self) -> bool:
        """Whether somebody has it or a view of it."""
        return self._memory is None and self._lives() is not None


def adoptable(
    traced: Iterable[TracedPiece], landed: Mapping[tuple[str, Box], torch.Tensor], buffers: Mapping[str, Buffer]
) -> dict[str, torch.Tensor]:
    """By buffer: the landed memory that holds all of it, element for element.

    Args:
        traced: What lies where in the buffers.
        landed: By name and box: the tensor, contiguous.
        buffers: By name.
    """
    by_buffer: defaultdict[str, list[TracedPiece]] = defaultdict(list)
    for one in traced:
        by_buffer[one.region.buffer].append(one)
    found = {}
    for name, pieces in by_buffer.items():
        memory = _as_one(pieces, landed, buffers[name])
        if memory is not None:
            found[name] = memory
    return found


def _as_one(
    pieces: list[TracedPiece], landed: Mapping[tuple[str, Box], torch.Tensor], buffer: Buffer
) -> torch.Tensor | None:
    """What has landed as one tensor of the buffer's shape, if its pieces lie one after the other as they do there."""
    pieces = sorted(pieces, key=lambda one: one.region.offset)
    tensors = [landed[one.piece.name, one.piece.box] for one in pieces]
    first, at = tensors[0], 0
    for one, tensor in zip(pieces, tensors, strict=True):
        is_here = (
            tensor.device.type == "cpu"
            and str(tensor.dtype)[6:] == buffer.dtype
            and tensor.is_contiguous()
            and tensor.data_ptr() == first.data_ptr() + at * first.element_size()
            and tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        )
        if not is_here or one.region.strides != contiguous_strides(one.region.shape):
            return None
        at += prod(one.region.shape)  # no two pieces share an element, so that together they are all of it or less
    if at != prod(buffer.shape) or buffer.strides != contiguous_strides(buffer.shape):
        return None
    return first.as_strided(buffer.shape, buffer.strides, first.storage_offset())
