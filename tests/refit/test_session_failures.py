"""Crashes: a process is killed at every state, on either side; survivors are told in time and refit again.

Real processes; the successor of the dead one is a spare that joins under its world and rank.
"""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.refit.sessions import Rank, error_of, ranks_of

import reshard
from reshard.errors import ConfigError, MembershipError, RefitTimeout, ReshardError, TransportError
from reshard.refit import events, last_events, membership, runner
from reshard.refit.commands import AWAITED, Command
from reshard.refit.compiled import CompiledRefit
from reshard.refit.journal import KEPT, Journal
from reshard.refit.machine import State
from reshard.refit.timeline import to_perfetto
from reshard.testing.ports import free_port
from reshard.testing.processes import Died, ProcessPool
from reshard.transports.shm import ShmTransport

EXPECT = {"trainer": 2, "gen0": 2}
SPARE = 4
PATIENCE = timedelta(seconds=3)
LONG = timedelta(seconds=30)
SHORT = timedelta(seconds=1.5)
"""Where nothing can succeed before the deadline, so that nobody has to be quick."""
IN_A_REFIT = [
    (command, commit)
    for command in sorted(AWAITED - {Command.MEET}, key=lambda c: c.name)
    for commit in ("staged", "in-place")
    if (command, commit) != (Command.DRAIN, "in-place")  # no lease holds back what lands in the live weights
]


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(5) as processes:
        yield processes


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def tell(ctx, what):
    ctx.store.set(what, "yes")


def wait_for(ctx, *what):
    ctx.store.wait(list(what), timedelta(seconds=30))


def told_of(me, session, call):
    """What a survivor sees of a failed call: the error, how long it took, and what its weights are then."""
    started = time.monotonic()
    error = error_of(call)
    return {
        "error": type(error).__name__,
        "message": "" if error is None else error.message,
        "seconds": time.monotonic() - started,
        "serving": session.serving,
        "whole": [version for version in (1, 2) if not me.is_source and me.is_version(version)],
        "is_source": me.is_source,
    }


def end_epoch(session, fails):
    """Let a refit fail on all ranks, so that they meet anew in the next one; all are past its gate by then."""

    def refuse(_):
        raise ReshardError("this rank was told to fail")

    with mock.patch.dict(runner._EFFECTS, {Command.DRAIN: refuse} if fails else {}):
        assert "this rank was told to fail" in error_of(lambda: session.refit(2, timeout=LONG)).message


def _crash(ctx, address, victim, command, commit, inside, options):
    torch.set_num_threads(1)
    survivors = [rank for rank in range(4) if rank != victim]
    number = victim if ctx.rank == SPARE else ctx.rank
    me = Rank(*ranks_of(EXPECT, number), 2)
    if ctx.rank == SPARE:
        wait_for(ctx, *(f"told {rank}" for rank in survivors))
        session = me.connect(address, EXPECT, commit=commit, timeout=LONG, **options)
        me.train(3)
        report = session.refit(3)
        assert me.is_version(3)
        return report.epoch
    session = me.connect(address, EXPECT, commit=commit, timeout=LONG, **options)
    me.train(1)
    session.refit(1)
    if not me.is_source and commit == "staged":
        session.lease().release()
    me.train(2)
    if command is Command.MEET:
        end_epoch(session, fails=ctx.rank == victim)
    if ctx.rank == victim:
        if inside == "the meeting":
            membership.wait_for_key = die  # its name is written, and the others may count on it
        elif inside == "a window":
            move = CompiledRefit.move
            moves = iter([move, die])
            CompiledRefit.move = lambda *arguments: next(moves)(*arguments)
        elif inside:
            ShmTransport.wait = die
        else:
            runner._EFFECTS[command] = die
    patience = SHORT if command is Command.MEET else PATIENCE
    told = told_of(me, session, lambda: session.refit(2, timeout=patience))
    tell(ctx, f"told {ctx.rank}")
    me.train(3)
    report = session.refit(3, timeout=LONG)
    assert me.is_version(3)
    assert not session.serving.torn
    session.close()
    return told, report.epoch


