"""Hosts on one machine: namespaces that share nothing but files, joined by a bridge over links of a limited rate.

::

    this process --- keeper (pid and network namespace, holds the bridge)
                       |-- port0 ======= eth0 of host A: 10.77.0.1, its own /dev/shm, process numbers, host name
                       |-- port1 ======= eth0 of host B: 10.77.0.2
                       '-- ...             a link; both directions are limited by a token bucket

What two real hosts cannot share, these cannot either: network, shared memory, Unix sockets without a file, semaphores,
process numbers. Files they share, so that the same Python and the same code run everywhere; ``TMPDIR`` is a host's own.

Nothing of this machine's own network is touched: bridge and links lie inside the keeper's namespace and have no names
in the file system. **Whatever happens, all of it ends:** the keeper is the first process of a namespace that all
others nest in, so the kernel ends them with it; and it ends when this process closes the cluster or is gone itself,
killed or not, which the keeper sees in a pipe and in a descriptor of this process.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reshard.errors import ConfigError, EnvironmentNotSupported, PeerError, RefitTimeout, ReshardError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

TOOLS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("unshare", "nsenter", "mount"), "util-linux"),
}
"""Programs that are needed, and the Debian packages they are in."""

HEADER_NBYTES = 66
"""Ethernet, IPv4, and TCP with timestamps: what comes before a packet's payload."""

_BITS_PER_SECOND = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_START_SECONDS = 30.0
_CLOSE_SECONDS = 10.0
_GRACE_SECONDS = 2.0
"""After the first failure, time for the others to say theirs: a lost peer is often the effect and not the cause."""
_LOG_TAIL_NBYTES = 4000
_LONGEST_PACKET_NBYTES = 128 << 10  # the stack hands over 64 KiB at a time; a bucket that holds less would cut them up
_QUEUE_MILLISECONDS = 50  # deep enough that two who send to one host lose next to nothing


