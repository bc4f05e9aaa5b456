from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from tests.demo.tiny import CONFIGS, make_model, weights_of

from reshard.demo.architecture import Architecture
from reshard.demo.engine import Engine, Ranks, project
from reshard.layouts.manifest import Manifest
from reshard.testing.processes import threads

PROMPT = [5, 17, 3, 99, 42, 8, 150]
TIMEOUT = timedelta(seconds=20)


def fill(engine, weights):
    """Write what a refit would: every wanted view from the full tensor."""
    for name, shape, start, view in engine.wanted_views():
        full = weights[name]
        assert tuple(full.shape) == shape
        view.copy_(full[tuple(slice(lo, lo + n) for lo, n in zip(start, view.shape, strict=True))])


def architecture_of(model):
    return Architecture.from_config({**model.config.to_dict(), "architectures": [type(model).__name__]})


def on_ranks(tp, model, work):
    """Run ``work(engine)`` on every rank of one replica, filled with the model's weights."""
    architecture, weights = architecture_of(model), weights_of(model)

    def rank(context):
        engine = Engine(architecture, Ranks(context.process_group("tp") if tp > 1 else None, TIMEOUT), max_positions=32)
        fill(engine, weights)
        return work(engine)

    return threads(tp, rank)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tp", [1, 2, 4, 6])
def test_the_engine_scores_as_transformers_does(kind, tp):
    model = make_model(kind)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for logits in on_ranks(tp, model, lambda engine: engine.logits(PROMPT)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_token_by_token_gives_the_same_answer_as_transformers(tp):
    model = make_model("qwen3")
    with torch.no_grad():
        expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()
    answers = on_ranks(tp, model, lambda engine: engine.generate(PROMPT, max_tokens=12))
    assert answers == [expected] * tp


def test_an_answer_ends_with_a_stop_token():
    model = make_model("llama")
    (free,) = on_ranks(1, model, lambda engine: engine.generate(PROMPT, max_tokens=8))
    (stopped,) = on_ranks(1, model, lambda engine: engine.generate(PROMPT, max_tokens=8, stop=free[2:3]))
    assert stopped == free[: free.index(free[2]) + 1]


def test_one_element_that_nobody_wrote_spoils_every_score():
    model = make_model("llama")

    def forget_one(engine):
        engine.layers[1].down[3, 1] = float("nan")
        return engine.logits(PROMPT)

    for logits in on_ranks(2, model, forget_one):
        assert logits.isnan().any(dim=1).all()


def test_the_wanted_views_cover_every_element_but_padding_and_nothing_twice():
    model = make_model("llama with biases")

    def count(engine):
        for *_, view in engine.wanted_views():
            assert view.isnan().sum() == 0  # filled
            view.fill_(float("nan"))
        assert sum(int(b.isnan().sum()) for b in engine.buffers()) == sum(v.numel() for *_, v in engine.wanted_views())
        return sum(int(b.isfinite().sum()) for b in engine.buffers())

    padded_rows = 2 * (128 + 128 - 200)  # two matrices, two ranks, 200 rows in all
    assert sum(on_ranks(2, model, count)) == padded_rows * 36


def test_a_tied_head_is_one_buffer_with_two_names():
    (manifest,) = on_ranks(1, make_model("llama"), lambda engine: Manifest.from_views(engine.wanted_views()))
    assert manifest.aliases == (("model.embed_tokens.weight", "lm_head.weight"),)


def test_a_weight_is_multiplied_block_by_block_as_a_whole():
    x, weight = torch.randn(3, 700), torch.randn(1700, 700).to(torch.bfloat16)
    bias = torch.randn(1700).to(torch.bfloat16)
    torch.testing.assert_close(project(x, weight, bias), x @ weight.float().t() + bias.float(), rtol=1e-5, atol=1e-4)
