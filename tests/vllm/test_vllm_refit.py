"""An engine of vLLM follows an FSDP2 trainer of two processes, and answers as one freshly loaded does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm import trainers
from tests.vllm.engines import answer, in_process, in_processes, install, receive, tell
from tests.vllm.tiny import LLAMA, MOE, QWEN3, checkpoint, write_config

import reshard
from reshard.testing.processes import ProcessPool
from reshard.topology import presets

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

SEEDS = {1: 11, 2: 12}
"""Of the random weights of each version."""


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(2) as processes:
        yield processes


def bytes_of(worker, version):
    """(received, direct, whole) bytes of a worker in a refit, which is over when all other ranks have installed."""
    engine = worker.weight_transfer_engine
    expiry = time.monotonic() + 60
    while engine.report is None or engine.report.version != version:
        assert time.monotonic() < expiry
        time.sleep(0.01)
    return engine.report.received_nbytes, engine.trace.direct_nbytes, engine.trace.whole_nbytes


def follow(pool, folder, specs, *, tp, dtype, engine, **more):
    """Refit an engine to each version; what it answers after each, the trainer's reports, and the workers' bytes."""
    expect = {"trainer": 2, "engine": tp}
    hosts = presets.hosts([[0, 1], list(range(2, 2 + tp))], port_bytes_per_second=10**9)
    topology = hosts.to_json()
    folders = {version: folder / f"version{version}" for version in SEEDS}
    for each in folders.values():
        each.mkdir()
        (each / "config.json").write_text((folder / "config.json").read_text())
    with reshard.serve_store() as store, ThreadPoolExecutor(1) as thread, engine as llm:
        steps = [(version, seed, folders[version]) for version, seed in SEEDS.items()]
        trainer = thread.submit(
            pool.run, trainers.train, str(store), expect, specs, dtype, steps, topology, timeout=300
        )
        facts = {
            "address": str(store),
            "world": "engine",
            "expect": expect,
            "topology": topology,
            "check": True,
            **more,
        }
        tell(llm, "init_weight_transfer_engine", init_info={**facts, "timeout_seconds": 150.0})
        answers = {}
        for version in SEEDS:
            receive(llm, version)
            install(llm, version)
            answers[version] = answer(llm)
        return answers, trainer.result(), tell(llm, bytes_of, version=max(SEEDS)), folders


CORE = pytest.mark.vllm_core
CASES = [
    pytest.param(QWEN3, {"num_key_value_heads": 1}, 2, "float32", False, id="qwen3, one KV head, tp2"),
    pytest.param(LLAMA, {"num_attention_heads": 2}, 1, "bfloat16", False, id="llama, tp1", marks=CORE),
    pytest.param(LLAMA, {"num_attention_heads": 2}, 2, "float32", False, id="llama, tp2"),
    pytest.param(QWEN3, {"tie_word_embeddings": True}, 2, "bfloat16", False, id="tied, tp2"),
    pytest.param(MOE, {}, 1, "bfloat16", False, id="experts one by one, tp1"),
    pytest.param(MOE, {}, 2, "bfloat16", False, id="experts one by one, tp2"),
    pytest.param(MOE, {}, 1, "float32", True, id="experts stacked, tp1"),
    pytest.param(MOE, {}, 2, "bfloat16", True, id="experts stacked, tp2"),
]


@pytest.mark.parametrize(("config", "changes", "tp", "dtype", "stacked"), CASES)
def test_an_engine_follows_a_trainer_and_answers_as_one_freshly_loaded(
    config, changes, tp, dtype, stacked, tmp_path, pool
):
    config = write_config(tmp_path, config, **changes)
    specs = checkpoint(config, stacked_experts=stacked)
    start = in_process if tp == 1 else in_processes
    backend = {"weight_transfer_config": {"backend": "reshard"}}
    answers, reports, workers, folders = follow(
        pool, tmp_path, specs, tp=tp, dtype=dtype, engine=start(tmp_path, tp=tp, **backend)
    )
    for version, folder in folders.items():
        with start(folder, tp=tp, load_format="safetensors") as llm:
            fresh = answer(llm)
            assert answer(llm) == fresh  # the control
        assert answers[version] == fresh
    assert answers[1] != answers[2]
    assert all(whole == 0 for _, _, whole in workers)
    distinct = sum(spec.nbytes for spec in specs)
    sent = sum(rank_reports[-1].sent_nbytes for rank_reports in reports)
    assert sent <= 1.01 * distinct  # the trainer's host sends each byte to the engine's once, or lends its memory
    assert sum(received for received, _, _ in workers) >= distinct


def test_tensors_that_travel_whole_are_in_the_report_and_come_to_life_too(tmp_path, pool):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2))
    engine = in_process(tmp_path, weight_transfer_config={"backend": "reshard"})
    whole = {"*.o_proj.weight": "asked for"}
    answers, reports, workers, folders = follow(
        pool, tmp_path, specs, tp=1, dtype="bfloat16", engine=engine, whole=whole
    )
    with in_process(folders[2], load_format="safetensors") as llm:
        assert answer(llm) == answers[2]
    nbytes = {spec.name: spec.nbytes for spec in specs}
    asked = sum(n for name, n in nbytes.items() if name.endswith("o_proj.weight"))
    assert [opaque for _, _, opaque in workers] == [asked]
    report = reports[0][-1]
    assert report.direct_fraction == pytest.approx(1 - asked / sum(nbytes.values()))
    named = [name for name, path in report.paths.items() if path.startswith("whole for engine")]
    assert named == [name for name in nbytes if name.endswith("o_proj.weight")]


@pytest.mark.model
def test_a_real_model_follows_its_trainer_through_an_optimizer_step(tmp_path, pool):
    import shutil

    from reshard.demo.checkpoint import cache_folder, packaged_checkpoint

    folder = packaged_checkpoint(cache_folder(), print).folder
    saved = tmp_path / "saved"
    saved.mkdir()
    shutil.copy(folder / "config.json", saved)
    expect = {"trainer": 2, "engine": 1}
    backend = {"weight_transfer_config": {"backend": "reshard"}}
    answers = {}
    with (
        reshard.serve_store() as store,
        ThreadPoolExecutor(1) as thread,
        in_process(folder, **backend) as llm,
    ):
        arguments = (str(store), expect, str(folder), str(saved))
        trainer = thread.submit(pool.run, trainers.train_checkpoint, *arguments, timeout=300)
        facts = {"address": str(store), "world": "engine", "expect": expect, "timeout_seconds": 150.0}
        tell(llm, "init_weight_transfer_engine", init_info=facts)
        for version in (1, 2):
            receive(llm, version)
            install(llm, version)
            answers[version] = answer(llm)
        trainer.result()
        ((received, direct, opaque),) = tell(llm, bytes_of, version=2)
    assert (received, opaque) == (direct, 0)
    for version, whole in ((1, folder), (2, saved)):
        with in_process(whole, load_format="safetensors") as llm:
            assert answer(llm) == answers[version]
    assert answers[1] != answers[2]
