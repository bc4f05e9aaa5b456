"""The transport between ranks of one host keeps every promise, between threads and between processes."""

from __future__ import annotations

import gc
import json
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from reshard.errors import ConfigError, EnvironmentNotSupported, RefitTimeout, TransportError
from reshard.testing.processes import threads
from reshard.testing.transport_suite import (
    LendingSuite,
    ProcessTransportSuite,
    TransportSuite,
    expect,
    in_processes,
    in_threads,
    take,
)
from reshard.transports import handshake, sharing
from reshard.transports.base import Deadline, Loan
from reshard.transports.meeting import Meeting
from reshard.transports.shm import ShmTransport, share_memory_


def make_shm(context):
    return ShmTransport(
        dist.PrefixStore("shm", context.store), context.rank, context.size, timeout=timedelta(seconds=3)
    )


class TestShmBetweenThreads(LendingSuite, TransportSuite):
    prepare_loan = share_memory_

    @pytest.fixture
    def world(self):
        return in_threads(make_shm)


class TestShmBetweenProcesses(LendingSuite, ProcessTransportSuite):
    prepare_loan = share_memory_

    @pytest.fixture
    def world(self, pool):
        return in_processes(pool, make_shm)


def test_a_receiver_sees_the_senders_memory_and_not_a_copy():
    def scenario(context):
        with make_shm(context) as transport:
            peer = 1 - context.rank
            if context.rank == 0:
                arena = transport.staging(8).fill_(1)
                ticket = transport.post_send(peer, arena)
                context.store.wait(["waited"])
                arena.fill_(2)  # what a sender must not do: it shows that nothing was copied
                context.store.set("changed", "")
                transport.wait(ticket, Deadline(5))
                return None
            ticket = expect(transport, peer, 8)
            shown = transport.wait(ticket, Deadline(5))
            before = shown.tolist()
            context.store.set("waited", "")
            context.store.wait(["changed"])
            after = shown.tolist()
            transport.release(ticket)
            return before[0], after[0]

    assert threads(2, scenario) == [None, (1, 2)]


def test_a_payload_outside_the_arena_is_refused():
    def scenario(context):
        with make_shm(context) as transport:
            arena = transport.staging(100)
            with pytest.raises(TransportError, match=r"10 bytes to rank . does not lie in the staging arena"):
                transport.post_send(1 - context.rank, torch.zeros(10, dtype=torch.uint8))
            beyond = torch.empty(0, dtype=torch.uint8).set_(arena.untyped_storage())[:100]
            ticket = transport.post_send(1 - context.rank, beyond[90:])
            take(transport, expect(transport, 1 - context.rank, 10))
            transport.wait(ticket, Deadline(5))

    threads(2, scenario)


def test_a_tensor_in_private_memory_cannot_be_lent():
    def scenario(context):
        with make_shm(context) as transport, pytest.raises(TransportError, match="does not lie in shared memory"):
            transport.lend([torch.zeros(3)])

    threads(2, scenario)


def test_a_rank_on_another_host_is_not_reached_and_that_is_no_error():
    def scenario(context):
        store = dist.PrefixStore("shm", context.store)
        if context.rank != 1:
            with make_shm(context) as transport:
                reached = [transport.reaches(peer) for peer in range(3)]
                with pytest.raises(TransportError, match="rank 1"):
                    transport.post_recv(1, 0)
                return reached, transport.why_not(1)
        meeting = Meeting(store, 1, 3, scope="shm", timeout=timedelta(seconds=5))
        meeting.exchange("shm address", json.dumps(["a-name-of-another-host", "00" * 32]).encode())
        meeting.exchange("shm connected", b"[]")
        return None

    first, _, last = threads(3, scenario)
    assert first == ([False, False, True], "rank 1 found no socket of rank 0 on its host")
    assert last[0] == [True, False, False]
    assert last[1].startswith("rank 1 has no socket here (Connection refused)")


def test_a_rank_whose_memory_does_not_hold_its_nonce_is_not_reached(monkeypatch):
    monkeypatch.setattr(handshake, "reads", lambda descriptor, nonce: False)

    def scenario(context):
        with make_shm(context) as transport:
            return transport.reaches(1 - context.rank), transport.why_not(1 - context.rank)

    why = "has a socket here, but no memory that both can map"
    assert threads(2, scenario) == [(False, f"rank 1 {why}"), (False, f"rank 0 {why}")]


def test_a_rank_that_never_connects_is_named():
    def scenario(context):
        if context.rank == 0:
            with pytest.raises(RefitTimeout, match="for rank 1 in vain"):
                ShmTransport(context.store, 0, 2, timeout=timedelta(seconds=0.3))

    threads(2, scenario)


