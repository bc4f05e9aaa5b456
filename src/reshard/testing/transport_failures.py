"""What ranks do in the tests of a transport when one of them is silent, gives up, dies or makes a mistake.

`reshard.testing.transport_suite` runs them and says what must come of them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from reshard.errors import ConfigError, TransportError
from reshard.testing.transport_exchanges import MIB, PATIENCE_SECONDS, caught, expect, finish, meet, receive, take
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.testing.processes import RankContext
    from reshard.transports.base import Ticket, Transport

_LONG_NBYTES = 64 * MIB
_SOON_SECONDS = 0.2


def silent(context: RankContext, transport: Transport, way: str, seconds: float) -> tuple[object, ...]:
    peer = 1 - context.rank
    if context.rank == 0:
        payload = transport.staging(MIB)
        ticket = expect(transport, peer, 8) if way == "recv" else transport.post_send(peer, payload)
        kind, named, took = caught(lambda: transport.wait(ticket, Deadline(seconds)))
        after, _, _ = caught(lambda: transport.post_send(peer, payload))
        context.store.set("over", "")
        meet(context, "end")
        return kind, named, took, after
    context.store.wait(["over"], timedelta(seconds=PATIENCE_SECONDS))
    kind, named, _ = caught(lambda: transport.wait(expect(transport, peer, 8), Deadline(PATIENCE_SECONDS)))
    meet(context, "end")
    return kind, named


def aborting(context: RankContext, transport: Transport) -> tuple[object, ...] | None:
    nothing = torch.empty(0, dtype=torch.uint8)
    if context.rank == 1:
        finish(transport, [transport.post_send(peer, nothing) for peer in (0, 2)])
        transport.abort("the scenario says so")
        meet(context, "end")
        return None
    receive(transport, 1, 0)
    told = caught(lambda: transport.wait(expect(transport, 1, 64), Deadline(PATIENCE_SECONDS)))
    meet(context, "end")
    return told


def aborting_half_way(context: RankContext, transport: Transport, way: str) -> tuple[object, ...] | None:
    """Rank 1 gives up while rank 0 receives ("recv") or sends a message that no socket can hold."""
    payload = transport.staging(_LONG_NBYTES)
    told = None
    if context.rank == 1:
        _begin_to_serve(context, transport, way, payload)
        transport.abort("the scenario says so")
    else:
        told = caught(lambda: _wait_and_go_on(transport, _begin_to_wait(context, transport, way, payload)))
    meet(context, "end")
    return told


def aborted_from_outside(context: RankContext, transport: Transport) -> tuple[str, float] | None:
    if context.rank == 1:
        context.store.wait(["over"], timedelta(seconds=PATIENCE_SECONDS))
        return None
    ticket = expect(transport, 1, 64)
    timer = threading.Timer(0.2, partial(transport.abort, "called from outside"))
    timer.start()
    kind, _, seconds = caught(lambda: transport.wait(ticket, Deadline(PATIENCE_SECONDS)))
    timer.join()
    context.store.set("over", "")
    return kind, seconds


def wrong_size(context: RankContext, transport: Transport) -> tuple[str, int, bool]:
    message = ""
    peer = 1 - context.rank
    try:
        if context.rank == 0:
            finish(transport, [transport.post_send(peer, transport.staging(111))])
        else:
            receive(transport, peer, 222)
        kind, named = "no error", -1
    except TransportError as error:
        kind, named, message = type(error).__name__, int(str(error.facts["peer"])), str(error)
    meet(context, "end")
    return kind, named, "111 bytes" in message and "222 bytes" in message and context.rank == 1


def misuse(context: RankContext, transport: Transport) -> list[bool]:
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
    finish(transport, [send])
    results = [
        not transport.reaches(context.rank) and not transport.reaches(2) and transport.reaches(peer),
        refused(TransportError, lambda: transport.post_send(2, payload)),
        refused(TransportError, lambda: transport.post_send(context.rank, payload)),
        refused(ConfigError, lambda: transport.post_send(peer, payload.view(torch.int32))),
        refused(ConfigError, lambda: transport.release(ticket)),
    ]
    meet(context, "end")
    return results


def killed(context: RankContext, transport: Transport) -> tuple[object, ...]:
    if context.rank == 1:
        finish(transport, [transport.post_send(peer, torch.empty(0, dtype=torch.uint8)) for peer in (0, 2)])
        os.kill(os.getpid(), signal.SIGKILL)
    receive(transport, 1, 0)
    return caught(lambda: transport.wait(expect(transport, 1, 64), Deadline(PATIENCE_SECONDS)))


def killed_half_way(context: RankContext, transport: Transport, way: str) -> tuple[object, ...]:
    """Rank 1 stops while rank 0 receives ("recv") or sends a message that no socket can hold, and is killed then."""
    payload = transport.staging(_LONG_NBYTES)
    if context.rank == 1:
        context.store.set("victim", str(os.getpid()))
        _begin_to_serve(context, transport, way, payload)
        os.kill(os.getpid(), signal.SIGSTOP)
    victim = int(context.store.get("victim"))
    ticket = _begin_to_wait(context, transport, way, payload)
    while _state_of(victim) != "T":
        time.sleep(0.01)
    time.sleep(_SOON_SECONDS)  # as much has moved as can
    os.kill(victim, signal.SIGKILL)
    return caught(lambda: _wait_and_go_on(transport, ticket))


def _begin_to_wait(context: RankContext, transport: Transport, way: str, payload: torch.Tensor) -> Ticket:
    """Rank 0's part: it is the first to receive, and the last to send."""
    if way == "recv":
        ticket = expect(transport, 1, payload.numel())
        context.store.set("first", "")
        return ticket
    context.store.wait(["first"], timedelta(seconds=PATIENCE_SECONDS))
    return transport.post_send(1, payload)


def _begin_to_serve(context: RankContext, transport: Transport, way: str, payload: torch.Tensor) -> None:
    """Rank 1's part: when it returns, the message is under way or will be at once, and not through."""
    if way == "recv":
        context.store.wait(["first"], timedelta(seconds=PATIENCE_SECONDS))
        time.sleep(_SOON_SECONDS)  # rank 0's word that it can receive has come, so that posting sends all that fits
        transport.post_send(0, payload)
    else:
        expect(transport, 0, payload.numel())
        context.store.set("first", "")


def _wait_and_go_on(transport: Transport, ticket: Ticket) -> None:
    """Where a message is whole once it was posted, its wait is right to end well; the next one cannot."""
    transport.wait(ticket, Deadline(PATIENCE_SECONDS))
    transport.wait(expect(transport, 1, 64), Deadline(PATIENCE_SECONDS))


def _state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]


def killed_in_traffic(context: RankContext, transport: Transport) -> tuple[object, ...]:
    peer = 1 - context.rank
    arena = transport.staging(100_000)
    if context.rank == 1:
        for _ in range(20):
            receive(transport, peer, arena.numel())
        os.kill(os.getpid(), signal.SIGKILL)

    def send_on() -> None:
        for _ in range(1000):
            finish(transport, [transport.post_send(peer, arena)])

    kind, named, seconds = caught(send_on)
    assert seconds < PATIENCE_SECONDS
    return kind, named
