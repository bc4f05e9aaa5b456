"""Trainers of several kinds refit live servers over HTTP, and these answer as engines freshly loaded do."""

from __future__ import annotations

import shutil

import pytest
from tests.vllm import http_trainers, ranks
from tests.vllm import servers as vllm_servers
from tests.vllm.engines import save
from tests.vllm.tiny import LLAMA, MOE, checkpoint, write_config

import reshard
from reshard.testing.processes import ProcessPool

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def pool():
    """Processes that are ranks of a trainer, and later those of fresh engines: they import vLLM once."""
    with ProcessPool(4) as processes:
        yield processes


def fresh_answers(pool, folder, specs, seed, step, sizes):
    """What engines of these sizes answer that have loaded the trainer's weights after so many steps."""
    own = folder / f"seed{seed}step{step}"
    own.mkdir()
    shutil.copy(folder / "config.json", own)
    save(own, {name: tensor.bfloat16() for name, tensor in http_trainers.weights_of(specs, seed, step).items()})
    answers = []
    for tp in sizes:
        ((once, again), *others) = pool.run(ranks.answers_of_fresh, str(own), ranks=tp, timeout=300)
        assert once == again  # the control: the same engine gives the same numbers twice
        assert others == [(once, again)] * (tp - 1)
        answers.append(once)
    return answers


def refit_and_ask(pool, store, servers, folder, specs, seed, versions, *, size, tp=1, form="transformers"):
    """Let a trainer bring the versions one after the other; what the servers answer with the last, and the reports."""
    worlds = {f"gen{server.tp}": (server.url, server.tp) for server in servers}
    arguments = (str(store), worlds, str(folder), specs, seed, versions, tp, form)
    reports = pool.run(http_trainers.train, *arguments, ranks=size, timeout=300)
    for server in servers:
        assert server.get("/weight_info") == {"weight_version": str(versions[-1])}
    return [server.answer() for server in servers], reports


def test_a_trainer_of_fsdp2_over_tensor_parallel_refits_a_live_server(tmp_path, pool):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2, max_position_embeddings=2048))
    with reshard.serve_store() as store, vllm_servers.started(tmp_path, tmp_path, [1]) as servers:
        before = [server.answer() for server in servers]
        answers, reports = refit_and_ask(pool, store, servers, tmp_path, specs, 1, [1, 2], size=4, tp=2)
    assert answers == fresh_answers(pool, tmp_path, specs, 1, 1, [1]) != before
    distinct = sum(spec.nbytes for spec in specs)
    for version in range(2):
        assert sum(rank[version][0] for rank in reports) <= 1.01 * distinct
        assert reports[0][version][1] > 0


def test_experts_one_by_one_and_stacked_refit_the_same_two_live_servers(tmp_path, pool):
    specs = checkpoint(write_config(tmp_path, MOE, max_position_embeddings=2048))
    answers = {}
    with reshard.serve_store() as store, vllm_servers.started(tmp_path, tmp_path, [1, 2]) as servers:
        for seed, versions, form in ((1, [1, 2], "checkpoint"), (2, [3, 4], "transformers")):
            arguments = (pool, store, servers, tmp_path, specs, seed, versions)
            answers[seed], _ = refit_and_ask(*arguments, size=2, form=form)
    assert all(one != other for one, other in zip(answers[1], answers[2], strict=True))
    for seed, answered in answers.items():
        assert answered == fresh_answers(pool, tmp_path, specs, seed, 1, [1, 2])
