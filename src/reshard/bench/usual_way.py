"""The usual way for one tensor: everybody gets all of it and cuts out its part.

Three forms, all on gloo, each whole or in chunks; the fastest is what refits are compared with::

    all_gather    the sources all_gather, rank 0 broadcasts the whole to the destinations
    gather        the other sources send their shards to rank 0, which broadcasts the whole
    own_shards    every source broadcasts its own shard to the destinations

They get what a good implementation would give them: buffers are made once, chunks overlap, and what a root sends of
its own goes out of its own memory. ``UsualWayShm`` does the same over this library's shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reshard.bench.case import SIZE, SOURCES
from reshard.bench.operation import Operation
from reshard.demo.groups import gloo_group
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from datetime import timedelta

    import torch.distributed as dist

    from reshard.bench.case import Memory
    from reshard.transports.shm import ShmTransport

FORMS = ("all_gather", "gather", "own_shards")
_CHUNKS_UNDER_WAY = 4


class Groups:
    """The process groups of the usual way: the sources', and for every source one with all destinations."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        self.source = gloo_group(store, "usual/source", rank, SOURCES, timeout) if rank < SOURCES else None
        self.out: dict[int, dist.ProcessGroup] = {}
        for root in range(SOURCES):
            if rank == root or rank >= SOURCES:
                own = 0 if rank == root else rank - SOURCES + 1
                self.out[root] = gloo_group(store, f"usual/out{root}", own, SIZE - SOURCES + 1, timeout)


