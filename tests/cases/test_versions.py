"""VS-01: an earlier plan serves again only where everything that it depends on is the same."""

from __future__ import annotations

import threading

import torch
from tests.cases.dense import POISON, TIMEOUT, refused_refit, split

import reshard
from reshard.layouts.manifest import Manifest
from reshard.refit import compile as compiling
from reshard.testing.oracle import check_landed, dense, local_shard
from reshard.testing.processes import threads

SHAPE = (8, 4)


def test_VS_01_a_plan_serves_again_for_the_same_placement_and_no_other(transport, monkeypatch):
    src = split(SHAPE, [0, 1], ("x",))
    calls = [
        ("to ranks 2 and 3", split(SHAPE, [2, 3], ("x",)), "float32"),
        ("the same shapes on ranks 4 and 5", split(SHAPE, [4, 5], ("x",)), "float32"),
        ("swapped coordinates", split(SHAPE, [3, 2], ("x",)), "float32"),
        ("another dtype", split(SHAPE, [2, 3], ("x",), dtype="bfloat16"), "bfloat16"),
        ("the first again", split(SHAPE, [2, 3], ("x",)), "float32"),
    ]
    planned = []
    plan_refit = compiling.plan_refit

    def counted(*args, **options):
        planned.append(threading.current_thread().name)
        return plan_refit(*args, **options)

    monkeypatch.setattr(compiling, "plan_refit", counted)

    def body(ctx):
        group = ctx.process_group("cached")
        counts = []
        for version, (what, dst, dtype) in enumerate(calls):
            full = dense(SHAPE, dtype, seed=version)
            held = split(SHAPE, src.mesh.ranks, ("x",), dtype=dtype)
            source = local_shard(full, held, ctx.rank) if ctx.rank < 2 else None
            target = torch.full((4, 4), POISON, dtype=full.dtype) if ctx.rank in dst.mesh.ranks else None
            reshard.reshard(
                source,
                target,
                src_layout=None if source is None else held,
                dst_layout=None if target is None else dst,
                group=group,
                transport=transport,
                timeout=TIMEOUT,
            )
            if target is not None:
                check_landed(target, local_shard(full, dst, ctx.rank), what)
            counts.append(planned.count(threading.current_thread().name))
        return counts

    assert threads(6, body) == [[1, 2, 3, 4, 4]] * 6


def test_VS_07_a_destination_buffer_without_a_source_is_an_error_and_stays_as_it_was():
    """Buffers outside the state dict are nobody's business; those inside it need a source."""
    engine = torch.nn.Module()
    engine.w = torch.nn.Parameter(torch.full((4,), float(POISON)), requires_grad=False)
    engine.register_buffer("b", torch.ones(2))
    engine.register_buffer("inv_freq", torch.ones(3), persistent=False)

    def declare(rank):
        return (None, Manifest.from_torch(engine)) if rank else (Manifest.from_torch({"w": torch.zeros(4)}), None)

    for error in refused_refit(2, declare):
        assert error.missing == ("b",)
    assert engine.w.tolist() == [float(POISON)] * 4
    assert (engine.b.tolist(), engine.inv_freq.tolist()) == ([1.0] * 2, [1.0] * 3)
