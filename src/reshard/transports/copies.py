"""Copies: pairs of views of equal shape over the memory on either side of a copy, found once and copied many times.

Bits are copied as words. Where memory has another dtype than the wire the copy casts, as ``tensor.to(dtype)`` does.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reshard.errors import BindingError
from reshard.transports.views import BoundMemory, Region, aligned_word, copy_all, values, words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources."""

_SCRATCH_NUMEL = 1 << 18
"""Elements that a cast in two steps takes at a time: they stay in the cache, and are no staging to speak of."""

_ROWS_NUMEL = 1 << 16
"""The same for narrow rows, which are brought together before they are cast."""

_NARROW = range(16, 129)
"""Elements of a row that is cast faster among others in the cache than where it lies, if it goes to staging."""


class Scratch(threading.local):
    """Memory for a moment, one piece a thread: on a CPU, new memory costs more than to fill it."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """uint8 ``[nbytes]``, until the next call of this thread."""
        if device.type != "cpu":
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8)
        return self._buffer[:nbytes]


_SCRATCH = Scratch()


@dataclass(eq=False)
class Copies:
    """Copies that are made together."""

    bits: Pairs = field(default_factory=lambda: ([], []))
    """Words of equal shape."""

    casts: Pairs = field(default_factory=lambda: ([], []))
    """Values of equal shape and different dtypes."""

    stepwise: list[_Stepwise] = field(default_factory=list)
    """Casts that torch has no fast kernel for, or none at all."""

    rows: list[_Rows] = field(default_factory=list)
    """Casts of narrow rows."""

    nbytes: int = 0
    """As they travel."""

    def __bool__(self) -> bool:
        return bool(self.bits[0] or self.casts[0] or self.stepwise or self.rows)

    def add(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy words."""
        self.bits[0].append(target)
        self.bits[1].append(source)
        self.nbytes += target.numel() * target.element_size()

    def add_cast(
        self,
        memory: torch.Tensor,
        wire: torch.Tensor,
        dtype: torch.dtype,
        *,
        pack: bool,
        to_staging: bool = False,
    ) -> None:
        """Cast from memory to the wire's form, or the other way.

        Args:
            memory: The elements where they have a dtype of their own.
            wire: The same in the dtype in which they travel; as bytes (one more dim) where its place is not aligned.
            dtype: That dtype.
            pack: Whether the wire's form is the target.
            to_staging: Whether the target is staging, which is in the cache: then narrow rows are brought together
                first. On the way to memory that is not, nothing would be gained.
        """
        self.nbytes += memory.numel() * dtype.itemsize
        if wire.dtype is dtype and _run_alike(memory, wire):
            if to_staging and dtype is torch.bfloat16 and wire.is_contiguous() and _row_numel(memory) in _NARROW:
                self._add_rows(memory, wire)
                return
            self.casts[0].append(wire if pack else memory)
            self.casts[1].append(memory if pack else wire)
            return
        wire = _words_of(wire) if wire.dtype is dtype else wire
        self.stepwise += [_Stepwise(some, bits, dtype, pack) for some, bits in _portions(memory, wire)]

    def _add_rows(self, memory: torch.Tensor, wire: torch.Tensor) -> None:
        for run, some in _portions(wire, memory, _ROWS_NUMEL):  # cut where the wire is cut into runs
            if not self.rows or not self.rows[-1].has_room_for(some, run):
                self.rows.append(_Rows(some.dtype, run.dtype))
            self.rows[-1].add(some, run)


def carry_out(copies: Copies) -> None:
    """Make the copies, in as few calls as torch allows."""
    copy_all(*copies.bits)
    copy_all(*copies.casts)
    for step in copies.stepwise:
        step.copy()
    for rows in copies.rows:
        rows.cast()


