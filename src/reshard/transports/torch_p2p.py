"""The transport over a torch process group: gloo for CPU tensors, NCCL for CUDA tensors.

The group may be any `ProcessGroup` object, registered with torch or not, with or without a default group in the
process. Give the transport a group of its own: when a deadline expires or `abort` is called, all connections of that
group are closed, because there is no other way to keep a receive that is under way from writing into memory later.

What gloo does, and what follows from it (torch 2.13):

- A message longer than its receive ends the receiving process, a shorter one leaves the tail unwritten, and neither
  end is told. Sizes must be agreed by other means before the first byte.
- A wait that times out closes all pairs of this process, so an expired deadline ends the epoch here and, at once, at
  every peer that waits for this rank. `ProcessGroupGloo.abort()` does nothing, so `abort` makes a receive time out.
- `Work.is_completed()` can be wrong, so only `Work.wait` is asked; to learn which of many messages is done first, a
  thread for each pair waits.
- A peer that dies, or ends its epoch, closes its connections; other pairs go on. Waits for messages of which no byte
  has moved then fail within milliseconds. But a message that was under way, half written or half read, is forgotten
  (`Pair::signalException` passes over those of `tx_` and `rx_`): its wait lasts until it times out. So no wait is made
  here in the caller's thread. While nothing comes, the caller looks from time to time whether the pair takes another
  post; one that was closed refuses it.

CUDA: **no GPU has run this.** The code follows what torch's own `batch_isend_irecv` does: posts inside `batch` are one
NCCL group; `wait` orders the current stream behind the communication and does not block the host, so a deadline can
only be enforced in `settle`. The first operation of an NCCL group must involve all of its ranks unless the group was
connected eagerly.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist

from reshard.errors import ConfigError, RefitTimeout, TransportError
from reshard.transports.arrivals import Arrivals
from reshard.transports.base import Deadline, Ticket, Transport, check_into, check_payload

if TYPE_CHECKING:
    from collections.abc import Iterator

_TAG = 7341
"""Keeps our messages apart from others on the same gloo group; the next tag is never sent, see `abort`."""
_LOOK_TAG = _TAG + 2  # sent to see whether a pair is closed, and never received
_SHORTEST_WAIT = timedelta(milliseconds=1)  # gloo reads 0 as "no timeout"
_WATCHED_LONGER = timedelta(seconds=5)
_LOOK_SECONDS = 0.25
"""How long nothing comes before the pairs are looked at. Each look leaves some 40 bytes at both ends of a pair."""
_LAST_LOOK_SECONDS = 0.1
"""Once the deadline has expired: for a thread to tell of what is done already."""
_TURN_SECONDS = 0.5
"""How long a thread may take, on a busy machine, to tell of what was done before its pair was closed: a peer that has
sent all and left is not lost."""


class _P2PTicket(Ticket):
    __slots__ = ("is_watched", "memory", "shown", "work")

    def __init__(self, peer: int, nbytes: int, sequence: int, memory: torch.Tensor, *, is_send: bool) -> None:
        super().__init__(peer, nbytes, sequence, is_send=is_send)
        self.memory = memory  # what the library reads or writes: must outlive the work
        self.shown: torch.Tensor | None = None
        self.work: dist.Work | None = None
        self.is_watched = False


class TorchP2PTransport(Transport):
    """Send and receive over one process group; a send may be done before the receiver has read anything.

    Args:
        group: The process group; ranks of the transport are ranks of the group.
        device: Where messages lie: a CPU device (gloo), or this rank's CUDA device (NCCL; no GPU has run this).
        max_batch_ops: Most operations in one `batch` on CUDA. Large NCCL groups hang, and the two ends of a message
            must agree on how operations are grouped, so a bigger batch is refused instead of cut in two here.
    """

    name = "torch_p2p"
    sends_from = "anywhere"
    lands = "caller"
    releases_travel = False

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device | str = "cpu", max_batch_ops: int = 256
    ) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self.device = torch.device(device)
        self.max_batch_ops = max_batch_ops
        self._group: dist.ProcessGroup | None = group
        self._is_cuda = self.device.type == "cuda"
        self.groups_posts = self._is_cuda
        self._arena: torch.Tensor | None = None
        self._sent = [0] * self.size
        self._expected = [0] * self.size
        self._open: dict[int, _P2PTicket] = {}
        self._batch: list[_P2PTicket] | None = None
        self._ended: str | None = None
        self._lost_peer: int | None = None
        self._ending = threading.Lock()
        self.watches = not self._is_cuda
        self._arrivals: Arrivals[_P2PTicket] = Arrivals()
        self._waited_for: dict[int, _P2PTicket] = {}
        self._landed: list[Ticket] = []

    def why_not(self, peer: int) -> str | None:
        if peer == self.rank:
            return f"rank {peer} is this rank itself"
        if not 0 <= peer < self.size:
            return f"rank {peer} is not one of the {self.size} ranks of the group"
        return None

    def staging(self, nbytes: int) -> torch.Tensor:
        if self._arena is None or self._arena.numel() != nbytes:
            if any(ticket.is_send for ticket in self._open.values()):
                raise TransportError(
                    f"Rank {self.rank} (torch_p2p): the staging arena cannot be replaced while messages are in flight. "
                    "Wait for every send first.",
                    rank=self.rank,
                )
            self._arena = None  # free the old one before the new one is made
            self._arena = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)  # zeros: pages are there at once
        return self._arena

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Make one NCCL group of the posts inside the block; on CPU posts start at once and this does nothing."""
        if not self._is_cuda:
            yield
            return
        if self._batch is not None:
            raise ConfigError(f"Rank {self.rank} (torch_p2p): batches cannot be nested.")
        self._batch = []
        group = self._usable(None)
        try:
            yield
        finally:
            tickets, self._batch = self._batch, None
            if tickets:
                work = group._end_coalescing(self.device)
                for ticket in tickets:
                    ticket.work = work

    def post_send(self, peer: int, payload: torch.Tensor) -> Ticket:
        self._usable(peer)
        nbytes = check_payload(self, payload)
        ticket = _P2PTicket(peer, nbytes, self._sent[peer], self._carrier(payload), is_send=True)
        self._post(ticket)
        self._sent[peer] += 1
        return ticket

    def post_recv(self, peer: int, nbytes: int, into: torch.Tensor | None = None) -> Ticket:
        self._usable(peer)
        check_into(self, nbytes, into)
        if into is None:
            if nbytes:
                raise ConfigError(
                    f"Rank {self.rank} (torch_p2p): a receive of {nbytes} bytes from rank {peer} needs 'into'; "
                    "this transport has no memory of its own to show them in."
                )
            into = torch.empty(0, dtype=torch.uint8, device=self.device)
        ticket = _P2PTicket(peer, nbytes, self._expected[peer], self._carrier(into), is_send=False)
        ticket.shown = into
        self._post(ticket)
        self._expected[peer] += 1
        return ticket

    def wait(self, ticket: Ticket, deadline: Deadline) -> torch.Tensor | None:
        assert isinstance(ticket, _P2PTicket)
        if not ticket.done:
            self._usable(ticket.peer)
            if ticket.work is None:
                raise ConfigError(f"Rank {self.rank} (torch_p2p): {ticket!r} is waited for inside its own batch.")
            if self._is_cuda:
                try:
                    ticket.work.wait()
                except RuntimeError as error:
                    if "imed out" in str(error):
                        self._expire(ticket, deadline)
                    self._fail(ticket.peer, repr(ticket), error)
                self._done(ticket)
            else:
                self._wait_for(ticket, deadline)
                while not ticket.done:
                    if not self._take(deadline) and deadline.expired:
                        self._expire(ticket, deadline)
        return ticket.shown

    def watch(self, ticket: Ticket, deadline: Deadline) -> None:
        assert isinstance(ticket, _P2PTicket)
        self._wait_for(ticket, deadline)
        ticket.is_watched = True

    def landed(self, deadline: Deadline) -> list[Ticket]:
        self._usable(None)
        while not self._landed and (self._take(deadline) or not deadline.expired):
            pass
        landed, self._landed = self._landed, []
        return landed

    def _wait_for(self, ticket: _P2PTicket, deadline: Deadline) -> None:
        """Let a thread wait for a ticket."""
        if id(ticket) not in self._waited_for:
            assert ticket.work is not None
            self._waited_for[id(ticket)] = ticket
            # The caller looks at the deadline; a thread that gave up first would name whoever it waits for.
            last = timedelta(seconds=deadline.remaining()) + _WATCHED_LONGER
            self._arrivals.watch((ticket.peer, ticket.is_send), ticket, partial(ticket.work.wait, last))

    def _take(self, deadline: Deadline) -> bool:
        """Take note of what is done by now; waits a while for the first, and looks after the pairs if nothing comes."""
        found = self._arrivals.next(max(_LAST_LOOK_SECONDS, min(deadline.remaining(), _LOOK_SECONDS)))
        if not found:
            self._usable(None)  # an abort in another thread
            lost = self._find_lost()
            if lost is not None:
                found = self._arrivals.next(_TURN_SECONDS)  # what was done before the pair was closed
                if not found:
                    ticket, error = lost
                    self._fail(ticket.peer, repr(ticket), error)
        for ticket, failure in found:
            if failure is not None:
                self._fail(ticket.peer, repr(ticket), failure)
            self._done(ticket)
            if ticket.is_watched:
                self._landed.append(ticket)
        return bool(found)

    def _find_lost(self) -> tuple[_P2PTicket, RuntimeError] | None:
        """The first ticket waited for whose pair is closed, with what gloo says of that."""
        group = self._usable(None)
        nothing = torch.empty(0, dtype=torch.uint8)
        seen: set[int] = set()
        for ticket in self._waited_for.values():
            if ticket.peer not in seen:
                seen.add(ticket.peer)
                try:
                    group.send([nothing], ticket.peer, _LOOK_TAG)
                except RuntimeError as error:
                    return ticket, error
        return None

    def _done(self, ticket: _P2PTicket) -> None:
        ticket.done = True
        ticket.work = None
        self._waited_for.pop(id(ticket), None)
        del self._open[id(ticket)]

    def release(self, ticket: Ticket) -> None:
        """Mark the receive as read; nothing travels back, so a sender learns nothing from it."""
        if ticket.is_send or not ticket.done or ticket.released:
            raise ConfigError(
                f"Rank {self.rank} (torch_p2p): {ticket!r} cannot be released; "
                "a receive is released once, after its wait returned."
            )
        ticket.released = True

    def settle(self, deadline: Deadline) -> None:
        if not self._is_cuda:
            return
        self._usable(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        while not event.query():  # type: ignore[no-untyped-call]
            if deadline.expired:
                self._end("a deadline expired there", None)
                raise RefitTimeout(
                    f"Rank {self.rank} (torch_p2p): the work on {self.device} was not done after "
                    f"{deadline.seconds:g} s; a peer did not take part. The group is aborted; make a new one.",
                    rank=self.rank,
                )
            time.sleep(0.0001)

    def abort(self, reason: str) -> None:
        self._end(f"aborted: {reason}", None)

    def close(self) -> None:
        """Let go of the group, which stays the caller's; with messages still under way this is an abort."""
        if self._open:
            self._end("closed with messages under way", None)
        with self._ending:
            self._ended = self._ended or "closed"
            self._group = None
        self._arrivals.close()
        self._arena = None
        self._open.clear()
        self._waited_for.clear()

    def _carrier(self, memory: torch.Tensor) -> torch.Tensor:
        # NCCL is not asked to move nothing: a token travels as one byte there.
        return torch.zeros(1, dtype=torch.uint8, device=self.device) if self._is_cuda and not memory.numel() else memory

    def _post(self, ticket: _P2PTicket) -> None:
        group = self._usable(ticket.peer)
        if self._batch is not None:
            if len(self._batch) >= self.max_batch_ops:
                raise ConfigError(
                    f"Rank {self.rank} (torch_p2p): a batch of more than {self.max_batch_ops} operations; the two ends "
                    "of a message must group alike, so it is not cut here. Use rounds of fewer operations."
                )
            if not self._batch:
                group._start_coalescing(self.device)
            self._batch.append(ticket)
        try:
            call = group.send if ticket.is_send else group.recv
            ticket.work = call([ticket.memory], ticket.peer, _TAG)
        except RuntimeError as error:
            self._fail(ticket.peer, repr(ticket), error)
        self._open[id(ticket)] = ticket

    def _usable(self, peer: int | None) -> dist.ProcessGroup:
        group = self._group
        if self._ended is not None or group is None:
            raise TransportError(
                f"Rank {self.rank} (torch_p2p): this transport is over, it {self._ended}. Make a new group.",
                rank=self.rank,
                peer=peer if self._lost_peer is None else self._lost_peer,
            )
        why = None if peer is None else self.why_not(peer)
        if why is not None:
            raise TransportError(f"Rank {self.rank} (torch_p2p): {why}.", rank=self.rank, peer=peer)
        return group

    def _expire(self, ticket: _P2PTicket, deadline: Deadline) -> NoReturn:
        peer = ticket.peer
        self._end(f"waited {deadline.seconds:g} s for rank {peer} in vain", peer)
        raise RefitTimeout(
            f"Rank {self.rank} (torch_p2p) waited {deadline.seconds:g} s for rank {peer} in vain: {ticket!r}. "
            "The group's connections are closed; make a new group before the next try.",
            rank=self.rank,
            peer=peer,
        )

    def _fail(self, peer: int, what: str, error: RuntimeError) -> NoReturn:
        """Turn what the library raised into one of our errors, and end the epoch."""
        self._usable(peer)  # an abort in another thread comes out of the library as a closed pair
        text = str(error).split("] ")[-1].split(". ")[0]
        self._end(f"lost rank {peer}", peer)
        raise TransportError(
            f"Rank {self.rank} (torch_p2p) lost rank {peer}: {what}: {text}. Rank {peer} died, aborted, or closed its "
            "connections after an expired deadline of its own; look there.",
            rank=self.rank,
            peer=peer,
        ) from error

    def _end(self, state: str, peer: int | None) -> None:
        with self._ending:
            group = self._group
            if self._ended is not None or group is None:
                return
            self._ended, self._lost_peer = state, peer
        if self._is_cuda:
            with contextlib.suppress(RuntimeError):
                group._get_backend(self.device).abort()
            return
        never_sent = torch.empty(1, dtype=torch.uint8)
        for other in range(self.size):
            if other != self.rank:
                # The first pair that is still open times out, and with it gloo closes all pairs of this process.
                with contextlib.suppress(RuntimeError):
                    group.recv([never_sent], other, _TAG + 1).wait(_SHORTEST_WAIT)
        self._arrivals.wake()
