"""Handshake: how ranks of one host find each other, and make sure that they can map each other's memory.

Every rank listens on a socket in the abstract namespace, so that there is no file to leave behind, and tells its name
and a nonce through the store. Peers connect and hand each other a memory file with the nonce in it; only a peer whose
nonce was read out of memory mapped here is reached. Others (another host, another network namespace) are not, which is
no error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from reshard.errors import RefitTimeout, TransportError
from reshard.transports.datagrams import HEAD, HELLO, VERDICT, close_all, send
from reshard.transports.mapped import memory_file, reads
from reshard.transports.meeting import Meeting

if TYPE_CHECKING:
    import torch.distributed as dist

    from reshard.transports.base import Deadline

_NONCE_NBYTES = 32


def find_peers(
    store: dist.Store, rank: int, size: int, deadline: Deadline
) -> tuple[dict[int, socket.socket], dict[int, str]]:
    """Connect to every rank that shares memory with this one; called by all ranks of the group, on every host.

    Args:
        store: A store with a prefix that nothing else has used.
        rank: This rank in the group.
        size: Ranks in the group.
        deadline: For all of it.

    Returns:
        By rank: the sockets to those who are reached, and of the others why they are not.

    Raises:
        RefitTimeout: A rank did not take part in time.
        TransportError: A rank ended while connecting.
    """
    return _Handshake(rank, size, deadline).connect(store)


class _Handshake:
    def __init__(self, rank: int, size: int, deadline: Deadline) -> None:
        self.rank = rank
        self.size = size
        self._deadline = deadline
        self._why_not: dict[int, str] = {}

    def connect(self, store: dist.Store) -> tuple[dict[int, socket.socket], dict[int, str]]:
        """Do all of it; a higher rank connects to a lower one."""
        deadline = self._deadline
        meeting = Meeting(store, self.rank, self.size, scope="shm", timeout=timedelta(seconds=deadline.seconds))
        nonce = secrets.token_bytes(_NONCE_NBYTES)
        name = f"reshard-{secrets.token_hex(16)}"
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            listener.bind("\0" + name)
            listener.listen(self.size)
            told = meeting.exchange("shm address", json.dumps([name, nonce.hex()]).encode(), deadline)
            addresses = [json.loads(value) for value in told]
            nonces = [bytes.fromhex(their_nonce) for _, their_nonce in addresses]
            proof = memory_file("reshard-nonce", nonce)
            stack.callback(os.close, proof)
            made: dict[int, socket.socket] = {}
            failed = stack.enter_context(contextlib.ExitStack())
            for peer in range(self.rank):
                connection = self._dial(peer, addresses[peer][0])
                if connection is not None:
                    made[peer] = failed.enter_context(connection)
                    self._say(peer, connection, HELLO, [proof])
            value = json.dumps(sorted(made)).encode()
            dialled = [json.loads(value) for value in meeting.exchange("shm connected", value, deadline)]
            callers = {peer for peer in range(self.rank + 1, self.size) if self.rank in dialled[peer]}
            for peer in range(self.rank + 1, self.size):
                if peer not in callers:
                    self._why_not[peer] = f"rank {peer} found no socket of rank {self.rank} on its host"
            for peer, connection in self._accept(listener, callers).items():
                made[peer] = failed.enter_context(connection)
            good = dict.fromkeys(made, True)
            for peer in sorted(made, reverse=True):  # answer those who called before waiting for those called
                if peer > self.rank:
                    good[peer] = self._hear(peer, made[peer], HELLO, nonces[peer])
                    self._say(peer, made[peer], VERDICT, [proof], good[peer])
            for peer in sorted(made):
                if peer < self.rank:
                    good[peer] = self._hear(peer, made[peer], VERDICT, nonces[peer])
                    self._say(peer, made[peer], VERDICT, [], good[peer])
            for peer in sorted(made):
                if peer > self.rank:
                    good[peer] &= self._hear(peer, made[peer], VERDICT, None)
            for peer in [peer for peer in made if not good[peer]]:
                self._why_not[peer] = f"rank {peer} has a socket here, but no memory that both can map"
                made.pop(peer).close()
            failed.pop_all()
        return made, self._why_not

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

    def _accept(self, listener: socket.socket, callers: set[int]) -> dict[int, socket.socket]:
        """Take the calls of `callers`; a stranger who connects is turned away."""
        taken: dict[int, socket.socket] = {}
        try:
            while callers - taken.keys():
                listener.settimeout(max(0.001, self._deadline.remaining()))
                connection, _ = listener.accept()
                connection.settimeout(min(1.0, max(0.001, self._deadline.remaining())))  # a caller has spoken already
                head = connection.recv(HEAD.size, socket.MSG_PEEK)
                kind, rank, _, _ = HEAD.unpack(head) if len(head) == HEAD.size else (0, 0, 0, 0)
                if kind == HELLO and rank in callers - taken.keys():
                    taken[rank] = connection
                else:
                    connection.close()
        except OSError as error:
            for connection in taken.values():
                connection.close()
            self._expire(min(callers - taken.keys()), f"a connection ({error})")
        return taken

    def _say(self, peer: int, connection: socket.socket, kind: int, proof: list[int], good: bool = True) -> None:
        connection.settimeout(max(0.001, self._deadline.remaining()))
        try:
            send(connection, HEAD.pack(kind, self.rank, 0, good), proof)
        except OSError as error:
            self._lose(peer, f"it ended while connecting ({error})")

    def _hear(self, peer: int, connection: socket.socket, kind: int, nonce: bytes | None) -> bool:
        """Read one step of the handshake; tell whether the peer is content and its nonce was read from its memory."""
        connection.settimeout(max(0.001, self._deadline.remaining()))
        try:
            message, descriptors, _, _ = socket.recv_fds(connection, HEAD.size, 4)
        except TimeoutError:
            self._expire(peer, "its answer while connecting")
        except OSError as error:
            self._lose(peer, f"it ended while connecting ({error})")
        try:
            if not message:
                self._lose(peer, "it ended while connecting")
            their_kind, _, _, content = HEAD.unpack(message)
            if nonce is None:
                return bool(content)
            return their_kind == kind and bool(content) and len(descriptors) == 1 and reads(descriptors[0], nonce)
        finally:
            close_all(descriptors)

    def _expire(self, peer: int, what: str) -> NoReturn:
        raise RefitTimeout(
            f"Rank {self.rank} (shm) waited {self._deadline.seconds:g} s for rank {peer} in vain: {what}. This "
            "transport is over; make a new one before the next try.",
            rank=self.rank,
            peer=peer,
        )

    def _lose(self, peer: int, how: str) -> NoReturn:
        raise TransportError(
            f"Rank {self.rank} (shm): rank {peer} is lost: {how}. This transport is over; make a new one.",
            rank=self.rank,
            peer=peer,
        )
