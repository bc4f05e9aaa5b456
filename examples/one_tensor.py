"""One tensor, from 2 ranks that hold its rows to 4 that want its columns.

torchrun --nproc-per-node 6 examples/one_tensor.py
"""

import torch
import torch.distributed as dist

import reshard

dist.init_process_group("gloo")
rank = dist.get_rank()

rows = reshard.Layout((8, 8), "bfloat16", reshard.Mesh({"fsdp": 2}, ranks=[0, 1]), ("fsdp", None))
columns = reshard.Layout((8, 8), "bfloat16", reshard.Mesh({"tp": 4}, ranks=[2, 3, 4, 5]), (None, "tp"))

whole = torch.arange(64, dtype=torch.bfloat16).reshape(8, 8)  # only to fill the sources and to compare
src = whole[4 * rank : 4 * rank + 4].clone() if rank < 2 else None
dst = torch.full((8, 2), -1.0, dtype=torch.bfloat16) if rank >= 2 else None

report = reshard.reshard(src, dst, src_layout=rows, dst_layout=columns, verify="sum")

if dst is not None:
    assert torch.equal(dst, whole[:, 2 * (rank - 2) : 2 * (rank - 1)])
    print(f"rank {rank} has its 2 columns, {report.wire_nbytes} bytes from {len(report.links)} ranks", flush=True)
dist.destroy_process_group()