def check_crash(results, victim, commit, command):
    assert isinstance(results[victim], Died)
    told = {rank: results[rank][0] for rank in range(4) if rank != victim}
    victims_name = "{} rank {}".format(*ranks_of(EXPECT, victim))
    meets = command is Command.MEET
    errors = ("MembershipError", "RefitTimeout") if meets else ("TransportError", "RefitTimeout", "PeerError")
    for rank, seen in told.items():
        assert seen["error"] in errors, (rank, seen)
        assert "Session 'default', refit to version 2" in seen["message"]
        assert seen["seconds"] < PATIENCE.total_seconds() + 2
        serving = seen["serving"]
        if seen["is_source"]:
            continue
        if serving.torn:
            assert commit == "in-place", "staged weights are never torn"
            assert "It serves torn (was version 1)" in seen["message"]
        else:
            assert seen["whole"] == [serving.version]
    assert any(victims_name in seen["message"] for seen in told.values()), told
    before = (Command.MEET, Command.GATHER, Command.PLAN, Command.MOVE, Command.AWAIT_LANDED, Command.DRAIN)
    if commit == "staged" and command in before:
        assert all(seen["serving"].version == 1 for seen in told.values() if not seen["is_source"])
    epochs = {results[rank][1] for rank in told}
    assert epochs == {results[SPARE]}
    assert meets or epochs == {2}, "one epoch more"


@pytest.mark.parametrize(("command", "commit"), IN_A_REFIT, ids=lambda value: getattr(value, "name", value))
@pytest.mark.parametrize("victim", [1, 2], ids=["source", "destination"])
def test_a_process_killed_at_any_state_leaves_survivors_that_know_and_go_on(pool, command, victim, commit):
    with reshard.serve_store() as store:
        results = pool.run(_crash, str(store), victim, command, commit, False, {}, timeout=50, may_die={victim})
    check_crash(results, victim, commit, command)


@pytest.mark.parametrize("inside", [False, "the meeting"], ids=["before it comes", "after it has come"])
@pytest.mark.parametrize("victim", [1, 2], ids=["source", "destination"])
def test_a_process_killed_while_the_members_meet_anew_likewise(pool, victim, inside):
    with reshard.serve_store() as store:
        args = (str(store), victim, Command.MEET, "staged", inside, {})
        results = pool.run(_crash, *args, timeout=50, may_die={victim})
    check_crash(results, victim, "staged", Command.MEET)


def _dies_joining(ctx, address, victim):
    torch.set_num_threads(1)
    survivors = [rank for rank in range(4) if rank != victim]
    me = Rank(*ranks_of(EXPECT, victim if ctx.rank == SPARE else ctx.rank), 2)
    told = None
    if ctx.rank == SPARE:
        wait_for(ctx, *(f"told {rank}" for rank in survivors))
    if ctx.rank == victim:
        membership.wait_for_key = die
    session = me.connect(address, EXPECT, timeout=LONG)
    me.train(1)
    if ctx.rank != SPARE:
        told = told_of(me, session, lambda: session.refit(1, timeout=SHORT))
        tell(ctx, f"told {ctx.rank}")
    session.refit(1)
    assert me.is_version(1)
    return told


@pytest.mark.parametrize("victim", [1, 2], ids=["source", "destination"])
def test_a_process_killed_as_it_joins_is_missed_by_the_first_refit_and_its_successor_is_met(pool, victim):
    with reshard.serve_store() as store:
        results = pool.run(_dies_joining, str(store), victim, timeout=50, may_die={victim})
    assert isinstance(results[victim], Died)
    for seen in (results[rank] for rank in range(4) if rank != victim):
        assert seen["error"] == "RefitTimeout"
        assert "for {} rank {} to call refit".format(*ranks_of(EXPECT, victim)) in seen["message"]
        assert seen["seconds"] < SHORT.total_seconds() + 2
        assert seen["serving"].version is None


