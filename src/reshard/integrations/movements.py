"""The operations that only move: what each of them copies, as views of its arguments and of its result."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten

from reshard.integrations.watching import offset_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reshard.integrations.watching import Watcher


def _copy(watcher: Watcher, func: Any, dst: torch.Tensor, src: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    del func
    watcher.assign(dst, src.expand(dst.shape))
    return dst


def _foreach_copy(watcher: Watcher, func: Any, dsts: Any, srcs: Any, *_: Any, **__: Any) -> None:
    for dst, src in zip(dsts, srcs, strict=True):
        _copy(watcher, func, dst, src)


def _fill(watcher: Watcher, func: Any, dst: torch.Tensor, value: Any = 0) -> torch.Tensor:
    del func
    if isinstance(value, torch.Tensor):
        watcher.assign(dst, value.expand(dst.shape))
    else:
        watcher.fill(dst, value)
    return dst


def _clone(watcher: Watcher, func: Any, src: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    out: torch.Tensor = watcher.born(watcher.run(func, (src,), kwargs))
    watcher.assign(out, src)
    return out


def _cat(watcher: Watcher, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    del func
    tensors = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])  # cat takes such with all others
    shape = list(tensors[0].shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    out = _new(watcher, shape, tensors)
    at = 0
    for tensor in tensors:
        watcher.assign(out.narrow(dim, at, tensor.shape[dim]), tensor)
        at += tensor.shape[dim]
    return out


def _stack(watcher: Watcher, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    del func
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    out = _new(watcher, shape, tensors)
    for index, tensor in enumerate(tensors):
        watcher.assign(out.select(dim, index), tensor)
    return out


def _pad(watcher: Watcher, func: Any, src: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
    del func
    shape = list(src.shape)
    for index in range(len(pad) // 2):
        shape[-1 - index] += pad[2 * index] + pad[2 * index + 1]
    out = _new(watcher, shape, [src])
    watcher.fill(out, value)
    into = out
    for index in range(len(pad) // 2):
        dim, before, after = out.dim() - 1 - index, pad[2 * index], pad[2 * index + 1]
        src = src.narrow(dim, max(0, -before), src.shape[dim] - max(0, -before) - max(0, -after))
        into = into.narrow(dim, max(0, before), src.shape[dim])
    watcher.assign(into, src)
    return out


def _new(watcher: Watcher, shape: Sequence[int], like: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result of several tensors; made here, as torch's own meta kernels would import its compiler for it."""
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in like))
    return watcher.born(torch.empty(list(shape), dtype=dtype, device="meta"))


