"""This rank's memory as views of plain words, so that any dtype and any strides can be copied and compared bit by bit.

Weights travel as bytes. A copy of words (int16 for bfloat16, and so on) moves every bit as it is, for every dtype torch
has, where a copy of the dtype itself may be missing a kernel (packed 4-bit floats) or refuse (quantised integers). Only
memory of another floating-point dtype than its tensor travels in is seen as values, to be cast by the copy.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import TYPE_CHECKING

import torch

from reshard.errors import BindingError
from reshard.layouts.bound import refine
from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.layouts.piece import TensorSpec

_FLOATS = {str(dtype)[6:]: dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
"""What is cast where memory and wire differ; in every other dtype bits are bits."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def words(
    storage: torch.UntypedStorage,
    offset_nbytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    word: int | None = None,
) -> torch.Tensor:
    """A strided region of a storage as integers of ``word`` bytes.

    Args:
        storage: The memory.
        offset_nbytes: Where element 0 lies.
        shape: In elements of ``itemsize`` bytes.
        strides: In elements.
        itemsize: Bytes an element takes.
        word: Bytes a word takes; the largest that the element and its alignment allow if not given. Where an element
            has several words, they are one more dim at the end.
    """
    word = word or aligned_word(itemsize, offset_nbytes)
    per_item = itemsize // word
    size = (*shape, per_item) if per_item > 1 else tuple(shape)
    stride = (*(s * per_item for s in strides), 1) if per_item > 1 else tuple(strides)
    empty = torch.empty(0, dtype=_WORDS[word], device=storage.device)
    return empty.set_(storage, offset_nbytes // word, size, stride)


def values(
    storage: torch.UntypedStorage,
    offset_nbytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A strided region of a storage in a dtype, which its place must be aligned to."""
    assert offset_nbytes % dtype.itemsize == 0
    return torch.empty(0, dtype=dtype, device=storage.device).set_(
        storage, offset_nbytes // dtype.itemsize, tuple(shape), tuple(strides)
    )


def aligned_word(itemsize: int, offset_nbytes: int) -> int:
    """The largest word, up to 8 bytes, that divides an element and the place where it lies."""
    word = min(itemsize, 8)
    while offset_nbytes % word or itemsize % word:
        word //= 2
    return word


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-ordered array."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


class BoundMemory:
    """The pieces of this rank, to be asked where a box lies.

    Raises:
        BindingError: A view whose bits are not its values (a lazy conjugate or negative).
    """

    def __init__(self, pieces: Iterable[BoundPiece]) -> None:
        self._by_name: dict[str, list[BoundPiece]] = {}
        for bound in pieces:
            if bound.view.is_conj() or bound.view.is_neg():
                raise BindingError(
                    f"{bound.piece.name!r}: the view of {bound.piece.box} is a lazy conjugate or negative, so its "
                    f"bytes are not its values. Use tensor.resolve_conj().resolve_neg()."
                )
            self._by_name.setdefault(bound.piece.name, []).append(bound)

    def regions(self, spec: TensorSpec, box: Box) -> Iterator[Region]:
        """Where the elements of ``box`` lie: its parts that this rank holds, each as one strided region.

        Args:
            spec: The tensor, in the dtype in which it travels.
            box: In its global coordinates.
        """
        wire = _FLOATS.get(spec.dtype)
        for bound in self._by_name.get(spec.name, ()):
            shared = box.intersect(bound.piece.box)
            if shared is not None:
                dtype = bound.view.dtype
                is_cast = wire is not None and dtype is not wire and dtype in _FLOATS.values()
                yield from _regions_of_piece(bound, shared, wire if is_cast else None)


class Region:
    """A box of a tensor in this rank's memory: a strided region that may have more dims than the box."""

    __slots__ = ("box", "cast", "dtype", "offset_nbytes", "shape", "storage", "strides")

    def __init__(
        self,
        box: Box,
        storage: torch.UntypedStorage,
        offset_nbytes: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: torch.dtype,
        cast: torch.dtype | None = None,
    ) -> None:
        self.box = box
        self.storage = storage
        self.offset_nbytes = offset_nbytes
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.cast = cast
        """The dtype in which its elements travel, where that is another one; None where they travel as they are."""

    @property
    def itemsize(self) -> int:
        """Bytes an element takes here."""
        return self.dtype.itemsize

    @property
    def wire_itemsize(self) -> int:
        """Bytes an element takes on the wire."""
        return (self.cast or self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.box.numel * self.wire_itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    def words(self, word: int | None = None) -> torch.Tensor:
        """The region as words, shape ``self.shape`` (and one more dim where an element has several)."""
        return words(self.storage, self.offset_nbytes, self.shape, self.strides, self.itemsize, word)

    def values(self) -> torch.Tensor:
        """The region in its own dtype, shape ``self.shape``."""
        return values(self.storage, self.offset_nbytes, self.shape, self.strides, self.dtype)

    def inside(self, outer: Box, offset_nbytes: int) -> tuple[int, tuple[int, ...]]:
        """Where the same elements lie on the wire, if ``outer`` lies there in C order from a byte of it.

        Returns:
            The byte of the first one, and strides in elements, for this region's shape.
        """
        outer_strides = contiguous_strides(outer.shape)
        start = self.box.relative_to(outer.start).start
        at = offset_nbytes + self.wire_itemsize * sum(i * s for i, s in zip(start, outer_strides, strict=True))
        groups = refine(self.box.shape, self.shape)
        assert groups is not None
        strides = tuple(
            stride * inner
            for stride, group in zip(outer_strides, groups, strict=True)
            for inner in contiguous_strides(group)
        )
        return at, strides


def _regions_of_piece(bound: BoundPiece, box: Box, cast: torch.dtype | None) -> Iterator[Region]:
    view = bound.view
    storage, itemsize = view.untyped_storage(), view.element_size()
    origin, strides = view.storage_offset(), tuple(view.stride())
    groups = refine(bound.piece.box.shape, tuple(view.shape))
    assert groups is not None, f"{bound.piece} is bound to a view of shape {tuple(view.shape)}"
    local = box.relative_to(bound.piece.box.start)
    per_dim: list[list[tuple[int, int, Box]]] = []
    for lo, hi, group in zip(local.start, local.stop, groups, strict=True):
        runs, at = [], lo
        whole = Box((0,) * len(group), group)
        for run in whole.linear_range(lo, hi) if len(group) > 1 else (Box((lo,), (hi,)),):
            runs.append((at, at + run.numel, run))
            at += run.numel
        per_dim.append(runs)
    base = bound.piece.box.start
    for combo in product(*per_dim):
        start = tuple(b + lo for b, (lo, _, _) in zip(base, combo, strict=True))
        stop = tuple(b + hi for b, (_, hi, _) in zip(base, combo, strict=True))
        inner_start = tuple(i for _, _, run in combo for i in run.start)
        shape = tuple(n for _, _, run in combo for n in run.shape)
        offset = origin + sum(i * s for i, s in zip(inner_start, strides, strict=True))
        yield Region(Box(start, stop), storage, offset * itemsize, shape, strides, view.dtype, cast)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy every source into its target of the same shape, in as few calls as torch allows; nothing is allocated."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
    elif targets:
        torch._foreach_copy_(targets, sources)


def merged_run(regions: Sequence[Region]) -> torch.Tensor | None:
    """The one contiguous stretch of memory (uint8) that the regions are as they travel; None where they are not."""
    if not regions or any(region.cast is not None for region in regions):
        return None
    first = regions[0]
    at = first.offset_nbytes
    storage = first.storage.data_ptr()
    for region in regions:
        if region.offset_nbytes != at or not region.is_contiguous or region.storage.data_ptr() != storage:
            return None
        at += region.nbytes
    return words(first.storage, first.offset_nbytes, (at - first.offset_nbytes,), (1,), 1, 1)
