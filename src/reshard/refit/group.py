"""Group: what this process keeps for one process group: the control plane, the transports, and their staging memory."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from reshard.errors import ConfigError, EnvironmentNotSupported, TransportError
from reshard.transports.meeting import Meeting, store_of
from reshard.transports.operations import Link
from reshard.transports.shm import ShmTransport
from reshard.transports.torch_p2p import TorchP2PTransport

if TYPE_CHECKING:
    from reshard.transports.base import Deadline, Transport

TransportChoice = Literal["auto", "torch_p2p", "shm"]
CHOICES: tuple[TransportChoice, ...] = ("auto", "torch_p2p", "shm")

_GROUPS: dict[int, tuple[weakref.ref[dist.ProcessGroup], Group]] = {}


class Group:
    """The state of one process group: made at its first use, by all its ranks, and kept as long as the group.

    Works on any ``torch.distributed.ProcessGroup`` object, registered with torch or not, with or without a default
    group in the process.
    """

    def __init__(self, pg: dist.ProcessGroup, timeout: timedelta) -> None:
        self._pg = weakref.ref(pg)
        self.rank = pg.rank()
        self.size = pg.size()
        store = store_of(pg)
        self.meeting = Meeting(store, self.rank, self.size, scope="reshard/meeting", timeout=timeout)
        self._store = store
        self._p2p: dict[torch.device, TorchP2PTransport] = {}
        self._shm: ShmTransport | None = None
        self._arenas: dict[int, torch.Tensor] = {}
        self.caller: object | None = None
        """The collectives' calls on this group, kept here so that they end with it."""
        self.generation = 0
        """Counts how often staging memory was replaced; programs made before must be made again."""

    @classmethod
    def of(cls, pg: dist.ProcessGroup | None, timeout: timedelta) -> Group:
        """The state of ``pg``, or of the default group where None is given.

        Raises:
            ConfigError: There is no group.
        """
        if pg is None:
            if not dist.is_initialized():
                raise ConfigError(
                    "No process group was given and this process has no default group. Pass group=, or call "
                    "torch.distributed.init_process_group first."
                )
            pg = dist.group.WORLD
        if not isinstance(pg, dist.ProcessGroup):
            raise ConfigError("This rank is not a member of the group it passed; only members call.")
        known = _GROUPS.get(id(pg))
        if known is not None and known[0]() is pg:
            return known[1]
        key = id(pg)
        group = cls(pg, timeout)
        _GROUPS[key] = (weakref.ref(pg, lambda _: _forget(key)), group)
        return group

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The caller's group; None once nobody else keeps it."""
        return self._pg()

    def p2p(self, device: torch.device, deadline: Deadline) -> TorchP2PTransport:
        """The transport over torch; made by all ranks together at its first use.

        On the CPU it has a gloo group of its own beside the caller's, so that tags never meet, and an expired deadline
        closes none of the caller's connections. On a GPU it uses the caller's group, since another one costs memory.
        """
        if device not in self._p2p:
            theirs = self._pg()
            assert theirs is not None, "the caller's group is gone"
            pg = theirs if device.type == "cuda" else self._own_gloo(deadline)
            self._p2p[device] = TorchP2PTransport(pg, device=device)
        return self._p2p[device]

    def _own_gloo(self, deadline: Deadline) -> dist.ProcessGroup:
        store = dist.PrefixStore("reshard/gloo", self._store)
        timeout = timedelta(seconds=max(1.0, deadline.remaining()))
        try:
            backend = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
        except RuntimeError as error:
            raise TransportError(
                f"Rank {self.rank} could not connect to all {self.size} ranks over gloo within {timeout}: {error}. "
                f"If the machine has several networks, name the one to use in GLOO_SOCKET_IFNAME.",
                rank=self.rank,
            ) from error
        backend._set_sequence_number_for_group()
        pg = dist.ProcessGroup(store, self.rank, self.size)
        pg._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        pg._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return pg

    def shm(self, deadline: Deadline) -> ShmTransport:
        """The transport between ranks of one host; made by all ranks together at its first use."""
        if self._shm is None:
            prefixed = dist.PrefixStore("reshard/shm", self._store)
            timeout = timedelta(seconds=deadline.remaining())
            self._shm = ShmTransport(prefixed, self.rank, self.size, timeout=timeout)
        return self._shm

    def use_board(self, deadline: Deadline) -> None:
        """From now on, agree in shared memory; called by all ranks together, each of which reaches all others there."""
        if self.size > 1 and self.meeting.board is None:
            self.meeting.board = self.shm(deadline).board(deadline)

    def links(self, choice: str, device: torch.device, deadline: Deadline) -> dict[int, Link]:
        """How each other rank is reached.

        Args:
            choice: ``"auto"`` takes shared memory where two ranks share a host and the process group elsewhere.
            device: Where this rank's weights lie; those on a GPU go over the process group.
            deadline: For ranks of one host to find each other.

        Raises:
            EnvironmentNotSupported: ``"shm"`` was asked for and a rank cannot be reached through it.
        """
        others = [peer for peer in range(self.size) if peer != self.rank]
        p2p = self.p2p(device, deadline)
        if choice == "torch_p2p" or device.type == "cuda":
            return {peer: Link(p2p, peer) for peer in others}
        shm = self.shm(deadline)
        unreached = [peer for peer in others if not shm.reaches(peer)]
        if choice == "shm" and unreached:
            raise EnvironmentNotSupported(
                f"Rank {self.rank} cannot reach rank {unreached[0]} through shared memory: "
                f"{shm.why_not(unreached[0])} Use transport='auto', which takes the process group there.",
                rank=self.rank,
                peer=unreached[0],
            )
        return {peer: Link(p2p if peer in unreached else shm, peer) for peer in others}

    def shm_reason(self, peer: int) -> str | None:
        """Why shared memory is not used with ``peer``; None where it is, or where nobody asked for it."""
        return None if self._shm is None else self._shm.why_not(peer)

    def arena(self, transport: Transport, nbytes: int) -> torch.Tensor | None:
        """Staging memory of a transport, at least ``nbytes``; the same for all programs, grown when one needs more."""
        if nbytes == 0:
            return None
        have = self._arenas.get(id(transport))
        if have is None or have.numel() < nbytes:
            self._arenas[id(transport)] = transport.staging(nbytes)
            self.generation += have is not None
        return self._arenas[id(transport)]

    @property
    def staging_nbytes(self) -> int:
        """Staging memory that this group holds now."""
        return sum(arena.numel() for arena in self._arenas.values())

    def abort(self, reason: str) -> None:
        """End the epoch of both transports, so that peers who wait for this rank are told at once."""
        for transport in self._transports():
            transport.abort(reason)

    def _transports(self) -> list[Transport]:
        return [*([] if self._shm is None else [self._shm]), *self._p2p.values()]

    def close(self) -> None:
        """Give back connections and staging memory; the process group itself is left as it is."""
        for transport in self._transports():
            transport.close()
        self._arenas.clear()
        for key in [key for key, (_, group) in _GROUPS.items() if group is self]:
            del _GROUPS[key]


def _forget(key: int) -> None:
    """The process group is gone: give back what was kept for it."""
    known = _GROUPS.pop(key, None)
    if known is not None:
        known[1].close()
