"""A session whose engines are vLLM servers over HTTP: fake servers, whose workers are real ranks of the session."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.integrations.fake_vllm import FakeVLLM, WorkerError
from tests.refit.sessions import NAMES, SHAPE, Rank, dense, error_of

import reshard
from reshard.errors import ConfigError, EnvironmentNotSupported, InstallError, PeerError, RefitTimeout, ReshardError
from reshard.integrations.vllm.handover import Handover
from reshard.integrations.vllm.servers import VLLMServers
from reshard.integrations.vllm.workers import NOTHING_WRITTEN
from reshard.testing.processes import threads
from reshard.transports.base import Deadline

TIMEOUT = timedelta(seconds=40)
OF_WORKERS = ("trainer", "check", "whole")
"""What vLLM's workers are told besides the arguments of ``connect``."""


class Worker:
    """One worker of a fake server: what the weight transfer engine does, with tensors for a model."""

    def __init__(self, world, rank, size):
        self.me, self.session, self.facts = Rank(world, rank, size), None, None
        self.handover, self.thread, self.fail_after, self.left = None, None, None, []
        self.fails_untouched = False

    def join(self, info):
        if info == self.facts:
            return
        self.facts = dict(info)
        options = {name: value for name, value in info.items() if name not in OF_WORKERS}
        address, seconds = options.pop("address"), options.pop("timeout_seconds")
        old, self.session, before, self.thread = self.session, None, self.thread, None
        if old is not None:
            self.leave("another trainer came")
            old.abandon("another trainer came")
            self.left.append((old, before))

        def work():
            self.session = reshard.connect(
                address, role="destination", rank=self.me.rank, timeout=timedelta(seconds=seconds), **options
            )
            self.session.accept(
                self.me.manifest,
                groups=lambda name: name,
                install=lambda landed: self.handover.give(landed),
                committed=lambda _: self.handover.end(None),
            )

        self._start(work)

    def receive(self, version, **asked):
        self.leave("another version")
        handover = self.handover = Handover()

        def work():
            try:
                self.session.refit(version, **asked)
            except Exception as error:
                handover.end(error)
            else:
                handover.end(None)

        self._start(work)

    def install(self):
        try:
            self.handover.serve(self._write, 30)
        except Exception as error:
            raise WorkerError(str(error)) from error

    def _write(self, landed):
        if self.fail_after == 0:
            raise InstallError("out of memory", untouched=self.fails_untouched)
        self.fail_after = None if self.fail_after is None else self.fail_after - 1
        for piece, view in landed.pieces:
            self.me.tensors[piece.name].copy_(view)

    @property
    def wrote(self):
        return self.handover.touched or self.handover.installed > 0

    def leave(self, reason):
        if self.handover is not None:
            self.handover.leave(reason)

    def _start(self, work):
        before = self.thread

        def in_turn():
            if before is not None:
                before.join()
            work()

        self.thread = threading.Thread(target=in_turn, daemon=True)
        self.thread.start()


class Server(FakeVLLM):
    """A fake server with workers."""

    def __init__(self, world, size):
        super().__init__(workers=size)
        self.world = world
        self.ranks = [Worker(world, rank, size) for rank in range(size)]
        self.on_init = lambda info: [w.join(info) for w in self.ranks]
        self.on_receive = lambda version, **asked: [w.receive(version, **asked) for w in self.ranks]
        self.on_finish = lambda: [w.leave("the update was ended") for w in self.ranks]

        def install(_version):
            errors = []

            def run(worker):
                try:
                    worker.install()
                except WorkerError as error:
                    errors.append(error)

            at_work = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in self.ranks]
            for thread in at_work:
                thread.start()
            for thread in at_work:
                thread.join(30)
            if errors:  # as the workers of an engine agree
                ending = "" if any(worker.wrote for worker in self.ranks) else f" {NOTHING_WRITTEN}"
                raise WorkerError(f"{errors[0]}{ending}")

        self.on_install = install

    def is_version(self, version):
        return all(worker.me.is_version(version) for worker in self.ranks)

    def close(self):
        for worker in self.ranks:
            worker.leave("the server stops")
            for session, thread in [*worker.left, (worker.session, worker.thread)]:
                if thread is not None:
                    thread.join(30)
                    assert not thread.is_alive()
                if session is not None:
                    session.close()
        super().close()


def run_trainers(servers, body, *, trainers=2, address=None, timeout=TIMEOUT, engine_options=None, **options):
    """``body(me, session, engines)`` on every rank of the trainer, with the servers as destination worlds."""
    expect = {"trainer": trainers, **{server.world: server.workers for server in servers}}
    urls = {server.world: server.url for server in servers}

    def rank(store):
        def run(ctx):
            torch.set_num_threads(1)
            me = Rank("trainer", ctx.rank, trainers)
            engines = VLLMServers(urls, **{"timeout": timedelta(seconds=20), **options, **(engine_options or {})})
            with me.connect(store, expect, engines=engines, timeout=timeout) as session:
                return body(me, session, engines)

        return run

    if address is not None:
        return threads(trainers, rank(address), timeout=90)
    with reshard.serve_store() as store:
        return threads(trainers, rank(str(store)), timeout=90)


