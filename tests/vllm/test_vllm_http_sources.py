"""Trainers of several kinds refit a live server over HTTP, and it answers as an engine freshly loaded does."""

from __future__ import annotations

import shutil

import pytest
from tests.vllm import http_trainers
from tests.vllm import servers as vllm_servers
from tests.vllm.engines import answer, in_process, in_processes, save
from tests.vllm.tiny import LLAMA, MOE, checkpoint, write_config

import reshard
from reshard.testing.processes import ProcessPool

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]


def fresh_answers(folder, specs, seed, step, tp):
    """What an engine answers that has loaded the trainer's weights after so many steps, and again as a control."""
    own = folder / f"seed{seed}step{step}"
    own.mkdir()
    shutil.copy(folder / "config.json", own)
    save(own, {name: tensor.bfloat16() for name, tensor in http_trainers.weights_of(specs, seed, step).items()})
    with (in_process if tp == 1 else in_processes)(own, tp=tp, load_format="safetensors") as llm:
        fresh = answer(llm)
        assert answer(llm) == fresh
    return fresh


def refit_and_ask(pool, store, server, folder, specs, seed, versions, **options):
    """Let a trainer bring the versions one after the other; what the server answers with the last, and the reports."""
    address, url = str(store), (server.url, server.tp)
    reports = pool.run(
        http_trainers.train, address, url, str(folder), specs, seed, versions, *options.values(), timeout=300
    )
    assert server.get("/weight_info") == {"weight_version": str(versions[-1])}
    return server.answer(), reports


def test_a_trainer_of_fsdp2_over_tensor_parallel_refits_a_live_server(tmp_path):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2, max_position_embeddings=2048))
    with (
        ProcessPool(4) as pool,
        reshard.serve_store() as store,
        vllm_servers.started(tmp_path, tmp_path, [1]) as (server,),
    ):
        before = server.answer()
        answers, reports = refit_and_ask(pool, store, server, tmp_path, specs, 1, [1, 2], tp=2)
    assert answers == fresh_answers(tmp_path, specs, 1, 1, tp=1) != before
    distinct = sum(spec.nbytes for spec in specs)
    for version in range(2):
        assert sum(rank[version][0] for rank in reports) <= 1.01 * distinct
        assert reports[0][version][1] > 0


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_one_by_one_and_stacked_refit_the_same_live_server(tp, tmp_path):
    specs = checkpoint(write_config(tmp_path, MOE, max_position_embeddings=2048))
    answers = {}
    with (
        ProcessPool(2) as pool,
        reshard.serve_store() as store,
        vllm_servers.started(tmp_path, tmp_path, [tp]) as (server,),
    ):
        for seed, versions, form in ((1, [1, 2], "checkpoint"), (2, [3, 4], "transformers")):
            answers[seed], _ = refit_and_ask(pool, store, server, tmp_path, specs, seed, versions, tp=1, form=form)
    assert answers[1] != answers[2]
    for seed, answered in answers.items():
        assert answered == fresh_answers(tmp_path, specs, seed, 1, tp)
