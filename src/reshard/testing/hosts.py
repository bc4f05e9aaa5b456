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

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError, EnvironmentNotSupported, TransportError
from reshard.testing.namespaces import KEEP, SETUP, START_SECONDS, First, Inside, batch, enter, python, unshare
from reshard.testing.tasks import Talk, Task, TaskFailed, hear
from reshard.units import parse_rate

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Sequence

TOOLS = {
    **dict.fromkeys(("ip", "tc"), "iproute2"),
    **dict.fromkeys(("unshare", "nsenter", "mount"), "util-linux"),
}
"""Programs that are needed, and the Debian packages they are in."""

HEADER_NBYTES = 66
"""Ethernet, IPv4, and TCP with timestamps: what comes before a packet's payload."""

_LONGEST_PACKET_NBYTES = 128 << 10  # the stack hands over 64 KiB at a time; a bucket that holds less would cut them up
_QUEUE_MILLISECONDS = 50  # deep enough that two who send to one host lose next to nothing


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
        self._keeper: First | None = None
        self._firsts: dict[str, First] = {}
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
        command = [*enter(self._firsts[host].pid, "net", "mount", "ipc", "uts", "pid"), *folder, *argv]
        return Inside(command, env=environment, start_new_session=True, **options)

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
        task = Task(partial(self.popen, host), host, label or f"{function.__name__} on host {host}", function, args)
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
        expiry = time.monotonic() + START_SECONDS
        own = ["--user", "--map-root-user"] if os.geteuid() else []
        self._keeper = First([*unshare(*own, "--net"), *python(KEEP), "", ""], watch_this_process=True)
        keeper = self._keeper.find_pid(expiry)
        names = "\n".join(["127.0.0.1 localhost", *(f"{self.address(host)} {host}" for host in self.hosts)]) + "\n"
        for host in self.hosts:
            apart = unshare("--net", "--mount", "--ipc", "--uts")
            setup = ["sh", "-euc", SETUP, "sh", host, names, *python(KEEP)]
            self._firsts[host] = First([*enter(keeper, "net", "pid"), *apart, *setup])
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
        batch("ip", keeper, links)
        batch("tc", keeper, limits)
        for host, pid in zip(self.hosts, pids, strict=True):
            limit = _limit(self._bits_per_second[host])
            batch("tc", pid, [f"qdisc add dev eth0 root {limit}"] if limit else [])
            batch("ip", pid, [f"address add {self.address(host)}/24 dev eth0", _up("eth0")])


@cache
def supported() -> str | None:
    """Say why no cluster can be made on this machine by this process; None where one can. It is tried, once."""
    try:
        with Cluster(["probe"], rate="1Gbit"):
            return None
    except EnvironmentNotSupported as error:
        return error.message


def _up(device: str) -> str:
    # Without an address of its own that IPv6 makes up, a link carries nothing that nobody asked for.
    return f"link set {device} addrgenmode none up"


def _limit(bits_per_second: int | None) -> str | None:
    """A token bucket; it counts the headers of every packet that a real link would carry."""
    if bits_per_second is None:
        return None
    burst = max(_LONGEST_PACKET_NBYTES, bits_per_second // 8 // 1000)  # a millisecond's worth
    return f"tbf rate {bits_per_second}bit burst {burst} latency {_QUEUE_MILLISECONDS}ms"


def _call(_: Talk, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


__all__ = [
    "HEADER_NBYTES",
    "TOOLS",
    "Cluster",
    "LinkCount",
    "Talk",
    "Task",
    "TaskFailed",
    "hear",
    "parse_rate",
    "supported",
]
