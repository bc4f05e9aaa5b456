"""What every transport promises, as tests: subclass `TransportSuite`, give it a `world`, and pytest does the rest.

>>> class TestMemoryTransport(TransportSuite):
...     @pytest.fixture
...     def world(self):
...         return in_memory

A world runs a scenario (a function of this module) as n ranks, each with a transport of its own, and returns what the
scenario returned on each rank. A transport whose ranks are real processes subclasses `ProcessTransportSuite`, which
also kills ranks. One that lends memory adds `LendingSuite`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import tempfile
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest
import torch

from reshard.errors import ConfigError, TransportError
from reshard.testing.processes import Died, ProcessPool, RankContext, threads
from reshard.transports.base import Deadline, Loan, Ticket, Transport
from reshard.transports.memory import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

MIB = 1 << 20
PATIENCE_SECONDS = 20.0
"""Deadline of every wait that is not meant to expire."""
POISON = 0xEE


class World(Protocol):
    """Runs `scenario(context, transport, *args)` on `size` ranks and returns the results in rank order."""

    def __call__(
        self, size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()
    ) -> list[Any]: ...


def in_memory(size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()) -> list[Any]:
    """Run a scenario over `MemoryTransport`, one thread a rank."""
    transports = MemoryTransport.world(size)
    return threads(size, lambda context: _play(context, lambda _: transports[context.rank], scenario, args))


def in_threads(make: Callable[[RankContext], Transport]) -> World:
    """Return a world whose ranks are threads; `make` builds one rank's transport."""

    def run(size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()) -> list[Any]:
        return threads(size, lambda context: _play(context, make, scenario, args))

    return run


def in_processes(pool: ProcessPool, make: Callable[[RankContext], Transport]) -> World:
    """Return a world whose ranks are the pool's processes; `make` and scenarios must be importable there."""

    def run(size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()) -> list[Any]:
        return pool.run(_play, make, scenario, args, ranks=size, may_die=may_die)

    return run


def _play(
    context: RankContext, make: Callable[[RankContext], Transport], scenario: Callable[..., Any], args: Sequence[object]
) -> Any:
    with make(context) as transport:
        return scenario(context, transport, *args)


class TransportSuite:
    """The promises that every transport keeps."""

    sees_sizes: ClassVar[bool] = True
    """Whether the transport refuses a message whose size is not the agreed one (gloo cannot)."""

    @pytest.fixture
    def world(self) -> World:
        raise NotImplementedError("a subclass of TransportSuite gives the fixture 'world'")

    def test_messages_of_a_pair_arrive_in_the_order_of_their_posts(self, world: World) -> None:
        assert world(2, _ordered, 60) == [None, list(range(60))]

    @pytest.mark.parametrize("nbytes", [0, 1, 4097, MIB, 9 * MIB])
    def test_a_message_of_any_size_arrives_bit_for_bit(self, world: World, nbytes: int) -> None:
        assert world(2, _one_message, nbytes) == [True, True]

    def test_many_messages_are_in_flight_in_both_directions(self, world: World) -> None:
        assert world(3, _crossing, 1500, 96) == [2 * 1500] * 3

    def test_large_messages_cross_each_other(self, world: World) -> None:
        assert world(2, _crossing, 6, 3 * MIB) == [6, 6]

    def test_tokens_beyond_any_buffer_can_be_posted_before_the_peer_looks(self, world: World) -> None:
        assert world(2, _unread_tokens, 3000) == [3000, 3000]

    def test_a_payload_is_what_was_sent_though_the_sender_reuses_its_memory(self, world: World) -> None:
        assert world(2, _reused_memory, 30, 70_001) == [None, [True] * 30]

    def test_bytes_shown_stay_valid_until_release_though_the_sender_goes_on(self, world: World) -> None:
        assert world(2, _held_bytes) == [None, (True, True, True)]

    def test_bytes_land_in_into_where_it_is_given(self, world: World) -> None:
        assert world(2, _into) == [None, (True, True)]

    def test_a_token_is_done_when_the_reader_has_released_it(self, world: World) -> None:
        assert world(2, _token) == [True, True]

    def test_sixteen_ranks_talk_to_each_other(self, world: World) -> None:
        size = 16 if world(1, _can_be_many) == [True] else 4
        assert world(size, _crossing, 3, 1000) == [3 * (size - 1)] * size

    @pytest.mark.parametrize("way", ["recv", "send"])
    def test_a_silent_peer_is_named_at_the_deadline(self, world: World, way: str) -> None:
        (kind, peer, seconds, after), told = world(2, _silent, way, 0.5)
        assert (kind, peer) == ("RefitTimeout", 1)
        assert 0.4 <= seconds <= 2.0
        assert after == "TransportError"  # the epoch has ended
        assert told == ("TransportError", 0)  # and the peer learns it long before its own deadline

    def test_a_peer_that_aborts_is_named_long_before_the_deadline(self, world: World) -> None:
        results = world(3, _aborting)
        assert [results[0][:2], results[2][:2]] == [("TransportError", 1)] * 2
        assert max(results[0][2], results[2][2]) < 5.0

    def test_an_abort_from_another_thread_ends_a_wait(self, world: World) -> None:
        (kind, seconds), _ = world(2, _aborted_from_outside)
        assert kind == "TransportError"
        assert seconds < 5.0

    def test_a_message_of_another_size_than_agreed_is_refused_with_both_sizes(self, world: World) -> None:
        if self.sees_sizes:
            sender, receiver = world(2, _wrong_size)
            assert sender == ("TransportError", 1, False)
            assert receiver == ("TransportError", 0, True)

    def test_the_staging_arena_is_replaced_only_when_nothing_is_in_flight(self, world: World) -> None:
        assert world(2, _staging) == [("TransportError", 20, 20, True), None]

    def test_posts_to_a_rank_that_is_not_reached_and_misuse_are_refused(self, world: World) -> None:
        assert world(2, _misuse) == [[True] * 5] * 2

    def test_close_can_be_called_twice_and_nothing_is_left_behind(self, world: World) -> None:
        counts = [world(3, _open_and_close) for _ in range(3)]
        assert counts[1] == counts[2]  # the first run may load and warm what stays for good
        assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("reshard-shm")]


