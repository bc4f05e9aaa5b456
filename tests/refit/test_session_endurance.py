"""Endurance: what a process holds does not grow with the number of refits, nor with the number of epochs."""

from __future__ import annotations

import gc
import os
import statistics
import threading

import pytest
import torch
from tests.refit.sessions import NAMES, Rank, dense, error_of, ranks_of

import reshard
from reshard.errors import PeerError
from reshard.testing.processes import ProcessPool

EXPECT = {"trainer": 2, "gen0": 2}


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(4) as processes:
        yield processes


def held():
    """File descriptors, threads, and private memory of this process."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as rollup:
        pss = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return len(os.listdir("/proc/self/fd")), threading.active_count(), pss


def _refits(ctx, address, count):
    torch.set_num_threads(1)
    world, rank = ranks_of(EXPECT, ctx.rank)
    me = Rank(world, rank, 2, torch.float32 if world == "trainer" else torch.bfloat16)
    seen, seconds = {}, []
    with me.connect(address, EXPECT) as session:
        for version in range(count):
            me.train(version % 100)
            seconds.append(session.refit(version).seconds)
            if version in (9, count // 2 + 4, count - 1):
                seen[version] = held()
    assert all(torch.equal(t, dense(version % 100, n)[me.part].to(t.dtype)) for n, t in me.tensors.items())
    return list(seen.values()), statistics.median(seconds[5:15]), statistics.median(seconds[-10:])


def test_after_fifty_refits_a_process_holds_what_it_held_after_ten(pool):
    with reshard.serve_store() as store:
        for (early, middle, late), *_ in pool.run(_refits, str(store), 50, timeout=60):
            assert late[0] <= early[0] + 1, "descriptors (one may be open for a moment)"
            assert late[1] == early[1], "threads"
            # What leaks grows in both halves; threads that meet in malloc for the first time get an arena once.
            assert min(middle[2] - early[2], late[2] - middle[2]) < 256, "KiB in each of two times twenty refits"


def _epochs(ctx, address, count):
    torch.set_num_threads(1)
    me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
    fails = [False]

    def installed(group, version):
        if fails[0] and me.rank == 0:
            raise OSError("it fails")

    seen = []
    with me.connect(address, EXPECT) as session:
        if not me.is_source:
            session.accept(me.manifest, installed=installed)
        for epoch in range(count):
            me.train(epoch)
            session.refit(2 * epoch)
            fails[0] = True
            error = error_of(lambda epoch=epoch: session.refit(2 * epoch + 1))
            assert isinstance(error, PeerError) or "it fails" in error.message
            fails[0] = False
            seen.append((*held(), session.epoch))
    return seen


def test_epochs_leave_nothing_behind(pool):
    with reshard.serve_store() as store:
        for seen in pool.run(_epochs, str(store), 8, timeout=60):
            assert [row[3] for row in seen] == list(range(1, 9))
            assert seen[-1][:2] == seen[2][:2], "descriptors and threads"
            assert seen[-1][2] - seen[2][2] < 1024, "KiB"


def test_the_names_of_the_tests_model_are_those_of_every_rank():
    assert Rank("gen0", 0, 2).names == NAMES
