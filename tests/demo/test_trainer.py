from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.demo.tiny import make_model, write_folder

from reshard.demo.checkpoint import Checkpoint
from reshard.demo.trainer import STEP, Trainer
from reshard.demo.worlds import SourceWorld
from reshard.testing.processes import ProcessPool

PROMPT = [5, 17, 3, 99, 42, 8, 150]


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # tp 2 cuts through the middle KV head, and fsdp 3 divides hardly any number of rows
    return write_folder(make_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


def train(context, folder, source):
    """One rank: what it holds, its answers before and after a step, and the full weights after it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    dist.init_process_group(
        "gloo", store=context.store, rank=context.rank, world_size=context.size, timeout=timedelta(seconds=30)
    )
    try:
        trainer = Trainer(Checkpoint.open(folder), SourceWorld.parse(source))
        names = [name for name, _ in trainer.model.named_parameters()]
        for held, name in zip(trainer.held(), names, strict=True):
            full = trainer.model.get_parameter(name).full_tensor()
            if held.box is not None:
                where = tuple(slice(lo, hi) for lo, hi in zip(held.box.start, held.box.stop, strict=True))
                assert torch.equal(held.local, full[where]), name
        loaded = {name: trainer.model.get_parameter(name).full_tensor().detach() for name in names}
        before = trainer.generate(PROMPT, max_tokens=6)
        places = {held.name: held.local.data_ptr() for held in trainer.held()}
        stepped = trainer.step(PROMPT, before)
        assert places == {held.name: held.local.data_ptr() for held in trainer.held()}
        after = trainer.generate(PROMPT, max_tokens=6)
        weights = {name: trainer.model.get_parameter(name).full_tensor().detach() for name in names}
        return loaded, before, stepped, after, weights, trainer.nbytes
    finally:
        dist.destroy_process_group()


def train_alone(model, answer):
    """The same step on one unsharded model, in the arithmetic of the trainer: float32 gradients, bf16 weights."""
    tokens = torch.tensor([PROMPT + answer])
    labels = torch.tensor([[-100] * len(PROMPT) + answer])
    loss = model(input_ids=tokens, labels=labels).loss
    (-loss).backward()
    parameters = dict(model.named_parameters())
    length = torch.sqrt(sum(p.detach().square().sum() for p in parameters.values()))
    gradients = {name: p.grad.to(torch.bfloat16) for name, p in parameters.items()}
    steepness = torch.sqrt(sum(g.float().square().sum() for g in gradients.values()))
    rate = float(STEP * length / steepness)
    return loss.item(), {n: p.detach().to(torch.bfloat16).add(gradients[n], alpha=-rate) for n, p in parameters.items()}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["fsdp2", "fsdp3", "fsdp2 tp2", "fsdp1 tp2"])
def test_a_cut_trainer_answers_and_steps_as_a_whole_model(pool, folder, source):
    model = make_model("llama")
    original = {name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}
    with torch.no_grad():
        answer = model.generate(torch.tensor([PROMPT]), max_new_tokens=6, do_sample=False)[0, len(PROMPT) :].tolist()
    expected_loss, expected = train_alone(model, answer)
    ranks = SourceWorld.parse(source).size
    results = pool.run(train, folder, source, ranks=ranks, timeout=90)
    for loaded, before, stepped, after, weights, _ in results:
        assert before == answer
        assert after == results[0][3]
        assert stepped.loss == pytest.approx(expected_loss, rel=1e-4)
        assert stepped.changed == sum(int((weights[n] != original[n]).sum()) for n in weights) > 0
        for name in original:
            assert torch.equal(loaded[name], original[name]), name
            # The order of additions may move a last bit of few elements.
            assert (weights[name] != expected[name]).float().mean() < 0.01, name
    if "tp" not in source:
        assert sum(result[5] for result in results) == sum(p.numel() * 2 for p in model.parameters())
