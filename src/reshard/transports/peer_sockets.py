"""PeerSockets: one rank's sockets to its peers on the host: messages out, messages in, and the end of it all.

**Never stuck on a full socket.** A post that finds the socket full is queued and goes out in a later call; what must be
out before a rank turns to something else reads what comes in until it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from typing import TYPE_CHECKING, NoReturn

import torch

from reshard.errors import RefitTimeout, TransportError
from reshard.transports.base import Deadline, Ticket
from reshard.transports.board import Board
from reshard.transports.datagrams import (
    ABORT,
    ANCILLARY_NBYTES,
    ARENA,
    BOARD,
    BYE,
    HEAD,
    LOANS,
    RELEASE,
    SEND,
    TAIL_NBYTES,
    close_all,
    descriptors_in,
    is_full,
    send,
)
from reshard.transports.mapped import POPULATE_READ, map_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

_RETRY_SECONDS = 0.005


class ShmTicket(Ticket):
    """A message between ranks of one host."""

    __slots__ = ("into", "shown")

    def __init__(self, peer: int, nbytes: int, sequence: int, into: torch.Tensor | None, *, is_send: bool) -> None:
        super().__init__(peer, nbytes, sequence, is_send=is_send)
        self.into = into
        self.shown: torch.Tensor | None = None


class Peer:
    """One reached peer: its socket, its memory as mapped here, and the messages under way."""

    __slots__ = (
        "arena",
        "arrived",
        "closed",
        "expected",
        "loans",
        "outbox",
        "rank",
        "received",
        "sent",
        "socket",
        "unread_loans",
        "unreleased",
    )

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.arena = torch.empty(0, dtype=torch.uint8)
        self.sent = 0
        self.received = 0
        self.arrived: deque[tuple[int, int]] = deque()
        self.expected: deque[ShmTicket] = deque()
        self.unreleased: dict[int, ShmTicket] = {}
        self.outbox: deque[tuple[bytes, list[int]]] = deque()
        self.loans: dict[int, torch.Tensor] = {}
        self.unread_loans: set[int] = set()
        self.closed = False


class PeerSockets:
    """What a rank of the shm transport says to its peers and hears of them.

    Args:
        rank: This rank in the group.
        size: Ranks in the group.
        timeout: For a message that must be out and finds the socket full.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._peers: dict[int, Peer] = {}
        self._why_not: dict[int, str] = {}
        self._ended: tuple[str, int | None] | None = None
        self._blamed = False
        """A peer ended it since it waited for this rank."""
        self._ending = threading.Lock()
        self._board: Board | None = None
        self._inbox = bytearray(HEAD.size + TAIL_NBYTES)
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, Peer] = {}

    def _add(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._peers[peer] = self._by_descriptor[connection.fileno()] = Peer(peer, connection)
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def why_not(self, peer: int) -> str | None:
        if peer in self._peers:
            return None
        if peer == self.rank:
            return f"rank {peer} is this rank itself"
        if not 0 <= peer < self.size:
            return f"rank {peer} is not one of the {self.size} ranks of the group"
        return self._why_not[peer]

    def _reached(self, peer: int) -> Peer:
        other = self._peers.get(peer)
        if other is None or self._ended is not None:
            self._check(peer)
            raise TransportError(f"Rank {self.rank} (shm): {self.why_not(peer)}.", rank=self.rank, peer=peer)
        return other

    def _check(self, peer: int | None = None) -> None:
        """Raise if this transport is over, or `peer` has closed its end."""
        if self._ended is not None:
            reason, culprit = self._ended
            if self._blamed and peer is not None:  # the one who gave up waited for this rank, and this rank for another
                reason, culprit = f"{reason}; this rank was waiting for rank {peer}", peer
            raise TransportError(
                f"Rank {self.rank} (shm): {reason}. This transport is over; make a new one.",
                rank=self.rank,
                peer=peer if culprit is None else culprit,
            )
        if peer is not None and peer in self._peers and self._peers[peer].closed:
            raise TransportError(
                f"Rank {self.rank} (shm): rank {peer} has closed its transport.", rank=self.rank, peer=peer
            )

    def _expire(self, peer: int, what: str, deadline: Deadline) -> NoReturn:
        said = f"waited {deadline.seconds:g} s for rank {peer} in vain: {what}"
        self._end(said, peer, said)
        raise RefitTimeout(
            f"Rank {self.rank} (shm) {said}. This transport is over; make a new one before the next try.",
            rank=self.rank,
            peer=peer,
        )

    def _lose(self, peer: int, how: str) -> None:
        # The others are not told: each of them sees the same end of a socket.
        with self._ending:
            if self._ended is None:
                self._ended = (f"rank {peer} is lost: {how}", peer)

    def _end(self, said: str, culprit: int | None, to_peers: str | None) -> None:
        """End the epoch and wake everybody, here and at the peers; `to_peers` is None where nothing is wrong."""
        with self._ending:
            if self._ended is None:
                self._ended = (said, culprit)
            elif to_peers is None:
                to_peers, culprit = self._ended  # closing after a failure: the peers hear of its cause
        tail = b"" if to_peers is None else to_peers.encode()[:TAIL_NBYTES]
        blamed = 0 if culprit is None else culprit + 1
        last = HEAD.pack(BYE if to_peers is None else ABORT, 0, blamed, len(tail)) + tail
        for peer in list(self._peers.values()):
            # Not through the outbox, and never waiting: a peer whose socket is full sees its end all the same.
            with contextlib.suppress(OSError):
                peer.socket.send(last, socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def _tell(self, peer: Peer, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send, or queue what does not fit into the socket now."""
        if peer.closed:
            return
        if not peer.outbox:
            try:
                send(peer.socket, message, descriptors)
                return
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.ECONNRESET):
                    return  # the reader finds out why
                if not is_full(error):
                    raise
                if error.errno != errno.ETOOMANYREFS:
                    self._epoll.modify(peer.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
        peer.outbox.append((message, [os.dup(descriptor) for descriptor in descriptors]))

    def _flush(self, peer: Peer) -> None:
        while peer.outbox:
            message, descriptors = peer.outbox[0]
            try:
                send(peer.socket, message, descriptors)
            except OSError as error:
                if is_full(error):
                    return
            peer.outbox.popleft()
            close_all(descriptors)
        with contextlib.suppress(OSError):  # the end of the socket may have been seen meanwhile
            self._epoll.modify(peer.socket.fileno(), select.EPOLLIN)

    def _push_out(self, peer: Peer) -> None:
        """Read what comes in until this peer's messages are out, so that two ranks cannot block each other."""
        deadline = Deadline.after(self.timeout)
        while peer.outbox and self._ended is None and not peer.closed:
            if not self._pump(deadline) and deadline.expired:
                self._expire(peer.rank, "room in its socket", deadline)

    def _pump(self, deadline: Deadline) -> bool:
        """Block until something can be read or written, and do that; False if nothing came up to the deadline."""
        seconds = deadline.remaining()
        stalled = [peer for peer in self._peers.values() if peer.outbox]
        if stalled:
            # Too many descriptors in flight is no state of a socket, so it is tried again after a while.
            seconds = min(seconds, _RETRY_SECONDS)
            for peer in stalled:
                self._flush(peer)
        events = self._epoll.poll(seconds)
        for descriptor, event in events:
            peer_of = self._by_descriptor.get(descriptor)
            if peer_of is not None:
                if event & ~select.EPOLLOUT:
                    self._read(peer_of)
                if event & select.EPOLLOUT:
                    self._flush(peer_of)
        return bool(events)

    def _read(self, peer: Peer) -> int:
        """Take in all messages that have come from `peer`; returns how many."""
        count = 0
        inbox = self._inbox
        while not peer.closed:
            try:
                nbytes, ancillary, _, _ = peer.socket.recvmsg_into([inbox], ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return count
            except ConnectionResetError:
                continue  # the peer closed without reading all; what it had sent before can still be read
            except OSError as error:
                self._end_of(peer, str(error))
                return count
            if not nbytes:
                self._end_of(peer, "its process ended, or its socket was closed")
                return count
            count += 1
            kind, sequence, offset, size = HEAD.unpack_from(inbox)
            if kind == SEND:
                peer.arrived.append((offset, size))
                if peer.expected:
                    self._match(peer)
            elif kind == RELEASE:
                peer.unreleased.pop(sequence).done = True
            else:
                tail = bytes(inbox[HEAD.size : nbytes])
                self._take_rare(peer, kind, sequence, offset, size, tail, descriptors_in(ancillary))
        return count

    def _take_rare(
        self, peer: Peer, kind: int, sequence: int, offset: int, size: int, tail: bytes, descriptors: list[int]
    ) -> None:
        try:
            if kind == ARENA:
                peer.arena = map_file(descriptors[0], size, POPULATE_READ)
            elif kind == LOANS:
                files = iter(descriptors)
                for number, nbytes in enumerate(struct.unpack(f"<{size}Q", tail), start=sequence):
                    peer.loans[number] = map_file(next(files), nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
                    if nbytes:
                        peer.unread_loans.add(number)
            elif kind == ABORT:
                # A third rank may be the cause; if this rank is, then what it sees is that the peer gave up.
                blamed = bool(offset) and offset - 1 == self.rank
                culprit = offset - 1 if offset and not blamed else peer.rank
                with self._ending:
                    if self._ended is None:
                        self._blamed = blamed
                        self._ended = (f"rank {peer.rank} ended it: {tail.decode(errors='replace')}", culprit)
            elif kind == BOARD:
                memory, root_bell, bell = map(os.dup, descriptors)
                self._board = Board(self.rank, self.size, memory, [(0, root_bell), (self.rank, bell)])
            elif kind == BYE:
                self._end_of(peer, None)
        finally:
            close_all(descriptors)

    def _end_of(self, peer: Peer, how: str | None) -> None:
        """Stop listening to a peer; without a goodbye (`how` is given) it is lost, and the epoch with it."""
        if not peer.closed:
            peer.closed = True
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(peer.socket.fileno())
            if how is not None:
                self._lose(peer.rank, how)

    def _match(self, peer: Peer) -> None:
        """Pair the messages that have come with the receives posted for them, in order."""
        while peer.arrived and peer.expected:
            offset, nbytes = peer.arrived.popleft()
            ticket = peer.expected.popleft()
            if nbytes != ticket.nbytes:
                said = (
                    f"message {ticket.sequence} of rank {peer.rank} to rank {self.rank} has {nbytes} bytes, but "
                    f"{ticket.nbytes} bytes were expected; the two ends do not follow the same schedule"
                )
                self._end(said, peer.rank, said)
                return
            ticket.shown = peer.arena[offset : offset + nbytes]
            ticket.done = True
