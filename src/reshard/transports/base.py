"""Transport: the protocol that moves opaque bytes between ordered pairs of ranks, and what each call promises.

A transport knows ranks, bytes and nothing else: no tensor names, no plan. One object serves one rank of one group;
ranks count from 0 inside that group. The life of a message::

    sender                                   receiver
    ------                                   --------
    t = post_send(1, payload)                t = post_recv(0, nbytes)
          payload is lent to the transport         bytes = wait(t, deadline)
    wait(t, deadline)                              ... read bytes ...
          payload is the sender's again  <-------  release(t)

- **Order.** Messages of one ordered pair arrive in the order of their posts. Between pairs there is no order.
- **Sizes are agreed beforehand** by the two ends (they hold the same schedule); the wire carries no negotiation. A
  transport that can see a difference refuses it with a `TransportError` that names both sizes; gloo cannot see it.
- **When a send ticket is done** the sender may overwrite the payload. `memory` and `shm` show the sender's own memory
  to the receiver, so their send tickets are done only when the receiver has released. `torch_p2p` copies through the
  network, so there a send may be done before the receiver has even posted.
- **A zero-byte message is a token.** Where release travels back (`releases_travel`), it is a lock on the sender's
  memory: the sender says "you may read", and its ticket is done when the reader has released.
- **Every wait has a deadline.** At the deadline: `RefitTimeout` that names the peer. When a peer has died, closed or
  aborted: `TransportError` that names the peer, at once. Both end the transport's epoch: every later call fails, and
  a new transport over a new scope is needed.
- **One thread at a time** uses a transport; only `abort` may be called from another one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from reshard.errors import ConfigError, TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SendsFrom: TypeAlias = Literal["anywhere", "staging"]
Lands: TypeAlias = Literal["caller", "transport"]


class Deadline:
    """A point on the monotonic clock up to which a wait may last.

    >>> Deadline(60.0).expired
    False
    >>> Deadline.after(timedelta(0)).remaining()
    0.0
    """

    __slots__ = ("expiry", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.expiry = time.monotonic() + seconds

    @classmethod
    def after(cls, timeout: timedelta | float) -> Deadline:
        """Make the deadline that lies `timeout` (a timedelta, or seconds) from now."""
        return cls(timeout.total_seconds() if isinstance(timeout, timedelta) else timeout)

    def remaining(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self.expiry - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.expiry

    def __repr__(self) -> str:
        return f"Deadline({self.seconds:g} s, {self.remaining():.3f} s left)"


class Ticket:
    """One posted message; opaque to callers except for these facts.

    `sequence` counts the messages of this ordered pair from 0. `done` is a hint that costs nothing: once True, `wait`
    returns without blocking; it turns True only inside calls to the transport.
    """

    __slots__ = ("done", "is_send", "nbytes", "peer", "released", "sequence")

    def __init__(self, peer: int, nbytes: int, sequence: int, *, is_send: bool) -> None:
        self.peer = peer
        self.nbytes = nbytes
        self.sequence = sequence
        self.is_send = is_send
        self.done = False
        self.released = False

    def __repr__(self) -> str:
        way = "to" if self.is_send else "from"
        return f"<{type(self).__name__} {self.sequence}: {self.nbytes} bytes {way} rank {self.peer}>"


@dataclass(frozen=True, slots=True)
class Loan:
    """One tensor of `lender` whose storage a peer may map; the memory itself is passed by the transport.

    Tensors of one storage share `storage`, so a borrower maps it once.
    """

    lender: int
    """Rank that holds the memory."""
    storage: int
    """Number of the storage among those that the lender has lent, from 0."""
    storage_nbytes: int
    """Size of the whole storage: what `borrow` returns."""
    offset_nbytes: int
    """Where the tensor's first element lies in the storage."""

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, int]) -> Loan:
        return cls(facts["lender"], facts["storage"], facts["storage_nbytes"], facts["offset_nbytes"])


