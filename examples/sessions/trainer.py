"""The trainer's side of a session: FSDP2 with fp32 weights, under its own torchrun; its first rank hosts the store.

torchrun --nproc-per-node 2 --master-port 29401 examples/sessions/trainer.py 127.0.0.1:29411
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import reshard

dist.init_process_group("gloo")  # for training; the session does not touch it
address = sys.argv[1]
if dist.get_rank() == 0:
    host, port = address.split(":")
    store = reshard.serve_store(host, int(port))

torch.manual_seed(0)
model = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16, bias=False) for name in ("q", "k", "v", "o")})
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.values():
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

session = reshard.connect(address, role="source", world="trainer", expect={"trainer": 2, "engine": 2})
session.offer(model)
for version in range(1, 4):
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)  # stands for the backward pass
    optimizer.step()
    report = session.refit(version)
    # gathered only to print it
    q = model["q"].weight.full_tensor().bfloat16().double().sum().item()
    print(f"rank {dist.get_rank()}: version {version}, q sums to {q:.6f}, {len(report.casts)} tensors cast", flush=True)
session.close()
dist.barrier()  # the first rank hosts the store until all have left
dist.destroy_process_group()
