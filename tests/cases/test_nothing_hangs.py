"""TH-01 as far as a single call meets it: a rank that does not come, dies or stops is named on the others in time.

Real processes. A rank ends itself inside the transfer, at a given wait of its transport, so that it never ends before
or after; no test sleeps.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, split

import reshard
from reshard.errors import RefitTimeout, ReshardError, TransportError
from reshard.layouts.manifest import Manifest
from reshard.testing.oracle import check_landed, local_shard
from reshard.testing.processes import Died
from reshard.transports.program import Program
from reshard.transports.shm import ShmTransport
from reshard.transports.torch_p2p import TorchP2PTransport

TRANSPORTS = {"torch_p2p": TorchP2PTransport, "shm": ShmTransport}
SHAPE = (1024, 2048)
RANKS = 4
SRC, DST = split(SHAPE, [0, 1], ("x",)), split(SHAPE, [2, 3], (None, "x"))
"""Rows to columns: each source sends to each destination, packed, in some dozens of messages."""


def refit_once(ctx, group, transport, timeout, *, shared=False, verify="none", before_run=contextlib.nullcontext):
    """Compile and run the refit; the destination's tensor, or None on a source."""
    source = local_shard(arange(*SHAPE), SRC, ctx.rank) if ctx.rank in SRC.mesh.ranks else None
    target = torch.full(DST.local_shape(ctx.rank), float(POISON)) if ctx.rank in DST.mesh.ranks else None
    if shared and source is not None:
        reshard.share_memory_([source])
    layout, held = (DST, target) if source is None else (SRC, source)
    side = Manifest.from_views([("w", SHAPE, layout.boxes(ctx.rank)[0].start, held)])
    compiled = reshard.compile_refit(
        group,
        src=None if source is None else side,
        dst=None if target is None else side,
        transport=transport,
        staging_nbytes="1MiB",
        verify=verify,
        timeout=TIMEOUT,
    )
    with before_run():
        compiled.run(timeout)
    return target


@contextlib.contextmanager
def signalled(transport, at, number, method="wait"):
    """Send this process a signal at the ``at``-th wait of its transport, or the ``at``-th call of another method."""
    kind = TRANSPORTS[transport]
    original, calls = getattr(kind, method), itertools.count(1)

    def call(self, *args):
        if next(calls) == at:
            os.kill(os.getpid(), number)
        return original(self, *args)

    with mock.patch.object(kind, method, call):
        yield


def what_it_raises(call):
    started = time.monotonic()
    try:
        call()
    except ReshardError as error:
        return type(error).__name__, getattr(error, "peer", None), error.message, time.monotonic() - started
    return None


def check_told(told, victim, *, within):
    """Every survivor was told in time, each names a rank, and somebody names the victim."""
    survivors = [rank for rank in range(RANKS) if rank != victim]
    assert all(told[rank] is not None for rank in survivors), "a rank went on as if nothing had happened"
    peers = {rank: told[rank][1] for rank in survivors}
    assert victim in peers.values()
    assert all(peer is not None and f"rank {peer}" in told[rank][2] for rank, peer in peers.items())
    assert max(told[rank][3] for rank in survivors) < within


def _never_calls(ctx, absent):
    group = ctx.process_group("first")
    told = None
    if ctx.rank != absent:
        told = what_it_raises(lambda: _compile_small(ctx, group, timedelta(seconds=1)))
    again = ctx.process_group("second")  # meets the rank that was absent: it is alive
    _compile_small(ctx, again, TIMEOUT).run(TIMEOUT)
    return told


def _compile_small(ctx, group, timeout):
    side = Manifest.from_torch({"w": arange(8) if ctx.rank < 2 else torch.zeros(8)})
    return reshard.compile_refit(group, **({"src": side} if ctx.rank < 2 else {"dst": side}), timeout=timeout)


@pytest.mark.parametrize("absent", [0, 3])
def test_TH_01_a_rank_that_never_calls_is_named_and_a_later_call_works(pool, absent):
    told = pool.run(_never_calls, absent, ranks=RANKS, timeout=30)
    check_told(told, absent, within=4)
    assert {told[rank][0] for rank in range(RANKS) if rank != absent} == {RefitTimeout.__name__}


def _never_runs(ctx, absent):
    group = ctx.process_group("first")
    compiled = _compile_small(ctx, group, TIMEOUT)
    told = what_it_raises(lambda: compiled.run(timedelta(seconds=1))) if ctx.rank != absent else None
    ctx.process_group("end").barrier().wait(ctx.timeout)
    return told


def test_TH_01_a_rank_that_compiles_and_never_runs_is_named(pool):
    check_told(pool.run(_never_runs, 2, ranks=RANKS, timeout=30), 2, within=4)


def _dies_before(ctx, victim):
    group = ctx.process_group("first")
    if ctx.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return what_it_raises(lambda: _compile_small(ctx, group, timedelta(seconds=1)))


def test_TH_01_a_rank_that_dies_before_it_calls_is_named(pool):
    told = pool.run(_dies_before, 1, ranks=RANKS, timeout=30, may_die={1})
    assert isinstance(told[1], Died)
    check_told(told, 1, within=4)


def _dies_inside(ctx, transport, victim, at, shared, method="wait"):
    group = ctx.process_group("first")
    kill = functools.partial(signalled, transport, at, signal.SIGKILL, method)
    inside = kill if ctx.rank == victim else contextlib.nullcontext
    return what_it_raises(lambda: refit_once(ctx, group, transport, TIMEOUT, shared=shared, before_run=inside))


