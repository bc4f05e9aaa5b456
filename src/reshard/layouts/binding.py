"""Binding: where a piece lies in this rank's memory. Bindings are local and never sent."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class Binding:
    """A strided region of a buffer: ``shape`` elements at byte ``offset_nbytes``, ``strides`` in elements.

    The shape may have more dims than the piece's box (rows of one tensor interleaved with others' in a buffer): then it
    refines the box's dims, each box dim being the product of a run of binding dims, in C order.
    """

    buffer: int
    """Which buffer (a storage) of this rank; equal numbers mean the same memory."""

    offset_nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in C order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> tuple[int, int]:
        """First byte and one past the last byte that the region touches in its buffer."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True) if size)
        return self.offset_nbytes, self.offset_nbytes + (reach + 1) * self.itemsize

    @property
    def overlaps_itself(self) -> bool:
        """Whether elements of it share memory, as in an expanded view; so too where only their spans interleave."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride <= reach:
                return True
            reach += (size - 1) * stride
        return False

    def may_overlap(self, other: Binding) -> bool:
        """Whether the two regions may share a byte; exact up to many thousand runs, beyond that by span."""
        if self.buffer != other.buffer:
            return False
        (a_lo, a_hi), (b_lo, b_hi) = self.span, other.span
        if a_hi <= b_lo or b_hi <= a_lo:
            return False
        if _columns_apart(self, other):
            return False
        if max(_run_count(self), _run_count(other)) > _MOST_RUNS:
            return True
        return _runs_meet(sorted(_runs(self)), sorted(_runs(other)))


_MOST_RUNS = 1 << 16
"""Regions of more runs than this are only compared by their spans and columns."""


def _run_count(binding: Binding) -> int:
    return prod(binding.shape[: _outer_dims(binding)])


def _outer_dims(binding: Binding) -> int:
    """How many leading dims step from run to run; the others together are one contiguous run."""
    expected, dims = 1, len(binding.shape)
    for size, stride in zip(reversed(binding.shape), reversed(binding.strides), strict=True):
        if size != 1 and stride != expected:
            break
        expected *= size
        dims -= 1
    return dims


def _runs(binding: Binding) -> Iterator[tuple[int, int]]:
    """The contiguous byte ranges of a region."""
    outer = _outer_dims(binding)
    nbytes = prod(binding.shape[outer:]) * binding.itemsize
    for place in product(*(range(n) for n in binding.shape[:outer])):
        at = binding.offset_nbytes + binding.itemsize * sum(i * s for i, s in zip(place, binding.strides, strict=False))
        yield at, at + nbytes


def _runs_meet(a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]]) -> bool:
    i = j = 0
    while i < len(a) and j < len(b):
        if a[i][1] <= b[j][0]:
            i += 1
        elif b[j][1] <= a[i][0]:
            j += 1
        else:
            return True
    return False


def _columns_apart(a: Binding, b: Binding) -> bool:
    """Whether two regions of one row-strided matrix lie in different columns, so that their spans overlap but no byte.

    Both must be made of runs that repeat at one common row stride; then it is enough that the runs' places inside a
    row do not meet.
    """
    stride = _row_stride_nbytes(a) or _row_stride_nbytes(b)
    if not stride or (_row_stride_nbytes(a) or stride) != stride or (_row_stride_nbytes(b) or stride) != stride:
        return False
    a_lo, a_run = a.offset_nbytes % stride, _run_nbytes(a, stride)
    b_lo, b_run = b.offset_nbytes % stride, _run_nbytes(b, stride)
    if a_lo + a_run > stride or b_lo + b_run > stride:
        return False
    return a_lo + a_run <= b_lo or b_lo + b_run <= a_lo


def _row_stride_nbytes(binding: Binding) -> int:
    """The largest stride in bytes, 0 where the region is a single run."""
    strides = [s for n, s in zip(binding.shape, binding.strides, strict=True) if n > 1]
    return 0 if binding.is_contiguous or not strides else max(strides) * binding.itemsize


def _run_nbytes(binding: Binding, stride: int) -> int:
    """Bytes from the first to the last byte inside one row of ``stride`` bytes."""
    inner = [
        (n - 1) * s
        for n, s in zip(binding.shape, binding.strides, strict=True)
        if n > 1 and s * binding.itemsize < stride
    ]
    if any(s * binding.itemsize > stride for n, s in zip(binding.shape, binding.strides, strict=True) if n > 1):
        return stride + 1
    return (sum(inner) + 1) * binding.itemsize
