"""Real ranks for tests: a pool of processes that lives from test to test, and threads for when many ranks are wanted.

A pool's workers are forked from a server that has torch loaded already, so that four of them start in about 0.1 s
(where there is no such server they are spawned, in some seconds). They end when the process that made the pool ends,
however it ends: each worker holds one end of a pipe whose other end only the maker has, and leaves when that closes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from reshard.errors import ConfigError, ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

Result = TypeVar("Result")

_LOG_TAIL_NBYTES = 4096
_GRACE_SECONDS = 2.0
"""How long other ranks may go on after the first failure, so that what they say about it is seen too."""


@dataclass(frozen=True, slots=True)
class Died:
    """The result of a rank that ended its process, where the caller had said that it may."""

    exit_code: int | None
    """As `multiprocessing` has it: minus the signal's number for a signal."""


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
                expiry = min(expiry, time.monotonic() + _GRACE_SECONDS)
            changed.wait(max(0.0, expiry - time.monotonic()))
        told = set(results) | {failure.rank for failure in failures}
        frames = sys._current_frames()
        for rank in sorted(set(range(size)) - told):
            frame = frames.get(workers[rank].ident or -1)
            stack = "".join(traceback.format_stack(frame)) if frame else ""
            failures.append(RankFailure(rank, "did not end in time", stack, ""))
    if failures:
        raise _error_of(failures, size)
    for worker in workers:
        worker.join(max(0.0, expiry - time.monotonic()))
    return [results[rank] for rank in range(size)]


class ProcessPool:
    """A fixed number of worker processes that run one function after another as ranks.

    A worker that dies or hangs is named in the error, and all workers of that run are replaced before the next one.
    Use it as a context manager, or close it; the pool also ends with the interpreter.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigError(f"A pool of {size} processes cannot be made; it needs at least one.")
        self.size = size
        self._context = _context()
        # The maker hosts the store, so that no rank's death takes it away from the others.
        self._store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        self._runs = itertools.count()
        self._workers: list[_Worker | None] = [None] * size
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
            timeout: Seconds for all of it. A rank that is not done by then is killed and named.
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
            worker.start_of_log = worker.log_size()
            job = _Job(rank, size, self._store.host, self._store.port, prefix, timeout, tuple(sys.path), call)
            worker.pipe.send_bytes(pickle.dumps(job))
        results, failures = _collect(workers, timeout, may_die)
        broken = {failure.rank for failure in failures}
        for rank, worker in enumerate(workers):
            if rank not in results or isinstance(results[rank], Died) or rank in broken:
                worker.kill()
                self._workers[rank] = None
        if failures:
            raise _error_of(failures, size)
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

    def _worker(self, rank: int) -> _Worker:
        worker = self._workers[rank]
        if worker is None or not worker.process.is_alive():
            if worker is not None:
                worker.kill()
            worker = self._workers[rank] = _Worker(self._context, rank)
        return worker


@dataclass(frozen=True, slots=True)
class _Job:
    rank: int
    size: int
    host: str
    port: int
    prefix: str
    timeout: float
    path: tuple[str, ...]
    call: bytes


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a worker sends back; `error` is (summary, trace) or None."""

    result: Any
    error: tuple[str, str] | None


class _Worker:
    """One process, the pipe to it, and the memory file that its output goes to."""

    def __init__(self, context: ForkServerContext | SpawnContext, rank: int) -> None:
        self.pipe, theirs = context.Pipe()
        lifeline, self._mine = context.Pipe(duplex=False)
        self._log = os.memfd_create(f"reshard-test-log-{rank}")
        self.start_of_log = 0
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, lifeline, _LogFile(self._log)), name=f"reshard-rank-{rank}", daemon=True
        )
        self.process.start()
        theirs.close()
        lifeline.close()
        self._killed = False

    def log_size(self) -> int:
        return os.fstat(self._log).st_size

    def log_tail(self) -> str:
        start = max(self.start_of_log, self.log_size() - _LOG_TAIL_NBYTES)
        return os.pread(self._log, _LOG_TAIL_NBYTES, start).decode(errors="replace")

    def dump_stacks(self) -> None:
        """Make the process write the stacks of its threads to its log."""
        if self.process.is_alive() and self.process.pid is not None:
            before = self.log_size()
            os.kill(self.process.pid, signal.SIGUSR1)
            expiry = time.monotonic() + 0.5
            while self.log_size() == before and time.monotonic() < expiry:
                time.sleep(0.01)

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self.process.kill()
            self.process.join(10)
            self.pipe.close()
            self._mine.close()
            os.close(self._log)