class ProcessTransportSuite(TransportSuite):
    """The promises of a transport between processes: the death of one is seen by the others."""

    def test_a_peer_that_is_killed_is_named_within_seconds(self, world: World) -> None:
        first, killed, last = world(3, _killed, may_die={1})
        assert killed == Died(-signal.SIGKILL)
        assert [first[:2], last[:2]] == [("TransportError", 1)] * 2
        assert max(first[2], last[2]) < 5.0

    def test_a_peer_that_is_killed_while_many_messages_are_in_flight_is_named(self, world: World) -> None:
        survivor, killed = world(2, _killed_in_traffic, may_die={1})
        assert killed == Died(-signal.SIGKILL)
        assert survivor == ("TransportError", 1)


class LendingSuite:
    """The promises of a transport that lends memory; combine it with `TransportSuite`."""

    prepare_loan: ClassVar[Callable[[Sequence[torch.Tensor]], object] | None] = None
    """Importable function that moves tensors, in place, to where they can be lent."""

    def test_a_reader_pulls_straight_out_of_lent_memory_again_and_again(self, world: World) -> None:
        assert world(3, _lending, type(self).prepare_loan) == [None, [True] * 6, [True] * 6]

    def test_a_loan_survives_json_and_tensors_of_one_storage_share_it(self, world: World) -> None:
        assert world(2, _loans_as_json, type(self).prepare_loan) == [True, True]


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """Make uint8 `[nbytes]` whose values depend on their place and on `seed`."""
    return ((torch.arange(nbytes, dtype=torch.int64) * 7 + 13 * seed) % 251).to(torch.uint8)


def receive(transport: Transport, peer: int, nbytes: int) -> torch.Tensor:
    """Receive one message and return a copy of it."""
    ticket = expect(transport, peer, nbytes)
    return take(transport, ticket)


def expect(transport: Transport, peer: int, nbytes: int) -> Ticket:
    """Post a receive, with memory full of poison where the transport has none of its own."""
    needs = transport.lands == "caller" and nbytes > 0
    return transport.post_recv(peer, nbytes, torch.full((nbytes,), POISON, dtype=torch.uint8) if needs else None)


def take(transport: Transport, ticket: Ticket) -> torch.Tensor:
    """Wait for a receive and return a copy of its bytes, released."""
    shown = transport.wait(ticket, Deadline(PATIENCE_SECONDS))
    assert shown is not None
    copy = shown.clone()
    transport.release(ticket)
    return copy


