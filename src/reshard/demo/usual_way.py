"""The usual way, written by hand: gather whole parameters, broadcast them, let every receiver cut out its part.

It is what the refit is compared with, so it is given every advantage that it has in good frameworks: parameters travel
in large buckets, not one by one; buffers are made once; replicas are sent once; copies are coalesced. Its three forms::

    all_gather    the source's ranks all_gather a bucket, rank 0 puts the parameters together and broadcasts them
    gather        the same, but the other ranks send their parts to rank 0 point to point
    own_shards    each source rank broadcasts its own parts, and the receivers put the parameters together

All collectives are gloo's. The fastest form is the one that counts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reshard.demo.groups import gloo_group
from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    import torch.distributed as dist

    from reshard.demo.engine import WantedView
    from reshard.demo.trainer import Held

FORMS = ("all_gather", "gather", "own_shards")
BUCKET_NBYTES = 64 << 20
"""A bucket holds as many whole parameters as fit, or a single larger one."""

Copies = list[tuple[torch.Tensor, torch.Tensor]]
"""(to, from), in pairs of equal shape."""


@dataclass(frozen=True)
class _Part:
    """One source rank's box of one parameter, and where it lies in that rank's flat part of its bucket."""

    name: str
    box: Box
    offset: int


@dataclass(frozen=True)
class _Bucket:
    """Whole parameters that travel together: their shapes and offsets, and each source rank's parts of them."""

    shapes: dict[str, tuple[int, ...]]
    offsets: dict[str, int]
    numel: int
    parts: tuple[tuple[_Part, ...], ...]
    part_numels: tuple[int, ...]


class UsualWay:
    """One rank of the usual way; every rank of both worlds makes it, then calls ``run`` with equal forms.

    Args:
        store: Shared by all ranks, under a prefix of its own.
        rank: This rank among all: the source's ranks first.
        sources: Number of source ranks.
        size: Number of ranks.
        timeout: Of every collective.
        held: What this rank holds, on source ranks.
        views: Where this rank wants what, on destination ranks.
        bucket_nbytes: See ``BUCKET_NBYTES``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        sources: int,
        size: int,
        timeout: timedelta,
        *,
        held: Iterable[Held] = (),
        views: Iterable[WantedView] = (),
        bucket_nbytes: int = BUCKET_NBYTES,
    ) -> None:
        self._rank, self._sources, self._timeout = rank, sources, timeout
        mine = {(h.name, h.box): h for h in held if h.box is not None}
        self._buckets = _buckets_of(self._exchange(store, mine.values()), bucket_nbytes)
        self._source_group = gloo_group(store, "source", rank, sources, timeout) if rank < sources else None
        # Root 0 of each is a source rank; the other ranks are all receivers.
        self._out: dict[int, dist.ProcessGroup] = {}
        for root in range(sources):
            if rank == root or rank >= sources:
                own = 0 if rank == root else rank - sources + 1
                self._out[root] = gloo_group(store, f"out{root}", own, size - sources + 1, timeout)
        whole = max(bucket.numel for bucket in self._buckets)
        part = max(max(bucket.part_numels) for bucket in self._buckets)
        self._whole = _flat(whole if rank == 0 or rank >= sources else 0)
        self._own = _flat(part if rank < sources else 0)
        self._parts = [_flat(part) for _ in range(sources)]
        self._compile(mine, list(views))

    def run(self, form: str) -> None:
        """Bring the source's weights into the views, in one of ``FORMS``."""
        for index in range(len(self._buckets)):
            getattr(self, f"_{form}")(index)

    # -- the forms -------------------------------------------------------------------------------------------------

    def _all_gather(self, index: int) -> None:
        if self._source_group is not None:
            self._pack(index)
            # all_gather wants equal sizes: every part is as long as the longest.
            numel = max(self._buckets[index].part_numels)
            parts = [part[:numel] for part in self._parts]
            self._source_group.allgather([parts], [self._own[:numel]]).wait(self._timeout)
        self._broadcast_whole(index)

    def _gather(self, index: int) -> None:
        group = self._source_group
        if group is not None:
            self._pack(index)
            numels = self._buckets[index].part_numels
            if self._rank:
                group.send([self._own[: numels[self._rank]]], 0, 0).wait(self._timeout)
            else:
                # Its own part is put together from where all_gather leaves it.
                self._parts[0][: numels[0]].copy_(self._own[: numels[0]])
                works = [group.recv([self._parts[r][: numels[r]]], r, 0) for r in range(1, self._sources)]
                for work in works:
                    work.wait(self._timeout)
        self._broadcast_whole(index)

    def _own_shards(self, index: int) -> None:
        if self._source_group is not None:
            self._pack(index)
        works = []
        for root, group in self._out.items():
            part = self._own if root == self._rank else self._parts[root]
            works.append(group.broadcast(part[: self._buckets[index].part_numels[root]], 0))
        for work in works:
            work.wait(self._timeout)
        _copy(self._from_parts[index])

    def _broadcast_whole(self, index: int) -> None:
        if 0 not in self._out:
            return
        if self._rank == 0:
            _copy(self._together[index])
        self._out[0].broadcast(self._whole[: self._buckets[index].numel], 0).wait(self._timeout)
        _copy(self._from_whole[index])

    def _pack(self, index: int) -> None:
        _copy(self._packing[index])

    # -- made once -------------------------------------------------------------------------------------------------

    def _exchange(self, store: dist.Store, mine: Iterable[Held]) -> list[list[tuple[str, tuple[int, ...], Box]]]:
        """What every source rank holds, (name, global shape, box) each."""
        if self._rank < self._sources:
            rows = [(h.name, h.shape, h.box.start, h.box.stop) for h in mine if h.box is not None]
            store.set(f"held/{self._rank}", json.dumps(rows))
        keys = [f"held/{rank}" for rank in range(self._sources)]
        store.wait(keys, self._timeout)
        return [
            [(name, tuple(shape), Box(tuple(start), tuple(stop))) for name, shape, start, stop in json.loads(told)]
            for told in map(store.get, keys)
        ]

    def _compile(self, mine: dict[tuple[str, Box], Held], views: Sequence[WantedView]) -> None:
        """Every copy of every bucket as a pair of views of the buffers."""
        self._packing: list[Copies] = []
        self._together: list[Copies] = []
        self._from_whole: list[Copies] = []
        self._from_parts: list[Copies] = []
        wanted: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for name, _, start, view in views:
            box = Box(start, tuple(lo + n for lo, n in zip(start, view.shape, strict=True)))
            # The two names of a tied tensor are one view, and one name on the source.
            wanted.setdefault(name, []).append((box, view))
        for bucket in self._buckets:
            whole = {
                name: self._whole[at : at + _numel(shape)].view(shape)
                for (name, shape), at in zip(bucket.shapes.items(), bucket.offsets.values(), strict=True)
                if self._whole.numel()
            }
            parts = [
                [(p, self._parts[r][p.offset : p.offset + p.box.numel].view(p.box.shape)) for p in held]
                for r, held in enumerate(bucket.parts)
            ]
            flat = [row for rows in parts for row in rows]
            own = bucket.parts[self._rank] if self._rank < self._sources else ()
            self._packing.append(
                [
                    (self._own[p.offset : p.offset + p.box.numel].view(p.box.shape), mine[p.name, p.box].local)
                    for p in own
                ]
            )
            self._together.append([(whole[p.name][_slices(p.box)], memory) for p, memory in flat] if whole else [])
            self._from_whole.append(
                [(view, whole[name][_slices(box)]) for name in bucket.shapes for box, view in wanted.get(name, ())]
            )
            self._from_parts.append(
                [
                    (view[_slices(shared.relative_to(box.start))], memory[_slices(shared.relative_to(p.box.start))])
                    for p, memory in flat
                    for box, view in wanted.get(p.name, ())
                    if (shared := box.intersect(p.box)) is not None
                ]
            )


