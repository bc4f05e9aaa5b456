"""An ``LLM`` in the trainer's own process, driven through the same session as servers are."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.vllm.engines import answer, in_process, random_weights, save
from tests.vllm.test_vllm_tracing import in_each_others_place
from tests.vllm.tiny import LLAMA, checkpoint, write_config

import reshard
from reshard.errors import EnvironmentNotSupported, ReshardError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

TIMEOUT = timedelta(seconds=120)
EXPECT = {"trainer": 1, "engine": 1}


def connect(store, llm, **options):
    from reshard.integrations.vllm.servers import VLLMOffline

    engines = VLLMOffline(llm, **options)
    return reshard.connect(
        str(store), role="source", world="trainer", rank=0, expect=EXPECT, timeout=TIMEOUT, engines=engines
    )


def test_an_llm_made_with_no_weights_answers_as_one_freshly_loaded(tmp_path):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2))
    weights = random_weights(specs, 31)
    save(tmp_path, weights)
    with in_process(tmp_path, load_format="auto") as llm:
        fresh = answer(llm)
        with reshard.serve_store() as store, pytest.raises(EnvironmentNotSupported, match="weight_transfer_config="):
            connect(store, llm)  # it has no backend
    backend = {"weight_transfer_config": {"backend": "reshard"}}
    with in_process(tmp_path, **backend) as llm, reshard.serve_store() as store:
        assert answer(llm) != fresh
        with connect(store, llm) as session:
            session.offer({name: tensor.float() for name, tensor in weights.items()})
            report = session.refit(4)
            assert answer(llm) == fresh
            assert llm.get_weight_version() == "4"
            assert report.pause_seconds > 0
            session.offer(weights)  # in another dtype, which is planned anew
            session.refit(5)
            assert answer(llm) == fresh
            assert llm.get_weight_version() == "5"


def test_a_worker_that_finds_its_trace_wrong_takes_no_weights(tmp_path, monkeypatch):
    from reshard.integrations.vllm import member

    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2))
    first, second = (random_weights(specs, seed) for seed in (51, 52))
    backend = {"weight_transfer_config": {"backend": "reshard"}}
    reports = []
    with in_process(tmp_path, **backend) as llm, reshard.serve_store() as store:

        def refit(weights, version, **options):
            with connect(store, llm, **options) as session:
                session.offer(weights)
                reports.append(session.refit(version))
            return answer(llm)

        old = refit(first, 1)
        trace_model = member.trace_model
        monkeypatch.setattr(member, "trace_model", lambda *args: in_each_others_place(trace_model(*args)))
        with pytest.raises(ReshardError, match=r"gate_up_proj.weight': .* differ between a real load and the traced"):
            refit(second, 2)
        assert answer(llm) == old
        wrong = refit(second, 3, check=False)
        monkeypatch.undo()
        right = refit(second, 4)
        assert right not in (old, wrong)  # so the check does matter
        assert reports[-1].direct_fraction == 1.0
        assert refit(second, 5, whole={"*.down_proj.weight": "asked for"}) == right
        assert reports[-1].direct_fraction < 1.0


def test_a_prompt_that_was_seen_before_is_answered_from_the_new_weights(tmp_path):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2))
    first, second, third = (random_weights(specs, seed) for seed in (41, 42, 43))
    long = {"prompts": [range(3, 43)]}  # longer than a block of the cache
    backend = {"weight_transfer_config": {"backend": "reshard"}, "block_size": 32}
    with in_process(tmp_path, **backend) as llm, reshard.serve_store() as store:

        def refit(weights, version, **options):
            with connect(store, llm, **options) as session:
                session.offer(weights)
                session.refit(version)
            return answer(llm, forget=False, **long)

        refit(first, 1)
        assert refit(second, 2) == answer(llm, **long)
        assert refit(third, 3, clear_cache=False) != answer(llm, **long)  # so it does matter