def test_a_stranger_on_the_socket_is_turned_away(monkeypatch):
    accept = handshake._Handshake._accept

    def accept_after_a_stranger(self, listener, callers):
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect(listener.getsockname())
            stranger.send(b"hello?")
            return accept(self, listener, callers)

    monkeypatch.setattr(handshake._Handshake, "_accept", accept_after_a_stranger)

    def scenario(context):
        with make_shm(context) as transport:
            return transport.reaches(1 - context.rank)

    assert threads(2, scenario) == [True, True]


def fork_a_child_and_die(context):
    with make_shm(context) as transport:
        if context.rank == 1:
            reading, writing = os.pipe()
            if os.fork() == 0:
                os.close(reading)
                os.write(writing, b"x")
                os.execvp("sleep", ["sleep", "3"])
            os.read(reading, 1)
            os.kill(os.getpid(), 9)
        with pytest.raises(TransportError, match="rank 1 is lost"):
            transport.wait(expect(transport, 1, 8), Deadline(2.5))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_death_of_a_rank_is_seen_though_its_child_lives_on(pool):
    pool.run(fork_a_child_and_die, ranks=2, may_die={1})


class TestShareMemory:
    def test_tensors_move_in_place_and_their_aliases_follow(self):
        whole = torch.arange(10)
        alias = whole[2:5]
        other = torch.nn.Parameter(torch.ones(3))
        assert share_memory_([whole, alias, other]) == whole.nbytes + other.nbytes
        assert whole.is_shared()
        assert other.is_shared()
        whole.fill_(7)
        assert alias.tolist() == [7, 7, 7]
        assert share_memory_([whole, alias]) == 0

    def test_too_little_room_is_refused_before_anything_moves(self, monkeypatch):
        weights = torch.zeros(1 << 20, dtype=torch.uint8)
        full = os.statvfs_result((4096, 4096, 100, 10, 10, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: full)
        with pytest.raises(
            EnvironmentNotSupported, match="1 MiB of weights do not fit into /dev/shm, which has 40 KiB"
        ):
            share_memory_([weights])
        assert not weights.is_shared()

    def test_too_few_open_files_are_refused(self, monkeypatch):
        monkeypatch.setattr(sharing.resource, "getrlimit", lambda which: (50, 50))
        with pytest.raises(EnvironmentNotSupported, match="1 storages need one open file each"):
            share_memory_([torch.zeros(3)])

    def test_a_tensor_that_is_not_on_the_cpu_is_refused(self):
        with pytest.raises(ConfigError, match="only CPU tensors"):
            share_memory_([torch.zeros(3, device="meta")])


def many_loans(context, count):
    with make_shm(context) as transport:
        if context.rank == 0:
            tensors = [torch.full((5,), number % 256, dtype=torch.uint8) for number in range(count)]
            share_memory_(tensors)
            loans = transport.lend(tensors)
            context.store.set("loans", json.dumps([loan.to_json() for loan in loans]))
            transport.wait(transport.post_send(1, torch.empty(0, dtype=torch.uint8)), Deadline(10))
            return count
        take_loans = json.loads(context.store.get("loans"))
        before = len(os.listdir("/proc/self/fd"))
        views = [transport.borrow(0, Loan.from_json(facts)) for facts in take_loans]
        take(transport, expect(transport, 0, 0))
        assert len(os.listdir("/proc/self/fd")) == before  # a mapping keeps no file open
        return sum(int(view[4]) == number % 256 for number, view in enumerate(views))


def test_hundreds_of_storages_are_lent_and_no_borrower_keeps_a_file_open(pool):
    assert pool.run(many_loans, 600, ranks=2) == [600, 600]


def test_borrowed_memory_outlives_the_transport_as_long_as_it_is_looked_at():
    def scenario(context):
        with make_shm(context) as transport:
            if context.rank == 0:
                tensor = torch.arange(100, dtype=torch.uint8)
                share_memory_([tensor])
                (loan,) = transport.lend([tensor])
                context.store.set("loan", json.dumps(loan.to_json()))
                context.store.wait(["borrowed"])
                return None
            view = transport.borrow(0, Loan.from_json(json.loads(context.store.get("loan"))))
            context.store.set("borrowed", "")
        gc.collect()
        return view.tolist() == list(range(100))

    assert threads(2, scenario) == [None, True]


def test_who_is_waited_for_in_vain_names_the_one_it_waits_for_itself():
    def scenario(context):
        with make_shm(context) as transport:
            if context.rank == 2:
                context.store.wait(["told"])  # silent, and alive
                return None
            peer, seconds = (0, 0.3) if context.rank == 1 else (2, 20)
            ticket = transport.post_recv(peer, 0)
            with pytest.raises(TransportError) as caught:
                transport.wait(ticket, Deadline(seconds))
            if context.rank == 0:
                context.store.set("told", "")
            return caught.value.facts["peer"], caught.value.message

    (blamed, said), (waited_for, _), _ = threads(3, scenario)
    assert (blamed, waited_for) == (2, 0)
    assert "rank 1 ended it" in said
    assert "this rank was waiting for rank 2" in said
