"""Launch: start the processes of both worlds, hear what they do, and see that all of them end.

Every process is spawned, as a user's would be, and gets a pipe to this one. It sends what it is doing, and at last its
result or its error. The first error ends all of them; so does the deadline, which names who was silent and doing what.
A process also ends by itself when this one is gone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.reduction import DupFd
from typing import IO, TYPE_CHECKING, Any

from reshard.errors import PeerError, RefitTimeout, ReshardError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import SpawnProcess

_GRACE_SECONDS = 2.0
"""After the first error: time for the others to say theirs, since a lost peer is often the effect and not the cause."""
_LOG_TAIL_NBYTES = 4000


class RankFailed(ReshardError):
    """A process of the demo ended otherwise than with a result; ``rank`` and ``label`` name it."""


@dataclass(frozen=True)
class Job:
    """One process: the function it runs, importable by name, and its arguments."""

    label: str
    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass
class _Child:
    job: Job
    process: SpawnProcess
    pipe: Connection
    log: IO[bytes]
    doing: str = "starting"
    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    ended: bool = field(default=False)


def run_jobs(
    jobs: Sequence[Job],
    *,
    timeout: float,
    progress: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run every job as a process and return their results in order.

    Args:
        jobs: Each ``function(say, *args)`` runs in a process of its own; ``say(text, aloud=False)`` tells what it does.
        timeout: Seconds for all of it.
        progress: Told what jobs say aloud.
        environment: Variables that the processes have besides this one's.

    Raises:
        ReshardError: What a job raised, as it raised it.
        RankFailed: A job died, or raised something else.
        RefitTimeout: The jobs were not done in time.
    """
    context = multiprocessing.get_context("spawn")
    expiry = time.monotonic() + timeout
    children: list[_Child] = []
    try:
        for job in jobs:
            pipe, theirs = context.Pipe()
            log = tempfile.TemporaryFile()  # noqa: SIM115 - has no name, so it is gone however this process ends
            process = context.Process(
                target=_serve, args=(job, theirs, _Log(log.fileno())), name=job.label, daemon=True
            )
            with _environment(environment or {}):
                process.start()
            theirs.close()
            children.append(_Child(job, process, pipe, log))
        _attend(children, expiry, timeout, progress)
    finally:
        for child in children:
            if child.ended:
                child.process.join(5)
            if child.process.is_alive():
                child.process.kill()
                child.process.join(10)
            child.pipe.close()
            child.log.close()
    return [child.result for child in children]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a process that starts inside the block: libraries read them before any code of ours runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _attend(children: list[_Child], expiry: float, timeout: float, progress: Callable[[str], None]) -> None:
    failed: list[_Child] = []
    while waiting := [child for child in children if not child.ended]:
        objects: list[Any] = [child.pipe for child in waiting] + [child.process.sentinel for child in waiting]
        ready = multiprocessing.connection.wait(objects, max(0.0, expiry - time.monotonic()))
        if not ready:
            if failed:
                break
            silent = ", ".join(f"{child.job.label} ({child.doing})" for child in waiting)
            raise RefitTimeout(
                f"The processes were not done after {timeout:g} s; still at work: {silent}. "
                "Raise --timeout on a slow machine.",
                ranks=tuple(child.job.label for child in waiting),
            )
        for child in waiting:
            if child.pipe in ready or child.process.sentinel in ready:
                _hear(child, progress)
                if child.ended and (child.error is not None) and child not in failed:
                    failed.append(child)
                    expiry = min(expiry, time.monotonic() + _GRACE_SECONDS)
    if failed:
        _raise_first(failed)


def _hear(child: _Child, progress: Callable[[str], None]) -> None:
    """Take in all that a child has said by now; a child that is gone without a last word has died."""
    alive = child.process.is_alive()  # asked first: what a child said before its end is in the pipe by then
    try:
        while child.pipe.poll(0):
            kind, value = pickle.loads(child.pipe.recv_bytes())
            if kind == "doing":
                child.doing, aloud = value
                if aloud:
                    progress(child.doing)
            elif kind == "done":
                child.result, child.ended = value, True
            else:
                (child.error, child.trace), child.ended = value, True
    except (EOFError, OSError):
        alive = False
    if child.ended or alive:
        return
    child.process.join(10)
    code = child.process.exitcode
    died = f"by signal {signal.Signals(-code).name}" if code and code < 0 else f"with exit code {code}"
    child.error, child.ended = RankFailed(f"The process died {died} while {child.doing}."), True


def _raise_first(failed: Sequence[_Child]) -> None:
    """Raise the error that was there first; one that blames a peer gives way to the peer's own."""
    blaming = (PeerError, TransportError, RankFailed)
    child = next(
        (c for c in failed if isinstance(c.error, ReshardError) and not isinstance(c.error, blaming)), failed[0]
    )
    error = child.error
    assert error is not None
    if isinstance(error, ReshardError) and not isinstance(error, RankFailed):
        error.add_note(f"in {child.job.label}, while {child.doing}\n{child.trace}")
        raise error
    log = ""
    with contextlib.suppress(OSError):
        start = max(0, os.fstat(child.log.fileno()).st_size - _LOG_TAIL_NBYTES)
        log = os.pread(child.log.fileno(), _LOG_TAIL_NBYTES, start).decode(errors="replace").strip()
    lines = [f"{child.job.label}: {error}" if isinstance(error, RankFailed) else f"{child.job.label}: {error!r}"]
    lines += [text for text in (child.trace, log) if text]
    raise RankFailed("\n".join(lines), label=child.job.label) from error


class _Log:
    """The descriptor of a log on its way into a new process; there it arrives as a number."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return (_detach, (DupFd(self._descriptor),))


def _detach(duplicate: Any) -> int:
    descriptor: int = duplicate.detach()
    return descriptor


def _serve(job: Job, pipe: Connection, log: int) -> None:
    """Run one job: the whole life of a child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 - for the whole life of the process
    threading.Thread(target=_leave_with_parent, name="lifeline", daemon=True).start()
    warnings.simplefilter("ignore")

    def say(text: str, *, aloud: bool = False) -> None:
        pipe.send_bytes(pickle.dumps(("doing", (text, aloud))))

    try:
        word = pickle.dumps(("done", job.function(say, *job.args)))
    except BaseException as error:
        word = pickle.dumps(("failed", (_sendable(error), traceback.format_exc())))
    with contextlib.suppress(OSError):
        pipe.send_bytes(word)
    pipe.close()


def _sendable(error: BaseException) -> BaseException:
    """The error itself if another process can read it, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankFailed(f"{type(error).__name__}: {error}")
    return error


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
