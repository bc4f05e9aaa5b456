"""The engine's side: its own TP shards, q, k and v fused in one bf16 buffer, no torch.distributed of its own.

torchrun --nproc-per-node 2 --master-port 29402 examples/sessions/engine.py 127.0.0.1:29411
"""

import os
import sys

import torch

import reshard

rank = int(os.environ["RANK"])  # torchrun's; connect reads it too
half = 8 * rank  # this rank's rows of q, k and v, and its columns of o: [half, half + 8)
qkv = torch.zeros(24, 16, dtype=torch.bfloat16)
o = torch.zeros(16, 8, dtype=torch.bfloat16)
wanted = reshard.Manifest.from_views(
    [
        ("q.weight", (16, 16), (half, 0), qkv[0:8]),
        ("k.weight", (16, 16), (half, 0), qkv[8:16]),
        ("v.weight", (16, 16), (half, 0), qkv[16:24]),
        ("o.weight", (16, 16), (0, half), o),
    ]
)

session = reshard.connect(sys.argv[1], role="destination", world="engine", expect={"trainer": 2, "engine": 2})
session.accept(wanted)
for version in range(1, 4):
    session.refit(version)  # returns when all ranks of all worlds serve it
    q = qkv[0:8].double().sum().item()
    print(f"rank {rank}: version {session.serving.version}, its half of q sums to {q:.6f}", flush=True)
session.close()