def refit(me, session, version):
    me.train(version)
    return session.refit(version)


@pytest.fixture
def servers():
    with Server("gen0", 1) as one, Server("gen1", 2) as two:
        yield one, two


@pytest.mark.parametrize(("options", "is_checked"), [({}, True), ({"check": False}, False)], ids=["unasked", "refused"])
def test_workers_check_what_they_have_learned_of_their_loaders_unless_the_trainer_refuses_it(options, is_checked):
    with Server("gen0", 1) as server:
        run_trainers([server], lambda me, s, _: refit(me, s, 1), trainers=1, engine_options=options)
        assert [worker.facts["check"] for worker in server.ranks] == [is_checked]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_two_servers_of_other_sizes_get_every_version_and_are_paused_for_the_install_alone(mode, servers):
    reports = run_trainers(servers, lambda me, s, _: [refit(me, s, version) for version in (1, 2)], pause=mode)
    for server in servers:
        assert server.is_version(2)
        assert (server.label, server.paused, server.active) == ("2", False, False)
        changing = [call for call in server.asked() if not call.startswith("POST init")]
        assert changing == [
            call
            for version in (1, 2)
            for call in (
                "POST start_weight_update",
                f"POST update_weights action=receive version={version}",
                f"POST pause clear_cache=true mode={mode}",
                f"POST update_weights action=install version={version}",
                f"POST finish_weight_update weight_version={version}",
                "POST resume",
            )
        ]
    first = reports[0][1]
    assert set(first.engine_seconds) == {"gen0", "gen1"}
    assert 0 < first.pause_seconds < first.seconds
    assert reports[1][1].pause_seconds is None  # the other rank of the trainer drives no engine


def test_each_byte_of_the_weights_enters_each_engine_once(servers):
    sent = run_trainers(servers, lambda me, s, _: refit(me, s, 1).sent_nbytes)
    assert sum(sent) == len(servers) * len(NAMES) * SHAPE[0] * SHAPE[1] * 4  # they share no host that could relay


def test_a_refit_to_one_engine_leaves_the_other_alone(servers):
    def body(me, session, _):
        refit(me, session, 1)
        me.train(2)
        session.refit(2, to=["gen1"])

    run_trainers(servers, body)
    assert [server.label for server in servers] == ["1", "2"]
    assert servers[0].is_version(1)
    assert servers[1].is_version(2)
    assert sum(call == "POST resume" for call in servers[0].calls) == 1


def fail_once(servers, route, answer=(500, {"error": {"message": "out of memory"}})):
    """What a trainer of one rank sees when one route of the second server fails in the refit to version 2."""

    def body(me, session, _):
        refit(me, session, 1)
        servers[1].faults[route] = answer
        error = error_of(lambda: refit(me, session, 2))
        servers[1].faults.clear()
        between = [(server.paused, server.label, server.is_version(1)) for server in servers]
        refit(me, session, 3)
        return error, between

    return run_trainers(servers, body, trainers=1)[0]


@pytest.mark.parametrize("route", ["/init_weight_transfer_engine", "/update_weights receive", "/pause"])
def test_a_server_that_fails_before_the_install_costs_nobody_the_old_weights(route, servers):
    error, between = fail_once(servers, route)
    assert isinstance(error, ReshardError)
    assert "engine 'gen1'" in error.message
    assert f"POST {route.split()[0]} answered 500: out of memory" in error.message
    assert "gen0 serves version 1; gen1 serves version 1" in error.message
    assert between == [(False, "1", True)] * 2
    for server in servers:
        assert server.is_version(3)
        assert (server.label, server.paused) == ("3", False)


def test_a_server_whose_requests_keep_it_from_pausing_fails_the_refit_by_its_deadline_and_is_resumed(servers):
    def body(me, session, _):
        refit(me, session, 1)
        servers[1].faults["/pause"] = "hang"
        began = time.monotonic()
        error = error_of(lambda: refit(me, session, 2))
        took = time.monotonic() - began
        servers[1].faults.clear()
        return error, took, [server.calls[-1] for server in servers]

    options = {"pause": "wait", "timeout": timedelta(seconds=2)}
    ((error, took, last),) = run_trainers(servers, body, trainers=1, engine_options=options)
    assert isinstance(error, RefitTimeout)
    assert "engine 'gen1'" in error.message
    assert "while pausing (mode 'wait'): POST /pause had no answer" in error.message
    assert "Use pause='keep' or 'abort', or a longer timeout." in error.message
    assert "gen0 serves version 1; gen1 serves version 1" in error.message
    assert took < 20
    assert last == ["POST resume"] * 2
    assert all(server.is_version(1) for server in servers)


