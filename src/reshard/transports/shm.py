"""The transport between ranks of one host: bytes lie in shared memory, small messages on Unix sockets say where.

    sender                                             receiver
    packs into its arena (one memfd, mapped by all)
    post_send  --- SEND sequence, offset, nbytes --->  wait shows the arena's bytes in place
    wait       <-- RELEASE sequence ----------------   release

A message costs one small datagram each way and nothing is copied here. The kernel's socket calls order memory: what
was written before a send is seen after the receive. Death of a peer is the end of its socket, seen at once.

`handshake` finds the peers, `peer_sockets` carries the messages, `mapped` maps memory, `sharing` moves tensors there.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from reshard.errors import ConfigError, EnvironmentNotSupported, TransportError
from reshard.transports.base import Deadline, Loan, Ticket, Transport, check_into, check_payload
from reshard.transports.board import Board, board_nbytes
from reshard.transports.datagrams import ARENA, BOARD, HEAD, LOANS, LOANS_A_MESSAGE, RELEASE, SEND, close_all
from reshard.transports.handshake import find_peers
from reshard.transports.mapped import enter_pages, make_arena
from reshard.transports.peer_sockets import PeerSockets, ShmTicket
from reshard.transports.sharing import check_lendable, descriptor_of, share_memory_

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist


class ShmTransport(PeerSockets, Transport):
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
        super().__init__(rank, size, timeout)
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._arena_start = self._arena_stop = 0
        self._lent: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._closed = False
        try:
            connections, self._why_not = find_peers(store, rank, size, Deadline.after(timeout))
            for peer, connection in connections.items():
                self._add(peer, connection)
        except BaseException:
            self.close()
            raise
        _alive.add(self)

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
                    self._arena = make_arena(descriptor, nbytes)
                    for peer in self._peers.values():
                        self._tell(peer, HEAD.pack(ARENA, 0, 0, nbytes), [descriptor])
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
        ticket = other.unreleased[sequence] = ShmTicket(peer, nbytes, sequence, None, is_send=True)
        self._tell(other, HEAD.pack(SEND, sequence, offset, nbytes))
        return ticket

    def post_recv(self, peer: int, nbytes: int, into: torch.Tensor | None = None) -> Ticket:
        other = self._reached(peer)
        check_into(self, nbytes, into)
        ticket = ShmTicket(peer, nbytes, other.received, into, is_send=False)
        other.received += 1
        other.expected.append(ticket)
        if other.arrived:
            self._match(other)
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> torch.Tensor | None:
        assert isinstance(ticket, ShmTicket)
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
        if not isinstance(ticket, ShmTicket) or ticket.is_send or not ticket.done or ticket.released:
            raise ConfigError(
                f"Rank {self.rank} (shm): {ticket!r} cannot be released; "
                "a receive is released once, after its wait returned."
            )
        ticket.released = True
        if ticket.into is None:
            ticket.shown = None
        if self._ended is None:
            peer = self._peers[ticket.peer]
            self._tell(peer, HEAD.pack(RELEASE, ticket.sequence, 0, 0))
            if peer.outbox:
                self._push_out(peer)

    def lend(self, tensors: Sequence[torch.Tensor]) -> tuple[Loan, ...]:
        self._check()
        loans, new = [], []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = self._lent.get(storage.data_ptr()) if storage.nbytes() else None
            if known is None:
                check_lendable(tensor, self.rank)
                known = (len(self._lent), storage)
                self._lent[storage.data_ptr() or -len(self._lent) - 1] = known
                new.append(known)
            offset = int(tensor.storage_offset()) * tensor.element_size()
            loans.append(Loan(self.rank, known[0], storage.nbytes(), offset))
        for start in range(0, len(new), LOANS_A_MESSAGE):
            part = new[start : start + LOANS_A_MESSAGE]
            sizes = [storage.nbytes() for _, storage in part]
            message = HEAD.pack(LOANS, part[0][0], 0, len(part)) + struct.pack(f"<{len(part)}Q", *sizes)
            descriptors = [descriptor_of(storage) for _, storage in part if storage.nbytes()]
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
            enter_pages(memory)
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
            self._tell(peer, HEAD.pack(BOARD, 0, 0, 0), [memory, bells[0], bells[peer.rank]])
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
                close_all(descriptors)
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


__all__ = ["ShmTransport", "share_memory_"]
