"""Every rank has what its framework would give it: manifests against dense copies that are cut by hand."""

from __future__ import annotations

import time

import pytest
import torch
from tests.models import by_hand
from tests.models.small import DENSE, HYBRID, LATENT, MOE, dense_copy, elements, small

from reshard import plan_refit
from reshard.errors import ConfigError, LayoutError
from reshard.models.catalogue import find_model
from reshard.models.parallelism import Parallelism
from reshard.models.worlds import manifest_of

TIED = DENSE | {"tie_word_embeddings": True}


def check(manifest, tensors, size, local_tensors, first=0):
    """Compare what each rank has with its local tensors."""
    for rank in range(size):
        found, wanted = elements(manifest, tensors, first + rank), by_hand.joined(local_tensors(rank))
        assert torch.equal(found, wanted), (
            f"rank {rank}: {len(found)} elements, {len(wanted)} by hand; first that differ: "
            f"{sorted(set(found.tolist()) ^ set(wanted.tolist()))[:8]}"
        )


def expert_tp(sizes):
    """Each expert is whole where experts are spread, unless something is said; else it is cut as all else is."""
    return sizes.get("etp", 1 if "ep" in sizes else sizes.get("tp", 1))


# -- a Megatron-like trainer ---------------------------------------------------------------------------------------


def megatron_rank(config, tensors, layers_of_stage, *, tp, ep, etp, stage_size, stages, rank, is_tied=False):
    """The local tensors of a rank of Megatron-Core: rank = stage, then copy, then tensor parallel rank."""
    stage, inside = divmod(rank, stage_size)
    count = config.get("num_experts", config.get("n_routed_experts", 0)) // ep
    owner = inside // etp % ep
    parts = list(
        by_hand.ends(
            tensors,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            tp=tp,
            rank=inside % tp,
            multiple=128 * tp,
            is_tied=is_tied,
        )
    )
    for layer in layers_of_stage[stage]:
        parts += by_hand.layer_parts(
            by_hand.layer_tensors(tensors, layer),
            config,
            tp=tp,
            rank=inside % tp,
            experts=range(owner * count, (owner + 1) * count),
            etp=etp,
            etp_rank=inside % etp,
            style="megatron",
        )
    return parts


