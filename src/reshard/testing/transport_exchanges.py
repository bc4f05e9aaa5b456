"""What ranks do in the tests of a transport: exchanges in which nothing goes wrong, each as one rank sees it.

`reshard.testing.transport_suite` runs them and says what must come of them.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import torch

from reshard.errors import TransportError
from reshard.transports.base import Deadline, Loan, Ticket, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.testing.processes import RankContext

MIB = 1 << 20
PATIENCE_SECONDS = 20.0
"""Deadline of every wait that is not meant to expire."""
POISON = 0xEE


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


def finish(transport: Transport, tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        transport.wait(ticket, Deadline(PATIENCE_SECONDS))


def meet(context: RankContext, name: str) -> None:
    """Wait for all ranks without the transport, so that a scenario's order does not depend on luck."""
    context.store.set(f"{name}/{context.rank}", "")
    context.store.wait([f"{name}/{rank}" for rank in range(context.size)], timedelta(seconds=PATIENCE_SECONDS))


def caught(call: Callable[[], object]) -> tuple[str, int, float]:
    """Call, and return the error's type, the rank it names, and the seconds it took."""
    start = time.monotonic()
    try:
        call()
    except TransportError as error:
        peer = error.facts.get("peer")
        return type(error).__name__, peer if isinstance(peer, int) else -1, time.monotonic() - start
    return "no error", -1, time.monotonic() - start


def ordered(context: RankContext, transport: Transport, count: int) -> list[int] | None:
    sizes = [1 + 37 * number for number in range(count)]
    if context.rank == 0:
        slots = torch.split(transport.staging(sum(sizes)), sizes)
        for number, slot in enumerate(slots):
            slot.copy_(pattern(sizes[number], number))
        finish(transport, [transport.post_send(1, slot) for slot in slots])
        return None
    tickets = [expect(transport, 0, nbytes) for nbytes in sizes]
    found = {}
    for number in reversed(range(count)):  # waiting in another order changes nothing
        data = take(transport, tickets[number])
        found[number] = next(seed for seed in range(count) if torch.equal(data, pattern(len(data), seed)))
    return [found[number] for number in range(count)]


def one_message(context: RankContext, transport: Transport, nbytes: int) -> bool:
    if context.rank == 0:
        payload = transport.staging(nbytes).copy_(pattern(nbytes, 1))
        finish(transport, [transport.post_send(1, payload)])
        return True
    return torch.equal(receive(transport, 0, nbytes), pattern(nbytes, 1))


def crossing(context: RankContext, transport: Transport, count: int, nbytes: int) -> int:
    peers = [peer for peer in range(context.size) if peer != context.rank]
    arena = transport.staging(nbytes).copy_(pattern(nbytes, context.rank))
    sends, recvs = [], []
    for _ in range(count):
        for peer in peers:
            sends.append(transport.post_send(peer, arena))
            recvs.append((peer, expect(transport, peer, nbytes)))
    right = {peer: pattern(nbytes, peer) for peer in peers}
    good = sum(torch.equal(take(transport, ticket), right[peer]) for peer, ticket in recvs)
    finish(transport, sends)
    return good


def can_be_many(context: RankContext, transport: Transport) -> bool:
    return threading.current_thread() is not threading.main_thread()


def unread_tokens(context: RankContext, transport: Transport, count: int) -> int:
    nothing = torch.empty(0, dtype=torch.uint8)
    peer = 1 - context.rank
    sends = [transport.post_send(peer, nothing) for _ in range(count)]
    meet(context, "posted")
    recvs = [expect(transport, peer, 0) for _ in range(count)]
    done = sum(take(transport, ticket).numel() == 0 for ticket in recvs)
    finish(transport, sends)
    return done


def reused_memory(context: RankContext, transport: Transport, count: int, nbytes: int) -> list[bool] | None:
    if context.rank == 0:
        slot = transport.staging(nbytes)
        for number in range(count):
            slot.copy_(pattern(nbytes, number))
            finish(transport, [transport.post_send(1, slot)])
            slot.fill_(POISON)
        return None
    return [torch.equal(receive(transport, 0, nbytes), pattern(nbytes, number)) for number in range(count)]


