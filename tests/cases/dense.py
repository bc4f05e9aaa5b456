"""The dense copy that a case is compared with, and its ranks: threads in this process, a gloo group each run."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import reshard
from reshard.errors import ReshardError
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.testing.oracle import bits, check_landed, local_shard, poisoned
from reshard.testing.processes import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.layouts.manifest import Manifest
    from reshard.refit.compiled import CompiledRefit, RunReport
    from reshard.testing.processes import RankContext

POISON = -7
TIMEOUT = timedelta(seconds=20)
SOON = 1.0
"""Seconds within which a mistake must be told on every rank, counted from the moment at which all ranks are there."""


def arange(*shape, dtype=torch.float32):
    """A tensor whose every element names its place."""
    return torch.arange(int(torch.Size(shape).numel())).to(dtype).reshape(shape)


def split(shape, ranks, placement, *, dtype="float32", axes=None, rule="ceil"):
    """A layout on a mesh of one axis ``x``, or of the ``axes`` given."""
    return Layout(shape, dtype, Mesh(axes or {"x": len(ranks)}, ranks), placement, rule)


def same_bits(a, b):
    """Equal shape, dtype and bits, whatever the strides; NaNs compare equal too."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a.detach()), bits(b.detach()))


def move(full, src, dst, size, **options) -> tuple[dict[int, torch.Tensor], list[RunReport]]:
    """Reshard a dense tensor from ``src`` to ``dst`` among ``size`` ranks; what each destination then holds."""

    def body(ctx: RankContext):
        source = local_shard(full, src, ctx.rank) if ctx.rank in src.mesh.ranks else None
        target = poisoned(local_shard(full, dst, ctx.rank)) if ctx.rank in dst.mesh.ranks else None
        report = reshard.reshard(
            source,
            target,
            src_layout=None if source is None else src,
            dst_layout=None if target is None else dst,
            group=ctx.process_group("move"),
            timeout=TIMEOUT,
            **options,
        )
        return target, report

    told = threads(size, body)
    return {rank: target for rank, (target, _) in enumerate(told) if target is not None}, [r for _, r in told]


def lands_right(full, src, dst, size, **options) -> list[RunReport]:
    """As ``move``; every destination rank must hold exactly its part of the dense tensor."""
    landed, reports = move(full, src, dst, size, **options)
    assert set(landed) == set(dst.mesh.ranks)
    for rank, target in landed.items():
        check_landed(target, local_shard(full, dst, rank), f"rank {rank}")
    return reports


def refit(
    size: int, declare: Callable[[int], tuple[Manifest | None, Manifest | None]], **options
) -> list[tuple[RunReport, CompiledRefit]]:
    """Compile a refit among ``size`` ranks from what ``declare(rank)`` gives, run it once; a report a rank."""

    def body(ctx: RankContext):
        src, dst = declare(ctx.rank)
        group = ctx.process_group("refit")
        compiled = reshard.compile_refit(group, src=src, dst=dst, timeout=TIMEOUT, **options)
        return compiled.run(TIMEOUT), compiled

    return threads(size, body)


def refusals(size: int, call: Callable[[int, dist.ProcessGroup], object]) -> list[ReshardError]:
    """What ``call(rank, group)`` raises: one error on every rank, soon, and the process goes on."""

    def body(ctx: RankContext):
        group = ctx.process_group("refused")
        group.barrier().wait(TIMEOUT)
        started = time.perf_counter()
        try:
            call(ctx.rank, group)
        except ReshardError as error:
            return error, time.perf_counter() - started
        return None, 0.0

    told = threads(size, body)
    assert [rank for rank, (error, _) in enumerate(told) if error is None] == [], "these ranks saw no error"
    assert max(seconds for _, seconds in told) < SOON
    return [error for error, _ in told]


def refused_refit(
    size: int, declare: Callable[[int], tuple[Manifest | None, Manifest | None]], **options
) -> list[ReshardError]:
    """What each rank raises when the refit is compiled."""

    def call(rank: int, group: dist.ProcessGroup) -> None:
        src, dst = declare(rank)
        reshard.compile_refit(group, src=src, dst=dst, timeout=TIMEOUT, **options)

    return refusals(size, call)


def rows(full, numbers: Sequence[int]):
    """Some rows of the dense tensor, in this order."""
    return full[list(numbers)]
