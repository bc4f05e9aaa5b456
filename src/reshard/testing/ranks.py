"""Ranks: what a function that runs as one rank is given, how its failure is told, and ranks that are threads."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from reshard.errors import ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Result = TypeVar("Result")

GRACE_SECONDS = 2.0
"""How long other ranks may go on after the first failure, so that what they say about it is seen too."""


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What happened to one rank."""

    rank: int
    summary: str
    trace: str
    log: str


class RanksFailed(ReshardError):
    """One or more ranks raised, died or hung; `failures` has one `RankFailure` for each, the first one first."""

    failures: tuple[RankFailure, ...]

    @classmethod
    def of(cls, failures: Sequence[RankFailure], size: int) -> RanksFailed:
        """Make the error of some of ``size`` ranks."""
        first = failures[0]
        lines = [f"Rank {first.rank} of {size}: {first.summary}"]
        lines += [f"Rank {failure.rank} then: {failure.summary.splitlines()[0]}" for failure in failures[1:]]
        for failure in failures:
            for title, text in (("traceback", failure.trace), ("log", failure.log)):
                if text.strip():
                    lines.append(f"--- rank {failure.rank}, {title} ---\n{text.rstrip()}")
        return cls("\n".join(lines), rank=first.rank, failures=tuple(failures))


class RankContext:
    """What a function that runs as one rank is given."""

    def __init__(self, rank: int, size: int, store: dist.Store, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.store = store
        """Shared by all ranks of this run and by no other run."""
        self.timeout = timeout

    def process_group(self, name: str) -> dist.ProcessGroup:
        """Make a gloo group of all ranks under `name`, which must be fresh; no default group is made or needed."""
        store = dist.PrefixStore(f"group/{name}", self.store)
        # The constructor that takes no options looks up the name of the host; tests stay on loopback.
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self.timeout
        backend = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, self.rank, self.size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group


def threads(size: int, function: Callable[[RankContext], Result], *, timeout: float = 30.0) -> list[Result]:
    """Run `function` as `size` ranks, one thread each, and return their results in rank order.

    Args:
        size: Number of ranks; 64 with a gloo group each take about a second.
        function: Called with the rank's `RankContext`.
        timeout: Seconds for all of it. A thread cannot be killed: one that hangs is left behind as a daemon.

    Raises:
        RanksFailed: A rank raised, or was not done in time.
    """
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=timeout))
    results: dict[int, Result] = {}
    failures: list[RankFailure] = []
    changed = threading.Condition()

    def run(rank: int) -> None:
        context = RankContext(rank, size, dist.PrefixStore("run", store), timedelta(seconds=timeout))
        try:
            result = function(context)
        except BaseException as error:
            failure = RankFailure(rank, f"{type(error).__name__}: {error}", traceback.format_exc(), "")
            with changed:
                failures.append(failure)
                changed.notify()
        else:
            with changed:
                results[rank] = result
                changed.notify()

    workers = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    expiry = time.monotonic() + timeout
    for worker in workers:
        worker.start()
    with changed:
        while len(results) + len(failures) < size and time.monotonic() < expiry:
            if failures:
                expiry = min(expiry, time.monotonic() + GRACE_SECONDS)
            changed.wait(max(0.0, expiry - time.monotonic()))
        told = set(results) | {failure.rank for failure in failures}
        frames = sys._current_frames()
        for rank in sorted(set(range(size)) - told):
            frame = frames.get(workers[rank].ident or -1)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            failures.append(RankFailure(rank, "did not end in time", stack, ""))
    if failures:
        raise RanksFailed.of(failures, size)
    for worker in workers:
        worker.join(max(0.0, expiry - time.monotonic()))
    return [results[rank] for rank in range(size)]
