"""Ways over the network of the cluster benchmark, as one rank carries them out.

    raw_socket                     the bytes of the busiest link over one bare socket: what the link gives
    gather_broadcast/<form>        everybody gets every tensor whole and cuts out its part, in three forms on gloo
    gather_broadcast_host_aware    the same, but one copy goes to each host, which then broadcasts inside
    point_to_point, reshard        refits

The forms get what a good implementation would give them: buffers are made once, chunks overlap, what a root sends
goes out of its own memory, and a rank that wants a chunk as it comes receives it in place.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reshard.bench.case import WORD
from reshard.bench.cluster_scenarios import TENSORS, rows_of
from reshard.bench.operation import Operation
from reshard.refit.compile import compile_refit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    from reshard.bench.cluster_memory import Memory
    from reshard.bench.cluster_scenarios import Bound, Scenario
    from reshard.topology.topology import Topology

FORMS = ("all_gather", "gather", "own_shards")
_CHUNK_NBYTES = 8 << 20
CHUNKS_UNDER_WAY = 6
_SOCKET_BUFFER_NBYTES = 16 << 20


class Meet:
    """The store that the ranks of all hosts share, and the groups they make on it.

    Args:
        store: Shared by all ranks.
        rank: This process's rank.
        timeout: Of every wait.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        self.store, self.rank, self.timeout = store, rank, timeout

    def group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        """Make a gloo group over the network, beside a default group that it leaves alone; None for other ranks.

        The interface is the one that ``GLOO_SOCKET_IFNAME`` names; between ranks of one host the kernel takes loopback.
        """
        if self.rank not in ranks or len(ranks) < 2:
            return None
        prefixed = dist.PrefixStore(f"group/{name}", self.store)
        rank, size = ranks.index(self.rank), len(ranks)
        backend = dist.ProcessGroupGloo(prefixed, rank, size, self.timeout)
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(prefixed, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group


class RawSocket(Operation):
    """One sender, one receiver, sendall and recv_into.

    Args:
        name: What the report calls it.
        meet: Where the two find each other.
        ends: Sender and receiver.
        address: The receiver's.
        nbytes: How much goes over.
    """

    brings = False

    def __init__(self, name: str, meet: Meet, ends: tuple[int, int], address: str, nbytes: int) -> None:
        super().__init__(name)
        self.takes_part = meet.rank in ends
        if not self.takes_part:
            return
        self._sends, self._nbytes = meet.rank == ends[0], nbytes
        self._buffer = memoryview(bytearray(min(nbytes, _SOCKET_BUFFER_NBYTES)))
        seconds = meet.timeout.total_seconds()
        if self._sends:
            port = int(meet.store.get("raw_socket"))
            self._socket = socket.create_connection((address, port), seconds)
        else:
            with socket.create_server((address, 0)) as server:
                server.settimeout(seconds)
                meet.store.set("raw_socket", str(server.getsockname()[1]))
                self._socket, _ = server.accept()
        self._socket.settimeout(seconds)

    def run(self) -> None:
        if not self.takes_part:
            return
        left = self._nbytes
        while left:
            part = self._buffer[: min(left, len(self._buffer))]
            if self._sends:
                self._socket.sendall(part)
                left -= len(part)
            else:
                left -= self._socket.recv_into(part)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some rows of one tensor that travel together."""

    tensor: int
    source: int
    """The rank that sends them in the usual way."""
    rows: tuple[int, int]


def chunks_of(scenario: Scenario, side: int) -> list[Chunk]:
    """Every tensor in chunks, those of different sources by turns."""
    chunks = []
    spans = [rows_of(source.sends, side) for source in scenario.sources]
    step = max(1, _CHUNK_NBYTES // (2 * side))
    for tensor in range(TENSORS):
        for at in range(0, max(span.shape[0] for span in spans), step):
            for source, span in enumerate(spans):
                lo, hi = span.start[0] + at, min(span.start[0] + at + step, span.stop[0])
                if lo < hi:
                    chunks.append(Chunk(tensor, source, (lo, hi)))
    return chunks


class _Landing:
    """Where a rank's chunks pass through: its own memory where it holds or wants them as they are, else buffers."""

    def __init__(self, memory: Memory, chunks: Sequence[Chunk], *, buffers: bool) -> None:
        self._memory = memory
        self.whole = memory.box.shape[1] == memory.side
        rows = max(hi - lo for lo, hi in (chunk.rows for chunk in chunks))
        self._buffers = torch.zeros((CHUNKS_UNDER_WAY if buffers else 0, rows, memory.side), dtype=WORD)
        self.nbytes = self._buffers.numel() * 2

    def own(self, chunk: Chunk) -> torch.Tensor:
        """A chunk in this rank's own memory, which holds whole rows."""
        start = self._memory.box.start[0]
        return self._memory.views[chunk.tensor][chunk.rows[0] - start : chunk.rows[1] - start]

    def place(self, at: int, chunk: Chunk) -> torch.Tensor:
        """Where a destination receives its ``at``-th chunk."""
        return self.own(chunk) if self.whole else self.buffer(at, chunk)

    def buffer(self, at: int, chunk: Chunk) -> torch.Tensor:
        """A buffer; at most ``CHUNKS_UNDER_WAY`` chunks in order are there at a time."""
        return self._buffers[at % CHUNKS_UNDER_WAY, : chunk.rows[1] - chunk.rows[0]]

    def cut_out(self, at: int, chunk: Chunk) -> None:
        """Copy this destination's columns of a chunk to where they belong."""
        if not self.whole:
            box = self._memory.box
            self.own(chunk).copy_(self.buffer(at, chunk)[:, box.start[1] : box.stop[1]])


class GatherBroadcast(Operation):
    """One form of the usual way.

    ::

        all_gather    the sources all_gather, rank 0 broadcasts the whole to all destinations
        gather        the other sources send their rows to rank 0, which broadcasts the whole
        own_shards    every source broadcasts its own rows to all destinations

    Args:
        name: What the report calls it.
        meet: Where the ranks find each other.
        memory: This rank's.
        form: One of ``FORMS``.
    """

    def __init__(self, name: str, meet: Meet, memory: Memory, form: str) -> None:
        super().__init__(name)
        scenario = memory.scenario
        sources, everybody = range(len(scenario.sources)), range(len(scenario.sources), scenario.size)
        self._rank, self._form, self._timeout = memory.rank, form, meet.timeout
        self._chunks = chunks_of(scenario, memory.side)
        self._is_source = scenario.is_source(memory.rank)
        gathers = self._is_source and (form == "all_gather" or (form == "gather" and memory.rank == 0))
        self._landing = _Landing(memory, self._chunks, buffers=gathers or not self._is_source)
        self.buffer_nbytes = self._landing.nbytes
        self._among = meet.group(f"{name}/sources", sources)
        roots = sources if form == "own_shards" else range(1)
        self._out = {root: meet.group(f"{name}/out{root}", [root, *everybody]) for root in roots}

    def run(self) -> None:
        if not self._is_source:
            self._receive()
        elif self._form == "own_shards":
            _wait([self._broadcast(self._rank, self._landing.own(c)) for c in self._mine(self._rank)], self._timeout)
        elif self._form == "gather":
            self._gather()
        else:
            self._all_gather()

    def _mine(self, rank: int) -> list[Chunk]:
        return [chunk for chunk in self._chunks if chunk.source == rank]

    def _broadcast(self, root: int, part: torch.Tensor) -> dist.Work:
        group = self._out[root]
        assert group is not None
        return group.broadcast(_bytes(part), 0)

    def _receive(self) -> None:
        landing = self._landing
        works: dict[int, dist.Work] = {}
        for at in range(len(self._chunks) + CHUNKS_UNDER_WAY):
            done = at - CHUNKS_UNDER_WAY
            if done >= 0:
                works.pop(done).wait(self._timeout)
                landing.cut_out(done, self._chunks[done])
            if at < len(self._chunks):
                chunk = self._chunks[at]
                root = chunk.source if self._form == "own_shards" else 0
                works[at] = self._broadcast(root, landing.place(at, chunk))

    def _gather(self) -> None:
        """Rank 0 broadcasts what it holds and what comes from the others, in order."""
        group, landing = self._among, self._landing
        if self._rank:
            assert group is not None
            _wait([group.send([_bytes(landing.own(chunk))], 0, 0) for chunk in self._mine(self._rank)], self._timeout)
            return
        coming: dict[int, dist.Work] = {}
        sending: dict[int, dist.Work] = {}
        posted = 0
        for at, chunk in enumerate(self._chunks):
            while posted < min(at + CHUNKS_UNDER_WAY, len(self._chunks)):
                later = self._chunks[posted]
                if later.source:
                    assert group is not None
                    if posted >= CHUNKS_UNDER_WAY:  # its buffer is that of an earlier chunk
                        sending.pop(posted - CHUNKS_UNDER_WAY).wait(self._timeout)
                    coming[posted] = group.recv([_bytes(landing.buffer(posted, later))], later.source, 0)
                posted += 1
            if chunk.source:
                coming.pop(at).wait(self._timeout)
            sending[at] = self._broadcast(0, landing.buffer(at, chunk) if chunk.source else landing.own(chunk))
        _wait(sending.values(), self._timeout)

    def _all_gather(self) -> None:
        group, landing = self._among, self._landing
        sources = len({chunk.source for chunk in self._chunks})
        assert group is not None
        sending: dict[int, dist.Work] = {}
        for first in range(0, len(self._chunks), sources):  # chunks of all sources, of equal rows
            turn = self._chunks[first : first + sources]
            for at in range(first, first + sources):
                if at - CHUNKS_UNDER_WAY in sending:
                    sending.pop(at - CHUNKS_UNDER_WAY).wait(self._timeout)
            parts = [_bytes(landing.buffer(first + at, chunk)) for at, chunk in enumerate(turn)]
            group.allgather([parts], [_bytes(landing.own(turn[self._rank]))]).wait(self._timeout)
            if self._rank == 0:
                for at, chunk in enumerate(turn):
                    sending[first + at] = self._broadcast(0, landing.buffer(first + at, chunk))
        _wait(sending.values(), self._timeout)


class HostAware(Operation):
    """Every source broadcasts its rows to one rank of each host, which broadcasts them inside the host.

    Args:
        name: What the report calls it.
        meet: Where the ranks find each other.
        memory: This rank's.
    """

    def __init__(self, name: str, meet: Meet, memory: Memory) -> None:
        super().__init__(name)
        scenario = memory.scenario
        self._rank, self._timeout = memory.rank, meet.timeout
        self._chunks = chunks_of(scenario, memory.side)
        self._is_source = scenario.is_source(memory.rank)
        self._landing = _Landing(memory, self._chunks, buffers=not self._is_source)
        self.buffer_nbytes = self._landing.nbytes
        receivers = {
            host: [rank for rank in scenario.hosts[host] if not scenario.is_source(rank)]
            for host in scenario.destination_hosts
        }
        leaders = [ranks[0] for ranks in receivers.values()]
        self._leads = memory.rank in leaders
        self._across = {
            root: meet.group(f"{name}/across{root}", [root, *leaders]) for root in range(len(scenario.sources))
        }
        groups = [meet.group(f"{name}/inside{host}", ranks) for host, ranks in receivers.items()]
        self._inside = next((group for group in groups if group is not None), None)

    def run(self) -> None:
        if self._is_source:
            mine = [chunk for chunk in self._chunks if chunk.source == self._rank]
            _wait([self._broadcast(self._across[self._rank], self._landing.own(c)) for c in mine], self._timeout)
        else:
            self._receive()

    def _broadcast(self, group: dist.ProcessGroup | None, part: torch.Tensor) -> dist.Work:
        assert group is not None
        return group.broadcast(_bytes(part), 0)

    def _receive(self) -> None:
        """Chunk k is cut out while the next ones come, and goes on inside the host before its buffer is used again."""
        landing = self._landing
        coming: dict[int, dist.Work] = {}
        going: dict[int, dist.Work] = {}
        for at in range(len(self._chunks) + CHUNKS_UNDER_WAY):
            done = at - CHUNKS_UNDER_WAY + 1
            if 0 <= done < len(self._chunks):
                coming.pop(done).wait(self._timeout)
                if self._leads and self._inside is not None:
                    going[done] = self._broadcast(self._inside, landing.place(done, self._chunks[done]))
                landing.cut_out(done, self._chunks[done])
            if at < len(self._chunks):
                if at - CHUNKS_UNDER_WAY in going:
                    going.pop(at - CHUNKS_UNDER_WAY).wait(self._timeout)
                chunk = self._chunks[at]
                group = self._across[chunk.source] if self._leads else self._inside
                coming[at] = self._broadcast(group, landing.place(at, chunk))
        _wait(going.values(), self._timeout)


class Refit(Operation):
    """A compiled refit in its steady state, among all ranks or some.

    Args:
        name: What the report calls it.
        group: Of the ranks that take part; None on others.
        memory: This rank's.
        strategy: As ``compile_refit`` has it.
        topology: Of the group's ranks; None to plan as if all were on one host.
        timeout: Of one run.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup | None,
        memory: Memory,
        *,
        strategy: str,
        topology: Topology | None,
        timeout: timedelta,
    ) -> None:
        super().__init__(name)
        self.takes_part = self.brings = group is not None
        if group is None:
            return
        src, dst = memory.manifest()
        self._group = group  # the refit's state lives as long as the group
        self._timeout = timeout
        self._refit = compile_refit(group, src=src, dst=dst, strategy=strategy, topology=topology, timeout=timeout)

    def run(self) -> None:
        if self.takes_part:
            report = self._refit.run(self._timeout)
            self.wire_nbytes, self.buffer_nbytes = report.wire_nbytes, report.staging_nbytes
            self.after_network_seconds = report.after_network_seconds if report.received_nbytes else None


def raw_socket_ends(scenario: Scenario, bound: Bound) -> tuple[int, int]:
    """A source rank and a destination rank whose hosts the busiest link joins, the other end at least as fast."""
    sources, destinations = range(len(scenario.sources)), range(len(scenario.sources), scenario.size)

    def rate(rank: int) -> float:
        return float(scenario.part_of_rate(scenario.host_of[rank]))

    sender, receiver = max(sources, key=rate), max(destinations, key=rate)
    own = next(rank for rank in (sources if bound.leaves else destinations) if scenario.host_of[rank] == bound.host)
    return (own, receiver) if bound.leaves else (sender, own)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _wait(works: Iterable[dist.Work], timeout: timedelta) -> None:
    for work in works:
        work.wait(timeout)