@pytest.mark.parametrize("commit", ["staged", "in-place"])
@pytest.mark.parametrize("victim", [0, 3], ids=["source", "destination"])
def test_a_process_killed_inside_the_transfer_likewise(pool, victim, commit):
    with reshard.serve_store() as store:
        results = pool.run(_crash, str(store), victim, Command.MOVE, commit, True, {}, timeout=50, may_die={victim})
    check_crash(results, victim, commit, Command.MOVE)


@pytest.mark.parametrize("victim", [1, 2], ids=["source", "destination"])
def test_a_process_killed_between_two_windows_of_tensors_that_go_whole_likewise(pool, victim):
    options = {"routes": {"*": "whole"}, "staging_nbytes": 4608}  # half of it is room for two of the three tensors
    with reshard.serve_store() as store:
        args = (str(store), victim, Command.MOVE, "in-place", "a window", options)
        results = pool.run(_crash, *args, timeout=50, may_die={victim})
    check_crash(results, victim, "in-place", Command.MOVE)
    destinations = [results[rank][0] for rank in (2, 3) if rank != victim]
    assert all(seen["serving"].torn for seen in destinations)


def _trainer_restarts_between_refits(ctx, address):
    torch.set_num_threads(1)
    spare = ctx.rank == SPARE
    me = Rank(*ranks_of(EXPECT, 0 if spare else ctx.rank), 2)
    if spare:
        wait_for(ctx, "first is done")
    session = me.connect(address, EXPECT, timeout=LONG)
    if not spare:
        me.train(1)
        session.refit(1)
        if ctx.rank == 0:
            tell(ctx, "first is done")
            die()
        wait_for(ctx, "first is done")
    me.train(2)
    report = session.refit(2)
    assert me.is_version(2)
    return report.epoch


def test_a_trainer_that_restarts_between_two_refits_is_met_by_the_next_without_an_error(pool):
    with reshard.serve_store() as store:
        epochs = pool.run(_trainer_restarts_between_refits, str(store), timeout=50, may_die={0})
    assert epochs[1:] == [2, 2, 2, 2]


REPLICAS = {"trainer": 1, "gen0": 1, "gen1": 2}


def _replica_restarts(ctx, address):
    torch.set_num_threads(1)
    spare = ctx.rank == SPARE
    world, rank = ranks_of(REPLICAS, 2 if spare else ctx.rank)
    me = Rank(world, rank, REPLICAS[world])
    if spare:
        wait_for(ctx, "first is done")
    session = me.connect(address, REPLICAS, timeout=LONG)
    if not spare:
        me.train(1)
        session.refit(1)
        if ctx.rank == 2:
            tell(ctx, "first is done")
            die()
        wait_for(ctx, "first is done")
    if world == "gen0":
        wait_for(ctx, "caught up 0", "caught up 1")
        assert me.is_version(1)
    else:
        session.refit(1, to=["gen1"])
        assert me.is_version(1)
        if world == "gen1":
            tell(ctx, f"caught up {rank}")
    me.train(2)
    report = session.refit(2)
    assert me.is_version(2)
    return report.epoch


def test_MF_03_a_replica_that_was_killed_and_restarted_catches_up_while_the_others_call_nothing(pool):
    with reshard.serve_store() as store:
        epochs = pool.run(_replica_restarts, str(store), timeout=50, may_die={2})
    assert [epochs[rank] for rank in (0, 1, 3, SPARE)] == [2] * 4


def _served_again(port):
    """A store at a port whose process was killed; it has the port until the system has cleared it away."""
    expiry = time.monotonic() + 10
    while True:
        try:
            return reshard.serve_store(port=port)
        except ConfigError:
            if time.monotonic() > expiry:
                raise
            time.sleep(0.05)


