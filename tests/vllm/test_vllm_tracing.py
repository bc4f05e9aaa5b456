"""vLLM's own model classes, every rank traced in this process and each trace checked against vLLM's own load."""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod

import pytest
from tests.vllm.tiny import LLAMA, MOE, QWEN3, checkpoint, write_config

from reshard.errors import ConfigError, EnvironmentNotSupported, VerifyError
from reshard.layouts.box import Box
from reshard.plan.plan import plan_refit

pytestmark = [
    pytest.mark.vllm_core,
    pytest.mark.filterwarnings("ignore"),  # what vLLM and its dependencies say of each other
    pytest.mark.timeout(600),  # the first import of vLLM takes a minute on a busy machine
]


def traced(folder, config, *, tp=1, expert_parallel=False, stacked_experts=False, **changes):
    """(traces by rank, checked against real loads; the checkpoint)."""
    from reshard.integrations.vllm import trace_world

    config = write_config(folder, config, **changes)
    specs = checkpoint(config, stacked_experts=stacked_experts)
    return trace_world(folder, specs, tp=tp, expert_parallel=expert_parallel, check=True), specs


def boxes(trace, name):
    return [(p.piece.box, p.region.buffer) for p in trace.pieces if p.piece.name == name]


DENSE = [
    ("qwen3", QWEN3, 1, {}),
    ("qwen3 tp2", QWEN3, 2, {}),
    ("qwen3 tp2, one KV head", QWEN3, 2, {"num_key_value_heads": 1}),
    ("qwen3 tied, tp2", QWEN3, 2, {"tie_word_embeddings": True}),
    ("llama with biases, tp2", LLAMA, 2, {"attention_bias": True}),
    (
        "llama of 9 heads, 3 KV, tp3",
        LLAMA,
        3,
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 576},
    ),
]


@pytest.mark.parametrize(("config", "tp", "changes"), [case[1:] for case in DENSE], ids=[case[0] for case in DENSE])
def test_every_weight_of_a_dense_model_is_direct(config, tp, changes, tmp_path):
    traces, specs = traced(tmp_path, config, tp=tp, **changes)
    for trace in traces.values():
        assert trace.opaque == trace.hidden == trace.unused == trace.copies == ()
        assert {p.piece.name for p in trace.pieces} == {spec.name for spec in specs}
        assert len(trace.pieces) == len(specs)  # a box for each tensor


def test_a_kv_head_that_two_ranks_need_is_whole_on_both_and_queries_are_split(tmp_path):
    traces, _ = traced(tmp_path, QWEN3, tp=2, num_key_value_heads=1)
    for rank, trace in traces.items():
        at = "model.layers.1.self_attn"
        buffer = f"{at}.qkv_proj.weight"
        assert boxes(trace, f"{at}.k_proj.weight") == [(Box((0, 0), (32, 64)), buffer)]
        assert boxes(trace, f"{at}.q_proj.weight") == [(Box((64 * rank, 0), (64 * rank + 64, 64)), buffer)]


def test_a_padded_vocabulary_is_filled_with_zeros_on_the_rank_that_has_the_padding(tmp_path):
    traces, _ = traced(tmp_path, QWEN3, tp=2, vocab_size=259)
    assert boxes(traces[0], "lm_head.weight") == [(Box((0, 0), (160, 64)), "lm_head.weight")]
    assert boxes(traces[1], "lm_head.weight") == [(Box((160, 0), (259, 64)), "lm_head.weight")]
    assert traces[0].fills == ()
    assert {(fill.region.buffer, fill.region.offset, fill.value) for fill in traces[1].fills} == {
        ("model.embed_tokens.weight", 99 * 64, 0.0),
        ("lm_head.weight", 99 * 64, 0.0),
    }


@pytest.mark.parametrize("stacked", [False, True], ids=["one by one", "stacked"])
@pytest.mark.parametrize("experts", [8, 7])
@pytest.mark.parametrize("expert_parallel", [False, True], ids=["tp2", "ep2"])
def test_every_expert_is_direct_in_tensor_and_expert_parallel(stacked, experts, expert_parallel, tmp_path):
    traces, specs = traced(
        tmp_path, MOE, tp=2, expert_parallel=expert_parallel, stacked_experts=stacked, num_experts=experts
    )
    names = [{p.piece.name for p in trace.pieces} for trace in traces.values()]
    assert names[0] | names[1] == {spec.name for spec in specs}
    for trace in traces.values():
        assert trace.opaque == trace.hidden == ()
    if stacked and expert_parallel:  # the first rank has one expert more where they are uneven
        at = "model.layers.0.mlp.experts"
        first = (experts + 1) // 2
        assert boxes(traces[0], f"{at}.down_proj") == [
            (Box((0, 0, 0), (first, 64, 32)), f"{at}.routed_experts.w2_weight")
        ]
        assert boxes(traces[1], f"{at}.down_proj") == [
            (Box((first, 0, 0), (experts, 64, 32)), f"{at}.routed_experts.w2_weight")
        ]
    if stacked:
        assert all(len(trace.pieces) == len(specs) + (2 if not expert_parallel else 0) for trace in traces.values())


def test_an_engine_of_two_ranks_takes_each_byte_of_its_split_weights_once(tmp_path):
    from reshard.integrations.vllm import engine_manifest

    one, _ = traced(tmp_path, LLAMA, tp=1)
    two, _ = traced(tmp_path, LLAMA, tp=2)
    plan = plan_refit(engine_manifest(one, world="trainer"), engine_manifest(two))
    plan.proof()
    assert plan.wire_nbytes < 1.01 * engine_manifest(two).nbytes


def test_one_layer_of_each_kind_stands_for_all_in_the_check(tmp_path):
    from reshard.integrations.vllm import check_layers, check_model, rank_model, trace_model

    specs = checkpoint(write_config(tmp_path, MOE, num_hidden_layers=4, num_experts=7))
    with rank_model(tmp_path, 1, tp=2, expert_parallel=True) as model:
        trace = trace_model(model, specs)
        layers = {piece.region.buffer.rpartition(".")[0] for piece in trace.pieces}
        first = {layer for layer in layers if not re.match(r"model\.layers\.[123]\.", layer)}
        buffers = [one for one in trace.buffers if one.name.rpartition(".")[0] in first]
        assert check_layers(trace, model) == sum(prod(one.shape) for one in buffers) < check_model(trace, model)
        with pytest.raises(VerifyError, match=r"w13_weight': .* elements differ between a real load and the traced"):
            check_layers(in_each_others_place(trace), model)


def in_each_others_place(trace):
    """The trace with the first two pieces of each fused buffer of gates and ups exchanged."""
    pieces = list(trace.pieces)
    for name in {piece.region.buffer for piece in pieces}:
        if name.endswith(("w13_weight", "gate_up_proj.weight")):
            a, b = [at for at, piece in enumerate(pieces) if piece.region.buffer == name][:2]
            first, second = pieces[a].region, pieces[b].region
            pieces[a], pieces[b] = replace(pieces[a], region=second), replace(pieces[b], region=first)
    return replace(trace, pieces=tuple(pieces))


def test_a_rank_that_is_not_there_and_a_process_in_a_group_are_refused(tmp_path):
    import torch.distributed as dist

    from reshard.integrations.vllm import rank_model

    with pytest.raises(ConfigError, match="rank=2 is none of the 2 ranks"), rank_model(tmp_path, 2, tp=2):
        pass
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(EnvironmentNotSupported, match="part of a torch process group"), rank_model(tmp_path, 0):
            pass
    finally:
        dist.destroy_process_group()
