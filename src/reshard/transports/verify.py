"""Sums over landed bytes: what a receiver has in its memory against what the sender had in its own.

Both kinds are sums of words modulo 2**64 over a box, and depend on the box and its bits alone, not on strides, buckets
or ranks. ``sum`` adds the words as they are. ``fingerprint`` adds each times a number that is drawn from its place in
the global tensor, so that two swapped blocks show. Its words are cut by the tensor and not by the box, and a box that
takes a part of a word counts that part: so the fingerprints of any boxes that make up a tensor add up to the tensor's.

The number of a place is ``row(r) * block(c >> 16) * column(c & 0xffff)`` of its row and the word ``c`` in it, all three
odd: no single change can cancel. As a product it need not be made for every word: a row of 2**16 words or fewer is one
dot product with the same numbers, which is what makes it cheap.

Memory of another dtype than its tensor travels in is cast as it is summed, some rows at a time. Of a NaN a cast keeps
that it is one and not its bits (which these are differs between torch's own kernels), so there all NaNs count as one.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd, prod
from typing import TYPE_CHECKING, Literal

import torch

from reshard.layouts.box import Box
from reshard.transports.copies import Scratch, carry_out, wire_copies
from reshard.transports.views import Region, contiguous_strides, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.layouts.piece import TensorSpec
    from reshard.transports.views import BoundMemory

Verify = Literal["none", "sum", "fingerprint"]
VERIFY: tuple[Verify, ...] = ("none", "sum", "fingerprint")

_CHUNK_WORDS = 1 << 16
"""Words taken at a time: small enough that the temporaries stay in the cache."""

_PACKED_NBYTES = 1 << 20
"""Bytes packed at a time: so many that finding their places takes no time to speak of, and few enough for the cache."""

_SCRATCH = Scratch()

_WIDE = Scratch()
"""For words as int64: malloc may give memory of this size back to the system each time, and faults cost half as much
as the sums."""

_BLOCK_BITS = 16
"""A block of a row is 2**16 words."""

_ROW, _BLOCK, _COLUMN = 0x243F6A8885A308D3, 0x13198A2E03707344, 0x082EFA98EC4E6C89
"""What a number is drawn for: three starts of the sequence it is drawn from (digits of pi)."""


def word_of(box: Box, spec: TensorSpec) -> int:
    """Bytes of the words that a box is summed in: the largest, up to 8, that cuts its rows and the tensor's evenly.

    A function of the box alone, so that sender and receiver agree whatever their strides.
    """
    if not box.shape:
        return min(spec.itemsize, 8)
    edges = (box.start[-1], box.stop[-1], spec.shape[-1])
    return gcd(8, *(edge * spec.itemsize for edge in edges))


def tensor_word(spec: TensorSpec) -> int:
    """Bytes of the words of a fingerprint: the largest, up to 4, that cuts the tensor's rows evenly.

    Products of words of 4 bytes keep at least 33 bits modulo 2**64 whichever bit of a word has changed.
    """
    return gcd(4, (spec.shape[-1] if spec.shape else 1) * spec.itemsize)


def box_sum(box: Box, spec: TensorSpec, memory: BoundMemory, kind: Verify, *, cast: bool = False) -> torch.Tensor:
    """As ``BoxSum``, made once."""
    return BoxSum(box, spec, memory, kind, cast=cast)()


class BoxSum:
    """The sum over the elements of a box that lie in a memory; its places are found once, and summed at each call.

    Where the memory's own runs are not whole words (interleaved rows, a box in two pieces), some rows at a time are
    packed first, so that the words are those of the box, or of the tensor.

    Args:
        box: What is summed.
        spec: Its tensor, in the dtype in which it travels: the sum is of these bits.
        memory: Where it lies, in that dtype or in one that is cast to it.
        kind: ``"sum"`` or ``"fingerprint"``.
        cast: Whether the tensor is cast here or elsewhere, so that all NaNs count as one.
    """

    __slots__ = ("_box", "_device", "_is_cast", "_kind", "_memory", "_plain", "_spec", "_word")

    def __init__(self, box: Box, spec: TensorSpec, memory: BoundMemory, kind: Verify, *, cast: bool = False) -> None:
        self._box, self._spec, self._memory, self._kind = box, spec, memory, kind
        self._word = word_of(box, spec) if kind == "sum" else tensor_word(spec)
        regions = list(memory.regions(spec, box))
        self._device = regions[0].storage.device if regions else None
        self._is_cast = cast or any(region.cast is not None for region in regions)
        self._plain: list[tuple[Region, torch.Tensor]] | None = None
        """Regions, each with its words, where these can be read as they lie."""
        if all(_fits(region, spec, self._word) for region in regions):
            self._plain = [(region, _in_words(region, self._word)) for region in regions]

    def __call__(self) -> torch.Tensor:
        """Make the sum, an int64 scalar on the memory's device."""
        plain = self._plain
        if plain is not None and not (self._is_cast and any(_may_hold_nan(region) for region, _ in plain)):
            sums = [self._sum(region, words) for region, words in plain]
        else:
            parts = _packed(self._box, self._spec, self._memory, self._word, self._is_cast)
            sums = [self._sum(part, _in_words(part, self._word)) for part in parts]
        if len(sums) == 1:
            return sums[0]
        return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=self._device)

    def both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the very bits, and the one in which all NaNs count as one."""
        bits = self()
        if self._plain is not None and not any(_may_hold_nan(region) for region, _ in self._plain):
            return bits, bits
        return bits, BoxSum(self._box, self._spec, self._memory, self._kind, cast=True)()

    def _sum(self, region: Region, words: torch.Tensor) -> torch.Tensor:
        return words.sum(dtype=torch.int64) if self._kind == "sum" else _mixed_sum(words, region.box, self._spec)


def _fits(region: Region, spec: TensorSpec, word: int) -> bool:
    """Whether a region can be read as words of its tensor where it lies."""
    if region.cast is not None:
        return False
    edges = (region.box.start[-1], region.box.stop[-1], region.shape[-1]) if region.box.shape else ()
    return all(edge * spec.itemsize % word == 0 for edge in edges) and _as_rows(region, word) is not None


def _some_rows(box: Box, spec: TensorSpec) -> Iterator[Box]:
    """The rows (last dim) of a box, some at a time, in boxes."""
    row = box.shape[-1] if box.shape else 1
    step = max(1, _PACKED_NBYTES // (row * spec.itemsize)) * row
    for at in range(0, box.numel, step):
        yield from box.linear_range(at, min(at + step, box.numel))


def _packed(box: Box, spec: TensorSpec, memory: BoundMemory, word: int, cast: bool) -> Iterator[Region]:
    """The elements of ``box`` as they travel, some rows at a time, in C order, with zeros up to whole words of a row.

    Each part lies where the one before did. Where they are ``cast``, all NaNs have the same bits.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    for rows in _some_rows(box, spec):
        regions = list(memory.regions(spec, rows))
        wide = _in_whole_words(rows, spec, word)
        nbytes = wide.numel * spec.itemsize
        buffer = _SCRATCH.take(nbytes, regions[0].storage.device if regions else torch.device("cpu"))
        if wide != rows or sum(region.box.numel for region in regions) != rows.numel:
            buffer.zero_()
        carry_out(wire_copies([(wide, 0, region) for region in regions], buffer, 0, pack=True))
        packed = Region(wide, buffer.untyped_storage(), 0, wide.shape, contiguous_strides(wide.shape), dtype)
        if cast and _may_hold_nan(packed):
            torch.nan_to_num_(packed.values(), nan=float("nan"), posinf=float("inf"), neginf=float("-inf"))
        yield packed


