"""Landed pieces come to life in a live engine, which answers as a freshly loaded one; a failure leaves no gap."""

from __future__ import annotations

import pytest
import torch
from tests.vllm.engines import answer, in_process, model_of, random_weights, save
from tests.vllm.tiny import LLAMA, MOE, QWEN3, checkpoint, write_config

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

CASES = [
    ("qwen3, one KV head", QWEN3, {"num_key_value_heads": 1}, False),
    ("tied head", QWEN3, {"tie_word_embeddings": True}, False),
    ("biases", LLAMA, {"attention_bias": True, "num_attention_heads": 2, "num_key_value_heads": 1}, False),
    ("padded vocabulary", LLAMA, {"vocab_size": 259, "num_attention_heads": 2}, False),
    ("experts one by one", MOE, {}, False),
    ("experts stacked", MOE, {}, True),
]


def landed(group, weights):
    """A group's pieces, cut from whole weights as a refit would land them."""
    cut = [
        (p.piece, weights[p.piece.name][tuple(map(slice, p.piece.box.start, p.piece.box.stop))]) for p in group.pieces
    ]
    from reshard.layouts.box import Box
    from reshard.layouts.piece import Piece

    cut += [(Piece(name, Box.whole(weights[name].shape)), weights[name]) for name in group.whole]
    return [(piece, tensor.clone(memory_format=torch.contiguous_format)) for piece, tensor in cut]


def freshly_loaded(folder, weights):
    """What an engine answers that loads the weights from a checkpoint."""
    save(folder, weights)
    with in_process(folder, load_format="safetensors") as llm:
        first, again = answer(llm), answer(llm)
        assert first == again  # the control: the same engine gives the same numbers twice
        return first


def installer_of(llm, specs, whole=None):
    from reshard.integrations.vllm import trace_model
    from reshard.integrations.vllm.groups import taken_whole
    from reshard.integrations.vllm.install import Installer

    model = model_of(llm)
    trace = taken_whole(trace_model(model, specs), whole or {})
    return Installer(model, llm.llm_engine.vllm_config, trace)


def as_stacked(weights):
    """Experts one by one, as saved, for weights that are stacked."""
    flat = {}
    for name, tensor in weights.items():
        at, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                flat |= {f"{at}.{expert}.gate_proj.weight": gate, f"{at}.{expert}.up_proj.weight": up}
        elif last == "down_proj":
            flat |= {f"{at}.{expert}.down_proj.weight": down for expert, down in enumerate(tensor)}
        else:
            flat[name] = tensor
    return flat


WHOLE = [
    ("all of them", {"*": "asked for"}, 0),
    ("some, of fused buffers too", {"*.q_proj.weight": "asked for", "*.1.mlp.*": "asked for"}, 1),
]


@pytest.mark.parametrize(("patterns", "rest"), [case[1:] for case in WHOLE], ids=[case[0] for case in WHOLE])
def test_tensors_that_come_whole_go_through_the_models_loader(patterns, rest, tmp_path):
    config = write_config(tmp_path, LLAMA, num_attention_heads=2, attention_bias=True)
    specs = checkpoint(config)
    weights = random_weights(specs, 1)
    fresh = freshly_loaded(tmp_path, weights)
    with in_process(tmp_path) as llm:
        installer = installer_of(llm, specs, patterns)
        assert sum(bool(group.pieces) for group in installer.groups) >= rest
        for group in installer.groups:
            installer.install(group.name, landed(group, weights))
        assert answer(llm) == fresh


@pytest.mark.parametrize(("config", "changes", "stacked"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_an_engine_answers_as_a_freshly_loaded_one_after_each_of_two_installs(config, changes, stacked, tmp_path):
    config = write_config(tmp_path, config, **changes)
    specs = checkpoint(config, stacked_experts=stacked)
    versions = [random_weights(specs, seed) for seed in (1, 2)]
    fresh = [freshly_loaded(tmp_path, as_stacked(weights)) for weights in versions]
    assert fresh[0] != fresh[1]
    with in_process(tmp_path) as llm:
        installer = installer_of(llm, specs)
        assert [group.name for group in installer.groups if ".layers." in group.name] == [
            "model.layers.0",
            "model.layers.1",
        ]
        for weights, expected in zip(versions, fresh, strict=True):
            for group in installer.groups:
                installer.install(group.name, landed(group, weights))
            assert answer(llm) == expected


def live(model):
    return {name: (t.data_ptr(), tuple(t.shape)) for name, t in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["dense", "experts"])
def test_an_install_that_fails_inside_a_layer_leaves_no_gap_and_the_next_one_is_whole(config, tmp_path, monkeypatch):
    from vllm.model_executor.model_loader.reload import layerwise

    config = write_config(tmp_path, config, num_attention_heads=2, attention_bias=config is LLAMA)
    specs = checkpoint(config)
    old, new = random_weights(specs, 1), random_weights(specs, 2)
    process, begun = layerwise._layerwise_process, []

    def fail_at(count):
        def processing(layer, info):
            begun.append(layer)
            if len(begun) == count:
                raise MemoryError("no room")
            process(layer, info)

        begun.clear()
        monkeypatch.setattr(layerwise, "_layerwise_process", processing)

    with in_process(tmp_path) as llm:
        installer = installer_of(llm, specs)

        def install_all(weights):
            for group in installer.groups:
                installer.install(group.name, landed(group, weights))

        install_all(old)
        answered, was = answer(llm), live(model_of(llm))
        fail_at(3)
        layer = next(group for group in installer.groups if group.name == "model.layers.1")
        with pytest.raises(MemoryError) as failed:
            installer.install(layer.name, landed(layer, new))
        assert failed.value.untouched is False  # two of its parts are new: the caller must not let it serve
        assert {name: shape for name, (_, shape) in live(model_of(llm)).items()} == {n: s for n, (_, s) in was.items()}
        assert not any(tensor.is_meta for tensor in model_of(llm).state_dict().values())
        answer(llm)  # it runs
        monkeypatch.setattr(layerwise, "_layerwise_process", process)
        install_all(old)
        assert answer(llm) == answered


def test_an_install_that_fails_before_a_layer_is_processed_leaves_the_old_weights_whole(tmp_path, monkeypatch):
    from reshard.errors import BindingError
    from reshard.integrations.vllm.private import OpenGroup

    config = write_config(tmp_path, LLAMA, num_attention_heads=2, attention_bias=True)
    specs = checkpoint(config)
    with in_process(tmp_path) as llm:
        installer = installer_of(llm, specs)
        for group in installer.groups:
            installer.install(group.name, landed(group, random_weights(specs, 1)))
        answered = answer(llm)
        layer = next(group for group in installer.groups if group.name == "model.layers.1")
        pieces = landed(layer, random_weights(specs, 2))
        with pytest.raises(BindingError, match="has not landed") as failed:
            installer.install(layer.name, pieces[:-1])
        assert failed.value.untouched

        def closing(self):
            raise MemoryError("no room")

        monkeypatch.setattr(OpenGroup, "close", closing)
        with pytest.raises(MemoryError) as failed:  # its pieces are written by now, its biases where they serve
            installer.install(layer.name, pieces)
        assert failed.value.untouched is True
        assert answer(llm) == answered