@pytest.mark.parametrize("at", [1, 5, 12])
@pytest.mark.parametrize("victim", [0, 3])  # a source, a destination
def test_TH_01_a_rank_killed_inside_the_transfer_is_named_long_before_the_deadline(pool, transport, victim, at):
    told = pool.run(_dies_inside, transport, victim, at, False, ranks=RANKS, timeout=30, may_die={victim})
    assert isinstance(told[victim], Died), "the signal came inside the transfer"
    check_told(told, victim, within=TIMEOUT.total_seconds() / 2)


def test_TH_01_a_reader_killed_while_it_reads_memory_in_place_is_named(pool):
    # the first thing that a reader sends is that it has read one source's memory
    told = pool.run(_dies_inside, "shm", 3, 1, True, "post_send", ranks=RANKS, timeout=30, may_die={3})
    assert isinstance(told[3], Died)
    assert 3 in (told[0][1], told[1][1]), "both sources wait for it; one may hear of it through the other"
    assert all("rank 3" in told[rank][2] for rank in (0, 1))
    assert max(told[0][3], told[1][3]) < TIMEOUT.total_seconds() / 2


def test_TH_01_a_lender_killed_while_others_read_its_memory_leaves_nobody_waiting(pool):
    """What its readers have mapped outlives it: they end, well or with its name, but they end."""
    told = pool.run(_dies_inside, "shm", 0, 1, True, ranks=RANKS, timeout=TIMEOUT.total_seconds() / 2, may_die={0})
    assert isinstance(told[0], Died)
    assert all(told[rank] is None or "rank" in told[rank][2] for rank in (1, 2, 3))


def _fails_inside(ctx, transport, victim, kind, when, verify):
    """The victim's transfer ends in an error of its own, before it has moved a byte or after it has moved all."""
    group, original = ctx.process_group("first"), Program.run

    def run(self, deadline):
        if when == "after":
            original(self, deadline)
        raise kind("the test says so")

    if ctx.rank == victim:
        fail = functools.partial(mock.patch.object, Program, "run", run)
        with pytest.raises(kind, match="the test says so"):
            refit_once(ctx, group, transport, TIMEOUT, verify=verify, before_run=fail)
        ctx.store.wait([f"told {rank}" for rank in range(RANKS) if rank != victim], TIMEOUT)  # it lives on meanwhile
        return None
    told = what_it_raises(lambda: refit_once(ctx, group, transport, TIMEOUT, verify=verify))
    ctx.store.set(f"told {ctx.rank}", "yes")
    return told


@pytest.mark.parametrize("kind", [TransportError, RuntimeError])
@pytest.mark.parametrize("victim", [0, 3])
def test_TH_01_a_rank_that_fails_in_the_transfer_and_lives_on_leaves_nobody_waiting(pool, transport, victim, kind):
    told = pool.run(_fails_inside, transport, victim, kind, "before", "none", ranks=RANKS, timeout=50)
    check_told(told, victim, within=TIMEOUT.total_seconds() / 2)


@pytest.mark.parametrize("kind", [TransportError, RuntimeError])
def test_TH_01_ranks_that_have_all_their_bytes_hear_of_one_that_failed_before_it_said_that_they_are_right(
    pool, transport, kind
):
    told = pool.run(_fails_inside, transport, 3, kind, "after", "fingerprint", ranks=RANKS, timeout=50)
    for rank in (0, 1, 2):
        assert told[rank] is not None, "a rank went on as if nothing had happened"
        assert "ank 3" in told[rank][2]
        assert told[rank][3] < TIMEOUT.total_seconds() / 2


def _stops_inside(ctx, transport, victim, deadline):
    """The victim stops in the middle; once all others have been told, the first of them lets it go on."""
    group = ctx.process_group("first")
    others = [rank for rank in range(RANKS) if rank != victim]
    if ctx.rank == victim:
        ctx.store.set("victim", str(os.getpid()))
    inside = (lambda: signalled(transport, 5, signal.SIGSTOP)) if ctx.rank == victim else contextlib.nullcontext
    told = what_it_raises(lambda: refit_once(ctx, group, transport, deadline, before_run=inside))
    ctx.store.set(f"told {ctx.rank}", "yes")
    if ctx.rank == others[0]:
        ctx.store.wait([f"told {rank}" for rank in others], timedelta(seconds=20))
        os.kill(int(ctx.store.get("victim")), signal.SIGCONT)
    return told


@pytest.mark.parametrize("victim", [1, 2])
def test_TH_01_a_rank_that_stops_inside_the_transfer_is_named_at_the_deadline(pool, transport, victim):
    told = pool.run(_stops_inside, transport, victim, timedelta(seconds=2), ranks=RANKS, timeout=40)
    check_told(told, victim, within=4)
    named = [told[rank] for rank in range(RANKS) if rank != victim and told[rank][1] == victim]
    assert RefitTimeout.__name__ in {name for name, *_ in named}
    assert told[victim] is not None, "it woke up in a transfer that was over"


def _refits_after(ctx, transport):
    target = refit_once(ctx, ctx.process_group("fresh"), transport, TIMEOUT)
    if target is not None:
        check_landed(target, local_shard(arange(*SHAPE), DST, ctx.rank), f"rank {ctx.rank}")


def test_TH_01_survivors_of_all_this_refit_again_in_a_new_group(pool, transport):
    pool.run(_dies_inside, transport, 3, 5, False, ranks=RANKS, timeout=30, may_die={3})
    pool.run(_refits_after, transport, ranks=RANKS, timeout=30)


def test_TH_01_errors_of_lost_peers_are_transport_errors():
    assert issubclass(RefitTimeout, TransportError)
