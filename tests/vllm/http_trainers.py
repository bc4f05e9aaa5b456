"""Trainers of Hugging Face models: FSDP2, alone or over tensor parallel, that drive live servers themselves."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from tests.vllm.engines import random_weights
from tests.vllm.trainers import Tree

import reshard

TIMEOUT = timedelta(seconds=150)
GROWTH = 1.25
"""Factor of all weights from one version to the next."""

COLUMNWISE = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


def weights_of(specs, seed, step):
    """The weights that a trainer has after so many steps, in float32."""
    return {name: tensor.float() * GROWTH**step for name, tensor in random_weights(specs, seed).items()}


def stacked(weights):
    """The same model under the names that its experts have since version 5 of transformers."""
    experts, rest = {}, {}
    for name, tensor in weights.items():
        before, found, after = name.partition(".mlp.experts.")
        if not found:
            rest[name] = tensor
            continue
        number, projection, _ = after.split(".")
        experts.setdefault(before, {}).setdefault(projection, {})[int(number)] = tensor
    for before, by_projection in experts.items():
        gate, up, down = (
            torch.stack([by_projection[name][i] for i in range(len(by_projection[name]))])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        rest[f"{before}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        rest[f"{before}.mlp.experts.down_proj"] = down
    return rest


def hugging_face_model(folder, weights):
    """A model as transformers has it, in float32, with these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    return model


def train(ctx, address, servers, folder, specs, seed, versions, tp=1, form="transformers"):
    """Refit servers to versions, after each of which all weights grow.

    Args:
        servers: By world, (URL, its ranks).
        tp: Tensor parallel ranks of the trainer; the others are FSDP2's.
        form: ``"transformers"`` for the model as that has it; ``"checkpoint"`` for parameters of the specs' names.

    Returns:
        What this rank sent, and the pause, of each version.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from reshard.integrations.vllm.servers import VLLMServers

    torch.set_num_threads(1)
    store = dist.PrefixStore(f"trainer{versions[0]}", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=TIMEOUT)
    try:
        weights = weights_of(specs, seed, 0)
        has_experts = "num_experts" in json.loads(Path(folder, "config.json").read_text())
        if form == "checkpoint":
            model = Tree.of(weights)
        else:
            model = hugging_face_model(folder, stacked(weights) if has_experts else weights)
        mesh = init_device_mesh("cpu", (ctx.size // tp, tp), mesh_dim_names=("dp", "tp"))
        layers = model.get_submodule("model.layers")
        if tp > 1:
            styles = dict.fromkeys(COLUMNWISE, ColwiseParallel) | dict.fromkeys(ROWWISE, RowwiseParallel)
            for layer in layers.children():
                plan = {
                    name: styles[last]() for name, _ in layer.named_modules() if (last := name.split(".")[-1]) in styles
                }
                assert len(plan) == len(styles)
                parallelize_module(layer, mesh["tp"], plan)
        for layer in layers.children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        session = reshard.connect(
            address,
            role="source",
            world="trainer",
            rank=ctx.rank,
            world_size=ctx.size,
            expect={"trainer": ctx.size, **{world: ranks for world, (_, ranks) in servers.items()}},
            timeout=TIMEOUT,
            engines=VLLMServers({world: url for world, (url, _) in servers.items()}),
        )
        session.offer(model)
        told = []
        for version in versions:
            report = session.refit(version)
            told.append((report.sent_nbytes, report.pause_seconds))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().mul_(GROWTH)
        session.close()
        return told
    finally:
        dist.destroy_process_group()
