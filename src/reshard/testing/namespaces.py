"""Namespaces: processes that have a network, memory and process numbers of their own, and how such are made and ended.

All of it goes by programs that stand between this process and those (`unshare`, `nsenter`), so it needs no rights but
theirs. The first process of a namespace of process numbers takes all others in it with it when it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

from reshard.errors import EnvironmentNotSupported

if TYPE_CHECKING:
    from collections.abc import Sequence

START_SECONDS = 30.0
CLOSE_SECONDS = 10.0

# The first process of a namespace: with it all others in it end. It waits until its input or a watched process ends.
KEEP = """
import os, select, signal, socket, sys
name, pid, *watched = sys.argv[1:]
if name:
    socket.sethostname(name)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans are handed to the first process; the kernel buries them so
print(pid or os.readlink("/proc/self"), flush=True)
poll = select.poll()
for descriptor in (0, *map(int, watched)):
    poll.register(descriptor, select.POLLIN)
poll.poll()
"""

# /proc is still the machine's when this begins, so the number read there is the one that the machine knows.
SETUP = """
name=$1 known=$2; shift 2
read -r pid rest </proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys || true
mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm
mkdir -m 1777 /dev/shm/tmp
if [ -e /etc/hosts ]; then
    printf '%s' "$known" >/dev/shm/tmp/hosts
    mount --bind /dev/shm/tmp/hosts /etc/hosts
    rm /dev/shm/tmp/hosts
fi
ip link set lo up
exec "$@" "$name" "$pid"
"""


class First:
    """The first process of a namespace of process numbers, and the programs that stand between it and this process."""

    def __init__(self, command: Sequence[str], *, watch_this_process: bool = False) -> None:
        self.pid = 0
        """In the numbers of this process."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        try:
            watched = [os.pidfd_open(os.getpid())] if watch_this_process else []
        except OSError as error:
            raise EnvironmentNotSupported(
                f"Hosts in namespaces end with the process that made them, which takes Linux 5.3 or newer: {error}."
            ) from error
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, watched)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=watched,
                start_new_session=True,  # Ctrl-C is for this process, whose end is theirs
            )
        finally:
            for descriptor in watched:
                os.close(descriptor)

    def find_pid(self, expiry: float) -> int:
        """Wait until it is there and says its number.

        Raises:
            EnvironmentNotSupported: It could not be made.
        """
        line = _read_line(self._process.stdout, expiry)
        if not line.strip().isdigit():
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").strip() or f"nothing for {START_SECONDS:g} s"
            raise EnvironmentNotSupported(
                f"This process may not make hosts out of namespaces here; it was told: {said}. It needs root, or "
                "user namespaces, and in a container the right to mount (docker run --privileged)."
            )
        self.pid = int(line)
        return self.pid

    def close(self) -> None:
        """End it, and wait until it has ended, since then all that was in the namespace has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # unshare --kill-child
            self._process.wait(CLOSE_SECONDS)
        self._process.stdout.close()
        self._errors.close()


class Inside(subprocess.Popen[bytes]):
    """A program on a host. This process's child is the nsenter that forks it and must live to bury it."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program; does nothing where it has ended."""
        while self.poll() is None:
            program = _child_of(self.pid)
            if program is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(program, sig)
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0.002)  # it has not forked yet, or is about to end


def _child_of(pid: int) -> int | None:
    """The process that another one has forked."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text("utf-8", "replace").rpartition(")")[2].split()
            if int(fields[1]) == pid:
                return int(status.parent.name)
    return None


def _read_line(stream: IO[bytes] | None, expiry: float) -> bytes:
    """One line of a process, or what came of it before the end of the stream or of the time."""
    assert stream is not None
    line = b""
    while not line.endswith(b"\n") and select.select([stream], [], [], max(0.0, expiry - time.monotonic()))[0]:
        byte = os.read(stream.fileno(), 1)
        if not byte:
            break
        line += byte
    return line


def unshare(*kinds: str) -> list[str]:
    """What to put before a command so that it is the first process of new namespaces."""
    return ["unshare", *kinds, "--pid", "--fork", "--kill-child", "--"]


def enter(pid: int, *kinds: str) -> list[str]:
    """What to put before a command so that it runs in namespaces of a process."""
    user = ["--user", "--preserve-credentials"] if os.geteuid() else []
    return ["nsenter", "--target", str(pid), *user, *(f"--{kind}" for kind in kinds), "--"]


def python(script: str) -> list[str]:
    """A Python that starts quickly: without packages and settings of this machine."""
    return [sys.executable, "-I", "-S", "-c", script]


def batch(program: str, pid: int, lines: Sequence[str]) -> None:
    """Let ``ip`` or ``tc`` carry out lines in the network of a process.

    Raises:
        EnvironmentNotSupported: One of them could not be carried out; the message says what the program said.
    """
    if not lines:
        return
    # Only the network is entered: ``netns PID`` is a number of this process's namespace.
    done = subprocess.run(
        [*enter(pid, "net"), program, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    if done.returncode:
        told = (done.stderr or done.stdout).strip()
        raise EnvironmentNotSupported(
            f"The network between the hosts could not be made; {program} was told: {told}. "
            "It needs a kernel with bridges, veth pairs and the tbf queue (modules bridge, veth, sch_tbf)."
        )
