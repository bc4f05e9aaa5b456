"""An engine of vLLM follows an FSDP2 trainer of two processes, and answers as one freshly loaded does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm import ranks, trainers
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

BACKEND = {"weight_transfer_config": {"backend": "reshard"}}


@pytest.fixture(scope="module")
def pool():
    """The trainer's processes."""
    with ProcessPool(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def engines():
    """Processes that become the ranks of one engine after the other."""
    with ProcessPool(2) as processes:
        yield processes


class Run:
    """A trainer of two processes that refits an engine to each version, and saves it."""

    def __init__(self, store, pool, thread, folder, specs, tp, dtype, more):
        expect = {"trainer": 2, "engine": tp}
        hosts = presets.hosts([[0, 1], list(range(2, 2 + tp))], port_bytes_per_second=10**9)
        self.folder, self.folders = folder, {version: folder / f"version{version}" for version in SEEDS}
        for each in self.folders.values():
            each.mkdir()
            (each / "config.json").write_text((folder / "config.json").read_text())
        steps = [(version, seed, self.folders[version]) for version, seed in SEEDS.items()]
        arguments = (str(store), expect, specs, dtype, steps, hosts.to_json())
        self.trainer = thread.submit(pool.run, trainers.train, *arguments, timeout=300)
        self.told = {
            "address": str(store),
            "world": "engine",
            "expect": expect,
            "topology": hosts.to_json(),
            "timeout_seconds": 150.0,
            "check": False,  # it loads tensors whole, one after the other, and the memory of a refit is looked at here
            **more,
        }

    def drive(self, llm):
        """Let an engine follow; what it answers after each version, and the accounts of its workers."""
        tell(llm, "init_weight_transfer_engine", init_info=self.told)
        answers = {}
        for version in SEEDS:
            receive(llm, version)
            install(llm, version)
            answers[version] = answer(llm)
        return answers, tell(llm, ranks.account_of, version=max(SEEDS))


@pytest.fixture
def start(tmp_path, pool):
    """Start the trainer's part of a refit."""
    with reshard.serve_store() as store, ThreadPoolExecutor(1) as thread:
        yield lambda specs, *, tp, dtype="bfloat16", **more: Run(store, pool, thread, tmp_path, specs, tp, dtype, more)


def fresh(engines, run, tp):
    """By version, what an engine answers that is loaded from the trainer's checkpoint."""
    loaded = {}
    for version, folder in run.folders.items():
        ((once, again), *others) = engines.run(ranks.answers_of_fresh, str(folder), ranks=tp, timeout=300)
        assert once == again  # the control: the same engine gives the same numbers twice
        assert others == [(once, again)] * (tp - 1)
        loaded[version] = once
    return loaded


CORE = pytest.mark.vllm_core
TIED = {"tie_word_embeddings": True, "num_key_value_heads": 1}
CASES = [
    pytest.param(QWEN3, TIED, 2, "float32", False, id="qwen3, tied, one KV head, tp2", marks=CORE),
    pytest.param(QWEN3, {}, 2, "bfloat16", False, id="qwen3, tp2"),
    pytest.param(LLAMA, {"num_attention_heads": 2}, 1, "bfloat16", False, id="llama, tp1"),
    pytest.param(LLAMA, {"num_attention_heads": 2}, 2, "float32", False, id="llama, tp2"),
    pytest.param(MOE, {}, 1, "bfloat16", False, id="experts one by one, tp1"),
    pytest.param(MOE, {}, 2, "bfloat16", False, id="experts one by one, tp2"),
    pytest.param(MOE, {}, 1, "float32", True, id="experts stacked, tp1"),
    pytest.param(MOE, {}, 2, "bfloat16", True, id="experts stacked, tp2"),
]


@pytest.mark.parametrize(("config", "changes", "tp", "dtype", "stacked"), CASES)
def test_an_engine_follows_a_trainer_and_answers_as_one_freshly_loaded(
    config, changes, tp, dtype, stacked, tmp_path, start, engines
):
    specs = checkpoint(write_config(tmp_path, config, **changes), stacked_experts=stacked)
    run = start(specs, tp=tp, dtype=dtype)
    followed = engines.run(ranks.follow, str(tmp_path), run.told, tuple(SEEDS), ranks=tp, timeout=300)
    reports = run.trainer.result()
    answers = followed[0][0]
    assert all(own == answers for own, _ in followed)
    assert answers == fresh(engines, run, tp)
    assert answers[1] != answers[2]
    accounts = [account for _, account in followed]
    check_bytes(specs, reports, accounts)
    check_memory(specs, accounts)


def check_bytes(specs, reports, accounts):
    """Every byte comes by its pieces to the ranks that need it, and enters the engine's host once."""
    report = reports[0][-1]
    assert report.direct_fraction >= 0.99
    assert not any("whole for" in path for path in report.paths.values())
    assert report.copies_into["host1"] <= 1.01
    distinct = sum(spec.nbytes for spec in specs)
    assert sum(each[-1].sent_nbytes for each in reports) <= 1.01 * distinct  # or the trainer's host lends its memory
    assert sum(account["received"] for account in accounts) >= distinct
    for account in accounts:
        assert account["received"] == account["room"] == account["direct"]
        assert account["whole"] == 0
        assert account["staging"] <= 64 << 10  # the trainer's limit, which is the least
        if len(accounts) > 1:
            assert account["received"] < 0.75 * distinct


def check_memory(specs, accounts):
    """Besides its own pieces, no rank ever has memory in which a whole tensor of those that are split would fit."""
    for account in accounts:
        *others, room = account["receiving"]
        assert room == account["room"]
        assert others[-1] <= account["largest buffer"]
        assert account["installing"][-1] <= account["largest that serves"]  # vLLM pads experts there
        if len(accounts) > 1:
            assert account["largest buffer"] < max(spec.nbytes for spec in specs)


def test_an_engine_whose_workers_are_its_own_processes_follows_too(tmp_path, start, engines):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2))
    run = start(specs, tp=2, check=True)
    with in_processes(tmp_path, tp=2, **BACKEND) as llm:
        answers, accounts = run.drive(llm)
    check_bytes(specs, run.trainer.result(), accounts)
    assert answers == fresh(engines, run, 2)