def parse_rate(text: str) -> int:
    """Read a link's rate into bits per second.

    Raises:
        ConfigError: The text is no positive number with a unit.

    >>> parse_rate("2Gbit"), parse_rate("1.5 Mbit/s")
    (2000000000, 1500000)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgG]?bit)(?:/s|ps)?\s*", text)
    bits = round(float(match.group(1)) * _BITS_PER_SECOND[match.group(2).lower()]) if match else 0
    if bits < 8:
        raise ConfigError(f"{text!r} is not a rate. Write a number and a unit, as in '2Gbit' or '500Mbit'.", value=text)
    return bits


@dataclass(frozen=True, slots=True)
class LinkCount:
    """What went over a host's link since it was made, as the interface counts it; differences are counts too.

    A packet of up to 64 KiB that the stack cuts up at its end is counted once, with one header.
    """

    out_nbytes: int
    in_nbytes: int
    out_packets: int
    in_packets: int

    def __sub__(self, earlier: LinkCount) -> LinkCount:
        return LinkCount(
            self.out_nbytes - earlier.out_nbytes,
            self.in_nbytes - earlier.in_nbytes,
            self.out_packets - earlier.out_packets,
            self.in_packets - earlier.in_packets,
        )

    @property
    def out_payload_nbytes(self) -> int:
        """Bytes that left the host, less a TCP header for every packet."""
        return self.out_nbytes - HEADER_NBYTES * self.out_packets

    @property
    def in_payload_nbytes(self) -> int:
        """Bytes that came to the host, less a TCP header for every packet."""
        return self.in_nbytes - HEADER_NBYTES * self.in_packets


class TaskFailed(ReshardError):
    """A function on a host raised an error that is not ours, or its process died; ``label`` names it."""


class Cluster:
    """Some hosts, as long as the ``with`` block lasts.

    Args:
        hosts: Names; or by name the rate of its link, None for the rate of all.
        rate: Of every link, in each direction, as ``"2Gbit"``; None for no limit.

    Raises:
        ConfigError: A name that no host can have, or a rate that cannot be read.
        EnvironmentNotSupported: This machine does not let this process make namespaces; the message says why.

    >>> with Cluster(["A", "B"], rate="1Gbit") as cluster:  # doctest: +SKIP
    ...     cluster.run("B", socket.gethostname)
    'B'
    """

    def __init__(self, hosts: Mapping[str, str | None] | Iterable[str], *, rate: str | None = None) -> None:
        given = dict(hosts) if isinstance(hosts, Mapping) else dict.fromkeys(hosts)
        for name in given:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,62}", name):
                raise ConfigError(f"{name!r} is no name for a host: a letter, then letters, digits and '-'.")
        if not 1 <= len(given) <= 200:
            raise ConfigError(f"A cluster of {len(given)} hosts cannot be made; it has 1 to 200.")
        self.hosts = tuple(given)
        self._bits_per_second = {
            name: None if (text := own or rate) is None else parse_rate(text) for name, own in given.items()
        }
        self._keeper: _First | None = None
        self._firsts: dict[str, _First] = {}
        self._tasks: list[Task] = []

    # -- what a host has -------------------------------------------------------------------------------------------

    def address(self, host: str) -> str:
        """The host's address in the cluster's network."""
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def bytes_per_second(self, host: str) -> float | None:
        """The rate of the host's link in each direction, headers included; None where it has no limit."""
        bits = self._bits_per_second[host]
        return None if bits is None else bits / 8

    def link_count(self, host: str) -> LinkCount:
        """What has gone over the host's link by now, counted at the bridge's end of it."""
        assert self._keeper is not None
        port = f"port{self.hosts.index(host)}:"
        for line in Path(f"/proc/{self._keeper.pid}/net/dev").read_text("ascii").splitlines():
            name, *counts = line.split()
            if name == port:  # received here is what the host has sent
                return LinkCount(int(counts[0]), int(counts[8]), int(counts[1]), int(counts[9]))
        raise TransportError(f"Host {host!r} has no link any more.", host=host)

    def link_nbytes(self, host: str) -> tuple[int, int]:
        """Bytes that have left the host and come to it by now, headers included."""
        count = self.link_count(host)
        return count.out_nbytes, count.in_nbytes

    def pids(self) -> list[int]:
        """The first process of each host, in this process's numbers, and the keeper's; when they are gone, all is."""
        assert self._keeper is not None
        return [*(first.pid for first in self._firsts.values()), self._keeper.pid]

    # -- what runs on it -------------------------------------------------------------------------------------------

    def popen(self, host: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program on a host; it ends with the cluster, or when the process returned here is killed.

        Args:
            host: Where.
            argv: The program and its arguments.
            **options: As ``subprocess.Popen`` has them. Gloo and NCCL are told the host's interface.
        """
        environment = dict(options.pop("env", None) or os.environ)
        environment |= {"TMPDIR": "/dev/shm/tmp", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        folder = ["env", f"--chdir={options.pop('cwd', None) or os.getcwd()}"]
        command = [*_enter(self._firsts[host].pid, "net", "mount", "ipc", "uts", "pid"), *folder, *argv]
        return _Inside(command, env=environment, start_new_session=True, **options)

    def start(self, host: str, function: Callable[..., Any], *args: Any, label: str | None = None) -> Task:
        """Start ``function(talk, *args)`` in a Python of its own on a host.

        Args:
            host: Where.
            function: Importable by name: defined at the top of a module. It is given a ``Talk`` with the task.
            *args: Picklable.
            label: What errors call it.

        Raises:
            ConfigError: Function or arguments cannot be sent to another process.
        """
        task = Task(self, host, label or f"{function.__name__} on host {host}", function, args)
        self._tasks.append(task)
        return task

    def run(self, host: str, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
        """Call ``function(*args)`` in a Python of its own on a host, and return what it returns.

        Raises:
            ReshardError: One of ours, as it was raised there.
            TaskFailed: It raised another error, or died.
            RefitTimeout: It was not done after ``timeout`` seconds.
        """
        task = self.start(host, _call, function, args, label=f"{function.__name__} on host {host}")
        try:
            return hear([task], timeout)[0]
        finally:
            task.kill()

    def kill(self, host: str) -> None:
        """End a host at once, with all that runs on it, as if its power had gone."""
        self._firsts[host].close()

    # -- beginning and end -----------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and all that runs on them; may be called more than once."""
        if self._keeper is not None:
            self._keeper.close()
        for task in self._tasks:
            task.close()
        for first in self._firsts.values():
            first.close()
        self._keeper = None

    def _open(self) -> None:
        if sys.platform != "linux":
            raise EnvironmentNotSupported(f"Hosts in namespaces need Linux; this is {sys.platform}.")
        lacking = {tool: package for tool, package in TOOLS.items() if shutil.which(tool) is None}
        if lacking:
            raise EnvironmentNotSupported(
                f"Hosts in namespaces need programs that are missing here: {', '.join(lacking)}. On Debian: "
                f"apt-get install {' '.join(sorted(set(lacking.values())))}."
            )
        expiry = time.monotonic() + _START_SECONDS
        own = ["--user", "--map-root-user"] if os.geteuid() else []
        self._keeper = _First([*_unshare(*own, "--net"), *_python(_KEEP), "", ""], watch_this_process=True)
        keeper = self._keeper.find_pid(expiry)
        names = "\n".join(["127.0.0.1 localhost", *(f"{self.address(host)} {host}" for host in self.hosts)]) + "\n"
        for host in self.hosts:
            apart = _unshare("--net", "--mount", "--ipc", "--uts")
            setup = ["sh", "-euc", _SETUP, "sh", host, names, *_python(_KEEP)]
            self._firsts[host] = _First([*_enter(keeper, "net", "pid"), *apart, *setup])
        pids = [first.find_pid(expiry) for first in self._firsts.values()]
        self._join(keeper, pids)

    def _join(self, keeper: int, pids: Sequence[int]) -> None:
        """Lay a link from each host to the bridge."""
        links = ["link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0", _up("br0")]
        limits: list[str] = []
        for at, (host, pid) in enumerate(zip(self.hosts, pids, strict=True)):
            port, limit = f"port{at}", _limit(self._bits_per_second[host])
            links += [f"link add {port} type veth peer name eth0 netns {pid}", f"link set {port} master br0", _up(port)]
            limits += [f"qdisc add dev {port} root {limit}"] if limit else []
        _batch("ip", keeper, links)
        _batch("tc", keeper, limits)
        for host, pid in zip(self.hosts, pids, strict=True):
            limit = _limit(self._bits_per_second[host])
            _batch("tc", pid, [f"qdisc add dev eth0 root {limit}"] if limit else [])
            _batch("ip", pid, [f"address add {self.address(host)}/24 dev eth0", _up("eth0")])


@functools.cache
def supported() -> str | None:
    """Say why no cluster can be made on this machine by this process; None where one can. It is tried, once."""
    try:
        with Cluster(["probe"], rate="1Gbit"):
            return None
    except EnvironmentNotSupported as error:
        return error.message


# -- namespaces --------------------------------------------------------------------------------------------------------

# The first process of a namespace: with it all others in it end. It waits until its input or a watched process ends.
_KEEP = """
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
_SETUP = """
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


class _First:
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
            said = self._errors.read().decode(errors="replace").strip() or f"nothing for {_START_SECONDS:g} s"
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
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # unshare --kill-child
            self._process.wait(_CLOSE_SECONDS)
        self._process.stdout.close()
        self._errors.close()


class _Inside(subprocess.Popen[bytes]):
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


def _unshare(*kinds: str) -> list[str]:
    return ["unshare", *kinds, "--pid", "--fork", "--kill-child", "--"]


def _enter(pid: int, *kinds: str) -> list[str]:
    user = ["--user", "--preserve-credentials"] if os.geteuid() else []
    return ["nsenter", "--target", str(pid), *user, *(f"--{kind}" for kind in kinds), "--"]


def _python(script: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", script]


def _up(device: str) -> str:
    # Without an address of its own that IPv6 makes up, a link carries nothing that nobody asked for.
    return f"link set {device} addrgenmode none up"


def _limit(bits_per_second: int | None) -> str | None:
    """A token bucket; it counts the headers of every packet that a real link would carry."""
    if bits_per_second is None:
        return None
    burst = max(_LONGEST_PACKET_NBYTES, bits_per_second // 8 // 1000)  # a millisecond's worth
    return f"tbf rate {bits_per_second}bit burst {burst} latency {_QUEUE_MILLISECONDS}ms"


def _batch(program: str, pid: int, lines: Sequence[str]) -> None:
    """Let ``ip`` or ``tc`` carry out lines in the network of a process."""
    if not lines:
        return
    # Only the network is entered: ``netns PID`` is a number of this process's namespace.
    done = subprocess.run(
        [*_enter(pid, "net"), program, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=_START_SECONDS,
        check=False,
    )
    if done.returncode:
        told = (done.stderr or done.stdout).strip()
        raise EnvironmentNotSupported(
            f"The network between the hosts could not be made; {program} was told: {told}. "
            "It needs a kernel with bridges, veth pairs and the tbf queue (modules bridge, veth, sch_tbf)."
        )


# -- functions on hosts ------------------------------------------------------------------------------------------------


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
    """A function that runs in a process of its own on a host; made by ``Cluster.start``."""

    def __init__(
        self, cluster: Cluster, host: str, label: str, function: Callable[..., Any], args: tuple[Any, ...]
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
            self._process = cluster.popen(
                host,
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
        self._process.wait(_CLOSE_SECONDS)
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
            code = self._process.wait(_CLOSE_SECONDS)
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


_TASK = "import sys; from reshard.testing.hosts import serve; serve(int(sys.argv[1]))"


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


def _call(_: Talk, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)
