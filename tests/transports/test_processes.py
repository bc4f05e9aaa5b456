"""The pool of real processes for tests: what fails is named, and nothing outlives its maker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from reshard.errors import ConfigError
from reshard.testing.processes import Died, RanksFailed, threads


def pass_round(context, value):
    group = context.process_group("ring")
    sent, got = torch.tensor([value + context.rank]), torch.tensor([-1])
    works = [
        group.send([sent], (context.rank + 1) % context.size, 0),
        group.recv([got], (context.rank - 1) % context.size, 0),
    ]
    for work in works:
        work.wait()
    return int(got), torch.get_num_threads(), os.getpid()


def raise_on_one(context):
    print(f"rank {context.rank} says this")
    if context.rank == 1:
        raise ValueError("rank one's own words")
    context.store.wait(["never"])


def die_on_one(context):
    if context.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class SlowToLoad:
    """Takes longer to be read in another process than the ranks that get it may run."""

    def __reduce__(self):
        return time.sleep, (1.2,)


def hang_on_one(context, _slow):
    if context.rank == 1:
        threading.Event().wait()


def test_ranks_run_in_processes_that_live_from_run_to_run(pool):
    first = pool.run(pass_round, 10, ranks=3)
    assert [got for got, _, _ in first] == [12, 10, 11]
    assert {number for _, number, _ in first} == {1}
    assert len({pid for _, _, pid in first} | {os.getpid()}) == 4
    assert pool.run(pass_round, 20, ranks=3) == [(got + 10, 1, pid) for got, _, pid in first]


def test_the_first_failure_stops_all_and_shows_trace_and_log(pool):
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"Rank 1 of 2: ValueError: rank one's own words") as caught:
        pool.run(raise_on_one, ranks=2)
    assert time.monotonic() - start < 10
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    assert "rank 1 says this" in str(caught.value)
    assert "in raise_on_one" in str(caught.value)


def test_a_rank_that_dies_is_named_or_allowed_to_and_is_replaced(pool):
    with pytest.raises(RanksFailed, match=r"Rank 1 of 3: died \(signal SIGKILL\)"):
        pool.run(die_on_one, ranks=3)
    assert pool.run(die_on_one, ranks=3, may_die={1}) == [None, Died(-9), None]
    assert [got for got, _, _ in pool.run(pass_round, 0, ranks=3)] == [2, 0, 1]


def test_a_rank_that_hangs_is_named_with_the_place_where_it_hangs(pool):
    with pytest.raises(RanksFailed, match="Rank 1 of 2: was not done after 1 s") as caught:
        pool.run(hang_on_one, SlowToLoad(), ranks=2, timeout=1)
    assert "in hang_on_one" in str(caught.value)
    assert [got for got, _, _ in pool.run(pass_round, 0, ranks=2)] == [1, 0]


def test_what_cannot_be_sent_to_a_process_is_refused(pool):
    with pytest.raises(ConfigError, match="Define the function at the top of an importable module"):
        pool.run(lambda context: None)
    with pytest.raises(ConfigError, match="5 ranks cannot run in a pool of 4 processes"):
        pool.run(pass_round, 0, ranks=5)


def test_workers_end_when_their_maker_is_killed():
    script = (
        "import os, signal\n"
        "from reshard.testing.processes import ProcessPool\n"
        "if __name__ == '__main__':\n"
        "    print(*ProcessPool(2).pids(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    expiry = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < expiry, "workers outlive the process that made them"
        time.sleep(0.02)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_many_ranks_run_as_threads():
    assert [got for got, _, _ in threads(32, lambda context: pass_round(context, 0))] == [31, *range(31)]


def test_a_thread_that_raises_or_hangs_is_named():
    def scenario(context):
        if context.rank == 2:
            raise ValueError("two")
        if context.rank == 0:
            context.store.wait(["never"])

    with pytest.raises(RanksFailed, match="Rank 2 of 3: ValueError: two\nRank 0 then: did not end in time"):
        threads(3, scenario, timeout=5)