@pytest.mark.parametrize(
    ("config", "sizes", "stages"),
    [
        (DENSE, {"tp": 2}, [range(5)]),  # whole groups of heads; a vocabulary of 270 is filled up to 512
        (DENSE, {"tp": 8}, [range(5)]),  # 2 groups of heads over 8 ranks: cuts in the middle of a head
        (DENSE, {"tp": 4, "cp": 2, "dp": 2}, [range(5)]),
        (DENSE, {"pp": 2, "tp": 2}, [range(3), range(3, 5)]),  # an uneven pipeline
        (DENSE, {"pp": 2, "vpp": 2}, [[0, 1, 3], [2, 4]]),  # chunks are dealt to the stages in turn
        (TIED, {"pp": 2, "tp": 2}, [range(3), range(3, 5)]),  # both ends have the embedding
        (MOE, {"tp": 2}, [range(5)]),  # no ep: experts are cut as all else is
        (MOE, {"ep": 3, "dp": 2, "pp": 2}, [range(3), range(3, 5)]),
        (MOE, {"tp": 2, "ep": 2, "etp": 2}, [range(5)]),
        (MOE, {"tp": 4, "ep": 2}, [range(5)]),  # experts in two copies inside one stage of one copy
        (LATENT, {"tp": 4, "ep": 8, "dp": 2}, [range(3)]),
        (HYBRID, {"tp": 4, "ep": 2, "pp": 2}, [range(2), range(2, 4)]),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_trainer_holds_what_megatron_cuts(config, sizes, stages, stacked):
    model, parallelism = small(config, stacked=stacked), Parallelism.from_sizes("megatron", sizes)
    tensors = dense_copy(model)
    facts = {"tp": sizes.get("tp", 1), "ep": sizes.get("ep", 1), "etp": expert_tp(sizes), "stages": len(stages)}
    check(
        manifest_of(model, parallelism, first=3),
        tensors,
        parallelism.size,
        lambda rank: megatron_rank(
            config,
            tensors,
            stages,
            stage_size=parallelism.size // len(stages),
            rank=rank,
            is_tied=config is TIED,
            **facts,
        ),
        first=3,
    )


# -- a vLLM-like engine --------------------------------------------------------------------------------------------


def vllm_rank(config, tensors, layers_of_stage, experts_of, *, tp, etp, rank, is_tied=False):
    """The local tensors of a rank of vLLM: rank = copy of the attention, then stage, then tensor parallel rank."""
    stages = len(layers_of_stage)
    copy, stage, place = rank // (stages * tp), rank // tp % stages, rank % tp
    inside = (copy * tp + place) // etp % len(experts_of)  # copies of the attention share the experts
    parts = list(
        by_hand.ends(
            tensors,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            tp=tp,
            rank=place,
            multiple=64,
            is_tied=is_tied,
        )
    )
    for layer in layers_of_stage[stage]:
        parts += by_hand.layer_parts(
            by_hand.layer_tensors(tensors, layer),
            config,
            tp=tp,
            rank=place,
            experts=experts_of[inside],
            etp=etp,
            etp_rank=place % etp,
            style="vllm",
        )
    return parts


EVEN = [range(6)]


@pytest.mark.parametrize(
    ("config", "sizes", "stages", "experts_of"),
    [
        (DENSE, {"tp": 2, "dp": 2}, [range(5)], EVEN),  # a vocabulary of 270 is filled up to 320
        (DENSE, {"tp": 8}, [range(5)], EVEN),  # 2 KV heads on 8 ranks: each head on 4
        (DENSE, {"tp": 1, "pp": 3, "dp": 2}, [[0, 1], [2, 3], [4]], EVEN),  # the last stage is never the longest
        (TIED, {"tp": 2, "pp": 2}, [[0, 1, 2], [3, 4]], EVEN),
        (MOE, {"tp": 4, "dp": 2}, [range(5)], [range(6)]),  # no ep: tensor parallelism inside each expert
        (MOE, {"tp": 2, "ep": 2}, [range(5)], [[0, 1, 2], [3, 4, 5]]),
        (MOE, {"tp": 4, "ep": 4}, [range(5)], [[0, 1], [2, 3], [4], [5]]),  # 6 experts on 4 ranks: uneven
        (MOE, {"tp": 2, "ep": 4, "dp": 2}, [range(5)], [[0, 1], [2, 3], [4], [5]]),  # attention in 2 copies an engine
        (MOE, {"tp": 2, "ep": 2, "pp": 2}, [[0, 1, 2], [3, 4]], [[0, 1, 2], [3, 4, 5]]),
        (MOE, {"tp": 4, "ep": 2, "etp": 2}, [range(5)], [[0, 1, 2], [3, 4, 5]]),  # tensor parallelism inside ep
        (LATENT, {"tp": 8, "dp": 2}, [range(3)], [range(8)]),
        (LATENT, {"tp": 2, "ep": 8}, [range(3)], [[e] for e in range(8)]),
        (HYBRID, {"tp": 4}, [range(4)], [range(4)]),
        (HYBRID, {"tp": 4, "ep": 4, "dp": 2}, [range(4)], [[0], [1], [2], [3]]),
    ],
)
@pytest.mark.parametrize("stacked", [False, True])
def test_an_engine_wants_what_vllm_loads(config, sizes, stages, experts_of, stacked):
    model, parallelism = small(config, stacked=stacked), Parallelism.from_sizes("vllm", sizes)
    tensors = dense_copy(model)
    check(
        manifest_of(model, parallelism),
        tensors,
        parallelism.size,
        lambda rank: vllm_rank(
            config,
            tensors,
            stages,
            experts_of,
            tp=sizes.get("tp", 1),
            etp=expert_tp(sizes),
            rank=rank,
            is_tied=config is TIED,
        ),
    )


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("order", "etp", "expert_map", "experts_of"),
    [
        ("round_robin", 1, None, [[0, 4], [1, 5], [2], [3]]),
        ("round_robin", 2, None, [[0, 2, 4], [1, 3, 5]]),
        ("linear", 1, [[0, 1, 5], [2, 3, 5], [4], [5]], [[0, 1, 5], [2, 3, 5], [4], [5]]),  # expert 5 is redundant
    ],
)
def test_which_experts_a_rank_has_may_be_any_map(order, etp, expert_map, experts_of, stacked):
    model = small(MOE, stacked=stacked)
    parallelism = Parallelism("vllm", tp=4, ep=len(experts_of), etp=etp, expert_order=order)
    tensors = dense_copy(model)
    check(
        manifest_of(model, parallelism, expert_map=expert_map),
        tensors,
        4,
        lambda rank: vllm_rank(MOE, tensors, [range(5)], experts_of, tp=4, etp=etp, rank=rank),
    )


# -- an FSDP-like trainer ------------------------------------------------------------------------------------------


def chunk(tensor, parts, index, dim=0):
    """torch.chunk, of which the last parts may be missing."""
    found = tensor.chunk(parts, dim)
    return found[index] if index < len(found) else tensor[:0]


@pytest.mark.parametrize(
    ("sizes", "shards", "copies"), [({"fsdp": 7}, 7, 1), ({"hsdp": 2, "fsdp": 4}, 4, 2), ({"fsdp": 2, "cp": 2}, 4, 1)]
)
@pytest.mark.parametrize("config", [DENSE, MOE])
def test_fsdp_cuts_dim_0_of_everything_as_torch_chunks_it(config, sizes, shards, copies):
    model, parallelism = small(config), Parallelism.from_sizes("fsdp", sizes)
    tensors = dense_copy(model)
    assert parallelism.size == shards * copies
    check(
        manifest_of(model, parallelism),
        tensors,
        parallelism.size,
        lambda rank: [chunk(tensor, shards, rank % shards) for tensor in tensors.values()],
    )


# ep takes the inner ranks of fsdp. 6 experts on 4 ranks: an owner's 3 are dealt out to its 2 ranks. On 8 ranks: rows of
# each expert are cut over the owner's 4 ranks.
@pytest.mark.parametrize(("fsdp", "dim"), [(4, 0), (8, 1)])
def test_fsdp_with_expert_parallelism_cuts_a_stack_twice(fsdp, dim):
    model, parallelism = small(MOE, stacked=True), Parallelism("fsdp", fsdp=fsdp, ep=2)
    tensors = dense_copy(model)

    def local(rank):
        for name, tensor in tensors.items():
            if ".experts." in name:
                yield chunk(tensor.chunk(2)[rank % 2], fsdp // 2, rank // 2, dim)
            else:
                yield chunk(tensor, fsdp, rank)

    check(manifest_of(model, parallelism), tensors, fsdp, lambda rank: list(local(rank)))


@pytest.mark.parametrize("fsdp", [4, 8])
def test_fsdp_with_expert_parallelism_has_whole_experts_or_rows_of_each(fsdp):
    model, parallelism = small(MOE), Parallelism("fsdp", fsdp=fsdp, ep=2)
    tensors = dense_copy(model)

    def local(rank):
        owned = torch.arange(6).chunk(2)[rank % 2]
        dealt = chunk(owned, fsdp // 2, rank // 2).tolist() if fsdp == 4 else owned.tolist()
        for name, tensor in tensors.items():
            if ".experts." not in name:
                yield chunk(tensor, fsdp, rank)
            elif int(name.split(".experts.")[1].split(".")[0]) in dealt:
                yield tensor if fsdp == 4 else chunk(tensor, fsdp // 2, rank // 2)

    check(manifest_of(model, parallelism), tensors, fsdp, lambda rank: list(local(rank)))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "style", "sizes", "said"),
    [
        (DENSE, "megatron", {"tp": 3}, "it has 2 KV heads and tp is 3. Use a tp that divides or is a multiple of 2"),
        (DENSE, "vllm", {"tp": 16}, "it has 8 query heads and tp is 16"),
        (HYBRID, "vllm", {"tp": 8}, "it has 4 state-space groups and tp is 8"),
        (DENSE | {"vocab_size": 304}, "vllm", {"tp": 3}, "filled up to 320, is not a multiple of tp 3"),
        (MOE, "vllm", {"tp": 1, "ep": 1, "etp": 16}, "it has 8 rows and tp is 16"),
    ],
)
def test_what_a_framework_cannot_cut_is_refused_by_name(config, style, sizes, said):
    with pytest.raises(LayoutError, match=said) as refused:
        manifest_of(small(config), Parallelism.from_sizes(style, sizes))
    assert refused.value.tensor in {spec.name for spec in small(config).specs}


def test_a_trainer_needs_as_many_experts_on_each_rank():
    with pytest.raises(ConfigError, match="the model has 6 experts a layer, which ep4 does not divide"):
        manifest_of(small(MOE), Parallelism("megatron", ep=4))


def test_an_expert_map_must_have_every_expert():
    with pytest.raises(ConfigError, match=r"leaves out experts \[5\]"):
        manifest_of(small(MOE), Parallelism("vllm", tp=2, ep=2), expert_map=[[0, 1, 2], [3, 4]])


# -- both sides together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DENSE, TIED, MOE, LATENT, HYBRID])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_plan_between_a_trainer_and_an_engine_is_proved(config, stacked):
    model = small(config, stacked=stacked)
    source = Parallelism.from_sizes("megatron", {"tp": 2, "pp": 2} | ({"ep": 2} if model.experts else {}))
    engine = Parallelism.from_sizes("vllm", {"tp": 4, "dp": 2} | ({"ep": 4} if model.experts else {}))
    plan = plan_refit(manifest_of(model, source), manifest_of(model, engine, first=source.size))
    assert plan.proof().needed_nbytes == sum(
        box.numel * entry.spec.itemsize * len(ranks)
        for entry in plan.dst[0].entries
        for holding in entry.holdings
        for box, ranks in holding.boxes(entry.spec)
    )


def test_the_manifests_of_a_large_model_are_made_quickly_and_of_few_rules():
    model = find_model("deepseek-v3")
    started = time.process_time()
    source = manifest_of(model, Parallelism("megatron", ep=16, pp=4, dp=2))
    wanted = manifest_of(model, Parallelism.from_sizes("vllm", {"tp": 8, "dp": 16}), first=source.size)
    assert time.process_time() - started < 2.5  # 0.5 s on the machine that this was written on
    assert (source.size, wanted.size, len(wanted.entries)) == (128, 256, 45395)
    assert len({id(entry.holdings[0]) for entry in source.entries}) < 250
    assert len({id(entry.holdings[0]) for entry in wanted.entries}) < 25