class _LogFile:
    """A file descriptor that survives the way into a new process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return (_detach, (DupFd(self.descriptor),))


def _detach(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


def _context() -> ForkServerContext | SpawnContext:
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", __name__])
        return context
    return multiprocessing.get_context("spawn")


def _collect(
    workers: Sequence[_Worker], timeout: float, may_die: Collection[int]
) -> tuple[dict[int, Any], list[RankFailure]]:
    """Wait for all ranks; after the first failure the others have a short while to say what they saw of it."""
    results: dict[int, Any] = {}
    failures: list[RankFailure] = []
    waiting = dict(enumerate(workers))
    expiry = time.monotonic() + timeout
    while waiting:
        objects: list[Any] = [worker.pipe for worker in waiting.values()]
        objects += [worker.process.sentinel for worker in waiting.values()]
        ready = set(multiprocessing.connection.wait(objects, max(0.0, expiry - time.monotonic())))
        if not ready:
            for worker in waiting.values():
                worker.dump_stacks()
            first = not failures
            for rank, worker in waiting.items():
                said = f"was not done after {timeout:g} s" if first else "was stopped because another rank had failed"
                failures.append(RankFailure(rank, said, "", worker.log_tail()))
            break
        for rank, worker in list(waiting.items()):
            if worker.pipe not in ready and worker.process.sentinel not in ready:
                continue
            del waiting[rank]
            outcome = _outcome(worker)
            if outcome is not None and outcome.error is None:
                results[rank] = outcome.result
                continue
            if outcome is not None and outcome.error is not None:
                failures.append(RankFailure(rank, *outcome.error, worker.log_tail()))
            else:
                worker.process.join(5)
                code = worker.process.exitcode
                if rank in may_die:
                    results[rank] = Died(code)
                    continue
                failures.append(RankFailure(rank, f"died ({_describe(code)})", "", worker.log_tail()))
            expiry = min(expiry, time.monotonic() + _GRACE_SECONDS)
    return results, failures


def _outcome(worker: _Worker) -> _Outcome | None:
    """Read what the worker sent; None if it died before it sent anything."""
    try:
        if worker.pipe.poll(0):
            outcome = pickle.loads(worker.pipe.recv_bytes())
            assert isinstance(outcome, _Outcome)
            return outcome
    except (EOFError, ConnectionError):
        pass
    return None


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def _error_of(failures: Sequence[RankFailure], size: int) -> RanksFailed:
    first = failures[0]
    lines = [f"Rank {first.rank} of {size}: {first.summary}"]
    lines += [f"Rank {failure.rank} then: {failure.summary.splitlines()[0]}" for failure in failures[1:]]
    for failure in failures:
        for title, text in (("traceback", failure.trace), ("log", failure.log)):
            if text.strip():
                lines.append(f"--- rank {failure.rank}, {title} ---\n{text.rstrip()}")
    return RanksFailed("\n".join(lines), rank=first.rank, failures=tuple(failures))


def _serve(pipe: Connection, lifeline: Connection, log: int) -> None:
    """Run jobs until the pipe closes: the whole life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the maker, whose end is ours
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the whole life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    threading.Thread(target=_leave_with, args=(lifeline,), name="lifeline", daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        outcome = pickle.dumps(_perform(job))
        try:
            pipe.send_bytes(outcome)
        except OSError:
            return


def _perform(job: _Job) -> _Outcome:
    try:
        sys.path.extend(entry for entry in job.path if entry not in sys.path)
        importlib.invalidate_caches()
        function, args = pickle.loads(job.call)
        timeout = timedelta(seconds=job.timeout)
        store = dist.TCPStore(job.host, job.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
        result = function(RankContext(job.rank, job.size, dist.PrefixStore(job.prefix, store), timeout), *args)
        pickle.dumps(result)
        return _Outcome(result, None)
    except BaseException as error:
        return _Outcome(None, (f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        # Groups and transports of this run must be gone before the next one, also where a traceback held them.
        gc.collect()


def _leave_with(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