class Transport(ABC):
    """Move bytes between this rank and its peers; the promises are in the module's docstring."""

    name: str
    rank: int
    size: int
    sends_from: SendsFrom
    """"anywhere", or "staging": a payload must lie in the memory that `staging` returned."""
    lands: Lands
    """"caller": `post_recv` needs `into`. "transport": bytes are shown in place and stay valid until `release`."""
    releases_travel: bool = True
    """Whether `release` reaches the sender: then a send ticket that is done means that the receiver has read it all."""
    groups_posts: bool = False
    """Whether the posts of a round must be made inside one `batch` (NCCL: single operations would wait in a ring)."""
    watches: bool = False
    """Whether `watch` and `landed` work."""
    lends: bool = False
    """Whether `lend` and `borrow` work."""

    def reaches(self, peer: int) -> bool:
        """Tell whether bytes can go to and come from `peer`; never True for this rank itself."""
        return self.why_not(peer) is None

    @abstractmethod
    def why_not(self, peer: int) -> str | None:
        """Return why `peer` is not reached, as a sentence; None if it is."""

    @abstractmethod
    def staging(self, nbytes: int) -> torch.Tensor:
        """Return this transport's one arena, uint8 `[nbytes]`, page-aligned where that is possible.

        The first call allocates and registers it. A later call with another size replaces it.

        Raises:
            TransportError: A message that was sent from the arena is still in flight.
        """

    def batch(self) -> AbstractContextManager[None]:
        """Group the posts made inside the block where the library underneath wants that (NCCL); else do nothing."""
        return nullcontext()

    @abstractmethod
    def post_send(self, peer: int, payload: torch.Tensor) -> Ticket:
        """Start sending a contiguous uint8 `[n]` to `peer`; n may be 0. Does not block.

        The payload must stay untouched until the ticket is done.

        Raises:
            TransportError: The peer is not reached or lost, or the payload does not lie where `sends_from` says.
        """

    @abstractmethod
    def post_recv(self, peer: int, nbytes: int, into: torch.Tensor | None = None) -> Ticket:
        """Expect the next message of `nbytes` (0 is allowed) from `peer`. Does not block.

        Args:
            peer: The sender.
            nbytes: Agreed size.
            into: Contiguous uint8 `[nbytes]` that the bytes end up in. Required where `lands` is "caller" and nbytes is
                not 0; optional elsewhere (it costs one copy, made inside `wait`).
        """

    @abstractmethod
    def wait(self, ticket: Ticket, deadline: Deadline) -> torch.Tensor | None:
        """Block until the ticket is done.

        Returns:
            For a receive: the bytes, uint8 `[nbytes]`, valid until `release` (`into` itself where it was given). For a
            send: None. Waiting again on a ticket that is done returns the same at once.

        Raises:
            RefitTimeout: The deadline expired; `peer` names who was waited for.
            TransportError: The peer died, closed or aborted, or this transport has been aborted or closed.
        """

    def watch(self, ticket: Ticket, deadline: Deadline) -> None:
        """Let `landed` tell when a ticket is done. It is not waited for by other means then.

        Raises:
            TransportError: This transport cannot watch (`watches` says so), or has ended.
        """
        raise TransportError(f"Transport {self.name!r} cannot watch messages: wait for each.", rank=self.rank)

    def landed(self, deadline: Deadline) -> list[Ticket]:
        """Block until a ticket that is watched is done, and return all that are; each is returned once.

        Returns:
            Tickets; none if the deadline expired before.

        Raises:
            TransportError: As `wait`.
        """
        raise TransportError(f"Transport {self.name!r} cannot watch messages: wait for each.", rank=self.rank)

    @abstractmethod
    def release(self, ticket: Ticket) -> None:
        """Say that the bytes of a receive are no longer read; exactly once for every receive ticket, after its wait."""

    def settle(self, deadline: Deadline) -> None:  # noqa: B027 - nothing to do is the right default
        """Block until all work that earlier waits left to a device has really happened.

        Only CUDA has such work (there `wait` orders streams and does not block the host); elsewhere it returns at once.
        """

    def lend(self, tensors: Sequence[torch.Tensor]) -> tuple[Loan, ...]:
        """Let every reached peer map the storages of these tensors; returns one loan a tensor, in order.

        Does not block. The memory is the lender's: it says with tokens when it may be read.

        Raises:
            TransportError: This transport cannot lend, or a tensor does not lie in memory that a peer can map.
        """
        raise TransportError(
            f"Transport {self.name!r} cannot lend memory: its peers have no way to map it. "
            "Send the bytes, or use the 'shm' transport between ranks of one host.",
            rank=self.rank,
        )

    def borrow(self, peer: int, loan: Loan) -> torch.Tensor:
        """Return the lender's storage mapped here, uint8 `[loan.storage_nbytes]`; read-only by convention.

        A storage is mapped once and kept until `close`.

        Raises:
            TransportError: The loan is not `peer`'s, or did not arrive, or the peer was lost.
        """
        raise TransportError(
            f"Transport {self.name!r} cannot borrow memory of rank {peer}: it has no way to map it. "
            "Receive the bytes, or use the 'shm' transport between ranks of one host.",
            rank=self.rank,
            peer=peer,
        )

    @abstractmethod
    def abort(self, reason: str) -> None:
        """End this transport's epoch: every wait here and at the peers fails at once with an error that names a rank.

        Never takes the process down, never blocks for long, may be called from another thread and more than once.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back what the transport holds. May be called more than once; a peer that still waits is told."""

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


def check_payload(transport: Transport, payload: torch.Tensor) -> int:
    """Return the size of a payload in bytes; raise `ConfigError` if it is not a contiguous uint8 `[n]`."""
    if payload.dtype is not torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
        raise ConfigError(
            f"Transport {transport.name!r} of rank {transport.rank}: a message must be a contiguous uint8 tensor of "
            f"one dim, got {payload.dtype} {list(payload.shape)} with strides {list(payload.stride())}. "
            "Pass tensor.view(torch.uint8).reshape(-1) of contiguous memory."
        )
    return payload.numel()


def check_into(transport: Transport, nbytes: int, into: torch.Tensor | None) -> None:
    """Raise `ConfigError` if `into` is given and is not a contiguous uint8 `[nbytes]`."""
    if into is not None and check_payload(transport, into) != nbytes:
        raise ConfigError(
            f"Transport {transport.name!r} of rank {transport.rank}: the message has {nbytes} bytes and 'into' has "
            f"{into.numel()}. Pass memory of exactly the agreed size."
        )
