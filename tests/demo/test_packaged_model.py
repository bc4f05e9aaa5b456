"""The real model of the package: converted, and served by two tensor-parallel ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest

from reshard.demo.checkpoint import packaged_checkpoint
from reshard.demo.engine import Engine, Ranks
from reshard.layouts.box import Box
from reshard.testing.processes import threads

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def said():
    return []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, said):
    return packaged_checkpoint(tmp_path_factory.mktemp("cache"), said.append)


def test_it_is_converted_once_and_whole(checkpoint, said):
    assert packaged_checkpoint(checkpoint.folder.parent, said.append) == checkpoint
    assert len(said) == 1
    a = checkpoint.architecture
    assert (a.heads, a.kv_heads, a.layers, a.tied, a.stop_tokens) == (9, 3, 30, True, (2,))
    with checkpoint.reader() as reader:
        assert sum(reader.read(name).numel() for name, _ in checkpoint.files) == 134_515_008
    assert list(checkpoint.folder.parent.iterdir()) == [checkpoint.folder]  # nothing half done beside it


def test_two_uneven_ranks_know_the_capital_of_france(checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.folder))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]

    def answer(context):
        ranks = Ranks(context.process_group("tp"), timedelta(seconds=60))
        engine = Engine(checkpoint.architecture, ranks, max_positions=64)
        with checkpoint.reader() as reader:
            for name, _, start, view in engine.wanted_views():
                if name != "lm_head.weight":  # tied
                    box = Box(start, tuple(lo + n for lo, n in zip(start, view.shape, strict=True)))
                    view.copy_(reader.read(name, box))
        return engine.generate(prompt, max_tokens=16, stop=checkpoint.architecture.stop_tokens)

    for tokens in threads(2, answer, timeout=90):
        assert tokenizer.decode(tokens, skip_special_tokens=True) == "The capital of France is Paris."