def _buckets_of(held: Sequence[Sequence[tuple[str, tuple[int, ...], Box]]], bucket_nbytes: int) -> list[_Bucket]:
    """Cut the parameters, in the source's order, into buckets; a part that several ranks hold is the first one's."""
    shapes = {name: shape for rows in held for name, shape, _ in rows}
    owner: dict[tuple[str, Box], int] = {}
    for rank, rows in enumerate(held):
        for name, _, box in rows:
            owner.setdefault((name, box), rank)
    names: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        nbytes = _numel(shape) * torch.bfloat16.itemsize
        if not names or nbytes > room:
            names.append([])
            room = bucket_nbytes
        names[-1].append(name)
        room -= nbytes
    return [_bucket_of({name: shapes[name] for name in some}, held, owner) for some in names]


def _bucket_of(
    shapes: dict[str, tuple[int, ...]],
    held: Sequence[Sequence[tuple[str, tuple[int, ...], Box]]],
    owner: dict[tuple[str, Box], int],
) -> _Bucket:
    offsets: dict[str, int] = {}
    numel = 0
    for name, shape in shapes.items():
        offsets[name] = numel
        numel += _numel(shape)
    parts: list[tuple[_Part, ...]] = []
    numels: list[int] = []
    for rank, rows in enumerate(held):
        own: list[_Part] = []
        at = 0
        for name, _, box in rows:
            if name in shapes and owner[name, box] == rank:
                own.append(_Part(name, box, at))
                at += box.numel
        parts.append(tuple(own))
        numels.append(at)
    return _Bucket(shapes, offsets, numel, tuple(parts), tuple(numels))


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))


def _flat(numel: int) -> torch.Tensor:
    """A buffer whose pages are there already: the first refit shall not pay for them."""
    return torch.zeros(numel, dtype=torch.bfloat16)


def _copy(copies: Copies) -> None:
    if copies:
        torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
