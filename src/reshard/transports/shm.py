"""The transport between ranks of one host: bytes lie in shared memory, small messages on Unix sockets say where.

    sender                                             receiver
    packs into its arena (one memfd, mapped by all)
    post_send  --- SEND sequence, offset, nbytes --->  wait shows the arena's bytes in place
    wait       <-- RELEASE sequence ----------------   release

A message costs one small datagram each way and nothing is copied here. The kernel's socket calls order memory: what
was written before a send is seen after the receive. Death of a peer is the end of its socket, seen at once.

**Finding each other.** Every rank listens on a socket in the abstract namespace, so that there is no file to leave
behind, and tells its name and a nonce through the store. Peers connect and hand each other a memory file with the
nonce in it; only a peer whose nonce was read out of memory mapped here is reached. Others (another host, another
network namespace) are not, which is no error: `why_not` tells.

**Never stuck on a full socket.** A post that finds the socket full is queued and goes out in a later call; `release`,
after which a rank may turn to something else, reads what comes in until its message is out.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import secrets
import select
import socket
import struct
import threading
import weakref
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.multiprocessing

from reshard.errors import ConfigError, EnvironmentNotSupported, RefitTimeout, TransportError
from reshard.transports.base import Deadline, Loan, Ticket, Transport, check_into, check_payload
from reshard.transports.board import Board, board_nbytes
from reshard.transports.meeting import Meeting
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch.distributed as dist

_HEAD = struct.Struct("<BxxxxxxxQQQ")
"""Kind, sequence, offset, nbytes; some kinds have a tail."""
_HELLO, _VERDICT, _SEND, _RELEASE, _ARENA, _LOANS, _ABORT, _BYE, _BOARD = range(1, 10)
_TAIL_NBYTES = 1024
_LOANS_A_MESSAGE = _TAIL_NBYTES // 8  # below the kernel's limit of 253 descriptors
_ANCILLARY_NBYTES = socket.CMSG_SPACE(_LOANS_A_MESSAGE * 4)
_NONCE_NBYTES = 32
_RETRY_SECONDS = 0.005

_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23


class _ShmTicket(Ticket):
    __slots__ = ("into", "shown")

    def __init__(self, peer: int, nbytes: int, sequence: int, into: torch.Tensor | None, *, is_send: bool) -> None:
        super().__init__(peer, nbytes, sequence, is_send=is_send)
        self.into = into
        self.shown: torch.Tensor | None = None


class _Peer:
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
        self.expected: deque[_ShmTicket] = deque()
        self.unreleased: dict[int, _ShmTicket] = {}
        self.outbox: deque[tuple[bytes, list[int]]] = deque()
        self.loans: dict[int, torch.Tensor] = {}
        self.unread_loans: set[int] = set()
        self.closed = False


class ShmTransport(Transport):
    """One rank of a group some of whose ranks share this host.

    Making it is collective: all ranks of the group, on every host, make theirs over the same store.

    Args:
        store: A store with a prefix that no other transport has used.
        rank: This rank in the group.
        size: Ranks in the group.
        timeout: For making the connections, for a release that finds the socket full, and for a loan to arrive.

    Raises:
        EnvironmentNotSupported: This system has no memory files or abstract sockets (it is not Linux).
        RefitTimeout: A rank did not take part in time.
    """

    name = "shm"
    sends_from = "staging"
    lands = "transport"
    lends = True

    def __init__(self, store: dist.Store, rank: int, size: int, *, timeout: timedelta = timedelta(seconds=60)) -> None:
        if not hasattr(os, "memfd_create") or not hasattr(select, "epoll"):
            raise EnvironmentNotSupported(
                "The 'shm' transport needs Linux: memory files and abstract sockets. Use 'torch_p2p' here."
            )
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._peers: dict[int, _Peer] = {}
        self._why_not: dict[int, str] = {}
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_start = self._arena_stop = 0
        self._lent: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._ended: tuple[str, int | None] | None = None
        self._blamed = False
        """A peer ended it since it waited for this rank."""
        self._ending = threading.Lock()
        self._closed = False
        self._board: Board | None = None
        self._inbox = bytearray(_HEAD.size + _TAIL_NBYTES)
        self._epoll = select.epoll()
        self._by_descriptor: dict[int, _Peer] = {}
        try:
            for peer, connection in self._connect(store).items():
                connection.setblocking(False)
                self._peers[peer] = self._by_descriptor[connection.fileno()] = _Peer(peer, connection)
                self._epoll.register(connection.fileno(), select.EPOLLIN)
        except BaseException:
            self.close()
            raise
        _alive.add(self)

    def why_not(self, peer: int) -> str | None:
        if peer in self._peers:
            return None
        if peer == self.rank:
            return f"rank {peer} is this rank itself"
        if not 0 <= peer < self.size:
            return f"rank {peer} is not one of the {self.size} ranks of the group"
        return self._why_not[peer]

    def staging(self, nbytes: int) -> torch.Tensor:
        if self._arena.numel() != nbytes:
            self._check()
            if any(ticket.nbytes for peer in self._peers.values() for ticket in peer.unreleased.values()):
                raise TransportError(
                    f"Rank {self.rank} (shm): the staging arena cannot be replaced while messages are in flight. "
                    "Wait for every send first.",
                    rank=self.rank,
                )
            self._arena = torch.empty(0, dtype=torch.uint8)  # free the old one before the new one is made
            if nbytes:
                descriptor = os.memfd_create("reshard-arena")
                try:
                    self._arena = _make_arena(descriptor, nbytes)
                    for peer in self._peers.values():
                        self._tell(peer, _HEAD.pack(_ARENA, 0, 0, nbytes), [descriptor])
                finally:
                    os.close(descriptor)
            self._arena_start = self._arena.data_ptr()
            self._arena_stop = self._arena_start + nbytes
        return self._arena

    def post_send(self, peer: int, payload: torch.Tensor) -> Ticket:
        other = self._reached(peer)
        if other.closed:
            self._check(peer)
        nbytes = check_payload(self, payload)
        offset = 0
        if nbytes:
            start = payload.data_ptr()
            offset = start - self._arena_start
            if offset < 0 or start + nbytes > self._arena_stop:
                raise TransportError(
                    f"Rank {self.rank} (shm): a payload of {nbytes} bytes to rank {peer} does not lie in the staging "
                    "arena, so the peer cannot see it. Copy it into what staging() returned.",
                    rank=self.rank,
                    peer=peer,
                )
        sequence = other.sent
        other.sent += 1
        ticket = other.unreleased[sequence] = _ShmTicket(peer, nbytes, sequence, None, is_send=True)
        self._tell(other, _HEAD.pack(_SEND, sequence, offset, nbytes))
        return ticket

    def post_recv(self, peer: int, nbytes: int, into: torch.Tensor | None = None) -> Ticket:
        other = self._reached(peer)
        check_into(self, nbytes, into)
        ticket = _ShmTicket(peer, nbytes, other.received, into, is_send=False)
        other.received += 1
        other.expected.append(ticket)
        if other.arrived:
            self._match(other)
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> torch.Tensor | None:
        assert isinstance(ticket, _ShmTicket)
        if not ticket.done:
            peer = self._peers[ticket.peer]
            while not ticket.done:
                if self._read(peer) or ticket.done:
                    continue
                self._check(ticket.peer)
                if not self._pump(deadline) and not ticket.done and deadline.expired:
                    self._expire(ticket.peer, repr(ticket), deadline)
        shown, into = ticket.shown, ticket.into
        if into is not None and shown is not None and shown is not into:
            ticket.shown = into.copy_(shown)
        return ticket.shown

    def release(self, ticket: Ticket) -> None:
        if not isinstance(ticket, _ShmTicket) or ticket.is_send or not ticket.done or ticket.released:
            raise ConfigError(
                f"Rank {self.rank} (shm): {ticket!r} cannot be released; "
                "a receive is released once, after its wait returned."
            )
        ticket.released = True
        if ticket.into is None:
            ticket.shown = None
        if self._ended is None:
            peer = self._peers[ticket.peer]
            self._tell(peer, _HEAD.pack(_RELEASE, ticket.sequence, 0, 0))
            if peer.outbox:
                self._push_out(peer)

    def lend(self, tensors: Sequence[torch.Tensor]) -> tuple[Loan, ...]:
        self._check()
        loans, new = [], []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._lent.get(storage.data_ptr()) if storage.nbytes() else None
            if known is None:
                _check_lendable(tensor, self.rank)
                known = (len(self._lent), storage)
                self._lent[storage.data_ptr() or -len(self._lent) - 1] = known
                new.append(known)
            offset = int(tensor.storage_offset()) * tensor.element_size()
            loans.append(Loan(self.rank, known[0], storage.nbytes(), offset))
        for start in range(0, len(new), _LOANS_A_MESSAGE):
            part = new[start : start + _LOANS_A_MESSAGE]
            sizes = [storage.nbytes() for _, storage in part]
            message = _HEAD.pack(_LOANS, part[0][0], 0, len(part)) + struct.pack(f"<{len(part)}Q", *sizes)
            descriptors = [_descriptor_of(storage) for _, storage in part if storage.nbytes()]
            for peer in self._peers.values():
                self._tell(peer, message, descriptors)
        return tuple(loans)

    def borrow(self, peer: int, loan: Loan) -> torch.Tensor:
        other = self._reached(peer)
        deadline = Deadline.after(self.timeout)
        if loan.lender == peer:
            while loan.storage not in other.loans:
                if self._read(other):
                    continue
                self._check(peer)
                if not self._pump(deadline) and deadline.expired:
                    self._expire(peer, repr(loan), deadline)
        memory = other.loans.get(loan.storage)
        if memory is None or loan.lender != peer or memory.numel() != loan.storage_nbytes:
            raise TransportError(
                f"Rank {self.rank} (shm): rank {peer} has not lent {loan}. Borrow only loans made by that rank.",
                rank=self.rank,
                peer=peer,
            )
        if loan.storage in other.unread_loans:
            # Enter the pages that exist into the page table now, rather than one fault at a time in the first refit.
            other.unread_loans.discard(loan.storage)
            _libc.madvise(memory.data_ptr(), memory.numel(), _MADV_POPULATE_READ)
        return memory

    def board(self, deadline: Deadline) -> Board:
        """The board of this group; made by all ranks together at its first use, each of which reaches all others.

        Raises:
            RefitTimeout: Rank 0 did not make it in time.
            TransportError: Rank 0 was lost.
        """
        if self._board is None and self.rank == 0:
            self._board = self._make_board()
        while self._board is None:
            root = self._reached(0)
            if not self._read(root):
                self._check(0)
                if not self._pump(deadline) and self._board is None and deadline.expired:
                    self._expire(0, "the board", deadline)
        return self._board

    def _make_board(self) -> Board:
        self._check()
        memory = os.memfd_create("reshard-board")
        os.ftruncate(memory, board_nbytes(self.size))
        bells = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(self.size)]
        for peer in self._peers.values():
            self._tell(peer, _HEAD.pack(_BOARD, 0, 0, 0), [memory, bells[0], bells[peer.rank]])
        return Board(self.rank, self.size, memory, list(enumerate(bells)))

    def abort(self, reason: str) -> None:
        self._end(f"aborted: {reason}", None, reason)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _alive.discard(self)
        self._end("closed", None, None)
        for peer in self._peers.values():
            peer.socket.close()
            for _, descriptors in peer.outbox:
                _close_all(descriptors)
            peer.outbox.clear()
            peer.arena = torch.empty(0, dtype=torch.uint8)
            peer.loans.clear()
        self._epoll.close()
        if self._board is not None:
            self._board.close()
        self._by_descriptor.clear()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_start = self._arena_stop = 0
        self._lent.clear()

    # ---- making the connections -----------------------------------------------------------------------------------

    def _connect(self, store: dist.Store) -> dict[int, socket.socket]:
        """Connect to every rank that shares memory with this one; a higher rank connects to a lower one."""
        deadline = Deadline.after(self.timeout)
        meeting = Meeting(store, self.rank, self.size, scope="shm", timeout=self.timeout)
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        name = f"reshard-{secrets.token_hex(16)}"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind("\0" + name)
            listener.listen(self.size)
            told = meeting.exchange("shm address", json.dumps([name, nonce.hex()]).encode(), deadline)
            addresses = [json.loads(value) for value in told]
            nonces = [bytes.fromhex(their_nonce) for _, their_nonce in addresses]
            proof = _memory_file("reshard-nonce", nonce)
            stack.callback(os.close, proof)
            made: dict[int, socket.socket] = {}
            failed = stack.enter_context(contextlib.ExitStack())
            for peer in range(self.rank):
                connection = self._dial(peer, addresses[peer][0])
                if connection is not None:
                    made[peer] = failed.enter_context(connection)
                    self._handshake_send(peer, connection, _HELLO, [proof], deadline)
            value = json.dumps(sorted(made)).encode()
            dialled = [json.loads(value) for value in meeting.exchange("shm connected", value, deadline)]
            callers = {peer for peer in range(self.rank + 1, self.size) if self.rank in dialled[peer]}
            for peer in range(self.rank + 1, self.size):
                if peer not in callers:
                    self._why_not[peer] = f"rank {peer} found no socket of rank {self.rank} on its host"
            for peer, connection in self._accept(listener, callers, deadline).items():
                made[peer] = failed.enter_context(connection)
            good = dict.fromkeys(made, True)
            for peer in sorted(made, reverse=True):  # answer those who called before waiting for those called
                if peer > self.rank:
                    good[peer] = self._handshake_recv(peer, made[peer], _HELLO, nonces[peer], deadline)
                    self._handshake_send(peer, made[peer], _VERDICT, [proof], deadline, good[peer])
            for peer in sorted(made):
                if peer < self.rank:
                    good[peer] = self._handshake_recv(peer, made[peer], _VERDICT, nonces[peer], deadline)
                    self._handshake_send(peer, made[peer], _VERDICT, [], deadline, good[peer])
            for peer in sorted(made):
                if peer > self.rank:
                    good[peer] &= self._handshake_recv(peer, made[peer], _VERDICT, None, deadline)
            for peer in [peer for peer in made if not good[peer]]:
                self._why_not[peer] = f"rank {peer} has a socket here, but no memory that both can map"
                made.pop(peer).close()
            failed.pop_all()
        return made

    def _dial(self, peer: int, name: str) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + name)
        except OSError as error:
            connection.close()
            self._why_not[peer] = (
                f"rank {peer} has no socket here ({error.strerror}): it runs on another host or in another network "
                "namespace"
            )
            return None
        return connection

    def _accept(self, listener: socket.socket, callers: set[int], deadline: Deadline) -> dict[int, socket.socket]:
        """Take the calls of `callers`; a stranger who connects is turned away."""
        taken: dict[int, socket.socket] = {}
        try:
            while callers - taken.keys():
                listener.settimeout(max(0.001, deadline.remaining()))
                connection, _ = listener.accept()
                connection.settimeout(min(1.0, max(0.001, deadline.remaining())))  # a caller has spoken already
                head = connection.recv(_HEAD.size, socket.MSG_PEEK)
                kind, rank, _, _ = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0, 0)
                if kind == _HELLO and rank in callers - taken.keys():
                    taken[rank] = connection
                else:
                    connection.close()
        except OSError as error:
            for connection in taken.values():
                connection.close()
            self._expire(min(callers - taken.keys()), f"a connection ({error})", deadline)
        return taken

    def _handshake_send(
        self, peer: int, connection: socket.socket, kind: int, proof: list[int], deadline: Deadline, good: bool = True
    ) -> None:
        connection.settimeout(max(0.001, deadline.remaining()))
        try:
            _send(connection, _HEAD.pack(kind, self.rank, 0, good), proof)
        except OSError as error:
            self._lose(peer, f"it ended while connecting ({error})")
            self._check(peer)

    def _handshake_recv(
        self, peer: int, connection: socket.socket, kind: int, nonce: bytes | None, deadline: Deadline
    ) -> bool:
        """Read one step of the handshake; tell whether the peer is content and its nonce was read from its memory."""
        connection.settimeout(max(0.001, deadline.remaining()))
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 4)
        except TimeoutError:
            self._expire(peer, "its answer while connecting", deadline)
        except OSError as error:
            message, descriptors = b"", []
            self._lose(peer, f"it ended while connecting ({error})")
        try:
            if not message:
                self._lose(peer, "it ended while connecting")
                self._check(peer)
            their_kind, _, _, content = _HEAD.unpack(message)
            if nonce is None:
                return bool(content)
            return their_kind == kind and bool(content) and len(descriptors) == 1 and _reads(descriptors[0], nonce)
        finally:
            _close_all(descriptors)

    # ---- messages -------------------------------------------------------------------------------------------------

    def _reached(self, peer: int) -> _Peer:
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
        tail = b"" if to_peers is None else to_peers.encode()[:_TAIL_NBYTES]
        blamed = 0 if culprit is None else culprit + 1
        last = _HEAD.pack(_BYE if to_peers is None else _ABORT, 0, blamed, len(tail)) + tail
        for peer in list(self._peers.values()):
            # Not through the outbox, and never waiting: a peer whose socket is full sees its end all the same.
            with contextlib.suppress(OSError):
                peer.socket.send(last, socket.MSG_DONTWAIT)
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)

    def _tell(self, peer: _Peer, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send, or queue what does not fit into the socket now."""
        if peer.closed:
            return
        if not peer.outbox:
            try:
                _send(peer.socket, message, descriptors)
                return
            except OSError as error:
                if error.errno in (errno.EPIPE, errno.ECONNRESET):
                    return  # the reader finds out why
                if not _is_full(error):
                    raise
                if error.errno != errno.ETOOMANYREFS:
                    self._epoll.modify(peer.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)
        peer.outbox.append((message, [os.dup(descriptor) for descriptor in descriptors]))

    def _flush(self, peer: _Peer) -> None:
        while peer.outbox:
            message, descriptors = peer.outbox[0]
            try:
                _send(peer.socket, message, descriptors)
            except OSError as error:
                if _is_full(error):
                    return
            peer.outbox.popleft()
            _close_all(descriptors)
        with contextlib.suppress(OSError):  # the end of the socket may have been seen meanwhile
            self._epoll.modify(peer.socket.fileno(), select.EPOLLIN)

    def _push_out(self, peer: _Peer) -> None:
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

    def _read(self, peer: _Peer) -> int:
        """Take in all messages that have come from `peer`; returns how many."""
        count = 0
        inbox = self._inbox
        while not peer.closed:
            try:
                nbytes, ancillary, _, _ = peer.socket.recvmsg_into([inbox], _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
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
            kind, sequence, offset, size = _HEAD.unpack_from(inbox)
            if kind == _SEND:
                peer.arrived.append((offset, size))
                if peer.expected:
                    self._match(peer)
            elif kind == _RELEASE:
                peer.unreleased.pop(sequence).done = True
            else:
                tail = bytes(inbox[_HEAD.size : nbytes])
                self._take_rare(peer, kind, sequence, offset, size, tail, _descriptors(ancillary))
        return count

    def _take_rare(
        self, peer: _Peer, kind: int, sequence: int, offset: int, size: int, tail: bytes, descriptors: list[int]
    ) -> None:
        try:
            if kind == _ARENA:
                peer.arena = _map(descriptors[0], size, _MADV_POPULATE_READ)
            elif kind == _LOANS:
                files = iter(descriptors)
                for number, nbytes in enumerate(struct.unpack(f"<{size}Q", tail), start=sequence):
                    peer.loans[number] = _map(next(files), nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)
                    if nbytes:
                        peer.unread_loans.add(number)
            elif kind == _ABORT:
                # A third rank may be the cause; if this rank is, then what it sees is that the peer gave up.
                blamed = bool(offset) and offset - 1 == self.rank
                culprit = offset - 1 if offset and not blamed else peer.rank
                with self._ending:
                    if self._ended is None:
                        self._blamed = blamed
                        self._ended = (f"rank {peer.rank} ended it: {tail.decode(errors='replace')}", culprit)
            elif kind == _BOARD:
                memory, root_bell, bell = map(os.dup, descriptors)
                self._board = Board(self.rank, self.size, memory, [(0, root_bell), (self.rank, bell)])
            elif kind == _BYE:
                self._end_of(peer, None)
        finally:
            _close_all(descriptors)

    def _end_of(self, peer: _Peer, how: str | None) -> None:
        """Stop listening to a peer; without a goodbye (`how` is given) it is lost, and the epoch with it."""
        if not peer.closed:
            peer.closed = True
            with contextlib.suppress(OSError, ValueError):
                self._epoll.unregister(peer.socket.fileno())
            if how is not None:
                self._lose(peer.rank, how)

    def _match(self, peer: _Peer) -> None:
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


def share_memory_(tensors: Iterable[torch.Tensor]) -> int:
    """Move the storages of CPU tensors into shared memory, in place, so that `ShmTransport.lend` can lend them.

    Tensors that alias a storage follow, because the storage itself is moved; its address changes once.

    Returns:
        Bytes moved; 0 if all lay there already.

    Raises:
        EnvironmentNotSupported: There is too little room in /dev/shm, or the limit of open files is too low.
        ConfigError: A tensor is not on the CPU.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"A tensor of shape {list(tensor.shape)} is on {tensor.device}; only CPU tensors can be moved to "
                "shared memory."
            )
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.is_shared():
            storages[storage.data_ptr()] = storage
    nbytes = sum(storage.nbytes() for storage in storages.values())
    if storages:
        _check_room(nbytes, len(storages))
    for storage in storages.values():
        storage.share_memory_()
    return nbytes


def _check_room(nbytes: int, files: int) -> None:
    room = os.statvfs("/dev/shm")
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise EnvironmentNotSupported(
            f"{format_nbytes(nbytes)} of weights do not fit into /dev/shm, which has {format_nbytes(free)} free. Make "
            "it larger (docker: --shm-size; Kubernetes: an emptyDir with medium Memory), or leave the weights in "
            "private memory, which costs a second copy.",
            nbytes=nbytes,
            free=free,
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and opened + files + 64 > limit:
        raise EnvironmentNotSupported(
            f"{files} storages need one open file each to lie in shared memory; {opened} files are open and the limit "
            f"is {limit}. Raise it (ulimit -n), or leave the weights in private memory, which costs a second copy.",
            files=files,
            limit=limit,
        )


def _check_lendable(tensor: torch.Tensor, rank: int) -> None:
    storage = tensor.untyped_storage()
    shared = tensor.device.type == "cpu" and (storage.is_shared() or not storage.nbytes())
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if not shared or strategy != "file_descriptor":
        raise TransportError(
            f"Rank {rank} (shm): a tensor of shape {list(tensor.shape)} on {tensor.device} does not lie in shared "
            "memory that has a file descriptor, so it cannot be lent. Move it there with "
            "reshard.transports.shm.share_memory_, under torch's sharing strategy 'file_descriptor'.",
            rank=rank,
        )


def _descriptor_of(storage: torch.UntypedStorage) -> int:
    """Return the descriptor behind a shared storage; it stays the storage's. The one place that knows torch's name."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)


def _send(connection: socket.socket, message: bytes, descriptors: Sequence[int]) -> None:
    if descriptors:
        socket.send_fds(connection, [message], list(descriptors))
    else:
        connection.send(message)


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return found


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# ---- memory ------------------------------------------------------------------------------------------------------
# Python's mmap keeps a descriptor open for every mapping (until 3.13), one a borrowed tensor; so libc is asked.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_READ_WRITE, _MAP_SHARED = 3, 1


def _map(descriptor: int, nbytes: int, *advice: int) -> torch.Tensor:
    """Map a file whole as uint8 `[nbytes]`; it is unmapped when the last tensor over it is gone."""
    address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise TransportError(
            f"{format_nbytes(nbytes)} of a peer's memory could not be mapped: {os.strerror(number)}. "
            "Look at the limits of address space and mappings (ulimit -v, vm.max_map_count)."
        )
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    unmap = weakref.finalize(buffer, _libc.munmap, address, nbytes)
    unmap.atexit = False  # at the interpreter's end tensors may still be alive; the kernel unmaps then
    for kind in advice:
        if _libc.madvise(address, nbytes, kind) and ctypes.get_errno() == errno.ENOMEM:
            raise EnvironmentNotSupported(
                f"There is no memory for {format_nbytes(nbytes)} of staging. Lower the staging size."
            )
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _make_arena(descriptor: int, nbytes: int) -> torch.Tensor:
    os.ftruncate(descriptor, nbytes)
    # All pages are made now: faults during the first refit would halve its speed.
    return _map(descriptor, nbytes, _MADV_HUGEPAGE, _MADV_POPULATE_WRITE)


def _memory_file(name: str, content: bytes) -> int:
    descriptor = os.memfd_create(name)
    os.write(descriptor, content)
    return descriptor


def _reads(descriptor: int, nonce: bytes) -> bool:
    """Tell whether the file, mapped here, holds the nonce; what decides is that mapping it works."""
    if os.fstat(descriptor).st_size < len(nonce):
        return False
    return bytes(_map(descriptor, len(nonce)).tolist()) == nonce


# ---- children ----------------------------------------------------------------------------------------------------

_alive: weakref.WeakSet[ShmTransport] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: close its copies of the sockets, or peers would not see the parent's end."""
    for transport in list(_alive):
        transport._ended = ("this process was forked from the one that made the transport", None)
        for peer in transport._peers.values():
            peer.socket.close()
        transport._epoll.close()
    _alive.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
