"""Workers: the processes of a pool; each runs one function after another as a rank, until its maker is gone.

::

    maker                                     worker
    Worker(context, rank)                     serve
    start(job) ------- the job -------------> connects to the store of the run, loads the function
    hear() <---------- BEGUN ---------------- calls it
    hear() <---------- an Outcome ----------- waits for the next job
    ask_for_stacks() - SIGUSR1 -------------> writes the stacks of all threads to its log, wherever it hangs
                  <--- a byte --------------- has written them
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.testing.ranks import RankContext

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext
    from multiprocessing.process import BaseProcess

_LOG_TAIL_NBYTES = 4096
BEGUN = "begun"
"""A worker says this when it calls the function of a job."""


@dataclass(frozen=True, slots=True)
class Job:
    """One function to be called as one rank."""

    rank: int
    size: int
    host: str
    port: int
    prefix: str
    """Of the run's keys in the store at that host and port."""
    timeout: float
    path: tuple[str, ...]
    """Where the function may be imported from."""
    call: bytes
    """The function and its arguments, pickled."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker sends back; `error` is (summary, trace) or None."""

    result: Any
    error: tuple[str, str] | None


class Worker:
    """One process, the pipes to it, and the memory file that its output goes to."""

    def __init__(self, context: ForkServerContext | SpawnContext, rank: int) -> None:
        self.pipe, theirs = context.Pipe()
        lifeline, self._mine = context.Pipe(duplex=False)
        self._dumped, dumped = context.Pipe(duplex=False)
        self._log = os.memfd_create(f"reshard-test-log-{rank}")
        self._start_of_log = 0
        self._is_in_call = False
        self.process: BaseProcess = context.Process(
            target=serve,
            args=(theirs, lifeline, dumped, _LogFile(self._log)),
            name=f"reshard-rank-{rank}",
            daemon=True,
        )
        self.process.start()
        for end in (theirs, lifeline, dumped):
            end.close()
        self._killed = False

    def start(self, job: Job) -> None:
        """Send a job; its log begins here."""
        self._start_of_log = self._log_size()
        self.pipe.send_bytes(pickle.dumps(job))

    def hear(self) -> Outcome | str | None:
        """Read what the worker has sent: ``BEGUN``, or the outcome; None if it died before it sent anything."""
        try:
            if self.pipe.poll(0):
                word = pickle.loads(self.pipe.recv_bytes())
                self._is_in_call = word == BEGUN
                assert self._is_in_call or isinstance(word, Outcome)
                return word  # type: ignore[no-any-return]
        except (EOFError, ConnectionError):
            pass
        return None

    def log_tail(self) -> str:
        """The last of what the process has written since its job came."""
        start = max(self._start_of_log, self._log_size() - _LOG_TAIL_NBYTES)
        return os.pread(self._log, _LOG_TAIL_NBYTES, start).decode(errors="replace")

    def _log_size(self) -> int:
        return os.fstat(self._log).st_size

    def ask_for_stacks(self) -> None:
        """Make the process write the stacks of its threads to its log, if it is in the function of its job."""
        if self._is_in_call and self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def await_stacks(self, expiry: float) -> None:
        """Wait until it has written all of them, at most to ``expiry`` on the monotonic clock."""
        if self._is_in_call:
            left = max(0.0, expiry - time.monotonic())
            multiprocessing.connection.wait([self._dumped, self.process.sentinel], left)

    def kill(self) -> None:
        """End the process; may be called more than once."""
        if not self._killed:
            self._killed = True
            self.process.kill()
            self.process.join(10)
            for end in (self.pipe, self._mine, self._dumped):
                end.close()
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


def start_context() -> ForkServerContext | SpawnContext:
    """How workers are started: forked from a server that has torch, where the system has such servers."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", __name__])
        return context
    return multiprocessing.get_context("spawn")


def serve(pipe: Connection, lifeline: Connection, dumped: Connection, log: int) -> None:
    """Run jobs until the pipe closes: the whole life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the maker, whose end is ours
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the whole life of the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    _dump_when_asked(dumped)
    threading.Thread(target=_leave_with, args=(lifeline,), name="lifeline", daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # what is loaded by now stays: the collection after each job need not look at it
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
            outcome = pickle.dumps(_perform(job, pipe))
            pipe.send_bytes(outcome)
        except (EOFError, OSError):
            return


def _dump_when_asked(dumped: Connection) -> None:
    """At SIGUSR1 write the stacks, then a byte: the handler that faulthandler calls last is Python's own, which writes
    the signal's number there at once, even where no thread ever runs Python code again."""
    os.set_blocking(dumped.fileno(), False)
    signal.set_wakeup_fd(dumped.fileno())
    signal.signal(signal.SIGUSR1, lambda *_: None)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=True)


def _perform(job: Job, pipe: Connection) -> Outcome:
    try:
        sys.path.extend(entry for entry in job.path if entry not in sys.path)
        importlib.invalidate_caches()
        function, args = pickle.loads(job.call)
        timeout = timedelta(seconds=job.timeout)
        store = dist.TCPStore(job.host, job.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
        pipe.send_bytes(pickle.dumps(BEGUN))
        result = function(RankContext(job.rank, job.size, dist.PrefixStore(job.prefix, store), timeout), *args)
        pickle.dumps(result)
        return Outcome(result, None)
    except BaseException as error:
        return Outcome(None, (f"{type(error).__name__}: {error}", traceback.format_exc()))
    finally:
        # Groups and transports of this run must be gone before the next one, also where a traceback held them.
        gc.collect()


def _leave_with(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os._exit(1)