def _host_dies(ctx, port, host, command):
    """Who serves the store, a member or not, is killed as the last survivor is about to carry out a command."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    members = [rank for rank in range(4) if rank != host]
    told_all, done_all = ([f"{what} {rank}" for rank in members] for what in ("told", "done"))
    served = [reshard.serve_store(port=port)] if ctx.rank == host else []
    if served:
        ctx.store.set("host", str(os.getpid()))
    if ctx.rank == SPARE:  # it serves again, as a member if the host was one
        wait_for(ctx, *told_all, *(["never"] if host == SPARE else []))
        with _served_again(port):
            me = Rank(*ranks_of(EXPECT, host), 2)
            session = me.connect(address, EXPECT, timeout=LONG)
            me.train(3)
            session.refit(3)
            assert me.is_version(3)
            wait_for(ctx, *done_all)
        return None
    me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
    session = me.connect(address, EXPECT, timeout=LONG)
    me.train(1)
    session.refit(1)
    me.train(2)
    if command in (Command.MEET, Command.DRAIN) and not me.is_source:
        session.lease().release()
    if command is Command.MEET:
        end_epoch(session, fails=ctx.rank == members[0])
    effect = runner._EFFECTS[command]

    def without_the_host(this):
        os.kill(int(ctx.store.get("host")), signal.SIGKILL)
        return effect(this)

    with mock.patch.dict(runner._EFFECTS, {command: without_the_host} if ctx.rank == members[-1] else {}):
        told = told_of(me, session, lambda: session.refit(2, timeout=PATIENCE))
    tell(ctx, f"told {ctx.rank}")
    wait_for(ctx, *told_all)
    served += [_served_again(port)] if host == SPARE and ctx.rank == 0 else []
    me.train(3)
    if told["error"] == "NoneType":  # it completed without the store, and hears of it now
        late = error_of(lambda: session.refit(3, timeout=LONG))
        assert late is None or "lost the store" in late.message
    session.refit(3, timeout=LONG)
    assert me.is_version(3)
    assert not session.serving.torn
    session.close()
    tell(ctx, f"done {ctx.rank}")
    wait_for(ctx, *done_all)
    return told


@pytest.mark.parametrize(
    ("host", "command"),
    [
        *((SPARE, command) for command in sorted(AWAITED, key=lambda c: c.name)),
        (0, Command.AWAIT_LANDED),  # the store and a source at once
        (2, Command.MOVE),  # the store and a destination
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_when_the_stores_host_is_killed_all_are_told_and_go_on_once_it_is_served_again(pool, host, command):
    """A refit that needs the store no more may complete; nobody serves a mix of versions."""
    results = pool.run(_host_dies, free_port(), host, command, timeout=60, may_die={host})
    assert isinstance(results[host], Died)
    told = [results[rank] for rank in range(4) if rank != host]
    for seen in told:
        assert seen["error"] in ("TransportError", "RefitTimeout", "PeerError", "NoneType")
        assert seen["seconds"] < PATIENCE.total_seconds() + 2
        assert seen["is_source"] or seen["whole"] == [seen["serving"].version]
    if command in (Command.MEET, Command.GATHER, Command.PLAN):
        assert any("lost the store" in seen["message"] for seen in told)
        assert {seen["serving"].version for seen in told if not seen["is_source"]} == {1}


def _never_calls(ctx, address):
    torch.set_num_threads(1)
    me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
    session = me.connect(address, EXPECT, timeout=LONG)
    me.train(1)
    session.refit(1)
    if ctx.rank == 3:
        wait_for(ctx, *(f"told {rank}" for rank in range(3)))
        told = None
    else:
        me.train(2)
        told = told_of(me, session, lambda: session.refit(2, timeout=timedelta(seconds=2)))
        tell(ctx, f"told {ctx.rank}")
    me.train(2)
    session.refit(2)
    assert me.is_version(2)
    return told, session.epoch


def test_TH_01_a_member_that_does_not_call_is_named_with_session_version_and_phase_and_the_next_call_works(pool):
    with reshard.serve_store() as store:
        results = pool.run(_never_calls, str(store), ranks=4, timeout=50)
    for told, epoch in results[:3]:
        assert told["error"] == RefitTimeout.__name__
        for part in ("Session 'default'", "refit to version 2", "gathering", "for gen0 rank 1 to call refit"):
            assert part in told["message"]
        assert 2 <= told["seconds"] < 4
        assert epoch == 2


def _comes_too_late(ctx, address, absent):
    me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
    if ctx.rank == absent:
        return None
    started = time.monotonic()
    error = error_of(lambda: me.connect(address, EXPECT, timeout=timedelta(seconds=3)))
    return type(error).__name__, error.message, error.missing, time.monotonic() - started


@pytest.mark.parametrize("absent", [0, 3])
def test_TH_04_a_missing_member_is_named_on_every_side_at_the_deadline(pool, absent):
    with reshard.serve_store() as store:
        results = pool.run(_comes_too_late, str(store), absent, ranks=4, timeout=30)
    name = "{} rank {}".format(*ranks_of(EXPECT, absent))
    for told in (result for result in results if result is not None):
        assert told[0] == MembershipError.__name__
        assert name in told[2]
        assert told[3] < 5
    assert all(told[2] == (name,) for told in results if told is not None)


def test_errors_of_lost_members_are_transport_errors_or_name_the_missing():
    assert issubclass(RefitTimeout, TransportError)
    assert issubclass(MembershipError, ReshardError)


def _leaves_events(ctx, address, folder, what):
    torch.set_num_threads(1)
    me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
    file = f"{folder}/{ctx.rank}.jsonl" if ctx.rank in (0, 2) else None
    session = me.connect(address, EXPECT, timeout=LONG, events=file)
    me.train(1)
    session.refit(1)
    if ctx.rank == 3 and what == "dies":
        die()
    if ctx.rank == 3:
        wait_for(ctx, *(f"told {rank}" for rank in range(3)))
        return None
    started = time.monotonic()
    error = error_of(lambda: session.refit(2, timeout=timedelta(seconds=2)))
    tell(ctx, f"told {ctx.rank}")
    return type(error).__name__, time.monotonic() - started


@pytest.mark.parametrize("what", ["hangs", "dies"])
def test_at_a_failure_the_last_events_of_every_rank_that_can_be_reached_are_beside_each_log(pool, tmp_path, what):
    with reshard.serve_store() as store:
        results = pool.run(
            _leaves_events, str(store), str(tmp_path), what, ranks=4, timeout=50, may_die={3} if what == "dies" else ()
        )
    assert all(seconds < 2 + 4 and error == RefitTimeout.__name__ for error, seconds in results[:3])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.jsonl",
        "0.jsonl.failed",
        "2.jsonl",
        "2.jsonl.failed",
    ]
    for rank in (0, 2):
        rows = [json.loads(line) for line in (tmp_path / f"{rank}.jsonl.failed").read_text().splitlines()]
        by_member = {}
        for row in rows:
            by_member.setdefault(row["member"], []).append(row)
        assert set(by_member) == {"trainer rank 0", "trainer rank 1", "gen0 rank 0", "gen0 rank 1"}
        for member in ("trainer rank 0", "trainer rank 1", "gen0 rank 0"):
            last = by_member[member][-1]
            assert (last["event"], last["from"], last["version"]) == ("Failed", "gathering", 2)
            assert "gen0 rank 1" in last["error"]
        last = by_member["gen0 rank 1"][-1]
        assert (last["event"], last["version"], last["serving"]) == ("AllCommitted", 1, 1), "what it did last"
        bars = [row for row in to_perfetto(rows)["traceEvents"] if row["ph"] == "X"]
        assert {bar["name"] for bar in bars} >= {"gathering", "moving", "committing"}
        assert len({bar["tid"] for bar in bars}) == 4, "a track a member"


def test_what_ranks_leave_is_bounded_by_the_journal_and_overwritten():
    store = dist.HashStore()
    journal = Journal("default", "gen0 rank 0")
    for version in range(3 * KEPT):
        journal.note(events.Called(version), State(writes=True, staged=True), State(writes=True, staged=True))
        if version % 1000 == 0:
            journal.failed(ReshardError("it failed"), store, ["gen0 rank 0"], 1)
    journal.failed(ReshardError("it failed"), store, ["gen0 rank 0"], 1)
    rows = last_events.collect(store, ["gen0 rank 0"], 1)
    assert len(rows) == KEPT
    assert rows == list(journal.events)
    assert store.num_keys() == 1
    assert len(store.get("events/gen0 rank 0")) < 100_000