class _Chunks:
    """How the shards are cut, the buffers that chunks pass through, and what to copy out of them.

    A buffer holds the chunk of the same rows of every source's shard.
    """

    def __init__(self, memory: Memory, chunk_nbytes: int | None, depth: int) -> None:
        (shape,) = memory.case.shapes
        self.memory = memory
        self.rows, self.columns = shape[0] // SOURCES, shape[1]
        row_nbytes = self.columns * 2
        self.chunk_rows = self.rows if chunk_nbytes is None else min(self.rows, max(1, chunk_nbytes // row_nbytes))
        self.count = -(-self.rows // self.chunk_rows)
        self.depth = min(depth, self.count)
        self.buffers = torch.zeros(0, dtype=torch.int16)

    def make_buffers(self) -> int:
        shape = (self.depth, SOURCES, self.chunk_rows, self.columns)
        self.buffers = torch.zeros(shape, dtype=torch.int16)  # zeros: the pages are there at once
        return self.buffers.numel() * 2

    def span(self, index: int) -> tuple[int, int]:
        """The rows of a shard that a chunk holds."""
        return index * self.chunk_rows, min(self.rows, (index + 1) * self.chunk_rows)

    def buffer(self, index: int, source: int) -> torch.Tensor:
        """Where a source's chunk passes through, ``[rows, columns]``."""
        lo, hi = self.span(index)
        return self.buffers[index % self.depth, source, : hi - lo]

    def own(self, index: int) -> torch.Tensor:
        """A chunk of this source's own shard."""
        lo, hi = self.span(index)
        return self.memory.private[0][lo:hi]

    def cut_out(self, index: int, source: int) -> None:
        """Copy this destination's columns of a chunk to where they belong."""
        lo, hi = self.span(index)
        box = self.memory.case.boxes[self.memory.rank][0]
        at = source * self.rows
        self.memory.wanted[0][at + lo : at + hi].copy_(self.buffer(index, source)[:, box.start[1] : box.stop[1]])


class UsualWay(Operation):
    """One form of the usual way on gloo.

    Args:
        name: What the report calls it.
        groups: Made once for all forms.
        memory: A case of one tensor.
        form: One of ``FORMS``.
        chunk_nbytes: Size of a chunk of one shard; None moves shards whole.
        timeout: Of every collective.
    """

    def __init__(
        self, name: str, groups: Groups, memory: Memory, form: str, chunk_nbytes: int | None, timeout: timedelta
    ) -> None:
        super().__init__(name)
        self._groups, self._form, self._timeout = groups, form, timeout
        self._rank = memory.rank
        self._chunks = _Chunks(memory, chunk_nbytes, _CHUNKS_UNDER_WAY)
        shard_nbytes = self._chunks.rows * self._chunks.columns * 2
        is_source = self._rank < SOURCES
        gathers = is_source and (form == "all_gather" or (form == "gather" and self._rank == 0))
        if gathers or not is_source:
            self.buffer_nbytes = self._chunks.make_buffers()
        if gathers:
            self.wire_nbytes = (SOURCES - 1) * shard_nbytes
        elif not is_source:
            self.wire_nbytes = SOURCES * shard_nbytes

    def run(self) -> None:
        if self._rank >= SOURCES:
            self._receive()
        else:
            getattr(self, f"_{self._form}")()

    def _receive(self) -> None:
        chunks = self._chunks
        roots = range(SOURCES) if self._form == "own_shards" else [0] * SOURCES
        works: dict[int, list[dist.Work]] = {}
        posted = 0
        for index in range(chunks.count):
            while posted < min(chunks.count, index + chunks.depth):
                works[posted] = [
                    self._groups.out[root].broadcast(_bytes(chunks.buffer(posted, source)), 0)
                    for source, root in enumerate(roots)
                ]
                posted += 1
            for source, work in enumerate(works.pop(index)):
                work.wait(self._timeout)
                chunks.cut_out(index, source)

    def _all_gather(self) -> None:
        chunks, group = self._chunks, self._groups.source
        assert group is not None
        sending: dict[int, list[dist.Work]] = {}
        for index in range(chunks.count):
            self._finish(sending, index - chunks.depth)
            parts = [_bytes(chunks.buffer(index, source)) for source in range(SOURCES)]
            group.allgather([parts], [_bytes(chunks.own(index))]).wait(self._timeout)
            if self._rank == 0:
                sending[index] = [self._groups.out[0].broadcast(part, 0) for part in parts]
        self._finish_all(sending)

    def _gather(self) -> None:
        chunks, group = self._chunks, self._groups.source
        assert group is not None
        if self._rank:
            works = [group.send([_bytes(chunks.own(index))], 0, 0) for index in range(chunks.count)]
            for work in works:
                work.wait(self._timeout)
            return
        coming: dict[int, list[dist.Work]] = {}
        sending: dict[int, list[dist.Work]] = {}
        for index in range(min(chunks.depth, chunks.count)):
            coming[index] = self._post_receives(group, index)
        for index in range(chunks.count):
            broadcast = self._groups.out[0].broadcast
            sending[index] = [broadcast(_bytes(chunks.own(index)), 0)]
            for source, work in enumerate(coming.pop(index), start=1):
                work.wait(self._timeout)
                sending[index].append(broadcast(_bytes(chunks.buffer(index, source)), 0))
            if index + 1 < chunks.count and index + 1 not in coming:
                self._finish(sending, index + 1 - chunks.depth)
                coming[index + 1] = self._post_receives(group, index + 1)
        self._finish_all(sending)

    def _post_receives(self, group: dist.ProcessGroup, index: int) -> list[dist.Work]:
        return [group.recv([_bytes(self._chunks.buffer(index, source))], source, 0) for source in range(1, SOURCES)]

    def _own_shards(self) -> None:
        group = self._groups.out[self._rank]
        works = [group.broadcast(_bytes(self._chunks.own(index)), 0) for index in range(self._chunks.count)]
        for work in works:
            work.wait(self._timeout)

    def _finish(self, sending: dict[int, list[dist.Work]], index: int) -> None:
        for work in sending.pop(index, ()):
            work.wait(self._timeout)

    def _finish_all(self, sending: dict[int, list[dist.Work]]) -> None:
        for index in list(sending):
            self._finish(sending, index)


class UsualWayShm(Operation):
    """The usual way on this library's shared memory: a destination copies every shard whole, then cuts out its part.

    Args:
        name: What the report calls it.
        transport: Made once for all such operations.
        memory: A case of one tensor, its source shared.
        chunk_nbytes: Size of a chunk of one shard; None copies shards whole.
        timeout: Of one run.
    """

    def __init__(
        self, name: str, transport: ShmTransport, memory: Memory, chunk_nbytes: int | None, timeout: timedelta
    ) -> None:
        super().__init__(name)
        self._transport, self._memory, self._timeout = transport, memory, timeout
        self._chunks = _Chunks(memory, chunk_nbytes, 1)  # one chunk at a time stays in the cache
        if memory.rank >= SOURCES:
            self.buffer_nbytes = self._chunks.make_buffers()
            self.wire_nbytes = memory.case.nbytes

    def run(self) -> None:
        transport, deadline = self._transport, Deadline.after(self._timeout)
        if self._memory.rank < SOURCES:
            readers = range(SOURCES, SIZE)
            tickets = [transport.post_send(reader, torch.empty(0, dtype=torch.uint8)) for reader in readers]
            for ticket in tickets:
                transport.wait(ticket, deadline)
            return
        chunks = self._chunks
        for source in range(SOURCES):
            ticket = transport.post_recv(source, 0)
            transport.wait(ticket, deadline)
            for index in range(chunks.count):
                lo, hi = chunks.span(index)
                chunks.buffer(index, source).copy_(self._memory.lent[source][0][lo:hi])
                chunks.cut_out(index, source)
            transport.release(ticket)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