def _finish(transport: Transport, tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        transport.wait(ticket, Deadline(PATIENCE_SECONDS))


def _meet(context: RankContext, name: str) -> None:
    """Wait for all ranks without the transport, so that a scenario's order does not depend on luck."""
    context.store.set(f"{name}/{context.rank}", "")
    context.store.wait([f"{name}/{rank}" for rank in range(context.size)], timedelta(seconds=PATIENCE_SECONDS))


def _caught(call: Callable[[], object]) -> tuple[str, int, float]:
    """Call, and return the error's type, the rank it names, and the seconds it took."""
    start = time.monotonic()
    try:
        call()
    except TransportError as error:
        peer = error.facts.get("peer")
        return type(error).__name__, peer if isinstance(peer, int) else -1, time.monotonic() - start
    return "no error", -1, time.monotonic() - start


def _ordered(context: RankContext, transport: Transport, count: int) -> list[int] | None:
    sizes = [1 + 37 * number for number in range(count)]
    if context.rank == 0:
        slots = torch.split(transport.staging(sum(sizes)), sizes)
        for number, slot in enumerate(slots):
            slot.copy_(pattern(sizes[number], number))
        _finish(transport, [transport.post_send(1, slot) for slot in slots])
        return None
    tickets = [expect(transport, 0, nbytes) for nbytes in sizes]
    found = {}
    for number in reversed(range(count)):  # waiting in another order changes nothing
        data = take(transport, tickets[number])
        found[number] = next(seed for seed in range(count) if torch.equal(data, pattern(len(data), seed)))
    return [found[number] for number in range(count)]


def _one_message(context: RankContext, transport: Transport, nbytes: int) -> bool:
    if context.rank == 0:
        payload = transport.staging(nbytes).copy_(pattern(nbytes, 1))
        _finish(transport, [transport.post_send(1, payload)])
        return True
    return torch.equal(receive(transport, 0, nbytes), pattern(nbytes, 1))


def _crossing(context: RankContext, transport: Transport, count: int, nbytes: int) -> int:
    peers = [peer for peer in range(context.size) if peer != context.rank]
    arena = transport.staging(nbytes).copy_(pattern(nbytes, context.rank))
    sends, recvs = [], []
    for _ in range(count):
        for peer in peers:
            sends.append(transport.post_send(peer, arena))
            recvs.append((peer, expect(transport, peer, nbytes)))
    right = {peer: pattern(nbytes, peer) for peer in peers}
    good = sum(torch.equal(take(transport, ticket), right[peer]) for peer, ticket in recvs)
    _finish(transport, sends)
    return good


def _can_be_many(context: RankContext, transport: Transport) -> bool:
    return threading.current_thread() is not threading.main_thread()


def _unread_tokens(context: RankContext, transport: Transport, count: int) -> int:
    nothing = torch.empty(0, dtype=torch.uint8)
    peer = 1 - context.rank
    sends = [transport.post_send(peer, nothing) for _ in range(count)]
    _meet(context, "posted")
    recvs = [expect(transport, peer, 0) for _ in range(count)]
    done = sum(take(transport, ticket).numel() == 0 for ticket in recvs)
    _finish(transport, sends)
    return done


def _reused_memory(context: RankContext, transport: Transport, count: int, nbytes: int) -> list[bool] | None:
    if context.rank == 0:
        slot = transport.staging(nbytes)
        for number in range(count):
            slot.copy_(pattern(nbytes, number))
            _finish(transport, [transport.post_send(1, slot)])
            slot.fill_(POISON)
        return None
    return [torch.equal(receive(transport, 0, nbytes), pattern(nbytes, number)) for number in range(count)]


def _held_bytes(context: RankContext, transport: Transport) -> tuple[bool, ...] | None:
    nbytes = 5000
    if context.rank == 0:
        held, passing = torch.split(transport.staging(2 * nbytes), nbytes)
        first = transport.post_send(1, held.copy_(pattern(nbytes, 1)))
        for seed in (2, 3):
            _finish(transport, [transport.post_send(1, passing.copy_(pattern(nbytes, seed)))])
        _finish(transport, [first])
        return None
    ticket = expect(transport, 0, nbytes)
    shown = transport.wait(ticket, Deadline(PATIENCE_SECONDS))
    others = [torch.equal(receive(transport, 0, nbytes), pattern(nbytes, seed)) for seed in (2, 3)]
    assert shown is not None
    still = torch.equal(shown, pattern(nbytes, 1))
    transport.release(ticket)
    return still, *others


def _into(context: RankContext, transport: Transport) -> tuple[bool, bool] | None:
    nbytes = 12345
    if context.rank == 0:
        _finish(transport, [transport.post_send(1, transport.staging(nbytes).copy_(pattern(nbytes, 4)))])
        return None
    memory = torch.full((nbytes + 2,), POISON, dtype=torch.uint8)
    into = memory[1:-1]
    ticket = transport.post_recv(0, nbytes, into)
    shown = transport.wait(ticket, Deadline(PATIENCE_SECONDS))
    transport.release(ticket)
    assert shown is not None
    around = memory[[0, -1]].tolist() == [POISON, POISON]
    return torch.equal(into, pattern(nbytes, 4)) and shown.data_ptr() == into.data_ptr(), around


def _token(context: RankContext, transport: Transport) -> bool:
    nothing = torch.empty(0, dtype=torch.uint8)
    peer = 1 - context.rank
    if context.rank == 0:
        token = transport.post_send(peer, nothing)
        receive(transport, peer, 0)  # "I have your token, and have not released it"
        early = token.done and transport.releases_travel
        go = transport.post_send(peer, nothing)
        _finish(transport, [token, go])
        return not early
    token = expect(transport, peer, 0)
    transport.wait(token, Deadline(PATIENCE_SECONDS))
    word = transport.post_send(peer, nothing)
    receive(transport, peer, 0)
    transport.release(token)
    _finish(transport, [word])
    return True


def _silent(context: RankContext, transport: Transport, way: str, seconds: float) -> tuple[object, ...]:
    peer = 1 - context.rank
    if context.rank == 0:
        payload = transport.staging(MIB)
        ticket = expect(transport, peer, 8) if way == "recv" else transport.post_send(peer, payload)
        kind, named, took = _caught(lambda: transport.wait(ticket, Deadline(seconds)))
        after, _, _ = _caught(lambda: transport.post_send(peer, payload))
        context.store.set("over", "")
        _meet(context, "end")
        return kind, named, took, after
    context.store.wait(["over"], timedelta(seconds=PATIENCE_SECONDS))
    kind, named, _ = _caught(lambda: transport.wait(expect(transport, peer, 8), Deadline(PATIENCE_SECONDS)))
    _meet(context, "end")
    return kind, named


def _aborting(context: RankContext, transport: Transport) -> tuple[object, ...] | None:
    nothing = torch.empty(0, dtype=torch.uint8)
    if context.rank == 1:
        _finish(transport, [transport.post_send(peer, nothing) for peer in (0, 2)])
        transport.abort("the scenario says so")
        _meet(context, "end")
        return None
    receive(transport, 1, 0)
    caught = _caught(lambda: transport.wait(expect(transport, 1, 64), Deadline(PATIENCE_SECONDS)))
    _meet(context, "end")
    return caught


def _aborted_from_outside(context: RankContext, transport: Transport) -> tuple[str, float] | None:
    if context.rank == 1:
        context.store.wait(["over"], timedelta(seconds=PATIENCE_SECONDS))
        return None
    ticket = expect(transport, 1, 64)
    timer = threading.Timer(0.2, partial(transport.abort, "called from outside"))
    timer.start()
    kind, _, seconds = _caught(lambda: transport.wait(ticket, Deadline(PATIENCE_SECONDS)))
    timer.join()
    context.store.set("over", "")
    return kind, seconds


def _wrong_size(context: RankContext, transport: Transport) -> tuple[str, int, bool]:
    message = ""
    peer = 1 - context.rank
    try:
        if context.rank == 0:
            _finish(transport, [transport.post_send(peer, transport.staging(111))])
        else:
            receive(transport, peer, 222)
        kind, named = "no error", -1
    except TransportError as error:
        kind, named, message = type(error).__name__, int(str(error.facts["peer"])), str(error)
    _meet(context, "end")
    return kind, named, "111 bytes" in message and "222 bytes" in message and context.rank == 1


def _staging(context: RankContext, transport: Transport) -> tuple[object, ...] | None:
    if context.rank == 1:
        context.store.wait(["tried"], timedelta(seconds=PATIENCE_SECONDS))
        receive(transport, 0, 10)
        receive(transport, 0, 20)
        return None
    ticket = transport.post_send(1, transport.staging(10))
    kind, _, _ = _caught(lambda: transport.staging(20))
    context.store.set("tried", "")
    _finish(transport, [ticket])
    arena = transport.staging(20)
    same = transport.staging(20).data_ptr() == arena.data_ptr()
    _finish(transport, [transport.post_send(1, arena)])
    return kind, arena.numel(), int(arena.untyped_storage().nbytes()), same


def _misuse(context: RankContext, transport: Transport) -> list[bool]:
    def refused(kind: type[Exception], call: Callable[[], object]) -> bool:
        try:
            call()
        except kind:
            return True
        return False

    payload = transport.staging(8)
    peer = 1 - context.rank
    send = transport.post_send(peer, payload)
    ticket = expect(transport, peer, 8)
    take(transport, ticket)
    _finish(transport, [send])
    results = [
        not transport.reaches(context.rank) and not transport.reaches(2) and transport.reaches(peer),
        refused(TransportError, lambda: transport.post_send(2, payload)),
        refused(TransportError, lambda: transport.post_send(context.rank, payload)),
        refused(ConfigError, lambda: transport.post_send(peer, payload.view(torch.int32))),
        refused(ConfigError, lambda: transport.release(ticket)),
    ]
    _meet(context, "end")
    return results


def _open_and_close(context: RankContext, transport: Transport) -> int:
    _crossing(context, transport, 5, 10_000)
    _meet(context, "talked")
    transport.close()
    transport.close()
    assert _caught(lambda: transport.post_recv(1 - min(1, context.rank), 0))[0] == "TransportError"
    _meet(context, "closed")
    gc.collect()
    count = _open_descriptors()
    _meet(context, "counted")
    return count


def _open_descriptors() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of a listing, this one or another thread's
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("/proc/")
    return count


def _killed(context: RankContext, transport: Transport) -> tuple[object, ...]:
    if context.rank == 1:
        _finish(transport, [transport.post_send(peer, torch.empty(0, dtype=torch.uint8)) for peer in (0, 2)])
        os.kill(os.getpid(), signal.SIGKILL)
    receive(transport, 1, 0)
    return _caught(lambda: transport.wait(expect(transport, 1, 64), Deadline(PATIENCE_SECONDS)))


def _killed_in_traffic(context: RankContext, transport: Transport) -> tuple[object, ...]:
    peer = 1 - context.rank
    arena = transport.staging(100_000)
    if context.rank == 1:
        for _ in range(20):
            receive(transport, peer, arena.numel())
        os.kill(os.getpid(), signal.SIGKILL)

    def send_on() -> None:
        for _ in range(1000):
            _finish(transport, [transport.post_send(peer, arena)])

    kind, named, seconds = _caught(send_on)
    assert seconds < PATIENCE_SECONDS
    return kind, named


def _lending(
    context: RankContext, transport: Transport, prepare: Callable[[Sequence[torch.Tensor]], object] | None
) -> list[bool] | None:
    nothing = torch.empty(0, dtype=torch.uint8)
    sizes = [3 * MIB, 1, 4096]
    if context.rank == 0:
        tensors = [pattern(nbytes, 0) for nbytes in sizes]
        if prepare is not None:
            prepare(tensors)
        loans = transport.lend(tensors)
        context.store.set("loans", json.dumps([loan.to_json() for loan in loans]))
        for version in (1, 2):
            for tensor in tensors:
                tensor.copy_(pattern(tensor.numel(), version))
            _finish(transport, [transport.post_send(peer, nothing) for peer in (1, 2)])
            for tensor in tensors:
                tensor.fill_(POISON)  # all readers have released: the memory is the source's again
        return None
    loans = tuple(Loan.from_json(facts) for facts in json.loads(context.store.get("loans")))
    good = []
    for version in (1, 2):
        ticket = expect(transport, 0, 0)
        transport.wait(ticket, Deadline(PATIENCE_SECONDS))
        for loan, nbytes in zip(loans, sizes, strict=True):
            source = transport.borrow(0, loan)[loan.offset_nbytes :][:nbytes]
            good.append(torch.equal(source, pattern(nbytes, version)))
        transport.release(ticket)
    return good


def _loans_as_json(
    context: RankContext, transport: Transport, prepare: Callable[[Sequence[torch.Tensor]], object] | None
) -> bool:
    if context.rank == 0:
        whole = torch.arange(64, dtype=torch.int16)
        part, other = whole[10:20], torch.zeros(3)
        if prepare is not None:
            prepare([whole, other])
        loans = transport.lend([whole, part, other]) + transport.lend([part])
        context.store.set("loans", json.dumps([loan.to_json() for loan in loans]))
        _meet(context, "end")
        return [loan.storage for loan in loans] == [0, 0, 1, 0] and loans[1] == loans[3]
    loans = tuple(Loan.from_json(facts) for facts in json.loads(context.store.get("loans")))
    views = [transport.borrow(0, loan) for loan in loans]
    part = views[1][loans[1].offset_nbytes :][:20].view(torch.int16)
    good = part.tolist() == list(range(10, 20)) and views[0].data_ptr() == views[1].data_ptr()
    wrong = Loan(0, 99, 8, 0)
    start = time.monotonic()
    with pytest.raises(TransportError):
        transport.borrow(0, wrong)
    _meet(context, "end")
    return good and time.monotonic() - start < PATIENCE_SECONDS
