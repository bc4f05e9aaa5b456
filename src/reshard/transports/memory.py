"""The transport inside one process: the reference that the others are compared with.

Ranks are threads, or one thread plays all ranks in lockstep (post everything, then wait). Nothing is copied: a receive
shows the sender's own payload, and its release completes the send.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import torch

from reshard.errors import ConfigError, RefitTimeout, TransportError
from reshard.transports.base import Deadline, Loan, Ticket, Transport, check_into, check_payload

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Send(Ticket):
    __slots__ = ("payload",)

    def __init__(self, peer: int, sequence: int, payload: torch.Tensor) -> None:
        super().__init__(peer, payload.numel(), sequence, is_send=True)
        self.payload = payload


class _Recv(Ticket):
    __slots__ = ("into", "send", "shown")

    def __init__(self, peer: int, sequence: int, nbytes: int, into: torch.Tensor | None) -> None:
        super().__init__(peer, nbytes, sequence, is_send=False)
        self.into = into
        self.send: _Send | None = None
        self.shown: torch.Tensor | None = None


class _World:
    """What all ranks of one group share; `condition` guards all of it."""

    def __init__(self, size: int) -> None:
        self.condition = threading.Condition()
        self.posted: dict[tuple[int, int], deque[_Send]] = {}
        self.ended: dict[int, str] = {}
        self.aborted: int | None = None
        self.loans: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(size)}


class MemoryTransport(Transport):
    """One rank of a group that lives in this process; made by `world`."""

    name = "memory"
    sends_from = "anywhere"
    lands = "transport"
    lends = True

    def __init__(self, world: _World, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._world = world
        self._arena: torch.Tensor | None = None
        self._sent = [0] * size
        self._expected = [0] * size
        self._pending: deque[_Send] = deque()
        self._queues: list[deque[_Recv]] = [deque() for _ in range(size)]

    @classmethod
    def world(cls, size: int) -> list[MemoryTransport]:
        """Make the transports of all ranks of a new group, in rank order."""
        if size < 1:
            raise ConfigError(f"A group of {size} ranks cannot be made; it needs at least one rank.")
        shared = _World(size)
        return [cls(shared, rank, size) for rank in range(size)]

    def why_not(self, peer: int) -> str | None:
        if peer == self.rank:
            return f"rank {peer} is this rank itself"
        if not 0 <= peer < self.size:
            return f"rank {peer} is not one of the {self.size} ranks of the group"
        return None

    def staging(self, nbytes: int) -> torch.Tensor:
        with self._world.condition:
            if self._arena is None or self._arena.numel() != nbytes:
                while self._pending and self._pending[0].done:
                    self._pending.popleft()
                if any(not send.done for send in self._pending):
                    raise TransportError(
                        f"Rank {self.rank} (memory): the staging arena cannot be replaced while messages are in "
                        "flight. Wait for every send first.",
                        rank=self.rank,
                    )
                self._arena = torch.empty(nbytes, dtype=torch.uint8)
            return self._arena

    def post_send(self, peer: int, payload: torch.Tensor) -> Ticket:
        check_payload(self, payload)
        with self._world.condition:
            self._check_alive(peer)
            ticket = _Send(peer, self._sent[peer], payload)
            self._sent[peer] += 1
            self._world.posted.setdefault((self.rank, peer), deque()).append(ticket)
            while self._pending and self._pending[0].done:
                self._pending.popleft()
            self._pending.append(ticket)
            self._world.condition.notify_all()
        return ticket

    def post_recv(self, peer: int, nbytes: int, into: torch.Tensor | None = None) -> Ticket:
        check_into(self, nbytes, into)
        with self._world.condition:
            # A peer that ended may still have sent what is expected here; whether it did is for wait() to say.
            self._check_open(peer)
            ticket = _Recv(peer, self._expected[peer], nbytes, into)
            self._expected[peer] += 1
            self._queues[peer].append(ticket)
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> torch.Tensor | None:
        with self._world.condition:
            while not self._is_done(ticket):
                self._check_alive(ticket.peer)
                remaining = deadline.remaining()
                if remaining <= 0:
                    self._end("a deadline expired there")
                    raise RefitTimeout(
                        f"Rank {self.rank} (memory) waited {deadline.seconds:g} s for rank {ticket.peer} in vain: "
                        f"{ticket!r}. The transport is ended; make a new group before the next try.",
                        rank=self.rank,
                        peer=ticket.peer,
                    )
                self._world.condition.wait(remaining)
        return ticket.shown if isinstance(ticket, _Recv) else None

    def release(self, ticket: Ticket) -> None:
        if not isinstance(ticket, _Recv) or not ticket.done or ticket.released or ticket.send is None:
            raise ConfigError(
                f"Rank {self.rank} (memory): {ticket!r} cannot be released; "
                "a receive is released once, after its wait returned."
            )
        with self._world.condition:
            ticket.released = True
            ticket.send.done = True
            ticket.send = None
            ticket.shown = ticket.into
            self._world.condition.notify_all()

    def lend(self, tensors: Sequence[torch.Tensor]) -> tuple[Loan, ...]:
        loans = []
        with self._world.condition:
            lent = self._world.loans[self.rank]
            numbers = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(lent)}
            for tensor in tensors:
                storage = tensor.untyped_storage()
                number = numbers.get(storage.data_ptr())
                if number is None:
                    number = numbers[storage.data_ptr()] = len(lent)
                    lent.append(torch.empty(0, dtype=torch.uint8).set_(storage))
                offset = tensor.storage_offset() * tensor.element_size()
                loans.append(Loan(self.rank, number, storage.nbytes(), int(offset)))
        return tuple(loans)

    def borrow(self, peer: int, loan: Loan) -> torch.Tensor:
        with self._world.condition:
            self._check_alive(peer)
            lent = self._world.loans[peer]
            if loan.lender != peer or loan.storage >= len(lent):
                raise TransportError(
                    f"Rank {self.rank} (memory): rank {peer} has not lent {loan}. Borrow only loans made by that rank.",
                    rank=self.rank,
                    peer=peer,
                )
            return lent[loan.storage]

    def abort(self, reason: str) -> None:
        with self._world.condition:
            self._end(reason)

    def close(self) -> None:
        with self._world.condition:
            self._world.ended.setdefault(self.rank, "closed its transport")
            self._arena = None
            self._world.loans[self.rank] = []
            self._world.condition.notify_all()

    def _end(self, reason: str) -> None:
        if self.rank not in self._world.ended:
            self._world.ended[self.rank] = f"aborted: {reason}"
            if self._world.aborted is None:
                self._world.aborted = self.rank
            self._world.condition.notify_all()

    def _is_done(self, ticket: Ticket) -> bool:
        if isinstance(ticket, _Recv) and not ticket.done:
            self._match(ticket.peer)
        return ticket.done

    def _match(self, peer: int) -> None:
        """Pair the messages that have come from `peer` with the receives posted for them, in order."""
        expected = self._queues[peer]
        posted = self._world.posted.get((peer, self.rank))
        while expected and posted:
            send, recv = posted.popleft(), expected.popleft()
            if send.nbytes != recv.nbytes:
                message = (
                    f"Rank {peer} -> rank {self.rank} (memory): message {recv.sequence} has {send.nbytes} bytes, but "
                    f"{recv.nbytes} bytes were expected. The two ends do not follow the same schedule."
                )
                self._end(message)
                raise TransportError(message, rank=self.rank, peer=peer, sent=send.nbytes, expected=recv.nbytes)
            if recv.into is None:
                recv.shown = send.payload
            else:
                recv.shown = recv.into.copy_(send.payload)
            recv.send = send
            recv.done = True

    def _check_open(self, peer: int) -> None:
        """Raise if this transport is over, or `peer` is none of its peers."""
        ended = self._world.ended.get(self.rank)
        if ended is not None:
            raise TransportError(
                f"Rank {self.rank} (memory): this transport is over, it {ended}. Make a new group.",
                rank=self.rank,
                peer=peer,
            )
        why = self.why_not(peer)
        if why is not None:
            raise TransportError(f"Rank {self.rank} (memory): {why}.", rank=self.rank, peer=peer)

    def _check_alive(self, peer: int) -> None:
        """Raise if nothing can come from or go to `peer` any more; an abort anywhere ends the whole group."""
        self._check_open(peer)
        lost = peer if peer in self._world.ended else self._world.aborted
        if lost is not None:
            raise TransportError(
                f"Rank {self.rank} (memory): rank {lost} {self._world.ended[lost]}.", rank=self.rank, peer=lost
            )
