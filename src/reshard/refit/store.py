"""Store: where members of a session meet, and the process group that they make there; no default group is touched."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reshard.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from reshard.transports.base import Deadline

_PAUSE_SECONDS = 0.05
"""Between two tries to reach a store that is not there yet."""
_REACH_SECONDS = 5.0
"""For a store to be reached by the process that serves it, under the name that others will use."""
_HERE = "127.0.0.1"
_LISTENS_EVERYWHERE = ("", "0.0.0.0", "::", "*")
_PORTS = range(1, 1 << 16)


class ServedStore:
    """A store that this process hosts until it is closed, or the process ends; ``str`` gives its address."""

    def __init__(self, host: str, port: int) -> None:
        if host in _LISTENS_EVERYWHERE:
            raise ConfigError(
                f"host={host!r} says where to listen, and nobody can be told to go there. Give the name or address "
                f"under which the members reach this machine; the store listens on all of them."
            )
        if port not in (0, *_PORTS):
            raise ConfigError(
                f"port={port!r} is no port: they go up to {_PORTS[-1]}. Choose another, or 0 for any free."
            )
        try:  # torch would wait five minutes for itself under a name that leads elsewhere
            self._store: dist.TCPStore | None = dist.TCPStore(_HERE, port, None, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            raise ConfigError(
                f"No store can be served at {host}:{port}: {error}. Choose another port, or port=0 for any free one."
            ) from error
        self.host = host
        self.port = self._store.port
        self.address = f"tcp://{host}:{self.port}"
        try:
            socket.create_connection((host, self.port), timeout=_REACH_SECONDS).close()
        except OSError as error:
            self._store = None
            raise ConfigError(
                f"host={host!r} does not lead to this process, so no member would find the store there ({error}). Give "
                f"the name or address under which they reach this machine."
            ) from error

    def close(self) -> None:
        """Stop serving; sessions that meet there lose it."""
        self._store = None

    def __str__(self) -> str:
        return self.address

    def __repr__(self) -> str:
        return f"<ServedStore {self.address}>"

    def __enter__(self) -> ServedStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_store(host: str = "127.0.0.1", port: int = 0) -> ServedStore:
    """Host a store at which the worlds of a session meet; in either world, or in a process of its own.

    Args:
        host: The name or address under which the members reach this process.
        port: 0 for any free one. A fixed one lets a restarted host be found again.

    Returns:
        What keeps the store alive; ``str(...)`` is the address, ``tcp://host:port``, that members pass to ``connect``.

    Raises:
        ConfigError: The port is taken, or the host does not lead here.
    """
    return ServedStore(host, port)


def open_store(address: str, deadline: Deadline) -> dist.Store:
    """Connect to a store that another process hosts, as soon as it is there.

    Raises:
        ConfigError: The address cannot be read.
        TransportError: Nobody answers there within the deadline.
    """
    match = re.fullmatch(r"(?:tcp://)?\[?([^\]/]+?)\]?:(\d+)", address)
    if match is None or int(match[2]) not in _PORTS:
        raise ConfigError(f"store={address!r} is no address; use tcp://host:port, as serve_store gives it.")
    host, port = match[1], int(match[2])
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.01, min(1.0, deadline.remaining()))).close()
            return _connected(host, port, max(1.0, deadline.remaining()))
        except (OSError, RuntimeError) as error:
            if deadline.expired:
                raise TransportError(
                    f"No store answers at tcp://{host}:{port} for {deadline.seconds:g} s ({error}). The process that "
                    f"calls serve_store must run, and be reachable from here.",
                    store=address,
                ) from error
            time.sleep(min(_PAUSE_SECONDS, deadline.remaining()))


def _connected(host: str, port: int, seconds: float) -> dist.Store:
    """torch's client; it waits for ever for an answer of something that listens there and is no store.

    Raises:
        OSError, RuntimeError: It got none.
    """
    opened: Future[dist.Store] = Future()

    def connect() -> None:
        try:
            opened.set_result(dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=seconds)))
        except BaseException as error:
            opened.set_exception(error)

    threading.Thread(target=connect, name="reshard-store", daemon=True).start()
    try:
        return opened.result(seconds)
    except TimeoutError:
        raise OSError("something listens there, and does not answer as a store does") from None


def prefixed(store: dist.Store, prefix: str) -> dist.Store:
    """The part of a store under a prefix."""
    return dist.PrefixStore(prefix, store)


def make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> dist.ProcessGroup:
    """A process group of some members, known to nobody but its caller.

    On the CPU it has no backend: the transports make their own over its store. On a GPU it has NCCL (no GPU has run
    this).
    """
    group = dist.ProcessGroup(store, rank, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)
        backend._set_sequence_number_for_group()
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    return group
