"""The call with the eight arguments that existing frameworks make, in their order.

The source is cut over rows by 2 ranks; the destination is 2 replicas of 2 ranks that cut the columns. 7 rows do not
divide by 2: the first rank holds 4, the second 3, as torch cuts them.

    torchrun --nproc-per-node 6 examples/xferdtensor.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import reshard

dist.init_process_group("gloo")
rank = dist.get_rank()

src_mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("fsdp",))
dst_mesh = DeviceMesh("cpu", [[2, 3], [4, 5]], mesh_dim_names=("dp", "tp"))

whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
src = whole[:4].clone() if rank == 0 else whole[4:].clone() if rank == 1 else None
dst = torch.full((7, 3), -1.0) if rank >= 2 else None

# A rank passes None for the tensor of a side that it is not in; every rank may pass both meshes.
reshard.xferdtensor(src, src_mesh, [Shard(0)], dst, dst_mesh, [Replicate(), Shard(1)], dist.group.WORLD)

if dst is not None:
    column = 3 * ((rank - 2) % 2)
    assert torch.equal(dst, whole[:, column : column + 3])
    print(f"rank {rank} has columns {column} to {column + 2}", flush=True)
dist.destroy_process_group()
