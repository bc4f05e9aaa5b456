"""A default process group inside a worker process, and DTensors on parts of it."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.testing.processes import RankContext


@contextlib.contextmanager
def default_group(ctx: RankContext) -> Iterator[None]:
    """torch's default group over gloo for the time of the block, on loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.PrefixStore("default", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=ctx.timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(grid, names=None):
    """A DeviceMesh over ranks of the world in a nested list; every rank of the world makes it."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.tensor(grid), mesh_dim_names=names)


def placements_of(codes: Sequence[str]):
    """``R`` is Replicate, ``S0`` is Shard(0)."""
    from torch.distributed.tensor import Replicate, Shard

    return [Replicate() if code == "R" else Shard(int(code[1:])) for code in codes]


def dtensor(full: torch.Tensor, grid, codes: Sequence[str]):
    """A DTensor with the values of ``full``, cut by torch itself without a message; on ranks outside, an empty one."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full.clone(), mesh_of(grid), placements_of(codes), src_data_rank=None)
