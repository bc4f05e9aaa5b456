"""Engines driven by the source through a session: a fake engine of threads that joins, receives and installs."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.refit.sessions import SHAPE, Rank, error_of, ranks_of
from tests.refit.test_install import Engine, traced

import reshard
from reshard.errors import ConfigError, PeerError
from reshard.testing.processes import threads

EXPECT = {"trainer": 2, "gen0": 2, "gen1": 1}
TIMEOUT = timedelta(seconds=30)


class Worker:
    """A process of an engine: told by a driver what to do, joins and receives in a thread of its own."""

    def __init__(self, world, rank):
        self.me = Rank(world, rank, EXPECT[world])
        self.session = None
        self.engine = Engine(self.me)
        self.may_install = threading.Event()
        self.installed = threading.Event()
        self.thread = None
        self.error = None

    def join(self, facts):
        def work():
            options = dict(facts)
            address, seconds = options.pop("address"), options.pop("timeout_seconds")
            self.session = reshard.connect(
                address, role="destination", rank=self.me.rank, timeout=timedelta(seconds=seconds), **options
            )
            assert {spec.shape for spec in self.session.offered()} == {SHAPE}
            self.session.accept(traced(self.me), install=self.install, committed=lambda _: self.installed.set())

        self._start(work)

    def receive(self, version, to):
        before = self.thread

        def work():
            if before is not None:
                before.join()
            self.may_install.clear()
            self.installed.clear()
            self.error = error_of(lambda: self.session.refit(version, to=to))

        self._start(work)

    def install(self, landed):
        assert self.may_install.wait(landed.timeout_seconds)
        self.engine.install(landed)

    def _start(self, work):
        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()


class Fleet:
    """Drives two engines, and notes what it was called for."""

    def __init__(self):
        self.workers = {(w, r): Worker(w, r) for w in ("gen0", "gen1") for r in range(EXPECT[w])}
        self.calls = []
        self.fail_in = None
        self.joined = False

    def begin(self, facts, version, deadline):
        self.calls.append(("begin", version, facts.to))
        assert deadline.remaining() > 0
        if not self.joined:
            self._fail("join")
            self.joined = True
            for (world, _), worker in self.workers.items():
                worker.join(facts.for_world(world))
        if version is not None:
            self._fail("begin")
            for (world, _), worker in self.workers.items():
                if world in facts.to:
                    worker.receive(version, facts.to)
            self._fail("told")

    def commit(self, version, deadline):
        self.calls.append(("commit", version))
        self._fail("commit")
        self.to = [w for w in self.workers.values() if w.me.world in self.calls[-2][2]]
        for worker in self.to:
            worker.may_install.set()
        for worker in self.to:
            assert worker.installed.wait(deadline.remaining())

    def done(self, version):
        self.calls.append(("done", version))
        self._fail("done")
        return {"gen0": 0.25, "gen1": 0.5}

    def failed(self, version, error):
        self.calls.append(("failed", version, error.phase))
        for worker in self.workers.values():
            worker.may_install.set()  # a worker that waits is let go; this fake installs then
        self._fail("failed")

    def _fail(self, call):
        if self.fail_in and call in self.fail_in:
            raise OSError(f"no answer to {call}")

    def is_version(self, version, worlds=("gen0", "gen1")):
        for worker in self.workers.values():
            if worker.thread is not None:
                worker.thread.join(20)
        return all(w.me.is_version(version) for w in self.workers.values() if w.me.world in worlds)


def run_trainer(body, **options):
    """Run the body on the two ranks of a trainer whose first drives two engines; the fleet and what they returned."""
    fleet = Fleet()
    with reshard.serve_store() as store:

        def rank_body(ctx):
            torch.set_num_threads(1)
            me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
            session = reshard.connect(
                str(store), role="source", world="trainer", rank=me.rank, expect=EXPECT, timeout=TIMEOUT,
                engines=fleet, **options,
            )  # fmt: skip
            session.offer(me.manifest)
            return body(me, session)

        results = threads(2, rank_body, timeout=100)
        for worker in fleet.workers.values():
            if worker.thread is not None:
                worker.thread.join(30)
        return fleet, results


def test_engines_join_receive_stop_for_the_install_alone_and_go_on():
    def body(me, session):
        for version in (1, 2):
            me.train(version)
            report = session.refit(version)
        return report

    fleet, (first, second) = run_trainer(body)
    both = ("gen0", "gen1")
    assert fleet.calls == [
        ("begin", None, both),
        ("begin", 1, both),
        ("commit", 1),
        ("done", 1),
        ("begin", 2, both),
        ("commit", 2),
        ("done", 2),
    ]
    assert fleet.is_version(2)
    assert (first.pause_seconds, first.engine_seconds) == (0.5, {"gen0": 0.25, "gen1": 0.5})
    assert (second.pause_seconds, second.engine_seconds) == (None, {})
    assert "engines stood still for 500 ms" in str(first)


def test_only_the_engines_of_a_refit_are_told_of_it():
    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        session.refit(2, to=["gen1"])

    fleet, _ = run_trainer(body)
    assert fleet.calls[-3:] == [("begin", 2, ("gen1",)), ("commit", 2), ("done", 2)]
    assert fleet.is_version(2, ["gen1"])
    assert fleet.is_version(1, ["gen0"])


@pytest.mark.parametrize("call", ["begin", "commit", "done"])
def test_engines_that_do_not_answer_fail_the_refit_for_all_in_time_and_the_next_one_works(call):
    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        if me.rank == 0:
            fleets[0].fail_in = {call}
        started = time.monotonic()
        error = error_of(lambda: session.refit(2, timeout=timedelta(seconds=8)))
        seconds = time.monotonic() - started
        if me.rank == 0:
            fleets[0].fail_in = None
        me.train(3)
        session.refit(3)
        return error, seconds

    fleets = []
    original = Fleet.__init__

    def remembered(self):
        original(self)
        fleets.append(self)

    Fleet.__init__ = remembered
    try:
        fleet, ((first, _), (second, seconds)) = run_trainer(body)
    finally:
        Fleet.__init__ = original
    assert f"OSError: no answer to {call}" in first.message
    phase = {"begin": "gathering", "commit": "committing", "done": "ready"}[call]
    assert first.phase == phase
    assert ("failed", 2, phase) in fleet.calls
    if call == "done":
        assert second is None, "all ranks serve the version"
    else:
        assert isinstance(second, PeerError)
        assert "trainer rank 0 failed" in second.message
        assert f"OSError: no answer to {call}" in second.message
    assert seconds < 8
    assert fleet.is_version(3)


def test_engines_that_do_not_answer_while_members_meet_anew_fail_the_refit_for_all_at_once():
    """The epoch is over since a commit failed; the others meet already while the engines are told of the next."""

    def body(me, session):
        me.train(1)
        session.refit(1)
        if me.rank == 0:
            fleet = session._runner._drive.engines
            fleet.fail_in = {"commit"}
        assert error_of(lambda: session.refit(2, timeout=timedelta(seconds=8))) is not None
        if me.rank == 0:
            fleet.fail_in = {"told"}
        started = time.monotonic()
        error = error_of(lambda: session.refit(3, timeout=timedelta(seconds=25)))
        seconds = time.monotonic() - started
        told = []
        if me.rank == 0:
            fleet.fail_in = None
            for worker in fleet.workers.values():
                worker.thread.join(20)
                told.append(worker.error)
        me.train(4)
        session.refit(4)
        return error, seconds, told

    fleet, ((first, _, told), (second, seconds, _)) = run_trainer(body)
    assert (first.phase, second.phase) == ("meeting", "meeting")
    assert "OSError: no answer to told" in first.message
    assert seconds < 15
    for error in (second, *told):
        assert isinstance(error, PeerError)
        assert "trainer rank 0 failed: OSError: no answer to told" in error.message
    assert fleet.is_version(4)


@pytest.mark.parametrize("late", [False, True])
def test_engines_that_do_not_answer_fail_connect_for_all_at_once(late):
    fleet = Fleet()
    fleet.fail_in = {"join"}
    failed, told = threading.Event(), threading.Event()

    def connect(me, address):
        session = reshard.connect(
            address, role="source", world="trainer", rank=me.rank, expect=EXPECT, timeout=TIMEOUT, engines=fleet
        )
        session.offer(me.manifest)
        return session

    with reshard.serve_store() as store:

        def rank_body(ctx):
            me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
            if late and me.rank == 1:
                assert failed.wait(20)
            started = time.monotonic()
            error = error_of(lambda: connect(me, str(store)))
            seconds = time.monotonic() - started
            failed.set() if me.rank == 0 else told.set()
            assert told.wait(20)
            fleet.fail_in = None
            session = connect(me, str(store))
            me.train(1)
            session.refit(1)
            return error, seconds

        (first, _), (second, seconds) = threads(2, rank_body, timeout=100)
    assert "OSError: no answer to join" in first.message
    assert isinstance(second, PeerError)
    assert "trainer rank 0 failed: OSError: no answer to join" in second.message
    assert seconds < 15
    assert fleet.is_version(1)


def test_an_engine_that_cannot_be_told_of_a_failure_is_named_in_the_error():
    def body(me, session):
        me.train(1)
        session.refit(1)
        me.train(2)
        if me.rank == 0:
            session._runner._drive.engines.fail_in = {"commit", "failed"}
        return error_of(lambda: session.refit(2, timeout=timedelta(seconds=5)))

    _, (first, _) = run_trainer(body)
    assert "no answer to commit" in first.message
    assert "The engines could not be told of it: OSError: no answer to failed" in first.message


def test_a_refused_version_is_told_to_the_engines_which_go_on():
    def body(me, session):
        me.train(2)
        session.refit(2)
        return error_of(lambda: session.refit(1))

    fleet, errors = run_trainer(body)
    assert fleet.calls[-2:] == [("begin", 1, ("gen0", "gen1")), ("failed", 1, "gathering")]
    assert all("lower than version 2" in error.message for error in errors)
    assert fleet.is_version(2)


def test_a_destination_drives_no_engines():
    with reshard.serve_store() as store:
        error = error_of(
            lambda: reshard.connect(
                str(store), role="destination", world="gen0", rank=0, expect={"trainer": 1, "gen0": 1}, engines=Fleet()
            )
        )
    assert isinstance(error, ConfigError)
    assert "the source drives engines" in error.message
