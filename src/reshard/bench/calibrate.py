"""Calibrate: measure copies, messages and links of this machine, for the simulator; no refit runs, of whatever size.

Rates are bytes over the processor seconds of one process while a process on every other core does the same, so that
they hold for a machine that is busy moving weights, and other programs disturb them little.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.bench.cluster_ways import Meet
from reshard.bench.tokens import Tokens
from reshard.demo.groups import gloo_group
from reshard.demo.launch import Job, run_jobs
from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.box import Box
from reshard.layouts.piece import Piece, TensorSpec
from reshard.simulate.calibration import Calibration, SocketCosts
from reshard.simulate.run_rates import RunRates
from reshard.testing.hosts import Cluster, hear, parse_rate, supported
from reshard.transports.base import Deadline
from reshard.transports.mapped import enter_pages
from reshard.transports.shm import ShmTransport, share_memory_
from reshard.transports.verify import VERIFY, box_sum
from reshard.transports.views import BoundMemory, copy_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.testing.hosts import Talk

_ENDS = 2
_COLD_NBYTES = 80 << 20
_RUNS_NBYTES = (384, 1536, 6144, 24576)
_SLOT_NBYTES = 5 << 19
_WARM_NBYTES = 5 << 20
_OTHER_NBYTES = 640 << 20
_MESSAGE_NBYTES = 5 << 19
_SMALL_NBYTES, _SMALL_MESSAGES = 512, 1500
_BOXES, _BOX_NBYTES, _BOX_APART_NBYTES = 3000, 64, 24 << 10
_MIDDLE_RUN_NBYTES = 6144
_LINK_RATE, _LINK_NBYTES, _LINK_MESSAGE_NBYTES = "1Gbit", 60 << 20, 3 << 18
_TIMEOUT = timedelta(seconds=120)
_SIZES = "copies of 80 MiB in one run and in runs of 384 B and 1.5, 6 and 24 KiB, buckets of 2.5 MiB, links of 1 Gbit/s"


def calibrate(progress: Callable[[str], None] = lambda _: None, *, repeat: int = 7) -> Calibration:
    """Measure this machine; takes some twenty seconds.

    Args:
        progress: Told what is being done.
        repeat: Of how many runs of a copy the median counts.

    Raises:
        EnvironmentNotSupported: This system has no shared memory of the kind the library uses, or less than 165 MiB.
        RefitTimeout: The processes were not done in time.
    """
    progress("measuring copies, shared memory and loopback")
    slots = torch.zeros(2 * _SLOT_NBYTES, dtype=torch.uint8)
    lent = tuple(torch.zeros(_COLD_NBYTES, dtype=torch.uint8) for _ in range(_ENDS))
    share_memory_([slots, *lent])
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    tokens = Tokens(multiprocessing.get_context("spawn"), _ENDS, _TIMEOUT.total_seconds())
    jobs = [
        Job(f"rank {at}", _local_main, (at, store.host, store.port, tokens, slots, lent, repeat)) for at in range(_ENDS)
    ]
    told = run_jobs(jobs, timeout=600.0, progress=progress)
    both = {name: sum(end[name] for end in told) / _ENDS for name in told[0]}
    network, efficiency = None, 1.0
    if supported() is None:
        progress("measuring a link between two namespaces")
        network, efficiency = _measure_link()
    return Calibration(
        cores=os.cpu_count() or 1,
        copy_alone=told[0]["copy_alone"],
        copy=both["copy"],
        strided=both[f"strided {_MIDDLE_RUN_NBYTES}"],
        warm=both["warm"],
        staging=both["staging"],
        fresh=both["fresh"],
        box_seconds=both["box_seconds"],
        sum=both["sum"],
        fingerprint=both["fingerprint"],
        memory=SocketCosts(0.0, 0.0, both["shm_message"], told[0]["shm_latency"]),
        loopback=SocketCosts(told[0]["gloo_byte"], told[1]["gloo_byte"], both["gloo_message"], told[0]["gloo_latency"]),
        network=network,
        link_efficiency=efficiency,
        sizes=_SIZES,
        strided_runs=RunRates(tuple((run, both[f"strided {run}"]) for run in _RUNS_NBYTES)),
        lent_runs=RunRates(tuple((run, both[f"lent {run}"]) for run in (*_RUNS_NBYTES, _COLD_NBYTES))),
    )


# -- two processes of this host ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _End:
    rank: int
    tokens: Tokens
    other: torch.Tensor
    """Memory that nothing else uses, more than caches hold."""
    repeat: int

    def cool(self) -> None:
        """Drive everything else out of the caches."""
        self.other.add_(1)

    def cpu_seconds(self, run: Callable[[], object], *, alone: bool = False) -> float:
        """The median of this process's processor seconds for ``run``, which both ends run at once."""
        taken = []
        for _ in range(self.repeat):
            self.cool()
            self.tokens.meet(self.rank)
            began = time.process_time()
            if self.rank == 0 or not alone:
                run()
            taken.append(time.process_time() - began)
        return median(taken)


