"""Live vLLM servers, driven over HTTP by a trainer: one with one rank and one with two, on one session."""

from __future__ import annotations

import multiprocessing
import os
import time
from datetime import timedelta

import pytest
from tests.vllm import servers as vllm_servers
from tests.vllm.live import LONGEST, PROMPTS, SIZES, Counter, Trainer, answers_as, fresh_answers, write_model

import reshard
from reshard.errors import EnvironmentNotSupported
from reshard.testing.processes import threads
from reshard.transports.base import Deadline

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

TOKENS = 300
"""Of a request that is in flight."""
LATE = 2.0
"""Seconds by which a part of the source is late, so that engines wait in the middle of a transfer."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    return fresh_answers(tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def scene(fresh, tmp_path_factory):
    """(trainer, servers) on one session; afterwards no process of a server is left."""
    folder = tmp_path_factory.mktemp("servers")
    specs = write_model(folder)
    more = ["--max-model-len", str(LONGEST)]
    with reshard.serve_store() as store, vllm_servers.started(folder, folder, SIZES, more=more) as servers:
        worlds = {f"gen{server.tp}": (server.url, server.tp) for server in servers}
        yield Trainer(str(store), specs, worlds), servers


def test_a_server_that_was_started_with_no_weights_answers_right_after_its_first_refit(scene, fresh):
    trainer, servers = scene
    for server in servers:
        server.generate(PROMPTS[2])  # before: whatever, and it fills the prefix cache
        assert server.get("/weight_info") == {"weight_version": "default"}
    versions = [Counter.next(), Counter.next()]
    seen = {}

    def between(version):
        if version == versions[0]:
            return
        seen[version - 1] = [answers_as(server, fresh, version - 1) for server in servers]

    reports, sent = trainer.run(versions, between=between)
    seen[versions[-1]] = [answers_as(server, fresh, versions[-1]) for server in servers]
    for version in versions:
        assert seen[version] == [True, True]
    for server in servers:
        assert server.get("/weight_info") == {"weight_version": str(versions[-1])}
        assert server.get("/is_paused") == {"is_paused": False}
    # both engines are on one host: each byte of the weights comes to it once
    distinct = sum(spec.nbytes for spec in trainer.specs)  # bfloat16, as it travels
    assert all(nbytes <= 1.01 * distinct for nbytes in sent)
    assert all(0 < report.pause_seconds < report.seconds for report in reports)
    assert set(reports[0].engine_seconds) == {"gen1", "gen2"}


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_requests_in_flight_end_or_are_aborted_by_name_and_stop_for_the_install_only(mode, scene, fresh):
    trainer, servers = scene
    first, second = Counter.next(), Counter.next()
    busy = servers[0]  # the other one has two ranks, which get no turn on two cores while this one is busy
    clients, began = {}, {}

    def between(version):
        if version != second:
            return
        # two more than can run at the same time, and each asks again as soon as it is answered
        clients[busy] = [vllm_servers.Client(busy, [*PROMPTS[2], i], TOKENS) for i in range(10)]
        vllm_servers.wait_until_running(clients[busy], 8)
        began["refit"] = time.monotonic()

    reports, _ = trainer.run([first, second], between=between, late=LATE, pause=mode)
    ended = [stream for client in clients[busy] for stream in client.stop()]
    reasons = {stream.ended for stream in ended}
    assert reasons == ({"length", "abort"} if mode == "abort" else {"length"})
    assert all(len(stream.tokens) == TOKENS for stream in ended if stream.ended == "length")
    times = sorted(t for stream in ended for t in stream.times)
    # while the source was late, so that the engines were receiving, the streams went on
    assert sum(began["refit"] < t < began["refit"] + LATE for t in times) >= 8
    assert times[-1] > began["refit"] + reports[1].seconds  # and after it
    for server in servers:
        assert answers_as(server, fresh, second)  # of the last prompt, the streams had filled the prefix cache
    assert 0 < reports[1].pause_seconds < reports[1].seconds - LATE
    of_busy = trainer.seconds[f"gen{busy.tp}"]
    stop = sum(of_busy[phase] for phase in ("pausing", "installing", "finishing", "resuming"))
    assert stop <= reports[1].engine_seconds[f"gen{busy.tp}"] + 0.01
    steps = sum(of_busy[step] for step in ("calling", "waiting", "opening", "copying", "processing"))
    assert steps == pytest.approx(of_busy["installing"])
    print(f"{mode}: paused for {reports[1].engine_seconds}, in all {reports[1].seconds:.3f} s: {of_busy}")


def test_waiting_for_requests_that_outlast_the_deadline_fails_by_it_and_the_old_weights_go_on(scene, fresh):
    both, (busy, _) = scene
    # alone: the deadline is short, and beside a busy server, on two cores, one of two ranks may take longer to answer
    trainer = Trainer(both.address, both.specs, {"alone": (busy.url, busy.tp)}, session="alone")
    first, second = Counter.next(), Counter.next()
    streams = []

    def between(version):
        if version == second:
            streams.extend(busy.stream([*PROMPTS[2], i], LONGEST - 64) for i in range(3))
            vllm_servers.wait_until_running(streams, 3)

    with pytest.raises(Exception, match="Use pause='keep' or 'abort', or a longer timeout"):
        trainer.run([first, second], between=between, pause="wait", timeout=timedelta(seconds=15))
    since = time.monotonic()
    while any(stream.times[-1] <= since for stream in streams):
        assert time.monotonic() < since + 60, "the streams do not go on"
        time.sleep(0.05)
    assert busy.get("/is_paused") == {"is_paused": False}
    assert busy.ask("POST", "/abort_requests", {})[0] == 200
    assert [stream.wait().ended for stream in streams] == ["abort"] * 3
    assert answers_as(busy, fresh, first)


def test_a_prefix_cache_that_is_kept_answers_from_the_old_weights(scene, fresh):
    trainer, servers = scene
    first, second = Counter.next(), Counter.next()
    trainer.run([first])
    for server in servers:
        assert answers_as(server, fresh, first)
    trainer.run([second], clear_cache=False)
    assert not all(answers_as(server, fresh, second) for server in servers)
    third = Counter.next()
    trainer.run([third])
    for server in servers:
        assert answers_as(server, fresh, third)


def die_in_the_middle(trainer, version):
    """A process that joins as both ranks of the trainer, lets the engines begin to receive, and ends."""

    def rank(ctx):
        session, _, _ = trainer.join(ctx.rank)
        if ctx.rank == 0:
            drive = session._runner._drive
            drive.engines.begin(drive.facts, version, Deadline(60.0))
            os._exit(9)
        time.sleep(60)

    threads(2, rank, timeout=100)


def test_another_trainer_takes_over_from_one_that_died_while_the_engines_were_receiving(scene, fresh):
    trainer, servers = scene
    first, lost, next_one = Counter.next(), Counter.next(), Counter.next()
    trainer.run([first])
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=die_in_the_middle, args=(trainer, lost), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 9
    for server in servers:
        assert answers_as(server, fresh, first)  # nothing was installed
    trainer.run([next_one])
    for server in servers:
        assert server.get("/weight_info") == {"weight_version": str(next_one)}
        assert answers_as(server, fresh, next_one)


def test_what_a_server_lacks_is_named(scene):
    trainer, servers = scene
    from reshard.integrations.vllm.control import HTTPControl
    from reshard.integrations.vllm.routes import Routes

    with pytest.raises(EnvironmentNotSupported, match="VLLM_SERVER_DEV_MODE=1"):
        HTTPControl(Routes(f"{servers[0].url}/v1", 10.0)).start(Deadline(10.0))
    facts = HTTPControl(Routes(servers[1].url, 10.0)).look(Deadline(10.0))
    assert facts.world_size == 2
    assert facts.vllm.startswith("0.")
    assert trainer.urls
