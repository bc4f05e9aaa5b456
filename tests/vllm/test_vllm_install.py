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
        for weights, expected in zip(versions, fresh, strict=True):
            installer = installer_of(llm, specs)  # anew, as for a trainer that was restarted
            layers = [group.name for group in installer.groups if ".layers." in group.name]
            assert layers == ["model.layers.0", "model.layers.1"]
            room = {group.name: landed(group, weights) for group in installer.groups}
            for name, pieces in room.items():
                installer.install(name, pieces)
            for _, tensor in (piece for pieces in room.values() for piece in pieces):
                tensor.fill_(7)  # as the next refit does while requests run
            assert answer(llm) == expected


def test_a_layer_that_keeps_what_it_is_loaded_from_is_found_out_and_gets_a_copy(tmp_path, monkeypatch, caplog):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    config = write_config(tmp_path, LLAMA, num_attention_heads=2)
    specs = checkpoint(config)
    process, kept = UnquantizedLinearMethod.process_weights_after_loading, {}

    def keeping(self, layer):
        kept[layer] = layer.weight.view(-1)
        process(self, layer)

    with in_process(tmp_path) as llm:
        installer = installer_of(llm, specs)
        layer = next(group for group in installer.groups if group.name == "model.layers.0")
        pieces = landed(layer, random_weights(specs, 1))
        monkeypatch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", keeping)
        installer.install(layer.name, pieces)
        (down,) = (tensor for piece, tensor in pieces if piece.name.endswith("down_proj.weight"))
        was = down.clone()
        for _, tensor in pieces:
            tensor.fill_(7)
        own = model_of(llm).get_submodule("model.layers.0.mlp.down_proj")
        assert torch.equal(kept[own], was.view(-1))
        assert "copied from now on" in caplog.text


@pytest.mark.parametrize(("experts", "stacked"), [(8, False), (7, True)], ids=["8 experts", "7 experts, stacked"])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "ep2"])
def test_on_each_rank_installed_experts_are_those_that_a_load_packs(experts, stacked, expert_parallel, tmp_path):
    """With expert parallelism no engine runs on CPUs, so memory is compared, and no answers."""
    specs = checkpoint(write_config(tmp_path, MOE, num_experts=experts), stacked_experts=stacked)
    old, new = random_weights(specs, 1), random_weights(specs, 2)
    for rank in range(2):
        before, _ = packed_experts(tmp_path, rank, expert_parallel, old)
        _, installed = packed_experts(tmp_path, rank, expert_parallel, old, new)
        fresh, _ = packed_experts(tmp_path, rank, expert_parallel, new)
        assert sorted(name.rpartition(".")[2] for name in fresh) == ["w13_weight"] * 2 + ["w2_weight"] * 2
        for name, expected in fresh.items():
            assert not torch.equal(expected, before[name])
            assert torch.equal(installed[name], expected), name


def packed_experts(folder, rank, expert_parallel, weights, then=None):
    """The experts' memory of a rank that has loaded weights, and again where others were installed after that."""
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from reshard.integrations.vllm import rank_model, trace_model
    from reshard.integrations.vllm.install import Installer
    from reshard.layouts.piece import TensorSpec

    def experts():
        return {n: t.detach().clone() for n, t in model.named_parameters() if n.endswith(("w13_weight", "w2_weight"))}

    with rank_model(folder, rank, tp=2, expert_parallel=expert_parallel) as model:
        config = get_current_vllm_config()
        model.load_weights(weights.items())
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        loaded = experts()
        if then is not None:
            trace = trace_model(model, [TensorSpec(n, tuple(t.shape), "bfloat16") for n, t in then.items()])
            installer = Installer(model, config, trace)
            for group in installer.groups:
                installer.install(group.name, landed(group, then))
        return loaded, experts()


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