def test_a_worker_that_fails_within_its_install_leaves_its_engine_paused_and_the_other_goes_on(servers):
    def body(me, session, _):
        refit(me, session, 1)
        servers[1].ranks[0].fail_after = 1
        error = error_of(lambda: refit(me, session, 2))
        servers[1].ranks[0].fail_after = None
        between = [(server.paused, server.label) for server in servers]
        me.train(3)
        session.refit(3, names=NAMES[:1])  # which cannot mend it
        assert [server.paused for server in servers] == [False, True]
        refit(me, session, 3)
        return error, between

    ((error, between),) = run_trainers(servers, body, trainers=1)
    assert isinstance(error, ReshardError)
    assert "out of memory" in error.message
    assert "gen1 stays paused, its weights may be a mix of 1 and 2, until a refit completes" in error.message
    assert between[1] == (True, "1")
    for server in servers:
        assert server.is_version(3)
        assert (server.label, server.paused) == ("3", False)


@pytest.mark.parametrize(
    ("failing", "goes_on"),
    [
        ((0, 1), True),  # no rank has written
        ((0,), False),  # the other one has
    ],
)
def test_a_server_whose_install_fails_goes_on_with_the_old_weights_if_none_of_its_ranks_has_written(
    failing, goes_on, servers
):
    def body(me, session, _):
        refit(me, session, 1)
        for rank in failing:
            servers[1].ranks[rank].fail_after, servers[1].ranks[rank].fails_untouched = 0, True
        error = error_of(lambda: refit(me, session, 2))
        for rank in failing:
            servers[1].ranks[rank].fail_after = None
        between = servers[1].paused, servers[1].active, servers[1].label, servers[1].is_version(1)
        refit(me, session, 3)
        return error, between

    ((error, between),) = run_trainers(servers, body, trainers=1)
    assert between == ((False, False, "1", True) if goes_on else (True, False, "1", False))
    says = "gen1 serves version 1" if goes_on else "gen1 stays paused, its weights may be a mix of 1 and 2"
    assert f"{says}" in error.message
    assert (NOTHING_WRITTEN in error.message) is goes_on
    for server in servers:
        assert server.is_version(3)
        assert (server.label, server.paused) == ("3", False)


@pytest.mark.parametrize("route", ["/finish_weight_update", "/resume"])
def test_a_server_that_fails_after_the_install_serves_the_new_weights(route, servers):
    error, between = fail_once(servers, route)
    assert isinstance(error, PeerError)
    assert f"POST {route} answered 500" in error.message
    assert between[1][1:] == ("1" if route == "/finish_weight_update" else "2", False)
    assert servers[1].is_version(3)
    assert servers[1].label == "3"


def test_another_trainer_takes_over_a_session_whose_trainer_left_in_the_middle(servers):
    with reshard.serve_store() as store:

        def abandon(me, session, engines):
            refit(me, session, 1)
            facts = session._runner._drive.facts
            engines.begin(facts, 2, Deadline(10.0))  # and dies as soon as it has told them of a version

        run_trainers(servers, abandon, trainers=1, address=str(store))
        assert all(server.active for server in servers)
        run_trainers(servers, lambda me, s, _: refit(me, s, 3), trainers=1, address=str(store))
        for server in servers:
            assert server.is_version(3)
            assert (server.label, server.paused, server.active) == ("3", False, False)


def test_a_server_that_lacks_the_routes_is_an_error_at_connect_that_says_how_to_start_it():
    with Server("gen0", 1) as server:
        server.dev_mode = False
        began = time.monotonic()
        with pytest.raises(Exception, match="VLLM_SERVER_DEV_MODE=1") as raised:
            run_trainers([server], lambda *_: None, trainers=1)
        assert time.monotonic() - began < 20
        assert "EnvironmentNotSupported" in str(raised.value) or isinstance(raised.value, EnvironmentNotSupported)


def test_engines_are_named_as_the_worlds_of_the_session():
    assert VLLMServers("http://a:1").worlds == ("engine",)
    assert VLLMServers(["http://a:1", "http://a:2"]).worlds == ("engine0", "engine1")
    assert VLLMServers({"gen": "http://a:1"}).worlds == ("gen",)
    for wrong, why in [
        (lambda: VLLMServers(["http://a:1", "http://a:1"]), "given twice"),
        (lambda: VLLMServers([]), "name at least one"),
        (
            lambda: VLLMServers("http://a:1", pause="stop"),
            "pause='stop' is unknown; use one of 'keep', 'wait', 'abort'",
        ),
    ]:
        with pytest.raises(ConfigError, match=why):
            wrong()


def test_an_engine_that_is_no_world_of_the_session_is_refused():
    with Server("gen0", 1) as server, reshard.serve_store() as store:
        me = Rank("trainer", 0, 1)
        with pytest.raises(ConfigError, match=r"No world of the session is called 'engine'.* worlds are 'gen0'"):
            me.connect(str(store), {"trainer": 1, "gen0": 1}, engines=VLLMServers(server.url))


def test_the_trainers_weights_are_those_that_the_servers_got(servers):
    run_trainers(servers, lambda me, s, _: refit(me, s, 5))
    whole = torch.cat([worker.me.tensors["head.w"] for worker in servers[1].ranks], dim=1)
    assert torch.equal(whole, dense(5, "head.w"))
