"""Real ranks for tests: a pool of processes that lives from test to test, and threads for when many ranks are wanted.

A pool's workers are forked from a server that has torch loaded already, so that four of them start in about 0.1 s
(where there is no such server they are spawned, in some seconds). They end when the process that made the pool ends,
however it ends: each worker holds one end of a pipe whose other end only the maker has, and leaves when that closes.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing.connection
import pickle
import signal
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from reshard.errors import ConfigError
from reshard.testing.ranks import GRACE_SECONDS, RankContext, RankFailure, RanksFailed, threads
from reshard.testing.workers import BEGUN, Job, Outcome, Worker, start_context

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_START_SECONDS = 120.0
"""How long processes may take to start, load the function and find the store."""

_DUMP_SECONDS = 5.0
"""How long those that hang may take to say where; a busy machine may not let them run for a while."""


@dataclass(frozen=True, slots=True)
class Died:
    """The result of a rank that ended its process, where the caller had said that it may."""

    exit_code: int | None
    """As `multiprocessing` has it: minus the signal's number for a signal."""


class ProcessPool:
    """A fixed number of worker processes that run one function after another as ranks.

    A worker that dies or hangs is named in the error, and all workers of that run are replaced before the next one.
    Use it as a context manager, or close it; the pool also ends with the interpreter.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"A pool of {size} processes cannot be made; it needs at least one.")
        self.size = size
        self._context = start_context()
        # The maker hosts the store, so that no rank's death takes it away from the others.
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._runs = itertools.count()
        self._workers: list[Worker | None] = [None] * size
        self._closed = False
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        ranks: int | None = None,
        timeout: float = 60.0,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """Call `function(rank_context, *args)` on every rank, and return what they returned, in rank order.

        Args:
            function: Importable by name in another process: defined at the top of a module.
            *args: Picklable; the same for all ranks.
            ranks: How many ranks; all workers of the pool if not given.
            timeout: Seconds for all of it, from when the last rank begins. A rank that is not done by then is killed
                and named.
            may_die: Ranks whose process may end; their result is then a `Died`.

        Raises:
            RanksFailed: A rank raised, died, or was not done in time. The first failure ends the run.
        """
        size = self.size if ranks is None else ranks
        if self._closed or not 1 <= size <= self.size:
            raise ConfigError(f"{size} ranks cannot run in a pool of {self.size} processes (closed: {self._closed}).")
        prefix = f"run{next(self._runs)}"
        try:
            call = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{function!r} and its arguments cannot be sent to another process: {error}. "
                "Define the function at the top of an importable module."
            ) from error
        workers = [self._worker(rank) for rank in range(size)]
        for rank, worker in enumerate(workers):
            worker.start(Job(rank, size, self._store.host, self._store.port, prefix, timeout, tuple(sys.path), call))
        results, failures = _collect(workers, timeout, may_die)
        broken = {failure.rank for failure in failures}
        for rank, worker in enumerate(workers):
            if rank not in results or isinstance(results[rank], Died) or rank in broken:
                worker.kill()
                self._workers[rank] = None
        if failures:
            raise RanksFailed.of(failures, size)
        return [results[rank] for rank in range(size)]

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are alive, started if need be."""
        return [self._worker(rank).process.pid or 0 for rank in range(self.size)]

    def close(self) -> None:
        """End all workers; may be called more than once."""
        self._closed = True
        atexit.unregister(self.close)
        for worker in self._workers:
            if worker is not None:
                worker.kill()
        self._workers = [None] * self.size

    def __enter__(self) -> ProcessPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _worker(self, rank: int) -> Worker:
        worker = self._workers[rank]
        if worker is None or not worker.process.is_alive():
            if worker is not None:
                worker.kill()
            worker = self._workers[rank] = Worker(self._context, rank)
        return worker


def _collect(
    workers: Sequence[Worker], timeout: float, may_die: Collection[int]
) -> tuple[dict[int, Any], list[RankFailure]]:
    """Wait for all ranks; after the first failure the others have a short while to say what they saw of it."""
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    waiting = dict(enumerate(workers))
    starting = set(waiting)
    limit = f"had not begun after {_START_SECONDS:g} s"
    expiry = time.monotonic() + _START_SECONDS
    while waiting:
        objects: list[Any] = [worker.pipe for worker in waiting.values()]
        objects += [worker.process.sentinel for worker in waiting.values()]
        ready = set(multiprocessing.connection.wait(objects, max(0.0, expiry - time.monotonic())))
        if not ready:
            said = "was stopped because another rank had failed" if failures else limit
            late = waiting if failures or not starting else {rank: waiting[rank] for rank in sorted(starting)}
            for worker in late.values():
                worker.ask_for_stacks()
            last = time.monotonic() + _DUMP_SECONDS
            for rank, worker in late.items():
                worker.await_stacks(last)
                failures.append(RankFailure(rank, said, "", worker.log_tail()))
            break
        for rank, worker in list(waiting.items()):
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            outcome = worker.hear()
            if rank in starting:
                starting.discard(rank)
                if not starting and not failures:
                    limit = f"was not done after {timeout:g} s"
                    expiry = time.monotonic() + timeout
            if outcome == BEGUN:
                continue
            del waiting[rank]
            if isinstance(outcome, Outcome) and outcome.error is None:
                results[rank] = outcome.result
                continue
            if isinstance(outcome, Outcome) and outcome.error is not None:
                failures.append(RankFailure(rank, *outcome.error, worker.log_tail()))
            else:
                worker.process.join(5)
                code = worker.process.exitcode
                if rank in may_die:
                    results[rank] = Died(code)
                    continue
                failures.append(RankFailure(rank, f"died ({_describe(code)})", "", worker.log_tail()))
            expiry = min(expiry, time.monotonic() + GRACE_SECONDS)
    return results, failures


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


__all__ = ["Died", "ProcessPool", "RankContext", "RankFailure", "RanksFailed", "threads"]
