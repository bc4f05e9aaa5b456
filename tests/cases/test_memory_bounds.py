"""Cases MB-*: staging stays within its limit on every rank, whatever the model, and nothing is gathered."""

from __future__ import annotations

import contextlib
import gc
from unittest import mock

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, refit, refused_refit, same_bits
from tests.cases.worlds import default_group, dtensor

import reshard
from reshard.errors import BindingError, PeerError, ScheduleError
from reshard.layouts.manifest import Manifest
from reshard.testing.oracle import check_landed, dense
from reshard.testing.processes import threads

MIB = 1 << 20
UNIT_NBYTES = 16
"""Slots of the staging memory begin at multiples of this."""
PARAMETERS = [f"layers.{at}.weight" for at in range(16)]
SIDE = 512  # [512, 512] float32 is 1 MiB


@contextlib.contextmanager
def torch_allocations():
    """Collect what torch's allocator gives out inside the block: ``peak`` bytes held at once, beyond those before."""
    found = {"peak": 0}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    held = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            found["peak"] = max(found["peak"], held)


def resident_peak_nbytes():
    """The most memory that this process has had resident since ``forget_resident_peak``."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def forget_resident_peak():
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


def _bounded(ctx, transport, limit):
    """16 parameters of 1 MiB, from two ranks by rows to two by columns."""
    rank = ctx.rank % 2
    whole = {name: dense((SIDE, SIDE), "float32", seed=at) for at, name in enumerate(PARAMETERS)}
    if ctx.rank < 2:
        held = {name: full.chunk(2)[rank].clone() for name, full in whole.items()}
        start = (rank * SIDE // 2, 0)
    else:
        held = {name: torch.full((SIDE, SIDE // 2), float(POISON)) for name in whole}
        start = (0, rank * SIDE // 2)
    side = Manifest.from_views([(name, (SIDE, SIDE), start, part) for name, part in held.items()])
    group = ctx.process_group("bounded")
    group.barrier().wait(ctx.timeout)  # what gloo and the profiler take at their start is not ours
    with torch_allocations():
        torch.zeros(1)
    gc.collect()
    forget_resident_peak()
    before = resident_peak_nbytes()
    with torch_allocations() as allocated:
        compiled = reshard.compile_refit(
            group,
            **{"src" if ctx.rank < 2 else "dst": side},
            transport=transport,
            staging_nbytes=limit,
            timeout=TIMEOUT,
        )
        report = compiled.run(TIMEOUT)
    grown = resident_peak_nbytes() - before
    if ctx.rank >= 2:
        for name, part in held.items():
            check_landed(part, whole[name].chunk(2, 1)[rank].contiguous(), name)
    return report.staging_nbytes, allocated["peak"], grown, compiled.schedule.staging_nbytes(ctx.rank)


@pytest.mark.parametrize("limit", [1 * MIB, 2 * MIB, 8 * MIB])
def test_MB_01_staging_stays_within_its_limit_on_both_sides(pool, transport, limit):
    slack = 6 * MIB  # Python's own memory, its threads and sockets; a rank's 8 MiB of weights would show
    for held, allocated, grown, promised in pool.run(_bounded, transport, limit, ranks=4):
        assert held <= limit + UNIT_NBYTES
        assert promised <= limit + UNIT_NBYTES
        # An arena of shared memory is not torch's; what is torch's are sums and views.
        assert (allocated if transport == "torch_p2p" else allocated + held) <= limit + UNIT_NBYTES + 64 * 1024
        # Ranks map the arenas of those who send to them, and see them as their own memory.
        assert grown <= (1 if transport == "torch_p2p" else 3) * limit + slack


@contextlib.contextmanager
def gathering_forbidden():
    """Every way to gather a tensor raises."""
    from torch.distributed.tensor import DTensor

    def forbidden(*_, **__):
        raise AssertionError("a refit gathers nothing")

    names = [
        name
        for name in dir(torch.distributed)
        if name.lstrip("_").startswith(("all_gather", "gather", "broadcast", "all_reduce", "reduce_scatter"))
    ]
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch.distributed, name, forbidden))
        for method in ("full_tensor", "redistribute"):
            stack.enter_context(mock.patch.object(DTensor, method, forbidden))
        yield


def _without_gathering(ctx, count):
    with default_group(ctx):
        whole = {f"p{at}": dense((256, 64), "float32", seed=at) for at in range(count)}
        src = {name: dtensor(full, [0, 1, 2, 3], ["S0"]) for name, full in whole.items()}
        dst = {name: dtensor(torch.full_like(full, POISON), [4, 5], ["S1"]) for name, full in whole.items()}
        side = {"src": Manifest.from_torch(src)} if ctx.rank < 4 else {"dst": Manifest.from_torch(dst)}
        with gathering_forbidden(), torch_allocations() as allocated:
            compiled = reshard.compile_refit(**side, staging_nbytes=32 * 1024, transport="torch_p2p", timeout=TIMEOUT)
            report = compiled.run(TIMEOUT)
        if ctx.rank >= 4:
            for name, full in whole.items():
                check_landed(dst[name].to_local(), full.chunk(2, 1)[ctx.rank - 4].contiguous(), name)
        return report.staging_nbytes, allocated["peak"]


def test_MB_02_nothing_is_gathered_and_the_peak_does_not_grow_with_the_model(pool):
    small, large = (pool.run(_without_gathering, count, ranks=6) for count in (8, 32))
    assert [staging for staging, _ in small] == [staging for staging, _ in large]
    for (_, few), (_, many) in zip(small, large, strict=True):
        assert many <= few + 4096  # bookkeeping; three quarters of the larger model are 3 MiB
        assert many <= 32 * 1024 + 4096


LARGE = {"embed": arange(512, 8), "bias": 1000 + arange(3), "norm": arange(1000, dtype=torch.bfloat16)}


def test_MB_03_tensors_larger_than_the_staging_are_cut(transport):
    landed = {name: torch.full_like(full, POISON) for name, full in LARGE.items()}
    told = refit(
        2,
        lambda rank: (None, Manifest.from_torch(landed)) if rank else (Manifest.from_torch(dict(LARGE)), None),
        transport=transport,
        staging_nbytes=1024,
    )
    assert all(same_bits(landed[name], full) for name, full in LARGE.items())
    assert max(report.staging_nbytes for report, _ in told) <= 1024 + UNIT_NBYTES


def test_MB_03_strided_tensors_larger_than_the_staging_are_cut(transport):
    landed = {name: torch.full((full.numel() * 2,), POISON, dtype=full.dtype)[::2] for name, full in LARGE.items()}
    flat = {name: full.flatten() for name, full in LARGE.items()}
    told = refit(
        2,
        lambda rank: (None, Manifest.from_torch(landed)) if rank else (Manifest.from_torch(flat), None),
        transport=transport,
        staging_nbytes=1024,
    )
    assert all(same_bits(landed[name].contiguous(), full) for name, full in flat.items())
    assert max(report.staging_nbytes for report, _ in told) <= 1024 + UNIT_NBYTES


@pytest.mark.parametrize("limit", [1, 3])
def test_MB_03_a_limit_below_one_element_is_refused_on_every_rank(limit):
    def declare(rank):
        side = Manifest.from_torch(dict(LARGE))
        return (None, side) if rank else (side, None)

    assert all(isinstance(error, ScheduleError) for error in refused_refit(2, declare, staging_nbytes=limit))


@pytest.mark.parametrize("verify", ["sum", "fingerprint"])
def test_MB_01_verification_stays_within_the_limit_or_is_refused_before_any_byte(transport, verify):
    """Many small tensors: the sums of all of them are more than the staging holds at once."""
    whole = {f"p{at}": torch.full((2,), float(at)) for at in range(400)}
    landed = {name: torch.full((2,), float(POISON)) for name in whole}
    sides = [{"src": Manifest.from_torch(whole)}, {"dst": Manifest.from_torch(landed)}]
    options = {"transport": transport, "verify": verify, "staging_nbytes": 1024, "timeout": TIMEOUT}

    def body(ctx):
        group = ctx.process_group("verified")
        try:
            return reshard.compile_refit(group, **sides[ctx.rank], **options).run(TIMEOUT).staging_nbytes
        except (ScheduleError, PeerError) as error:
            return type(error)

    told = threads(2, body)
    if ScheduleError in told:
        assert set(told) <= {ScheduleError, PeerError}
        assert all(same_bits(tensor, torch.full((2,), float(POISON))) for tensor in landed.values())
    else:
        assert all(same_bits(landed[name], full) for name, full in whole.items())
        assert max(told) <= 1024 + UNIT_NBYTES


def shifted(rank):
    """Rank 0 is in both worlds and shifts rows within one buffer, so what would be overwritten is copied first."""
    if rank == 0:
        buffer = arange(65, 64)
        return (
            Manifest.from_views([("w", (64, 64), (0, 0), buffer[:64])]),
            Manifest.from_views([("w", (64, 64), (0, 0), buffer[1:])]),
            buffer,
        )
    buffer = torch.full((64, 64), float(POISON))
    return None, Manifest.from_views([("w", (64, 64), (0, 0), buffer)]), buffer


@pytest.mark.parametrize("size", [1, 3])
def test_MB_01_a_copy_of_memory_that_both_sides_share_counts_as_staging(transport, size):
    sides = [shifted(rank) for rank in range(size)]
    limit = 4 * 64 * 64 * 4
    told = refit(size, lambda rank: sides[rank][:2], transport=transport, staging_nbytes=limit)
    for _, _, buffer in sides:
        assert same_bits(buffer[-64:], arange(64, 64))
    assert told[0][0].staging_nbytes >= 64 * 64 * 4
    assert max(report.staging_nbytes for report, _ in told) <= limit + UNIT_NBYTES


def test_MB_01_a_copy_that_does_not_fit_is_told_to_all_and_nothing_is_written():
    sides = [shifted(rank) for rank in range(3)]
    mine, *others = refused_refit(3, lambda rank: sides[rank][:2], staging_nbytes=1024)
    assert isinstance(mine, BindingError)
    assert "'w'" in mine.message
    assert all(isinstance(error, PeerError) and error.rank == 0 for error in others)
    assert same_bits(sides[0][2], arange(65, 64))
    assert all(same_bits(buffer, torch.full((64, 64), float(POISON))) for _, _, buffer in sides[1:])
