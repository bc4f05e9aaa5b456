"""Meeting: the control plane, where ranks exchange small values over a store before any byte of weights moves.

Everything goes by exact keys, one a rank and call, so that a silent rank can be named, and so that a rank that is late
or gone harms no connection of the data plane. One exchange costs a few round trips to the store::

    set(mine)   count += 1, the last one sets the word   wait(word)   get(everyone's)

Where all ranks must say the same (``agree``) there is one value to compare with, and nothing to get; and where all of
them share memory, a board there says so without the store. A rank that fails sets the word instead, so nobody waits for
it. Old keys are deleted many at a time, once in many calls; never those of the last two: that this rank has finished
the call before shows that everyone has begun it, and so has finished the one before that.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

from reshard.errors import ConfigError, DigestError, EnvironmentNotSupported, PeerError, RefitTimeout, TransportError
from reshard.transports.base import Deadline
from reshard.transports.waiting import wait_for_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.transports.board import Board

_SAID, _FAILED, _EXPIRED, _DIFFERS, _EXCHANGES = b"+", b"-", b"!", b"?", b"="
_ALL_HERE = b"all here"
_ROLL_CALL = timedelta(seconds=0.5)
"""How long a rank whose deadline expired waits for others to say that they are here too."""
_MANY_KEYS = 32
"""Old keys of this rank that are left in the store before they are deleted together."""


class Meeting:
    """The ranks of one group meeting over one store, call after call, in the same order on every rank.

    Args:
        store: Any torch store that all ranks share; its own timeout does not matter.
        rank: This rank, counting inside the group.
        size: Number of ranks.
        scope: Prefix of all keys; fresh for every meeting on that store, equal on all ranks.
        timeout: Of an exchange that is given no deadline.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, *, scope: str, timeout: timedelta) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"Rank {rank} is not one of the {size} ranks of the meeting {scope!r}.")
        self.rank = rank
        self.size = size
        self.scope = scope
        self.timeout = timeout
        self._store = store
        self._calls = 0
        self._old_keys: list[str] = []
        self._last_keys: list[str] = []
        self._this_keys: list[str] = []
        self._broken: str | None = None
        self.board: Board | None = None
        """Where all ranks share memory: the quick way to ``agree``. Given to all ranks after the same call."""

    def exchange(self, label: str, payload: bytes, deadline: Deadline | None = None) -> list[bytes]:
        """Give `payload` to every rank and return all ranks' payloads in rank order.

        Raises:
            PeerError: A rank called `fail` instead; `rank` names it (the lowest, if several did) and `cause` carries
                its message. The meeting can go on.
            RefitTimeout: The deadline expired, here or at another rank; `ranks` has all who were silent. The meeting is
                over, for a rank that was only late too.
            TransportError: A rank is at another label, or the store was lost. The meeting is over.
        """
        deadline = deadline or Deadline.after(self.timeout)
        call = self._next_call(label)
        if self.size == 1:
            return [payload]
        if self.board is not None:
            self.board.refuse(call)  # a rank that is elsewhere waits there
        with self._store_errors(label):
            self._set(self._key(call, self.rank), _encode(_SAID, label, payload))
            self._arrive(call, label, _encode(_EXCHANGES, label, b""))
        self._forget(call)
        keys = [self._key(call, rank) for rank in range(self.size)]
        if not self._await_word(call, label, deadline):
            self._expire(keys, call, label, deadline)
        with self._store_errors(label):
            told = [_decode(value) for value in _get_all(self._store, keys)]
        for rank, (status, their_label, value) in enumerate(told):
            if their_label != label:
                self._break(
                    f"Rank {rank} is at {their_label!r} of meeting {self.scope!r}, rank {self.rank} is at {label!r}. "
                    "Every rank must make the same calls in the same order.",
                    rank=rank,
                )
            if status != _SAID:
                self._raise_failure(rank, label, status, value)
        return [value for _, _, value in told]

    def agree(self, label: str, value: bytes, deadline: Deadline | None = None) -> None:
        """Wait until all ranks are here with the same value: an exchange at half the cost.

        Raises:
            DigestError: Two ranks have different values; `ranks` names them. The meeting can go on.
            PeerError, RefitTimeout, TransportError: As `exchange`.
        """
        deadline = deadline or Deadline.after(self.timeout)
        call = self._next_call(label)
        if self.size == 1:
            return
        mine = _encode(_SAID, label, value)
        if self.board is not None and self.board.all_say(call, mine, deadline):
            return
        with self._store_errors(label):
            self._arrive(call, label, mine)
        self._forget(call)
        with self._store_errors(label):
            in_time = self._wait_for_word(call, deadline)
            failed = in_time and self._store.add(self._trouble_key(call), 0)
        if failed:
            self._await_word(call, label, deadline)
        if not in_time:
            self._expire_agreement(call, label, mine, deadline)

    def _arrive(self, call: int, label: str, mine: bytes) -> None:
        """Compare with what the first rank here said, and count this one; the last one sets the word."""
        first = self._compare_set(self._value_key(call), self.rank.to_bytes(4, "big") + mine)
        if first[4:] != mine:
            _, their_label, theirs = _decode(first[4:])
            ours = _decode(mine)[2].hex()[:12]
            facts = [int.from_bytes(first[:4], "big"), their_label, theirs.hex()[:12], label, ours]
            self._say_failed(call, label, _DIFFERS, json.dumps(facts).encode())
        elif self._store.add(self._count_key(call), 1) == self.size:
            self._compare_set(self._word_key(call), _ALL_HERE)  # who was too late for another's deadline hears of it

    def _expire_agreement(self, call: int, label: str, mine: bytes, deadline: Deadline) -> None:
        """Let those who are here say so, and raise `RefitTimeout` that names the others."""
        keys = [self._key(call, rank) for rank in range(self.size)]
        with self._store_errors(label):
            self._set(self._key(call, self.rank), mine)
        with contextlib.suppress(RuntimeError):  # the others' deadlines expire about now
            self._store.wait(keys, _ROLL_CALL)
        self._expire(keys, call, label, deadline)
        if not self._await_word(call, label, deadline):
            self._raise_timeout(self.rank, label, deadline.seconds, [r for r in range(self.size) if r != self.rank])

    def fail(self, label: str, message: str) -> None:
        """Take part in `exchange(label)` by failing: it then raises `PeerError` with `message` on every other rank."""
        call = self._next_call(label)
        if self.size == 1:
            return
        if self.board is not None:
            self.board.refuse(call)
        with self._store_errors(label):
            self._say_failed(call, label, _FAILED, message.encode())
        self._keep_old_keys()

    def _next_call(self, label: str) -> int:
        if self._broken is not None:
            raise TransportError(
                f"Meeting {self.scope!r} is over and cannot go on to {label!r}: {self._broken} Use a new scope.",
                rank=self.rank,
            )
        self._calls += 1
        return self._calls

    def _key(self, call: int, rank: int) -> str:
        return f"{self.scope}/{call}/{rank}"

    def _count_key(self, call: int) -> str:
        return f"{self.scope}/{call}/count"

    def _word_key(self, call: int) -> str:
        return f"{self.scope}/{call}/word"

    def _value_key(self, call: int) -> str:
        return f"{self.scope}/{call}/value"

    def _trouble_key(self, call: int) -> str:
        return f"{self.scope}/{call}/trouble"

    def _compare_set(self, key: str, value: bytes) -> bytes:
        """Set a key unless another rank was first; what it holds now."""
        return self._store.compare_set(key, "", value)  # type: ignore[arg-type] # torch takes bytes too

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type] # torch takes bytes too, its stubs do not say so

    def _say_failed(self, call: int, label: str, status: bytes, value: bytes) -> None:
        """Leave word for those who wait for all, and in the place of this rank's own payload."""
        self._set(self._key(call, self.rank), _encode(status, label, value))
        self._store.add(self._trouble_key(call), 1)
        self._set(self._word_key(call), self.rank.to_bytes(4, "big") + _encode(status, label, value))

    def _raise_failure(self, rank: int, label: str, status: bytes, value: bytes) -> NoReturn:
        if status == _FAILED:
            message = value.decode()
            raise PeerError(f"Rank {rank} failed at {label!r}: {message}", rank=rank, cause=message, label=label)
        if status == _DIFFERS:
            self._raise_difference(rank, *json.loads(value))
        seconds, silent = json.loads(value)
        self._raise_timeout(rank, label, seconds, silent)

    def _raise_difference(
        self, rank: int, other: int, their_label: str, theirs: str, label: str, ours: str
    ) -> NoReturn:
        rule = "Every rank must make the same calls in the same order."
        if their_label != label:
            where = f"of meeting {self.scope!r}, rank {rank} is at {label!r}"
            self._break(f"Rank {other} is at {their_label!r} {where}. {rule}", rank=other)
        raise DigestError(
            f"Rank {rank} is at another {label!r} than rank {other} ({ours} and {theirs}). {rule}",
            rank=rank,
            ranks=(other, rank),
        )

    def _raise_timeout(self, rank: int, label: str, seconds: float, silent: Sequence[int]) -> NoReturn:
        names = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        self._broken = f"rank {rank} waited {seconds:g} s at {label!r} for {names} in vain."
        raise RefitTimeout(
            f"Rank {rank} waited {seconds:g} s at {label!r} of meeting {self.scope!r} for {names} in vain. "
            "Look at what was going on there; the next try needs a new scope.",
            rank=self.rank,
            peer=silent[0],
            ranks=tuple(silent),
        )

    def _await_word(self, call: int, label: str, deadline: Deadline) -> bool:
        """Wait for the word that all are here; False at the deadline, `PeerError` once a rank has failed."""
        with self._store_errors(label):
            if not self._wait_for_word(call, deadline):
                return False
            word = self._store.get(self._word_key(call))
        if word != _ALL_HERE:
            self._keep_old_keys()
            status, _, value = _decode(word[4:])
            self._raise_failure(int.from_bytes(word[:4], "big"), label, status, value)
        return True

    def _wait_for_word(self, call: int, deadline: Deadline) -> bool:
        return wait_for_key(self._store, self._word_key(call), deadline)

    def _expire(self, keys: Sequence[str], call: int, label: str, deadline: Deadline) -> None:
        """Raise `RefitTimeout` if some rank is silent still, and see to it that no rank thinks that all went well."""
        with self._store_errors(label):
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not silent:
                return
            self._say_failed(call, label, _EXPIRED, json.dumps([deadline.seconds, silent]).encode())
        self._raise_timeout(self.rank, label, deadline.seconds, silent)

    def _forget(self, call: int) -> None:
        """Note this rank's keys, and delete those of calls that every rank has finished once they are many."""
        self._old_keys += self._last_keys
        self._last_keys = self._this_keys
        self._this_keys = [self._key(call, self.rank)]
        if self.rank == 0:
            shared = (self._count_key, self._word_key, self._value_key, self._trouble_key)
            self._this_keys += [key(call) for key in shared]
        if len(self._old_keys) < _MANY_KEYS:
            return
        done, self._old_keys = self._old_keys, []
        for key in done:
            with contextlib.suppress(RuntimeError):  # a store that cannot delete grows; that is all
                self._store.delete_key(key)

    def _keep_old_keys(self) -> None:
        """Leave all keys so far in the store: after a failure a late rank may not have read them yet."""
        self._old_keys, self._last_keys, self._this_keys = [], [], []

    def _break(self, message: str, rank: int) -> NoReturn:
        self._broken = message
        raise TransportError(message, rank=self.rank, peer=rank)

    @contextlib.contextmanager
    def _store_errors(self, label: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._broken = f"the store was lost: {error}."
            raise TransportError(
                f"Rank {self.rank} lost the store at {label!r} of meeting {self.scope!r}: {error}. "
                "The process that hosts the store must live as long as the meeting.",
                rank=self.rank,
            ) from error


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the store that a process group was made with.

    Raises:
        EnvironmentNotSupported: This torch does not tell, and the group is not registered.
    """
    getter = getattr(group, "get_group_store", None)
    if getter is not None:
        with contextlib.suppress(RuntimeError):
            store: dist.Store | None = getter()
            if store is not None:
                return store
    known = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", {}).get(group)
    if known is not None:
        _, registered = known
        return registered  # type: ignore[no-any-return]
    raise EnvironmentNotSupported(
        f"The store of the process group {group.name()!r} of {group.size()} ranks is not known to this torch. "
        "Give the store itself, or make the group with torch.distributed.new_group."
    )


def _encode(status: bytes, label: str, payload: bytes) -> bytes:
    name = label.encode()
    return status + len(name).to_bytes(2, "big") + name + payload


def _decode(value: bytes) -> tuple[bytes, str, bytes]:
    end = 3 + int.from_bytes(value[1:3], "big")
    return value[:1], value[3:end].decode(), value[end:]


def _get_all(store: dist.Store, keys: Sequence[str]) -> list[bytes]:
    if getattr(store, "has_extended_api", lambda: False)():
        return store.multi_get(list(keys))
    return [store.get(key) for key in keys]
