"""The dense copy that every plan must equal: values that name their place, poisoned destinations, whole-memory checks.

Every element's bytes are a mixing hash of its global coordinate, so an element that lands in a wrong place shows, a
swap of whole shards too. A destination is poisoned before it is written: every byte is the complement of what must
land there, so no element is right by chance. And a check looks at whole buffers: what lies between and around the
pieces must be as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.piece import Piece

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.layout import Layout

Dense = dict[str, torch.Tensor]
"""Whole tensors by name."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 18
"""Elements that are hashed at a time, so that the temporaries stay in the cache."""

_GAP = 0x5A
"""What memory holds that belongs to no piece."""


def hash_of(
    index: np.ndarray[tuple[int, ...], np.dtype[np.uint64]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Mix every 64-bit number so that each bit of it changes each bit of the result (the finaliser of splitmix64)."""
    z = index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x1234567)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def dense(shape: Sequence[int], dtype: str, *, seed: int = 0) -> torch.Tensor:
    """A whole tensor whose every element is a hash of its place, in C order.

    Args:
        shape: Its shape; any number of dims.
        dtype: Torch's name. The bits are the hash's lowest (for floats: NaNs among them; compare with ``bits``).
        seed: Another seed gives other values everywhere, as another tensor should have.
    """
    kind: torch.dtype = getattr(torch, dtype)
    numel = int(np.prod(shape, dtype=np.int64)) * -(-kind.itemsize // 8)
    words = torch.empty(numel, dtype=torch.uint8 if kind is torch.bool else _WORDS[min(kind.itemsize, 8)])
    for start in range(0, numel, _CHUNK):
        place = np.arange(start, min(start + _CHUNK, numel), dtype=np.uint64) + np.uint64(seed << 40)
        values = torch.from_numpy(hash_of(place).view(np.int64))
        words[start : start + _CHUNK] = values & 1 if kind is torch.bool else values
    return (words.view(kind) if numel else torch.empty(0, dtype=kind)).reshape(tuple(shape))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as plain integers, whatever the strides: equal bits compare equal, NaNs too."""
    if tensor.element_size() == 16:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(_WORDS[tensor.element_size()])


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a whole tensor that a box names, as a view."""
    return whole[tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))]


def local_shard(whole: torch.Tensor, layout: Layout, rank: int) -> torch.Tensor:
    """What ``rank`` holds under a layout, as its own contiguous tensor."""
    local = torch.empty(layout.local_shape(rank), dtype=whole.dtype)
    for shard in layout.shards(rank):
        stop = tuple(at + size for at, size in zip(shard.local_start, shard.box.shape, strict=True))
        at = tuple(slice(lo, hi) for lo, hi in zip(shard.local_start, stop, strict=True))
        bits(local)[at] = bits(cut(whole, shard.box))
    return local


def poisoned(expected: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of the same shape and dtype that differs from ``expected`` in every byte."""
    wrong = torch.empty(expected.shape, dtype=expected.dtype)
    torch.bitwise_not(bits(expected), out=bits(wrong))
    return wrong


def check_landed(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare bit by bit.

    Raises:
        AssertionError: Says ``what``, how many elements are wrong, how many of these were never written (still the
            poison), and where the first one lies.
    """
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
        )
    have, want = bits(got), bits(expected)
    if torch.equal(have, want):
        return
    wrong, unwritten = have != want, have == ~want
    if have.dim() > got.dim():  # complex128 has two words an element
        wrong, unwritten = wrong.any(-1), unwritten.all(-1)
    first = torch.nonzero(wrong)[0].tolist() if wrong.dim() else []
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, {int(unwritten.sum())} were never written; "
        f"the first at local index {first}"
    )


@dataclass(frozen=True)
class Memory:
    """One rank's pieces, and the whole buffers in which they lie."""

    pieces: tuple[BoundPiece, ...]
    buffers: tuple[torch.Tensor, ...]
    """uint8 ``[nbytes]`` each."""

    def fill(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Write the dense copy into every piece, and the gap value everywhere else."""
        for buffer in self.buffers:
            buffer.fill_(_GAP)
        _write(self.pieces, whole)

    def poison(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Write the complement of the dense copy into every piece, and the gap value everywhere else."""
        self.fill(whole)
        for bound in self.pieces:
            bits(bound.view).bitwise_not_()

    def check(self, whole: Mapping[str, torch.Tensor], what: str) -> None:
        """Compare every byte of every buffer, those outside the pieces too.

        Raises:
            AssertionError: Names the piece that is wrong, or the buffer that was written beside its pieces.
        """
        for bound in self.pieces:
            expected = cut(whole[bound.piece.name], bound.piece.box).reshape(bound.view.shape)
            check_landed(bound.view, expected, f"{what}: {bound.piece.name!r} {bound.piece.box}")
        written = [buffer.clone() for buffer in self.buffers]
        self.fill(whole)
        for number, (before, after) in enumerate(zip(self.buffers, written, strict=True)):
            if not torch.equal(before, after):
                at = torch.nonzero(before != after)[0].item()
                raise AssertionError(f"{what}: byte {at} of buffer {number} lies in no piece and was overwritten")


def _write(pieces: Iterable[BoundPiece], whole: Mapping[str, torch.Tensor]) -> None:
    for bound in pieces:
        values = cut(whole[bound.piece.name], bound.piece.box)
        bits(bound.view).copy_(bits(values.reshape(bound.view.shape)))


def contiguous_memory(pieces: Iterable[Piece], dtypes: Mapping[str, str]) -> Memory:
    """Memory of its own, in C order, for every piece."""
    bound, buffers = [], []
    for piece in pieces:
        kind: torch.dtype = getattr(torch, dtypes[piece.name])
        buffers.append(torch.empty(piece.box.numel * kind.itemsize, dtype=torch.uint8))
        view = buffers[-1].view(kind).view(piece.box.shape)
        bound.append(BoundPiece(piece, binding_of(view), view))
    return Memory(tuple(bound), tuple(buffers))


def memory_of_layouts(layouts: Mapping[str, Layout], rank: int) -> Memory:
    """Memory of its own for every box that ``rank`` holds of each layout's tensor."""
    pieces = [Piece(name, box) for name, layout in layouts.items() for box in layout.boxes(rank)]
    return contiguous_memory(pieces, {name: layout.dtype for name, layout in layouts.items()})