def test_tensors_that_travel_whole_are_in_the_report_and_come_to_life_too(tmp_path, start, engines):
    specs = checkpoint(write_config(tmp_path, LLAMA, num_attention_heads=2))
    run = start(specs, tp=1, whole={"*.o_proj.weight": "asked for"})
    ((answers, account),) = engines.run(ranks.follow, str(tmp_path), run.told, tuple(SEEDS), ranks=1, timeout=300)
    report = run.trainer.result()[0][-1]
    assert answers == fresh(engines, run, 1)
    nbytes = {spec.name: spec.nbytes for spec in specs}
    asked = sum(n for name, n in nbytes.items() if name.endswith("o_proj.weight"))
    assert account["whole"] == asked
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
    answers = {}
    with reshard.serve_store() as store, ThreadPoolExecutor(1) as thread, in_process(folder, **BACKEND) as llm:
        arguments = (str(store), expect, str(folder), str(saved))
        trainer = thread.submit(pool.run, trainers.train_checkpoint, *arguments, timeout=300)
        facts = {"address": str(store), "world": "engine", "expect": expect, "timeout_seconds": 150.0}
        tell(llm, "init_weight_transfer_engine", init_info=facts)
        for version in (1, 2):
            receive(llm, version)
            install(llm, version)
            answers[version] = answer(llm)
        trainer.result()
        (account,) = tell(llm, ranks.account_of, version=2)
    assert (account["received"], account["whole"]) == (account["direct"], 0)
    for version, whole in ((1, folder), (2, saved)):
        with in_process(whole, load_format="safetensors") as llm:
            assert answer(llm) == answers[version]
    assert answers[1] != answers[2]
