"""Sizes at which 32-bit counts and small fans break: over 2^32 elements, and 64 sources for one shard."""

from __future__ import annotations

import gc
import resource
from datetime import timedelta

import pytest
import torch
from tests.cases.dense import arange, lands_right, split

import reshard
from reshard.testing.processes import ProcessPool

NUMEL = 2**32 + 4097
PERIOD = 16_777_213
"""A prime, so that no two places a power of two apart hold the same part of the pattern."""
LIMIT_NBYTES = 10 << 30
PATIENCE = timedelta(seconds=90)


def make_pattern():
    """One period of random bytes, equal on every rank; the tensor repeats it."""
    return torch.randint(256, (PERIOD,), dtype=torch.uint8, generator=torch.Generator().manual_seed(32))


def chunks(tensor):
    """(first element, chunk of the tensor), period by period."""
    return ((at, tensor[at : at + PERIOD]) for at in range(0, NUMEL, PERIOD))


def _one_large_tensor(ctx):
    src, dst = (split((NUMEL,), [rank], (), dtype="uint8") for rank in (0, 1))
    tensor, pattern = torch.empty(NUMEL, dtype=torch.uint8), make_pattern()
    if ctx.rank == 0:
        for _, chunk in chunks(tensor):
            chunk.copy_(pattern[: chunk.numel()])
        sides = {"src": tensor, "src_layout": src}
    else:
        sides = {"dst": tensor, "dst_layout": dst}
    report = reshard.reshard(**sides, group=ctx.process_group("large"), transport="torch_p2p", timeout=PATIENCE)
    wrong = [at for at, chunk in chunks(tensor) if ctx.rank == 1 and not torch.equal(chunk, pattern[: chunk.numel()])]
    return wrong, report.wire_nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_tensor_of_more_than_two_to_the_32_elements_arrives_whole():
    with ProcessPool(2) as processes:
        told = processes.run(_one_large_tensor, timeout=200)
    assert told[1][0] == [], "chunks that begin at these elements are wrong"
    assert told[1][1] == NUMEL
    assert sum(peak for _, _, peak in told) < LIMIT_NBYTES


def test_64_sources_fill_one_destination_shard(transport):
    full = arange(130, 3)  # 64 ranks hold 3, ..., 3, 1, 0, ... rows
    reports = lands_right(
        full, split((130, 3), list(range(64)), ("x",)), split((130, 3), [64], ()), 65, transport=transport
    )
    assert reports[64].wire_nbytes == full.nbytes


@pytest.fixture(autouse=True)
def _connections_end():
    """Let the thousands of connections of a test end before the next one is timed."""
    yield
    gc.collect()
