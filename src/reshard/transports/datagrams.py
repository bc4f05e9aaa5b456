"""Datagrams: the small messages between ranks of one host, on Unix sockets that keep their ends and pass files on."""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HEAD = struct.Struct("<BxxxxxxxQQQ")
"""Kind, sequence, offset, nbytes; some kinds have a tail."""
HELLO, VERDICT, SEND, RELEASE, ARENA, LOANS, ABORT, BYE, BOARD = range(1, 10)
TAIL_NBYTES = 1024
LOANS_A_MESSAGE = TAIL_NBYTES // 8  # below the kernel's limit of 253 descriptors
ANCILLARY_NBYTES = socket.CMSG_SPACE(LOANS_A_MESSAGE * 4)


def send(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    """Send a message, with files where there are some; raises where it does not fit now (``is_full``)."""
    if descriptors:
        socket.send_fds(connection, [message], list(descriptors))
    else:
        connection.send(message)


def is_full(error: OSError) -> bool:
    """Whether a message did not fit now, and will later."""
    return error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The files that came with a message; they are the receiver's to close."""
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return found


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
