"""Cases VS-03 and MB-05: what a request reads is one version, or it is told which; old versions take no memory."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.cases.test_memory_bounds import MIB, torch_allocations
from tests.refit.sessions import Rank, error_of, run

import reshard
from reshard.errors import BindingError, ConfigError, PeerError, RefitTimeout, VersionError
from reshard.testing.processes import threads

PAIR = {"trainer": 1, "gen0": 1}
ENGINES = {"trainer": 1, "gen0": 2, "gen1": 1}


def request(session, read, seconds=0.3, **options):
    """One that takes its time: a thread, and the list in which it says what it saw at its two ends, and its lease."""
    saw, began = [], threading.Event()

    def work():
        with session.lease("request 1", **options) as lease:
            saw.append(read())
            began.set()
            time.sleep(seconds)
            saw.append(read())
        saw.append(lease)

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(20)
    return thread, saw


def version_of(me):
    """The version whose bytes a rank has; None if they are of none, or of several."""
    found = [version for version in range(12) if me.is_version(version)]
    return found[0] if len(found) == 1 else None


@pytest.mark.parametrize("holder", [("gen0", 1), ("gen1", 0)])
def test_VS_03_a_request_reads_the_version_that_it_began_with_on_every_rank_and_the_next_one_the_new(holder):
    together = threading.Barrier(4)

    def body(me, session):
        me.train(7)
        session.refit(7)
        together.wait(20)
        thread = saw = None
        if (me.world, me.rank) == holder:
            thread, saw = request(session, lambda: version_of(me))
        together.wait(20)
        me.train(8)
        report = session.refit(8)
        assert me.is_version(8)
        if thread is None:
            return report.phases
        thread.join(20)
        assert saw[:2] == [7, 7]
        assert (saw[2].version, saw[2].versions) == (7, (7, 7))
        with session.lease() as lease:
            assert (lease.version, version_of(me)) == (8, 8)
        return report.phases

    for phases in run(ENGINES, body):
        assert phases["committing"] < 10
        assert phases.get("draining", 0) + phases["landed"] > 0.1, "all ranks waited for the one request"


@pytest.mark.parametrize("commit", ["staged", "in-place"])
def test_VS_03_a_request_that_lets_commits_go_on_is_told_from_which_version_to_which_it_read(commit):
    def body(me, session):
        me.train(7)
        session.refit(7)
        if me.is_source:
            me.train(8)
            return session.refit(8)
        lease = session.lease(in_flight=True)
        assert lease.versions == (7, 7)
        session.refit(8)
        assert (lease.version, lease.versions) == (7, (7, 8))
        lease.release()
        lease.release()
        with session.lease(in_flight=True) as after:
            assert (after.version, after.versions) == (8, (8, 8)), "a version never goes backwards"
        error = error_of(session.lease)
        assert isinstance(error, ConfigError) == (commit == "in-place")
        return None

    run(PAIR, body, commit=commit)


@pytest.mark.parametrize("early", [True, False])
def test_VS_03_a_lease_that_does_not_end_is_named_on_every_rank_in_time_and_nothing_has_changed(early):
    """The first lease of all may also be taken while a refit is under way, when no other rank can know of it."""
    taken = threading.Event()

    def body(me, session):
        me.train(7)
        session.refit(7)
        me.train(8)
        mine = (me.world, me.rank) == ("gen0", 1)
        lease = session.lease("request 1") if mine and early else None
        if mine:
            if not early:
                timer = threading.Timer(1.0, lambda: (leases.append(session.lease("request 1")), taken.set()))
                leases = []
                timer.start()
        elif me.is_source:
            assert early or taken.wait(20)
        started = time.monotonic()
        error = error_of(lambda: session.refit(8, timeout=timedelta(seconds=5)))
        assert time.monotonic() - started < 9
        assert isinstance(error, RefitTimeout if mine else PeerError)
        assert "Leases are still held by 'request 1' for " in error.message
        assert me.is_source or me.is_version(7)
        assert me.is_source or session.serving.version == 7
        assert not mine or error.holders == ("request 1",)
        (lease or (leases[0] if mine else None)) and (lease or leases[0]).release()
        session.refit(8)
        assert me.is_version(8)

    run(ENGINES, body)


def test_VS_03_while_a_commit_waits_for_one_lease_no_other_is_given():
    def body(me, session):
        me.train(7)
        session.refit(7)
        if me.is_source:
            me.train(8)
            return session.refit(8)
        held = session.lease("request 1")
        work = session.refit(8, async_op=True)
        deadline = time.monotonic() + 15
        while "draining" not in [m.phase for m in session.status()] and time.monotonic() < deadline:
            time.sleep(0.01)
        own = next(m for m in session.status() if m.world == "gen0")
        assert own.phase == "draining"
        assert "lease of request 1" in own.waiting_for
        error = error_of(lambda: session.lease("request 2", timeout=timedelta(seconds=0.1)))
        assert isinstance(error, RefitTimeout)
        assert "version 8 is about to be committed" in error.message
        held.release()
        work.wait()
        assert session.lease("request 2").version == 8
        return None

    run(PAIR, body)


def test_MO_03_an_expert_map_that_changes_while_a_commit_waits_for_a_lease_fails_the_refit_on_all_ranks():
    slot_map = [0, 1]

    def body(me, session):
        if not me.is_source:
            session.accept(me.manifest, depends_on=lambda: slot_map)
        me.train(7)
        session.refit(7)
        me.train(8)
        timer = None
        if not me.is_source:
            lease = session.lease()

            def rebalance():
                slot_map[:] = [1, 0]
                lease.release()

            timer = threading.Timer(1.0, rebalance)
            timer.start()
        error = error_of(lambda: session.refit(8))
        assert isinstance(error, PeerError if me.is_source else BindingError)
        assert "gen0 rank 0 cannot commit: what the places of its tensors depend on" in error.message
        assert me.is_source or me.is_version(7)
        if not me.is_source:
            session.accept(me.manifest, depends_on=lambda: slot_map)
        session.refit(8)
        assert me.is_version(8)

    run(PAIR, body)


def test_VS_03_nothing_is_leased_where_no_version_is_whole():
    def body(me, session):
        if me.is_source:
            assert isinstance(error_of(session.lease), ConfigError)
            me.train(1)
            return session.refit(1)
        error = error_of(session.lease)
        assert isinstance(error, VersionError)
        assert "serves no version" in error.message
        session.refit(1)
        error = error_of(lambda: session.lease(version=2))
        assert (error.version, error.served) == (2, 1)
        return session.lease(version=1).version

    assert run(PAIR, body)[1] == 1


def test_MB_05_ten_versions_take_the_memory_of_two_though_a_slow_request_holds_one_of_them():
    """What is served, and what lands beside it: a version is dropped when the next one is committed."""
    side = 512  # [512, 512] float32 is 1 MiB
    with reshard.serve_store() as store:

        def body(ctx):
            me = Rank(list(PAIR)[ctx.rank], 0, 1)
            session = me.connect(str(store), PAIR)
            weight = torch.zeros(side, side)
            (session.offer if me.is_source else session.accept)({"w": weight})
            thread, saw = None, []
            for version in range(1, 11):
                if me.is_source:
                    weight.fill_(version)
                report = session.refit(version)
                assert report.copies_nbytes == (0 if me.is_source else MIB)
                assert me.is_source or session.landing_nbytes == MIB
                assert me.is_source or weight.unique().tolist() == [version]
                if not me.is_source and version == 3:
                    thread, saw = request(session, lambda: weight.unique().tolist())
            if me.is_source:
                return
            thread.join(20)
            assert saw[:2] == [[3], [3]]
            error = error_of(lambda: session.lease(version=3))
            assert (error.version, error.served) == (3, 10)
            assert "version 3 cannot be read here, which serves version 10" in error.message

        with torch_allocations() as allocated:
            threads(2, body, timeout=60)
    assert allocated["peak"] < 5 * MIB, "the weights of both sides, what lands, and staging"
