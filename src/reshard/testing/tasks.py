"""Tasks: functions that run in processes of their own, on hosts, and what those and the one who started them tell.

::

    Cluster.start(host, function, *args) -> Task          on the host: function(talk, *args)
    task.send(value) ------------------------------------> talk.recv()
    task.recv(timeout), hear(tasks, timeout) <------------ talk.send(value), or what the function returns or raises
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError, PeerError, RefitTimeout, ReshardError, TransportError
from reshard.testing.namespaces import CLOSE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_GRACE_SECONDS = 2.0
"""After the first failure, time for the others to say theirs: a lost peer is often the effect and not the cause."""
_LOG_TAIL_NBYTES = 4000


class TaskFailed(ReshardError):
    """A function on a host raised an error that is not ours, or its process died; ``label`` names it."""


class Talk:
    """The function's end of what it and the process that made the cluster tell each other; values must be picklable."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def send(self, value: Any) -> None:
        """Tell a value; ``Task.recv`` or ``hear`` returns it there."""
        self._pipe.send_bytes(pickle.dumps(("said", value)))

    def recv(self) -> Any:
        """Wait for a value that ``Task.send`` tells; the process ends with the cluster, so this needs no deadline."""
        return pickle.loads(self._pipe.recv_bytes())


class Task:
    """A function that runs in a process of its own on a host; made by ``Cluster.start``.

    Args:
        popen: Starts a program there: a program and its arguments, then as ``subprocess.Popen``.
        host: Where.
        label: What errors call it.
        function: Importable by name; it is given a ``Talk``.
        args: Picklable.
    """

    def __init__(
        self,
        popen: Callable[..., subprocess.Popen[bytes]],
        host: str,
        label: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        self.host = host
        self.label = label
        try:
            call = pickle.dumps((function, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{function!r} and its arguments cannot be sent to a host: {error}. Define the function at the top of "
                "an importable module."
            ) from error
        ours, theirs = socket.socketpair()
        self.pipe = Connection(ours.detach())
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - has no name, so it is gone however this process ends
        with theirs:
            self._process = popen(
                [sys.executable, "-P", "-c", _TASK, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        with contextlib.suppress(BrokenPipeError):  # it died at once; whoever listens will hear
            self.pipe.send_bytes(call)

    def send(self, value: Any) -> None:
        """Tell the function a value, which ``Talk.recv`` returns there."""
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send_bytes(pickle.dumps(value))

    def recv(self, timeout: float) -> Any:
        """What the function tells next, or what it returns; as ``hear`` for one."""
        return hear([self], timeout)[0]

    def log(self) -> str:
        """The last of what the process has written on its output."""
        end = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _LOG_TAIL_NBYTES, max(0, end - _LOG_TAIL_NBYTES))
        return text.decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process; may be called more than once, and after its end."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Wait for the process to end."""
        self._process.wait(CLOSE_SECONDS)
        self.pipe.close()
        self._log.close()

    def take(self) -> Any:
        """The word that is in the pipe.

        Raises:
            ReshardError: The function failed or died.
        """
        try:
            kind, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            code = self._process.wait(CLOSE_SECONDS)
            died = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            raise TaskFailed("\n".join(filter(None, (f"{self.label}: the process died {died}.", self.log()))),
                             label=self.label) from None  # fmt: skip
        if kind != "failed":
            return value
        error, summary, trace = value
        if isinstance(error, ReshardError):
            error.add_note(f"in {self.label}\n{trace}")
            raise error
        raise TaskFailed("\n".join(filter(None, (f"{self.label}: {summary}", trace, self.log()))), label=self.label)


def hear(tasks: Sequence[Task], timeout: float) -> list[Any]:
    """Wait for one word of every task: what it tells next, or what it returns.

    Args:
        tasks: Each has something to say.
        timeout: Seconds for all of them.

    Returns:
        Their words, in order.

    Raises:
        ReshardError: One of ours, as it was raised; the cause where others only blame a peer.
        TaskFailed: A function raised another error, or its process died.
        RefitTimeout: Some said nothing; they are named.
    """
    words: dict[int, Any] = {}
    failures: list[ReshardError] = []
    waiting = dict(enumerate(tasks))
    expiry = time.monotonic() + timeout
    while waiting:
        ready = wait([task.pipe for task in waiting.values()], max(0.0, expiry - time.monotonic()))
        if not ready:
            break
        for at, task in list(waiting.items()):
            if task.pipe not in ready:
                continue
            del waiting[at]
            try:
                words[at] = task.take()
            except ReshardError as error:
                failures.append(error)
                expiry = min(expiry, time.monotonic() + _GRACE_SECONDS)
    if failures:
        blaming = (PeerError, TransportError, TaskFailed)
        raise next((error for error in failures if not isinstance(error, blaming)), failures[0])
    if waiting:
        silent = tuple(task.label for task in waiting.values())
        raise RefitTimeout(f"Nothing was heard for {timeout:g} s of: {', '.join(silent)}.", labels=silent)
    return [words[at] for at in range(len(tasks))]


_TASK = "import sys; from reshard.testing.tasks import serve; serve(int(sys.argv[1]))"


def serve(descriptor: int) -> None:
    """Run one function: the whole life of a task's process."""
    pipe = Connection(descriptor)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        function, args = pickle.loads(pipe.recv_bytes())
        word = pickle.dumps(("done", function(Talk(pipe), *args)))
    except BaseException as error:
        told = error if isinstance(error, ReshardError) else None
        word = pickle.dumps(("failed", (told, f"{type(error).__name__}: {error}", traceback.format_exc())))
    with contextlib.suppress(OSError):
        pipe.send_bytes(word)
