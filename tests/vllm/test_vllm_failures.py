"""Refits that fail on the way: the engine answers with the old weights, or not at all, and never with mixed ones."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.vllm import trainers
from tests.vllm.engines import (
    answer,
    in_process,
    install,
    model_of,
    random_weights,
    receive,
    save,
    tell,
    wait_for_end_of,
)
from tests.vllm.tiny import LLAMA, checkpoint, write_config

import reshard
from reshard.errors import InstallError, ReshardError, TransportError
from reshard.testing.processes import Died, ProcessPool

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(900),
]

EXPECT = {"trainer": 2, "engine": 1}


class Scene:
    """An engine in this process, trainers in two others, and a store."""

    def __init__(self, folder, llm, store, pool, thread):
        self.folder, self.llm, self.store, self.pool, self.thread = folder, llm, store, pool, thread
        self.specs = checkpoint(write_config(folder, LLAMA, num_attention_heads=2))
        self.join("the first")

    def join(self, trainer):
        """Let the engine join a session of this trainer, and leave what it does with another."""
        facts = {"address": str(self.store), "world": "engine", "expect": EXPECT, "transport": "torch_p2p"}
        told = {**facts, "timeout_seconds": 150.0, "trainer": trainer}
        tell(self.llm, "init_weight_transfer_engine", init_info=told)

    def trainer(self, steps, dies=None, may_die=()):
        """Start trainers for some (version, seed)."""
        steps = [(version, seed, None) for version, seed in steps]
        may_die = may_die if dies is None else [1]
        arguments = (str(self.store), EXPECT, self.specs, "bfloat16", steps)
        options = {"topology": None, "dies": dies or (-1, 0)}
        return self.thread.submit(
            self.pool.run, trainers.train, *arguments, *options.values(), timeout=300, may_die=may_die
        )

    def refit(self, version):
        receive(self.llm, version)
        install(self.llm, version)


@pytest.fixture
def scene(tmp_path):
    write_config(tmp_path, LLAMA, num_attention_heads=2)
    backend = {"weight_transfer_config": {"backend": "reshard"}}
    with (
        ProcessPool(2) as pool,
        reshard.serve_store() as store,
        ThreadPoolExecutor(1) as thread,
        in_process(tmp_path, **backend) as llm,
    ):
        yield Scene(tmp_path, llm, store, pool, thread)


def test_a_trainer_that_dies_leaves_the_old_weights_and_its_successor_takes_over(scene):
    first = scene.trainer([(1, 1)])
    scene.refit(1)
    old = answer(scene.llm)
    first.result()
    for sends in (0, 2, 7):  # before anything is sent, and twice on the way; there are ten or so
        dying = scene.trainer([(2, 2)], dies=(2, sends))
        receive(scene.llm, 2)
        with pytest.raises(TransportError, match="serves version 1"):
            install(scene.llm, 2)
        assert answer(scene.llm) == old
        assert isinstance(dying.result()[1], Died)
    successor = scene.trainer([(3, 3)])
    scene.refit(3)
    new = answer(scene.llm)
    successor.result()
    save(scene.folder, random_weights(scene.specs, 3))
    with in_process(scene.folder, load_format="safetensors") as fresh:
        assert new == answer(fresh) != old


@pytest.fixture
def at_moment(scene, monkeypatch):
    """Let something happen once while an engine installs: before any layer, between two of them, or inside one."""
    from vllm.model_executor.model_loader.reload import layerwise

    from reshard.integrations.vllm.private import OpenGroup

    moments = {
        "before": (OpenGroup, "__init__", 1),
        "between": (OpenGroup, "__init__", 2),
        "inside": (layerwise, "_layerwise_process", 5),
    }

    def let(moment, version, happen):
        where, name, at = moments[moment]
        real, calls = getattr(where, name), []

        def counting(*arguments):
            calls.append(name)
            if len(calls) == at:
                happen()
            return real(*arguments)

        monkeypatch.setattr(where, name, counting)
        install(scene.llm, version)
        monkeypatch.setattr(where, name, real)
        assert len(calls) > at

    return let


def test_a_trainer_that_dies_while_the_engine_installs_leaves_the_new_weights_whole(scene, at_moment):
    first = scene.trainer([(1, 1)])
    scene.refit(1)
    first.result()
    answers = {}
    for version, moment in enumerate(("before", "between", "inside"), 2):
        processes = scene.pool.pids()

        def kill(processes=processes):
            for process in processes:
                os.kill(process, signal.SIGKILL)
            wait_for_end_of(processes)

        scene.join(f"of version {version}")
        dying = scene.trainer([(version, version)], may_die=(0, 1))
        receive(scene.llm, version)
        at_moment(moment, version, kill)  # all had landed on all ranks: what was left is the engine's own to do
        assert all(isinstance(result, Died) for result in dying.result())
        answers[version] = answer(scene.llm)
    scene.join("the last")
    successor = scene.trainer([(5, 2)])
    scene.refit(5)
    successor.result()
    assert answer(scene.llm) == answers[2]
    for version, answered in answers.items():  # last, since an engine that ends takes vLLM's groups with it
        save(scene.folder, random_weights(scene.specs, version))
        with in_process(scene.folder, load_format="safetensors") as fresh:
            assert answer(fresh) == answered


def test_a_version_that_nobody_installs_leaves_the_old_weights(scene):
    trainer = scene.trainer([(1, 1), (2, 2), (3, 1)])
    scene.refit(1)
    old = answer(scene.llm)
    receive(scene.llm, 2)
    tell(scene.llm, "finish_weight_update")  # the trainer's side has given up
    receive(scene.llm, 3)  # waits until the one before is over
    assert answer(scene.llm) == old
    install(scene.llm, 3)
    assert answer(scene.llm) == old  # the same weights again
    (reports, _) = trainer.result()
    assert "the trainer ended the update without it" in reports[1]
    assert "engine rank 0" in reports[1]


@pytest.mark.vllm_core
def test_an_engine_that_is_torn_answers_nothing_until_a_refit_completes(scene, monkeypatch):
    from vllm.model_executor.model_loader.reload import layerwise

    trainer = scene.trainer([(1, 1), (2, 2), (3, 1), (4, 2)])
    scene.refit(1)
    old = answer(scene.llm)
    process = layerwise._layerwise_process

    def tear(version):
        begun = []

        def failing(layer, info):
            begun.append(layer)
            if len(begun) == 4:
                raise MemoryError("no room")
            process(layer, info)

        monkeypatch.setattr(layerwise, "_layerwise_process", failing)
        receive(scene.llm, version)
        with pytest.raises(ReshardError, match="torn"):
            install(scene.llm, version)
        monkeypatch.setattr(layerwise, "_layerwise_process", process)

    refused = pytest.raises(InstallError, match="partly of one version and partly of another")
    tear(2)
    with refused:
        model_of(scene.llm)(None)
    scene.refit(3)
    assert answer(scene.llm) == old
    tear(4)
    with refused:
        answer(scene.llm)  # vLLM's engine is at its end with it
    trainer.result()
