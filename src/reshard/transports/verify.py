"""Sums over landed bytes: what a receiver has in its memory against what the sender had in its own.

Both kinds are sums of 64-bit words modulo 2**64 over a box, and depend on the box and its bits alone, not on strides,
buckets or ranks. ``sum`` adds the words as they are; ``fingerprint`` first mixes each word with its place in the
global tensor, so that two swapped blocks show.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Literal

import torch

from reshard.transports.views import Region, contiguous_strides, words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec
    from reshard.transports.views import BoundMemory

Verify = Literal["none", "sum", "fingerprint"]
VERIFY: tuple[Verify, ...] = ("none", "sum", "fingerprint")

_CHUNK_WORDS = 1 << 16
"""Words mixed at a time: small enough that the temporaries stay in the cache."""

_PRIME_PLACE = -7046029254386353131
_PRIME_MIX = -4417276706812531889


def word_of(box: Box, spec: TensorSpec) -> int:
    """Bytes of the words that a box is summed in: the largest, up to 8, that cuts its rows and the tensor's evenly.

    A function of the box alone, so that sender and receiver agree whatever their strides.
    """
    if not box.shape:
        return min(spec.itemsize, 8)
    edges = (box.start[-1], box.stop[-1], spec.shape[-1])
    return gcd(8, *(edge * spec.itemsize for edge in edges))


def box_sum(box: Box, spec: TensorSpec, memory: BoundMemory, kind: Verify, *, word: int | None = None) -> torch.Tensor:
    """The sum over the elements of ``box`` that lie in ``memory``, an int64 scalar on their device.

    With ``word`` the size of an element the sums of any boxes that make up a tensor add up to the same; without it the
    words are as large as the box allows, which is faster.

    Where the memory's own runs are not whole words (interleaved rows, a box in two pieces), some rows at a time are
    packed first, so that the words are those of the box.
    """
    word = word or word_of(box, spec)
    regions = list(memory.regions(spec.name, box))
    total = torch.zeros((), dtype=torch.int64, device=regions[0].storage.device if regions else None)
    whole_words = all(_fits(region, spec, word) for region in regions)
    parts = regions if whole_words else (_packed(rows, spec, memory, total.device) for rows in _some_rows(box, spec))
    for region in parts:
        total += _plain_sum(region, word) if kind == "sum" else _mixed_sum(region, spec, word)
    return total


def _fits(region: Region, spec: TensorSpec, word: int) -> bool:
    """Whether a region can be read as words of its tensor where it lies."""
    edges = (region.box.start[-1], region.box.stop[-1], region.shape[-1]) if region.box.shape else ()
    return all(edge * spec.itemsize % word == 0 for edge in edges) and _as_rows(region, word) is not None


def _some_rows(box: Box, spec: TensorSpec) -> Iterator[Box]:
    """The rows (last dim) of a box, some at a time, in boxes."""
    row = box.shape[-1] if box.shape else 1
    step = max(1, 8 * _CHUNK_WORDS // (row * spec.itemsize)) * row
    for at in range(0, box.numel, step):
        yield from box.linear_range(at, min(at + step, box.numel))


def _packed(box: Box, spec: TensorSpec, memory: BoundMemory, device: torch.device) -> Region:
    """The elements of ``box``, copied into memory of their own in C order."""
    storage = torch.zeros(box.numel * spec.itemsize, dtype=torch.uint8, device=device).untyped_storage()
    for region in memory.regions(spec.name, box):
        mine, packed = region.pair(box, storage, 0)
        packed.copy_(mine)
    return Region(box, storage, 0, box.shape, contiguous_strides(box.shape), spec.itemsize)


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


def _plain_sum(region: Region, word: int) -> torch.Tensor:
    return _in_words(region, word).sum(dtype=torch.int64)


def _mixed_sum(region: Region, spec: TensorSpec, word: int) -> torch.Tensor:
    """Sum of mix(place, word): place counts words from the global tensor's origin."""
    values = _in_words(region, word)
    device = values.device
    box = region.box
    last = (box.stop[-1] - box.start[-1]) * spec.itemsize // word if box.shape else values.numel()
    rows = values.reshape(-1, max(last, 1)) if values.is_contiguous() else values
    row_words = spec.shape[-1] * spec.itemsize // word if spec.shape else last
    starts = _row_starts(box, spec, row_words, word, device)
    columns = torch.arange(last, dtype=torch.int64, device=device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    flat = rows if rows.dim() == 2 and rows.shape[1] == last else values.reshape(-1, last)
    step = max(1, _CHUNK_WORDS // max(last, 1))
    for at in range(0, flat.shape[0], step):
        part = flat[at : at + step].to(torch.int64)
        place = starts[at : at + step].unsqueeze(1) + columns
        mixed = place.mul_(_PRIME_PLACE).bitwise_xor_(part)
        mixed.mul_(_PRIME_MIX)
        mixed.bitwise_xor_(mixed >> 29)
        mixed.mul_(_PRIME_PLACE)
        total += mixed.sum()
    return total


def _row_starts(box: Box, spec: TensorSpec, row_words: int, word: int, device: torch.device) -> torch.Tensor:
    """For each row (last dim) of the box in C order, the place of its first word in the global tensor."""
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(len(box.shape) - 1):
        step = prod(spec.shape[dim + 1 : -1]) * row_words
        index = torch.arange(box.start[dim], box.stop[dim], dtype=torch.int64, device=device) * step
        starts = (starts.unsqueeze(1) + index).reshape(-1)
    return starts + box.start[-1] * spec.itemsize // word if box.shape else starts