def held_bytes(context: RankContext, transport: Transport) -> tuple[bool, ...] | None:
    nbytes = 5000
    if context.rank == 0:
        held, passing = torch.split(transport.staging(2 * nbytes), nbytes)
        first = transport.post_send(1, held.copy_(pattern(nbytes, 1)))
        for seed in (2, 3):
            finish(transport, [transport.post_send(1, passing.copy_(pattern(nbytes, seed)))])
        finish(transport, [first])
        return None
    ticket = expect(transport, 0, nbytes)
    shown = transport.wait(ticket, Deadline(PATIENCE_SECONDS))
    others = [torch.equal(receive(transport, 0, nbytes), pattern(nbytes, seed)) for seed in (2, 3)]
    assert shown is not None
    still = torch.equal(shown, pattern(nbytes, 1))
    transport.release(ticket)
    return still, *others


def into(context: RankContext, transport: Transport) -> tuple[bool, bool] | None:
    nbytes = 12345
    if context.rank == 0:
        finish(transport, [transport.post_send(1, transport.staging(nbytes).copy_(pattern(nbytes, 4)))])
        return None
    memory = torch.full((nbytes + 2,), POISON, dtype=torch.uint8)
    into = memory[1:-1]
    ticket = transport.post_recv(0, nbytes, into)
    shown = transport.wait(ticket, Deadline(PATIENCE_SECONDS))
    transport.release(ticket)
    assert shown is not None
    around = memory[[0, -1]].tolist() == [POISON, POISON]
    return torch.equal(into, pattern(nbytes, 4)) and shown.data_ptr() == into.data_ptr(), around


def token(context: RankContext, transport: Transport) -> bool:
    nothing = torch.empty(0, dtype=torch.uint8)
    peer = 1 - context.rank
    if context.rank == 0:
        token = transport.post_send(peer, nothing)
        receive(transport, peer, 0)  # "I have your token, and have not released it"
        early = token.done and transport.releases_travel
        go = transport.post_send(peer, nothing)
        finish(transport, [token, go])
        return not early
    token = expect(transport, peer, 0)
    transport.wait(token, Deadline(PATIENCE_SECONDS))
    word = transport.post_send(peer, nothing)
    receive(transport, peer, 0)
    transport.release(token)
    finish(transport, [word])
    return True


def staging(context: RankContext, transport: Transport) -> tuple[object, ...] | None:
    if context.rank == 1:
        context.store.wait(["tried"], timedelta(seconds=PATIENCE_SECONDS))
        receive(transport, 0, 10)
        receive(transport, 0, 20)
        return None
    ticket = transport.post_send(1, transport.staging(10))
    kind, _, _ = caught(lambda: transport.staging(20))
    context.store.set("tried", "")
    finish(transport, [ticket])
    arena = transport.staging(20)
    same = transport.staging(20).data_ptr() == arena.data_ptr()
    finish(transport, [transport.post_send(1, arena)])
    return kind, arena.numel(), int(arena.untyped_storage().nbytes()), same


def open_and_close(context: RankContext, transport: Transport) -> int:
    crossing(context, transport, 5, 10_000)
    meet(context, "talked")
    transport.close()
    transport.close()
    assert caught(lambda: transport.post_recv(1 - min(1, context.rank), 0))[0] == "TransportError"
    meet(context, "closed")
    gc.collect()
    count = _open_descriptors()
    meet(context, "counted")
    return count


def _open_descriptors() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of a listing, this one or another thread's
            count += not os.readlink(f"/proc/self/fd/{name}").startswith("/proc/")
    return count


def lending(
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
            finish(transport, [transport.post_send(peer, nothing) for peer in (1, 2)])
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


def loans_as_json(
    context: RankContext, transport: Transport, prepare: Callable[[Sequence[torch.Tensor]], object] | None
) -> bool:
    if context.rank == 0:
        whole = torch.arange(64, dtype=torch.int16)
        part, other = whole[10:20], torch.zeros(3)
        if prepare is not None:
            prepare([whole, other])
        loans = transport.lend([whole, part, other]) + transport.lend([part])
        context.store.set("loans", json.dumps([loan.to_json() for loan in loans]))
        meet(context, "end")
        return [loan.storage for loan in loans] == [0, 0, 1, 0] and loans[1] == loans[3]
    loans = tuple(Loan.from_json(facts) for facts in json.loads(context.store.get("loans")))
    views = [transport.borrow(0, loan) for loan in loans]
    part = views[1][loans[1].offset_nbytes :][:20].view(torch.int16)
    good = part.tolist() == list(range(10, 20)) and views[0].data_ptr() == views[1].data_ptr()
    wrong = Loan(0, 99, 8, 0)
    start = time.monotonic()
    with pytest.raises(TransportError):
        transport.borrow(0, wrong)
    meet(context, "end")
    return good and time.monotonic() - start < PATIENCE_SECONDS
