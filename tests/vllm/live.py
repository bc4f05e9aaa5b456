"""Live vLLM servers on one session, a trainer that drives them, and what fresh engines answer."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from functools import cache

import torch
from tests.vllm import servers as vllm_servers
from tests.vllm.engines import in_process, random_weights, save
from tests.vllm.tiny import LLAMA, checkpoint, write_config

import reshard
from reshard.testing.processes import threads
from reshard.topology import presets

TIMEOUT = timedelta(seconds=120)
SIZES = (1, 2)
PROMPTS = ([1, 5, 9], [7] * 5, [3 * i % 500 for i in range(vllm_servers.BLOCK + 8)])
"""The last one fills a block of the prefix cache."""
LONGEST = 16_384
"""Tokens of a request that its model can take."""
KINDS = (21, 22)
"""Seeds of two sets of weights, which versions have by turns."""


class Trainer:
    """Two ranks of a trainer, as threads, each with half of the rows of every matrix.

    Args:
        servers: By world, (URL, workers). They are on one host, and the trainer is on another.
        session: Its name.
    """

    def __init__(self, address, specs, servers, session="default"):
        self.address, self.specs, self.session = address, specs, session
        self.urls = {world: url for world, (url, _) in servers.items()}
        self.expect = {"trainer": 2, **{world: workers for world, (_, workers) in servers.items()}}
        ranks = list(range(2, sum(self.expect.values())))
        self.topology = presets.hosts([[0, 1], ranks], port_bytes_per_second=10**9)
        self.seconds = {}
        """Of each engine in the last refit, by phase."""

    def join(self, rank, **options):
        from reshard.integrations.vllm.servers import VLLMServers

        tensors = {s.name: torch.zeros(s.shape, dtype=torch.float32) for s in self.specs}
        engines = VLLMServers(self.urls, **options)
        session = reshard.connect(
            self.address,
            role="source",
            world="trainer",
            rank=rank,
            world_size=2,
            expect=self.expect,
            session=self.session,
            topology=self.topology,
            timeout=TIMEOUT,
            engines=engines,
        )
        views = []
        for name, tensor in tensors.items():
            rows = tensor.shape[0]
            part = slice(rank * rows // 2, (rank + 1) * rows // 2)
            views.append((name, tuple(tensor.shape), (part.start, *[0] * (tensor.dim() - 1)), tensor[part]))
        session.offer(reshard.Manifest.from_views(views))
        return session, tensors, engines

    def run(self, versions, *, between=None, late=0.0, **options):
        """Refit both engines to versions in turn; the reports of the first rank, and what all ranks sent.

        ``between`` is called before each version; the second rank is ``late`` seconds later than the first.
        """
        ready = {version: threading.Event() for version in versions}

        def rank(ctx):
            torch.set_num_threads(1)
            session, tensors, engines = self.join(ctx.rank, **options)
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
            if ctx.rank == 0:
                self.seconds = engines.seconds
            return reports

        first, second = threads(2, rank, timeout=300)
        return first, [a.sent_nbytes + b.sent_nbytes for a, b in zip(first, second, strict=True)]


class Counter:
    """The next version, over all tests."""

    last = 0

    @classmethod
    def next(cls, kind=None):
        """A higher version than all before; of a kind of weights, if one is asked for."""
        cls.last += 1
        if kind is not None and cls.last % 2 != kind:
            cls.last += 1
        return cls.last


@cache
def fresh_answers(make_folder):
    """What engines answer that were started with a checkpoint of the weights, by kind."""
    answers = {}
    for kind, seed in enumerate(KINDS):
        folder = make_folder(f"kind{kind}")
        save(folder, random_weights(write_model(folder), seed))
        with in_process(folder, load_format="auto") as llm:
            answers[kind] = [offline_answer(llm, prompt) for prompt in PROMPTS]
    assert [one[:2] for one in answers[0]] != [one[:2] for one in answers[1]]
    return answers


def write_model(folder):
    """Make a tiny model's folder without weights; the checkpoint's tensors."""
    return checkpoint(write_config(folder, LLAMA, num_attention_heads=2, max_position_embeddings=LONGEST))


def offline_answer(llm, prompt):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=6, detokenize=False, ignore_eos=True)
    return list(llm.generate({"prompt_token_ids": list(prompt)}, greedy, use_tqdm=False)[0].outputs[0].token_ids)


def answers_as(server, fresh, version):
    """Whether a server answers as a fresh engine with the weights of a version.

    The fresh one has one rank: of two ranks, which add up in another order, the first tokens are compared.
    """
    tokens = 6 if server.tp == 1 else 2
    return [server.generate(prompt)[:tokens] for prompt in PROMPTS] == [one[:tokens] for one in fresh[version % 2]]
