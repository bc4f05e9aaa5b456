"""Hold a trace against a real load: random weights through the loader itself, and every element compared."""

from __future__ import annotations

from itertools import groupby
from math import prod
from typing import TYPE_CHECKING

import torch

from reshard.errors import BindingError, VerifyError
from reshard.integrations.tracing import put_back, tensors_of
from reshard.integrations.watching import id_of, offset_of
from reshard.transports.views import words

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.integrations.traced import Buffer, LoadTrace
    from reshard.integrations.tracing import Buffers, Loader
    from reshard.layouts.piece import TensorSpec

POISON = 0xA5
"""The byte that buffers are filled with before a load, so that what the loader does not write shows."""


def check_trace(trace: LoadTrace, load: Loader, buffers: Buffers, *, seed: int = 0) -> int:
    """Load random weights once in earnest, and once by the pieces, fills and copies, and compare every bit.

    Elements that the trace does not claim are compared too: they must be as they were before the load. Left out is
    only where opaque tensors go.

    Args:
        trace: What is to be trusted.
        load: The loader that was traced.
        buffers: The buffers that were traced, with memory. What they hold is put back at the end.
        seed: Of the weights.

    Returns:
        How many elements were compared.

    Raises:
        VerifyError: An element differs, or the loader leaves a buffer otherwise than traced.
        BindingError: The buffers are not those of the trace, or have no memory.
    """
    unseen = {one.name for one in trace.opaque if one.is_unseen}
    weights = {s.name: (s, seed + i) for i, s in enumerate(trace.tensors) if s.name not in unseen}
    written = _written(trace)
    with torch.no_grad(), put_back(buffers) as before:
        empty = sorted(name for name in written & set(before) if before[name].is_meta)
        if empty:
            raise BindingError(
                f"Buffer {empty[0]!r} is on the meta device, so nothing can be loaded into it. A trace needs no "
                f"memory, its check does: give buffers on a real device.",
                tensor=empty[0],
            )
        saved = [(tensor.data, tensor.detach().clone()) for tensor in before.values()]
        try:
            for name in written & set(before):
                _words(before[name]).fill_(int(_poison(before[name])))
            was = {id_of(tensor): _bytes_of(tensor).clone() for tensor in before.values()}
            load((name, random_weight(spec, number)) for name, (spec, number) in weights.items())
            loaded = {name: tensor.detach() for name, tensor in tensors_of(buffers).items()}
            trace.check_buffers(loaded)
            ours = _twins({one.name: loaded[one.name] for one in trace.buffers}, was)
            for name, pieces in groupby(trace.pieces, lambda traced: traced.piece.name):
                whole = random_weight(*weights[name])
                for traced in pieces:
                    box, view = traced.piece.box, traced.region.of(ours)
                    view.copy_(whole[tuple(map(slice, box.start, box.stop))].reshape(view.shape))
            trace.finish(ours)
            real = [one for one in trace.buffers if not loaded[one.name].is_meta]
            return sum(_compare(trace, one, loaded[one.name], ours[one.name]) for one in real)
        finally:
            for memory, had in saved:
                memory.copy_(had)


def _compare(trace: LoadTrace, buffer: Buffer, loaded: torch.Tensor, ours: torch.Tensor) -> int:
    """The number of elements of a buffer that were compared and are equal."""
    hidden = torch.empty_strided(ours.shape, ours.stride(), dtype=torch.bool, device=ours.device).fill_(False)
    for region in trace.hidden:
        if region.buffer == buffer.name:
            region.of({buffer.name: hidden}).fill_(True)
    unequal = _words(loaded) != _words(ours)
    wrong = (unequal.any(-1) if unequal.dim() > ours.dim() else unequal) & ~hidden
    if bool(wrong.any()):
        place = tuple(int(i) for i in wrong.nonzero()[0])
        raise VerifyError(
            f"Buffer {buffer.name!r}: {int(wrong.sum())} of {wrong.numel()} elements differ between a real load and "
            f"the traced pieces, the first at {list(place)}. The loader does something that a trace cannot see. Do not "
            f"use this trace: name the tensors that go there in opaque=.",
            tensor=buffer.name,
            place=place,
        )
    return int((~hidden).sum())


def random_weight(spec: TensorSpec, seed: int) -> torch.Tensor:
    """A checkpoint tensor of random bits, in the host's memory as one from a file.

    Floats are finite and below 2 in size, so that a cast keeps them apart.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(seed)
    numel = prod(spec.shape)
    nbytes = numel * dtype.itemsize
    drawn = torch.empty(-(-nbytes // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    values = drawn.view(torch.uint8)[:nbytes]  # eight bytes a draw: most of a check's time would be draws
    if dtype is torch.bool:
        values &= 1
    elif dtype.is_floating_point or dtype.is_complex:
        width = dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize
        values.view(-1, width)[:, -1] &= 0xBF  # without the exponent's highest bit (memory is little-endian)
    whole = values.view(dtype) if numel else torch.empty(0, dtype=dtype)
    return whole.reshape(spec.shape)


def _written(trace: LoadTrace) -> set[str]:
    """The buffers that the trace says are written; others may be tables that the loader itself looks into."""
    regions = [p.region for p in trace.pieces] + [f.region for f in trace.fills] + [c.target for c in trace.copies]
    return {region.buffer for region in (*regions, *trace.hidden)}


def _twins(tensors: Mapping[str, torch.Tensor], was: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that lie as those given do, those that share memory too, in new memory that holds what theirs did.

    Args:
        tensors: As they are after the load.
        was: The bytes before the load, by storage; a storage that the load has made new is full of poison.
    """
    memory = dict(was)
    twins: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        key, whole = id_of(tensor), _bytes_of(tensor)
        if key not in memory:
            memory[key] = torch.full_like(whole, POISON)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        twins[name] = empty.set_(memory[key].untyped_storage(), offset_of(tensor), tensor.shape, tensor.stride())
    return twins


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor, as bytes."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as integers, one or more an element."""
    itemsize = tensor.element_size()
    at = offset_of(tensor) * itemsize
    return words(tensor.untyped_storage(), at, tuple(tensor.shape), tensor.stride(), itemsize)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """What each word of an unwritten element holds."""
    word = _words(tensor)
    return torch.full((word.element_size(),), POISON, dtype=torch.uint8, device=tensor.device).view(word.dtype)