def _repeat(watcher: Watcher, func: Any, src: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    out: torch.Tensor = watcher.born(watcher.run(func, (src, repeats), {}))
    more = len(repeats) - src.dim()
    sizes, strides = (1,) * more + tuple(src.shape), (0,) * more + tuple(src.stride())
    both = [n for pair in zip(repeats, sizes, strict=True) for n in pair]
    steps = [step for stride in strides for step in (0, stride)]
    watcher.assign(out.view(both), src.as_strided(both, steps, offset_of(src)))
    return out


def _index_select(watcher: Watcher, func: Any, src: torch.Tensor, dim: int, index: torch.Tensor) -> Any:
    known = _known(watcher, index)
    if known is None:
        return watcher.compute(func, (src, dim, index), {}, [src, index])
    out: torch.Tensor = watcher.born(watcher.run(func, (src, dim, index), {}))
    _gather(watcher, out, src, dim, known)
    return out


def _index(watcher: Watcher, func: Any, src: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Any:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    known = _known(watcher, given[0][1]) if len(given) == 1 else None
    if known is None:
        return watcher.compute(func, (src, indices), {}, [src, *(i for _, i in given)])
    dim, index = given[0]
    places = torch.tensor(known, dtype=torch.int64) if index.dtype == torch.bool else index
    where = [*indices[:dim], places, *indices[dim + 1 :]]
    if places.dim() == 1:
        out = watcher.born(watcher.run(func, (src, where), {}))
        _gather(watcher, out, src, dim, known)
        return out
    shape = (*src.shape[:dim], *places.shape, *src.shape[dim + 1 :])
    out = watcher.born(torch.empty(shape, dtype=src.dtype, device="meta"))
    _gather(watcher, out.view(*src.shape[:dim], len(known), *src.shape[dim + 1 :]), src, dim, known)
    return out


def _index_put(
    watcher: Watcher,
    func: Any,
    dst: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> Any:
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    known = _known(watcher, given[0][1]) if len(given) == 1 and given[0][1].dim() == 1 and not accumulate else None
    if known is None:
        return watcher.mutate(func, (dst, indices, values), {}, [dst, values, *(i for _, i in given)])
    dim = given[0][0]
    values = values.expand(*dst.shape[:dim], len(known), *dst.shape[dim + 1 :])
    for at, start, step, count in _runs(known):
        watcher.assign(_stepped(dst, dim, start, step, count), values.narrow(dim, at, count))
    return dst


def _index_copy(
    watcher: Watcher, func: Any, dst: torch.Tensor, dim: int, index: torch.Tensor, src: torch.Tensor
) -> Any:
    return _index_put(watcher, func, dst, [*[None] * (dim % dst.dim()), index], src)


def _roll(watcher: Watcher, func: Any, src: torch.Tensor, shifts: Any, dims: Any = ()) -> Any:
    shifts, dims = tree_flatten(shifts)[0], tree_flatten(dims)[0]
    if not dims:
        return watcher.compute(func, (src, shifts), {}, [src])
    places = [
        [(i - shift) % src.shape[dim] for i in range(src.shape[dim])] for shift, dim in zip(shifts, dims, strict=True)
    ]
    return _rearranged(watcher, src, dims, places)


def _flip(watcher: Watcher, func: Any, src: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    del func
    return _rearranged(watcher, src, dims, [list(reversed(range(src.shape[dim]))) for dim in dims])


def _rearranged(watcher: Watcher, src: torch.Tensor, dims: Sequence[int], places: Sequence[list[int]]) -> torch.Tensor:
    """One dim after the other."""
    for dim, place in zip(dims, places, strict=True):
        out = watcher.born(torch.empty(src.shape, dtype=src.dtype, device="meta"))
        _gather(watcher, out, src, dim, place)
        src = out
    return src


def _gather(watcher: Watcher, out: torch.Tensor, src: torch.Tensor, dim: int, places: list[int]) -> None:
    for at, start, step, count in _runs([p % src.shape[dim] for p in places]):
        watcher.assign(out.narrow(dim, at, count), _stepped(src, dim, start, step, count))


def _known(watcher: Watcher, index: torch.Tensor) -> list[int] | None:
    """The places that an index names, flat; None where its values are not known."""
    if index.is_meta or watcher.is_watched(index):
        return None
    if index.dtype == torch.bool:
        return [int(i) for i in index.nonzero().flatten()] if index.dim() == 1 else None
    return [int(i) for i in index.flatten().tolist()]


def _runs(places: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """(position, first place, step, count) of the runs in which the places grow by equal steps."""
    at = 0
    while at < len(places):
        end = at + 1
        step = places[end] - places[at] if end < len(places) else 0
        while step > 0 and end < len(places) and places[end] - places[end - 1] == step:
            end += 1
        yield at, places[at], max(step, 1), end - at
        at = end


def _stepped(tensor: torch.Tensor, dim: int, start: int, step: int, count: int) -> torch.Tensor:
    return tensor.narrow(dim, start, (count - 1) * step + 1)[
        (*[slice(None)] * (dim % tensor.dim()), slice(None, None, step))
    ]


MOVING: dict[str, Callable[..., Any]] = {
    "copy_": _copy,
    "_foreach_copy_": _foreach_copy,
    "fill_": _fill,
    "zero_": _fill,
    "clone": _clone,
    "_to_copy": _clone,
    "cat": _cat,
    "stack": _stack,
    "constant_pad_nd": _pad,
    "repeat": _repeat,
    "index_select": _index_select,
    "index": _index,
    "index_put_": _index_put,
    "index_copy_": _index_copy,
    "roll": _roll,
    "flip": _flip,
}
"""Operations that move and do not compute."""