def _may_hold_nan(region: Region) -> bool:
    """False only where no element is NaN. On a device nobody waits for the answer."""
    return region.storage.device.type != "cpu" or bool(region.values().sum().isnan())


def _in_whole_words(box: Box, spec: TensorSpec, word: int) -> Box:
    """The least box around this one whose rows are whole words of the tensor's."""
    items = word // gcd(word, spec.itemsize)
    if not box.shape or items == 1:
        return box
    start, stop = box.start[-1] // items * items, -(-box.stop[-1] // items) * items
    return Box((*box.start[:-1], start), (*box.stop[:-1], min(stop, spec.shape[-1])))


def _as_rows(region: Region, word: int) -> torch.Tensor | None:
    """The region as words of ``word`` bytes, whole ones along its last dim, without a copy; None if it is not so."""
    shape, strides, itemsize = region.shape, region.strides, region.itemsize
    if word <= itemsize and region.offset_nbytes % word == 0:
        return region.words(word)
    row = shape[-1] * itemsize if shape else itemsize
    steps = [s * itemsize for n, s in zip(shape[:-1], strides[:-1], strict=True) if n > 1]
    if not shape or (strides[-1] != 1 and shape[-1] > 1) or gcd(word, row, region.offset_nbytes, *steps) != word:
        return None
    bytes_shape = (*shape[:-1], row // word)
    byte_strides = (*(s * itemsize // word for s in strides[:-1]), 1)
    return words(region.storage, region.offset_nbytes, bytes_shape, byte_strides, word, word)


def _in_words(region: Region, word: int) -> torch.Tensor:
    rows = _as_rows(region, word)
    assert rows is not None
    return rows


def _mixed_sum(values: torch.Tensor, box: Box, spec: TensorSpec) -> torch.Tensor:
    """The sum of each word of a box times the number of its place."""
    word = values.element_size()
    first, row_words = 0, values.numel()
    if box.shape:
        first = box.start[-1] * spec.itemsize // word
        row_words = box.shape[-1] * spec.itemsize // word
    flat = values.reshape(-1, max(row_words, 1))
    rows = _row_numbers(box, spec, values.device)
    sums = []
    for lo, hi in _blocks(first, first + row_words):
        block = flat[:, lo - first : hi - first]
        at = lo & (1 << _BLOCK_BITS) - 1
        columns = _table(_COLUMN, values.device)[at : at + hi - lo]
        step = max(1, _CHUNK_WORDS // (hi - lo))
        dots = [_dot(block[at : at + step], columns) for at in range(0, block.shape[0], step)]
        products = dots[0] if len(dots) == 1 else torch.cat(dots)
        sums.append((products * rows).sum() * _block_number(lo >> _BLOCK_BITS, values.device))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The words ``[start, stop)`` of a row, cut at multiples of a block."""
    while start < stop:
        end = min(stop, (start >> _BLOCK_BITS) + 1 << _BLOCK_BITS)
        yield start, end
        start = end


def _dot(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """For each row its product with ``columns``, modulo 2**64."""
    if rows.device.type != "cpu":
        return rows.to(torch.int64).mul_(columns).sum(1)  # CUDA has no mv of integers
    if rows.dtype is torch.int64:
        return rows.mv(columns)
    wide = _WIDE.take(8 * rows.numel(), rows.device).view(torch.int64).view(rows.shape)
    return wide.copy_(rows).mv(columns)


def _row_numbers(box: Box, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """For each row (last dim) of the box in C order, the number of its place in the global tensor."""
    if len(box.shape) < 2:
        return _table(_ROW, device)[:1]
    if len(box.shape) == 2 and box.stop[0] <= 1 << _BLOCK_BITS:
        return _table(_ROW, device)[box.start[0] : box.stop[0]]
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(len(box.shape) - 1):
        step = prod(spec.shape[dim + 1 : -1])
        index = torch.arange(box.start[dim], box.stop[dim], dtype=torch.int64, device=device) * step
        rows = (rows.unsqueeze(1) + index).reshape(-1)
    return _numbers(rows, _ROW)


@lru_cache(maxsize=16)
def _table(purpose: int, device: torch.device) -> torch.Tensor:
    """The numbers of the first places, which nearly all tensors need: 512 KiB."""
    return _numbers(torch.arange(1 << _BLOCK_BITS, dtype=torch.int64, device=device), purpose)


@lru_cache(maxsize=1024)
def _block_number(block: int, device: torch.device) -> torch.Tensor:
    return _numbers(torch.tensor([block], device=device), _BLOCK)[0]


def _numbers(places: torch.Tensor, purpose: int) -> torch.Tensor:
    """An odd number of 64 bits for each place, as if drawn at random (the finalizer of splitmix64)."""
    mixed = places * -7046029254386353131 + purpose
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    return mixed ^ (mixed >> 31 & (1 << 33) - 1) | 1
