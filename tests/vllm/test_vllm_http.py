"""Live vLLM servers, driven over HTTP by a trainer: one with one rank and one with two, on one session."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.vllm import servers as vllm_servers
from tests.vllm.engines import in_process, random_weights, save
from tests.vllm.tiny import LLAMA, checkpoint, write_config

import reshard
from reshard.errors import EnvironmentNotSupported
from reshard.testing.processes import threads
from reshard.topology import presets
from reshard.transports.base import Deadline

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

TIMEOUT = timedelta(seconds=120)
SIZES = (1, 2)
PROMPTS = ([1, 5, 9], [7] * 5, [3 * i % 500 for i in range(vllm_servers.BLOCK + 8)])
"""The last one fills a block of the prefix cache."""
TOKENS = 300
"""Of a request that is in flight."""
LATE = 2.0
"""Seconds by which a part of the source is late, so that engines wait in the middle of a transfer."""
KINDS = (21, 22)
"""Seeds of two sets of weights, which versions have by turns."""


class Trainer:
    """Two ranks of a trainer, as threads, each with half of the rows of every matrix."""

    def __init__(self, address, specs, urls):
        self.address, self.specs, self.urls = address, specs, urls
        self.expect = {"trainer": 2, **{f"gen{tp}": tp for tp in SIZES}}
        hosts = presets.hosts([[0, 1], [2, 3, 4]], port_bytes_per_second=10**9)
        self.topology = hosts

    def join(self, rank, **options):
        from reshard.integrations.vllm.servers import VLLMServers

        tensors = {s.name: torch.zeros(s.shape, dtype=torch.float32) for s in self.specs}
        session = reshard.connect(
            self.address,
            role="source",
            world="trainer",
            rank=rank,
            world_size=2,
            expect=self.expect,
            topology=self.topology,
            timeout=TIMEOUT,
            engines=VLLMServers(self.urls, **options),
        )
        views = []
        for name, tensor in tensors.items():
            rows = tensor.shape[0]
            part = slice(rank * rows // 2, (rank + 1) * rows // 2)
            views.append((name, tuple(tensor.shape), (part.start, *[0] * (tensor.dim() - 1)), tensor[part]))
        session.offer(reshard.Manifest.from_views(views))
        return session, tensors

    def run(self, versions, *, between=None, late=0.0, **options):
        """Refit both engines to versions in turn; the reports of the first rank, and what all ranks sent.

        ``between`` is called before each version; the second rank is ``late`` seconds later than the first.
        """
        ready = {version: threading.Event() for version in versions}

        def rank(ctx):
            torch.set_num_threads(1)
            session, tensors = self.join(ctx.rank, **options)
            reports = []
            with session:
                for version in versions:
                    for name, weights in random_weights(self.specs, KINDS[version % 2]).items():
                        tensors[name].copy_(weights)
                    if ctx.rank == 0:
                        if between is not None:
                            between(version)
                        ready[version].set()
                    else:
                        assert ready[version].wait(200)
                        time.sleep(late)
                    reports.append(session.refit(version))
            return reports

        first, second = threads(2, rank, timeout=300)
        return first, [a.sent_nbytes + b.sent_nbytes for a, b in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What engines answer that were started with a checkpoint of the weights, by kind."""
    answers = {}
    for kind, seed in enumerate(KINDS):
        folder = tmp_path_factory.mktemp(f"kind{kind}")
        specs = checkpoint(write_config(folder, LLAMA, num_attention_heads=2, max_position_embeddings=2048))
        save(folder, random_weights(specs, seed))
        with in_process(folder, load_format="auto") as llm:
            answers[kind] = [offline_answer(llm, prompt) for prompt in PROMPTS]
    assert [one[:2] for one in answers[0]] != [one[:2] for one in answers[1]]
    return answers


def offline_answer(llm, prompt):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": list(prompt)}, greedy, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.fixture(scope="module")
def scene(fresh, tmp_path_factory):
    """(trainer, servers) on one session; afterwards no process of a server is left."""
    folder = tmp_path_factory.mktemp("servers")
    specs = checkpoint(write_config(folder, LLAMA, num_attention_heads=2, max_position_embeddings=2048))
    with reshard.serve_store() as store, vllm_servers.started(folder, folder, SIZES) as servers:
        urls = {f"gen{server.tp}": server.url for server in servers}
        yield Trainer(str(store), specs, urls), servers


class Counter:
    """The next version, over all tests of the module."""

    last = 0

    @classmethod
    def next(cls):
        cls.last += 1
        return cls.last


def answers_as(server, fresh, version):
    """Whether a server answers as a fresh engine with the weights of a version.

    The fresh one has one rank: of two ranks, which add up in another order, the first tokens are compared.
    """
    tokens = 6 if server.tp == 1 else 2
    return [server.generate(prompt)[:tokens] for prompt in PROMPTS] == [one[:tokens] for one in fresh[version % 2]]


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
        # Two more than can run at the same time. vLLM's `wait` lasts until nobody asks any more.
        again = mode != "wait"
        clients[busy] = [vllm_servers.Client(busy, [*PROMPTS[2], i], TOKENS, again=again) for i in range(10)]
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
    assert mode == "wait" or times[-1] > began["refit"] + reports[1].seconds  # and after it
    for server in servers:
        assert answers_as(server, fresh, second)  # of the last prompt, the streams had filled the prefix cache
    assert 0 < reports[1].pause_seconds < reports[1].seconds - LATE
    print(f"{mode}: paused for {reports[1].engine_seconds}, in all {reports[1].seconds:.3f} s")


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


def die_in_the_middle(address, specs, urls, version):
    """A process that joins as both ranks of the trainer, lets the engines begin to receive, and ends."""
    trainer = Trainer(address, specs, urls)

    def rank(ctx):
        session, _ = trainer.join(ctx.rank)
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
    process = context.Process(
        target=die_in_the_middle, args=(trainer.address, trainer.specs, trainer.urls, lost), daemon=True
    )
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
