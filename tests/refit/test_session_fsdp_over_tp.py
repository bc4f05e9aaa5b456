"""The main job in small: FSDP2 over tensor parallelism with fp32 weights, and two engines of other layouts at once.

Nine real processes: a trainer of 2 x 2 with a default group of its own, engines of TP3 and TP2 with fused buffers and
without a default group. After each optimizer step every engine rank equals the dense weights cast once.
"""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from tests.refit.sessions import TIMEOUT, ranks_of

import reshard
from reshard.testing.processes import ProcessPool

EXPECT = {"trainer": 4, "gen0": 3, "gen1": 2}
HIDDEN, INNER = 10, 18  # 18 rows split evenly over TP3 and TP2; 10 over dp unevenly with tp inside
REFITS = 6


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(9) as processes:
        yield processes


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.up = torch.nn.Linear(HIDDEN, INNER, bias=False)
        self.down = torch.nn.Linear(INNER, HIDDEN, bias=False)
        self.norm = torch.nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x)) * self.norm


def train(ctx, address, rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    store = dist.PrefixStore("trainer", ctx.store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=ctx.timeout)
    try:
        torch.manual_seed(3)
        model = Block()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        column, row = ColwiseParallel(), RowwiseParallel()
        parallelize_module(model, mesh["tp"], {"gate": column, "up": column, "down": row})
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        session = reshard.connect(
            address, role="source", world="trainer", rank=rank, world_size=4, expect=EXPECT, timeout=TIMEOUT
        )
        session.offer(model)
        for version in range(REFITS):
            model(torch.randn(4, HIDDEN)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            dense = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
            if rank == 0:
                file = io.BytesIO()
                torch.save(dense, file)
                ctx.store.set(f"dense {version}", file.getvalue())
            report = session.refit(version)
        session.close()
        assert dist.is_initialized()
        return report
    finally:
        dist.destroy_process_group()


def serve(ctx, address, world, rank):
    size = EXPECT[world]
    step = INNER // size
    rows = slice(rank * step, (rank + 1) * step)
    fused = torch.full((2 * step, HIDDEN), -7.0, dtype=torch.bfloat16)  # gate above up
    down = torch.full((HIDDEN, step), -7.0, dtype=torch.bfloat16)
    norm = torch.full((HIDDEN,), -7.0, dtype=torch.bfloat16)
    session = reshard.connect(
        address, role="destination", world=world, rank=rank, world_size=size, expect=EXPECT, timeout=TIMEOUT
    )
    session.accept(
        reshard.Manifest.from_views(
            [
                ("gate.weight", (INNER, HIDDEN), (rows.start, 0), fused[:step]),
                ("up.weight", (INNER, HIDDEN), (rows.start, 0), fused[step:]),
                ("down.weight", (HIDDEN, INNER), (0, rows.start), down),
                ("norm", (HIDDEN,), (0,), norm),
            ]
        )
    )
    before = None
    for version in range(REFITS):
        report = session.refit(version)
        dense = torch.load(io.BytesIO(ctx.store.get(f"dense {version}")))
        dense = {name: tensor.to(torch.bfloat16) for name, tensor in dense.items()}
        assert torch.equal(fused, torch.cat([dense["gate.weight"][rows], dense["up.weight"][rows]])), version
        assert torch.equal(down, dense["down.weight"][:, rows])
        assert torch.equal(norm, dense["norm"])
        assert before is None or not torch.equal(before, fused), "the trainer has trained"
        before = fused.clone()
    session.close()
    assert not dist.is_initialized()
    return report


def _work(ctx, address):
    torch.set_num_threads(1)
    world, rank = ranks_of(EXPECT, ctx.rank)
    return train(ctx, address, rank) if world == "trainer" else serve(ctx, address, world, rank)


@pytest.mark.slow
def test_two_engines_follow_an_fsdp2_over_tp_trainer_step_by_step(pool):
    with reshard.serve_store() as store:
        reports = pool.run(_work, str(store), timeout=90)
    wire = sum(report.received_nbytes for report in reports)
    wanted = 2 * (2 * 3 * INNER * HIDDEN + 5 * HIDDEN)  # bf16: both engines take each matrix once, each rank the norm
    assert wire == wanted
    assert {cast.where for report in reports for cast in report.casts} == {"source"}