def _local_main(
    say: Callable[..., None],
    rank: int,
    host: str,
    port: int,
    tokens: Tokens,
    slots: torch.Tensor,
    lent: tuple[torch.Tensor, ...],
    repeat: int,
) -> dict[str, float]:
    torch.set_num_threads(1)
    end = _End(rank, tokens, torch.zeros(_OTHER_NBYTES, dtype=torch.uint8), repeat)
    store = dist.TCPStore(host, port, None, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    say("copying", aloud=rank == 0)
    lent[rank].fill_(1)
    tokens.meet(rank)
    found = _copies(end, lent[1 - rank])
    found["staging"] = _staging(end, slots)
    say("summing")
    found |= _sums(end)
    say("sending small messages in shared memory")
    transport = ShmTransport(dist.PrefixStore("calibrate", store), rank, _ENDS, timeout=_TIMEOUT)
    found |= _shm_messages(end, transport)
    say("sending over loopback")
    group = gloo_group(store, "calibrate", rank, _ENDS, _TIMEOUT)
    found["gloo_byte"] = _stream(end, group) / _COLD_NBYTES
    found |= _gloo_messages(end, group)
    tokens.meet(rank)
    return found


def _copies(end: _End, lent: torch.Tensor) -> dict[str, float]:
    """Of private memory, and out of what the other end has filled and lent."""
    source, target = (torch.ones(_COLD_NBYTES, dtype=torch.uint8) for _ in range(2))
    enter_pages(lent)
    found = {
        "copy": _COLD_NBYTES / end.cpu_seconds(lambda: target.copy_(source)),
        "copy_alone": _COLD_NBYTES / max(end.cpu_seconds(lambda: target.copy_(source), alone=True), 1e-9),
        f"lent {_COLD_NBYTES}": _COLD_NBYTES / end.cpu_seconds(lambda: target.copy_(lent)),
        "fresh": _COLD_NBYTES / end.cpu_seconds(source.clone),
    }
    for run in _RUNS_NBYTES:  # every fourth run of the memory, as a rank of four takes its columns
        rows = _COLD_NBYTES // (4 * run)
        landing = target.view(torch.int16)[: rows * run // 2].view(rows, run // 2)
        for name, memory in (("strided", source), ("lent", lent)):
            columns = memory[: rows * 4 * run].view(torch.int16).view(rows, 2 * run)[:, : run // 2]
            seconds = end.cpu_seconds(lambda to=landing, of=columns: to.copy_(of))  # type: ignore[misc]
            found[f"{name} {run}"] = rows * run / seconds
    buffer = torch.ones(_WARM_NBYTES, dtype=torch.uint8)
    parts, landed = (torch.split(memory, _WARM_NBYTES) for memory in (lent, target))

    def through_a_buffer() -> None:
        for part, place in zip(parts, landed, strict=True):
            buffer.copy_(part)
            place.copy_(buffer)

    found["warm"] = 2 * len(parts) * _WARM_NBYTES / end.cpu_seconds(through_a_buffer)
    small, places = _boxes_of(lent), _boxes_of(target)
    found["box_seconds"] = end.cpu_seconds(lambda: copy_all(places, small)) / _BOXES
    return found


def _boxes_of(memory: torch.Tensor) -> list[torch.Tensor]:
    """Small boxes, each on a page of its own, as tensors are that have been made one after the other."""
    apart = memory[: _BOXES * _BOX_APART_NBYTES].view(_BOXES, _BOX_APART_NBYTES)
    return list(apart[:, :_BOX_NBYTES].unbind())


def _staging(end: _End, slots: torch.Tensor) -> float:
    """Bytes a second into one of two shared slots by one process, and out of it by the other, taken together."""
    run = _MIDDLE_RUN_NBYTES
    rows = _SLOT_NBYTES // run
    memory = torch.ones(_COLD_NBYTES, dtype=torch.uint8)
    count = _COLD_NBYTES // (4 * rows * run)
    places = [slots[at * _SLOT_NBYTES : at * _SLOT_NBYTES + rows * run].view(torch.int16) for at in range(2)]

    def pack() -> None:
        for at in range(count):
            if at > 1:
                end.tokens.take(0, 1)
            columns = memory[at * 4 * rows * run : (at + 1) * 4 * rows * run].view(torch.int16).view(rows, 2 * run)
            places[at % 2].view(rows, run // 2).copy_(columns[:, : run // 2])
            end.tokens.give(0, 1)
        for _ in range(min(2, count)):
            end.tokens.take(0, 1)

    def unpack() -> None:
        for at in range(count):
            end.tokens.take(1, 0)
            memory[at * rows * run : (at + 1) * rows * run].view(torch.int16).copy_(places[at % 2])
            end.tokens.give(1, 0)

    return count * rows * run / end.cpu_seconds(pack if end.rank == 0 else unpack)


def _sums(end: _End) -> dict[str, float]:
    rows, columns = 5120, 2560
    view = torch.ones(rows, columns, dtype=torch.bfloat16)
    box, spec = Box((0, 0), (rows, columns)), TensorSpec("calibrate", (rows, columns), "bfloat16")
    memory = BoundMemory([BoundPiece(Piece("calibrate", box), binding_of(view), view)])
    return {
        kind: rows * columns * 2 / end.cpu_seconds(lambda how=kind: box_sum(box, spec, memory, how))  # type: ignore[misc]
        for kind in VERIFY
        if kind != "none"
    }


def _shm_messages(end: _End, transport: ShmTransport) -> dict[str, float]:
    """Empty messages: one process sends many, the other takes them; then one at a time there and back."""
    peer, deadline = 1 - end.rank, Deadline.after(_TIMEOUT)
    nothing = torch.empty(0, dtype=torch.uint8)

    def send() -> None:
        transport.wait(transport.post_send(peer, nothing), deadline)

    def receive() -> None:
        ticket = transport.post_recv(peer, 0)
        transport.wait(ticket, deadline)
        transport.release(ticket)

    def there_and_back() -> None:
        for _ in range(_SMALL_MESSAGES):
            (send, receive)[end.rank]()
            (receive, send)[end.rank]()

    found = _there_and_back(end, there_and_back)
    return {f"shm_{name}": value for name, value in found.items()}


def _there_and_back(end: _End, run: Callable[[], None]) -> dict[str, float]:
    """What a message takes an end, and the time it takes from end to end less that of both ends."""
    times, cpu = [], []
    for _ in range(3):
        end.tokens.meet(end.rank)
        began, began_cpu = time.perf_counter(), time.process_time()
        run()
        times.append((time.perf_counter() - began) / (2 * _SMALL_MESSAGES))
        cpu.append((time.process_time() - began_cpu) / (2 * _SMALL_MESSAGES))
    message = min(cpu)
    return {"message": message, "latency": max(0.0, min(times) - 2 * message)}


def _gloo_messages(end: _End, group: dist.ProcessGroup) -> dict[str, float]:
    peer = 1 - end.rank
    there, back = (torch.zeros(_SMALL_NBYTES, dtype=torch.uint8) for _ in range(2))

    def there_and_back() -> None:
        for _ in range(_SMALL_MESSAGES):
            for is_mine in (end.rank == 0, end.rank == 1):
                work = group.send([there], peer, 0) if is_mine else group.recv([back], peer, 0)
                work.wait(_TIMEOUT)

    return {f"gloo_{name}": value for name, value in _there_and_back(end, there_and_back).items()}


def _stream(end: _End, group: dist.ProcessGroup) -> float:
    memory = torch.ones(_COLD_NBYTES, dtype=torch.uint8)
    parts = list(torch.split(memory, _MESSAGE_NBYTES))
    return end.cpu_seconds(lambda: _send_or_receive(group, end.rank, parts))


def _send_or_receive(group: dist.ProcessGroup, rank: int, parts: Sequence[torch.Tensor]) -> None:
    """Rank 0 sends every part, rank 1 receives it; four are under way at a time."""
    works: list[Any] = []
    for at, part in enumerate(parts):
        if at >= 4:
            works[at - 4].wait(_TIMEOUT)
        works.append(group.send([part], 1, 0) if rank == 0 else group.recv([part], 0, 0))
    for work in works[-4:]:
        work.wait(_TIMEOUT)


# -- two namespaces ----------------------------------------------------------------------------------------------------


def _measure_link() -> tuple[SocketCosts, float]:
    """What a byte over a link takes both ends, and the payload that a link carries in parts of its rate."""
    with Cluster(["A", "B"], rate=_LINK_RATE) as cluster:
        address = cluster.address("A")
        tasks = [cluster.start(host, _link_main, at, address) for at, host in enumerate("AB")]
        port = hear(tasks, 60.0)[0]
        for task in tasks:
            task.send(port)
        ends = hear(tasks, 240.0)
    seconds = max(end["seconds"] for end in ends)
    message = sum(end["message"] for end in ends) / _ENDS
    latency = max(0.0, ends[0]["there_and_back"] / 2 - 2 * message)
    costs = SocketCosts(ends[0]["cpu"] / _LINK_NBYTES, ends[1]["cpu"] / _LINK_NBYTES, message, latency)
    return costs, _LINK_NBYTES / seconds / (parse_rate(_LINK_RATE) / 8)


def _link_main(talk: Talk, rank: int, address: str) -> None:
    torch.set_num_threads(1)
    hosted = dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False) if rank == 0 else None
    talk.send(hosted.port if hosted else None)
    store = dist.TCPStore(address, talk.recv(), None, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)
    group = Meet(store, rank, _TIMEOUT).group("calibrate", range(_ENDS))
    assert group is not None
    parts = list(torch.split(torch.ones(_LINK_NBYTES, dtype=torch.uint8), _LINK_MESSAGE_NBYTES))
    small = torch.zeros(_SMALL_NBYTES, dtype=torch.uint8)
    _send_or_receive(group, rank, [small] * 8)
    times, cpu = [], []
    for _ in range(3):
        group.barrier().wait(_TIMEOUT)
        began, began_cpu = time.perf_counter(), time.process_time()
        _send_or_receive(group, rank, parts)
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - began_cpu)
    group.barrier().wait(_TIMEOUT)
    began, began_cpu = time.perf_counter(), time.process_time()
    for _ in range(_SMALL_MESSAGES // 5):
        for is_mine in (rank == 0, rank == 1):
            work = group.send([small], 1 - rank, 0) if is_mine else group.recv([small], 1 - rank, 0)
            work.wait(_TIMEOUT)
    pings = _SMALL_MESSAGES // 5
    found = {
        "seconds": min(times),
        "cpu": median(cpu),
        "there_and_back": (time.perf_counter() - began) / pings,
        "message": (time.process_time() - began_cpu) / (2 * pings),
    }
    group.barrier().wait(_TIMEOUT)
    talk.send(found)