@dataclass(frozen=True, eq=False)
class _Stepwise:
    """A cast in two steps: between the dtypes in the memory's order, and as words to or from where the bits lie."""

    memory: torch.Tensor
    wire: torch.Tensor
    """As words."""

    dtype: torch.dtype
    pack: bool

    def copy(self) -> None:
        nbytes = self.memory.numel() * self.dtype.itemsize
        buffer = _SCRATCH.take(nbytes, self.memory.device)
        strides = _dense_strides(self.memory)
        cast = values(buffer.untyped_storage(), 0, self.memory.shape, strides, self.dtype)
        bits = words(
            buffer.untyped_storage(), 0, self.memory.shape, strides, cast.element_size(), self.wire.element_size()
        )
        if self.pack:
            cast.copy_(self.memory)
            self.wire.copy_(bits)
        else:
            bits.copy_(self.wire)
            self.memory.copy_(cast)


class _Rows:
    """Casts of narrow rows, brought together as they are and then cast in few calls.

    Torch's cast to bfloat16 waits for the memory of each row anew; its copy of words does not.
    """

    def __init__(self, dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
        self._dtype, self._wire_dtype = dtype, wire_dtype
        self._memory: list[torch.Tensor] = []
        self._wire: list[torch.Tensor] = []
        """Runs, flat."""
        self._numel = 0
        self._at = 0
        """Where the scratch lies that there are views of."""
        self._together: list[torch.Tensor] = []
        self._runs: list[torch.Tensor] = []

    def has_room_for(self, memory: torch.Tensor, wire: torch.Tensor) -> bool:
        """Whether another box may be cast with those before."""
        alike = (memory.dtype, wire.dtype, memory.device) == (self._dtype, self._wire_dtype, self._memory[0].device)
        return alike and self._numel + memory.numel() <= _ROWS_NUMEL

    def add(self, memory: torch.Tensor, wire: torch.Tensor) -> None:
        """Cast a box of the memory, of any strides, into its run on the wire."""
        self._memory.append(_words_of(memory, memory.element_size()))
        self._numel += memory.numel()
        storage, at, numel = wire.untyped_storage(), int(wire.storage_offset()), wire.numel()
        if self._wire:
            last = self._wire[-1]
            end = int(last.storage_offset()) + last.numel()
            if end == at and last.untyped_storage().data_ptr() == storage.data_ptr():
                at, numel = int(last.storage_offset()), numel + last.numel()
                del self._wire[-1]
        self._wire.append(values(storage, at * wire.element_size(), (numel,), (1,), wire.dtype))

    def cast(self) -> None:
        """Do it."""
        buffer = _SCRATCH.take(
            _ROWS_NUMEL * self._dtype.itemsize, self._memory[0].device
        )  # as much for all: views last
        if buffer.data_ptr() != self._at:
            self._bind(buffer)
        copy_all(self._together, self._memory)
        copy_all(self._wire, self._runs)

    def _bind(self, buffer: torch.Tensor) -> None:
        """Make the views of scratch; another thread has another one."""
        flat = buffer.view(self._dtype)[: self._numel]
        parts = torch.split(_words_of(flat, flat.element_size()), [box.numel() for box in self._memory])
        self._together = [part.view(box.shape) for part, box in zip(parts, self._memory, strict=True)]
        self._runs = list(torch.split(flat, [run.numel() for run in self._wire]))
        self._at = buffer.data_ptr()


def _row_numel(memory: torch.Tensor) -> int:
    """Elements that lie end to end before there is a gap; 0 where there is none, or on a device."""
    numel = 1
    for size, stride in sorted(zip(memory.shape, memory.stride(), strict=True), key=lambda dim: dim[1]):
        if size > 1 and stride != numel:
            return numel if memory.device.type == "cpu" else 0
        numel *= size
    return 0


def _dense_strides(view: torch.Tensor) -> tuple[int, ...]:
    """Strides without gaps in the order of the view's own, so that a cast between the two is fast."""
    strides, step = [0] * view.dim(), 1
    for dim in sorted(range(view.dim()), key=lambda dim: (view.stride(dim), -dim)):
        strides[dim] = step
        step *= view.shape[dim]
    return tuple(strides)


def _run_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one shape are walked fastest along the same dim: torch casts slowly otherwise."""
    dims = [dim for dim, size in enumerate(a.shape) if size > 1]
    if not dims:
        return True
    fastest = min(reversed(dims), key=a.stride)
    return b.stride(fastest) == min(map(b.stride, dims))


def _portions(
    first: torch.Tensor, second: torch.Tensor, most: int = _SCRATCH_NUMEL
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both views in parts of few elements, cut where the first one's are far apart."""
    if first.numel() <= most:
        yield first, second
        return
    dim = max((dim for dim, size in enumerate(first.shape) if size > 1), key=first.stride)
    half = first.shape[dim] // 2
    for start, size in ((0, half), (half, first.shape[dim] - half)):
        yield from _portions(first.narrow(dim, start, size), second.narrow(dim, start, size), most)


def _words_of(view: torch.Tensor, word: int | None = None) -> torch.Tensor:
    itemsize = view.element_size()
    at = int(view.storage_offset()) * itemsize
    return words(view.untyped_storage(), at, tuple(view.shape), tuple(view.stride()), itemsize, word)


def wire_copies(placed: Sequence[tuple[Box, int, Region]], wire: torch.Tensor, base: int, *, pack: bool) -> Copies:
    """Copies between regions and a bucket that begins at byte ``base`` of the wire memory's storage."""
    storage = wire.untyped_storage()
    copies = Copies()
    for outer, offset, region in placed:
        at, strides = region.inside(outer, base + offset)
        itemsize = region.wire_itemsize
        if region.cast is None:
            word = min(aligned_word(itemsize, region.offset_nbytes), aligned_word(itemsize, at))
            local, remote = region.words(word), words(storage, at, region.shape, strides, itemsize, word)
            copies.add(*((remote, local) if pack else (local, remote)))
        elif at % itemsize == 0:
            remote = values(storage, at, region.shape, strides, region.cast)
            copies.add_cast(region.values(), remote, region.cast, pack=pack, to_staging=pack)
        else:
            remote = words(storage, at, region.shape, strides, itemsize, aligned_word(itemsize, at))
            copies.add_cast(region.values(), remote, region.cast, pack=pack)
    return copies


def common_regions(spec: TensorSpec, box: Box, a: BoundMemory, b: BoundMemory) -> Iterator[tuple[Region, Region]]:
    """Regions of two memories that hold the same boxes and together what both hold of ``box``."""
    for mine in a.regions(spec, box):
        for theirs in b.regions(spec, mine.box):
            if theirs.box == mine.box:
                yield mine, theirs
            else:
                yield from common_regions(spec, theirs.box, a, b)


def add_local(copies: Copies, want: Region, have: Region) -> None:
    """Add the copy between two regions of one box, unless they are the same memory.

    Raises:
        BindingError: The two shapes cut one dim in ways that no common grid refines.
    """
    assert want.cast is None or have.cast is None, "what travels has the dtype of one of its sides"
    if want.cast is None and have.cast is None:
        target, source = _same_shape(want, have)
        if target.data_ptr() != source.data_ptr() or target.stride() != source.stride():
            copies.add(target, source)
        return
    target, source = want.values(), have.values()
    if target.shape != source.shape:
        target, source = _refined(target, source)
    if have.cast is not None:
        copies.add_cast(source, target, have.cast, pack=True)
    elif want.cast is not None:
        copies.add_cast(target, source, want.cast, pack=False)


def _same_shape(want: Region, have: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of two regions of one box as words of equal size and shape."""
    word = min(aligned_word(want.itemsize, want.offset_nbytes), aligned_word(have.itemsize, have.offset_nbytes))
    a, b = want.words(word), have.words(word)
    if a.shape == b.shape:
        return a, b
    return _refined(a, b)


def _refined(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split dims of both views until their shapes agree: each shape is a refinement of the same box.

    Raises:
        BindingError: The two shapes cut one dim in ways that no common grid refines.
    """
    a, b = a.squeeze(), b.squeeze()
    left, right = list(a.shape), list(b.shape)
    shape: list[int] = []
    while left or right:
        step = min(left[-1], right[-1])
        if left[-1] % step or right[-1] % step:
            raise BindingError(
                f"Views of shape {tuple(a.shape)} and {tuple(b.shape)} interleave one box in ways that have no "
                f"common grid. Describe one of them by more pieces."
            )
        shape.insert(0, step)
        for sizes in (left, right):
            sizes[-1] //= step
            if sizes[-1] == 1:
                sizes.pop()
    return a.view(shape), b.view(shape)
