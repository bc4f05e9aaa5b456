"""Trainers for tests: two processes that hold a model as FSDP2 shards it, and refit version after version."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from tests.vllm.engines import random_weights, save

import reshard
from reshard.errors import ReshardError
from reshard.topology.topology import Topology

TIMEOUT = timedelta(seconds=150)


class Tree(torch.nn.Module):
    """A module with parameters of given names."""

    @classmethod
    def of(cls, weights):
        root = cls()
        for name, tensor in weights.items():
            *path, last = name.split(".")
            module = root
            for part in path:
                if part not in module._modules:
                    module.add_module(part, cls())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(tensor))
        return root


def train(ctx, address, expect, specs, dtype, steps, topology=None, dies=None):
    """Refit versions of random weights from FSDP2 shards.

    Args:
        steps: (version, seed, folder to save it to or None).
        dies: (version, n): rank 1 ends when it is about to send for the n-th time in this version; 0 is before any.

    Returns:
        The reports of all steps; for one that failed, the error's message.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.PrefixStore("trainer", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=TIMEOUT)
    try:
        model = Tree.of({s.name: torch.zeros(s.shape, dtype=getattr(torch, dtype)) for s in specs})
        mesh = init_device_mesh("cpu", (ctx.size,))
        for layer in model.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        session = join(address, expect, ctx.rank, topology, "auto" if dies is None else "torch_p2p")
        session.offer(model)
        reports = []
        for version, seed, folder in steps:
            fill(model, random_weights(specs, seed))
            if folder is not None:
                whole = {name: parameter.full_tensor().bfloat16() for name, parameter in model.named_parameters()}
                if ctx.rank == 0:
                    save(folder, whole)
            if dies is not None and dies[0] == version and ctx.rank == 1:
                die_in_round(dies[1])
            try:
                reports.append(session.refit(version))
            except ReshardError as error:
                reports.append(str(error))
        session.close()
        return reports
    finally:
        dist.destroy_process_group()


def join(address, expect, rank, topology=None, transport="auto"):
    return reshard.connect(
        address,
        role="source",
        world="trainer",
        rank=rank,
        world_size=expect["trainer"],
        expect=expect,
        staging_nbytes="64KiB",  # so that even a tiny model takes many rounds
        transport=transport,
        topology=None if topology is None else Topology.from_json(topology),
        timeout=TIMEOUT,
    )


def fill(model, weights):
    """Set the shards of whole weights."""
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name].to(parameter.dtype)
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def die_in_round(after):
    """Let this process end when it is about to send for the n-th time from now."""
    from reshard.transports import mover

    left = [after]
    send = mover.Mover._post

    def counting(self, *args):
        left[0] -= 1
        if left[0] < 0:
            os._exit(9)
        return send(self, *args)

    mover.Mover._post = counting


def train_checkpoint(ctx, address, expect, folder, saved):
    """Refit version 1 as a checkpoint has it, and version 2 after an optimizer step; saves the latter."""
    from pathlib import Path

    from reshard.demo.checkpoint import Checkpoint
    from reshard.demo.trainer import Trainer
    from reshard.demo.worlds import SourceWorld

    torch.set_num_threads(1)
    store = dist.PrefixStore("trainer", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=TIMEOUT)
    try:
        trainer = Trainer(Checkpoint.open(Path(folder)), SourceWorld(ctx.size))
        session = join(address, expect, ctx.rank)
        session.offer(trainer.model)
        reports = [session.refit(1)]
        trainer.step([1, 5, 9], [17, 200, 3])
        whole = {name: parameter.full_tensor().detach() for name, parameter in trainer.model.named_parameters()}
        if ctx.rank == 0:
            save(Path(saved), whole)
        reports.append(session.refit(2))
        session.close()
        return reports
    finally:
        dist.destroy_process_group()
