"""Sums over landed bytes: what a receiver has in its memory against what the sender had in its own.

Both kinds are sums of 64-bit words modulo 2**64 over a box, and depend on the box and its bits alone, not on strides,
buckets or ranks. ``sum`` adds the words as they are; ``fingerprint`` first mixes each word with its place in the
global tensor, so that two swapped blocks show.
"""

from __future__ import annotations

from math import gcd, prod
from typing import TYPE_CHECKING, Literal

import torch

from reshard.transports.views import contiguous_strides, words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec
    from reshard.transports.views import Region

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


def box_sum(box: Box, spec: TensorSpec, regions: Sequence[Region], kind: Verify) -> torch.Tensor:
    """The sum over the elements of ``box`` that ``regions`` hold, an int64 scalar on their device."""
    word = word_of(box, spec)
    total = torch.zeros((), dtype=torch.int64, device=regions[0].storage.device)
    for region in regions:
        total += _plain_sum(region, word) if kind == "sum" else _mixed_sum(region, spec, word)
    return total


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
    if rows is not None:
        return rows
    packed = region.words().contiguous()
    nbytes = packed.numel() * packed.element_size()
    last = region.shape[-1] * region.itemsize if region.shape else region.itemsize
    shape = (nbytes // last, last // word)
    return words(packed.untyped_storage(), 0, shape, contiguous_strides(shape), word, word)


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
