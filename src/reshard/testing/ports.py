"""Ports: some of this host that a program may be told to serve at, a while before it does."""

from __future__ import annotations

import socket
from pathlib import Path
from random import SystemRandom

_FIRST, _EPHEMERAL = 10_000, 32_768
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has, and that nobody is given by chance until it is asked for.

    Port 0 gives one out of the range that the system gives to every connection and to whoever asks for any port, so
    that between the choice and the use of such a port, and while who served there is being restarted, others get it.

    Raises:
        OSError: All that were tried are taken.
    """
    chosen = SystemRandom()  # two programs that were seeded alike do not choose alike
    for _ in range(_TRIES):
        port = chosen.randrange(_FIRST, _first_ephemeral())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"{_TRIES} ports from {_FIRST} to {_first_ephemeral()} were tried, and all are taken.")


def _first_ephemeral() -> int:
    try:
        first = int(_RANGE.read_text("ascii").split()[0])
    except (OSError, ValueError):
        return _EPHEMERAL
    return first if first > _FIRST + _TRIES else _EPHEMERAL
