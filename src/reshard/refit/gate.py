"""Gate: where all ranks of a refit wait for each other before anything begins, and from which a newcomer can wake them.

A gate is passed again and again; calls count from 0. Unlike a meeting it can be ended by somebody who is not there: he
says that the epoch is over and sets the word of the call that ranks are waiting at, which the number of entries tells.
A rank enters first and looks for the end then, so one of the two always sees the other.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING

from reshard.errors import PeerError, RefitTimeout
from reshard.transports.waiting import wait_for_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from reshard.transports.base import Deadline

_ALL_HERE = "all here"
_NAME_WAIT = timedelta(seconds=1)


class EpochOver(Exception):
    """The membership has changed since; nothing has begun."""


class Gate:
    """One rank at a gate.

    Args:
        store: All members' store.
        epoch: The epoch that the gate belongs to.
        scope: Which members pass it; one gate a scope and epoch.
        rank: This rank among them.
        members: What they are called, in order.
    """

    def __init__(self, store: dist.Store, epoch: int, scope: str, rank: int, members: Sequence[str]) -> None:
        self._store = store
        self._epoch = epoch
        self._scope = f"{epoch}/gate/{scope}"
        self._rank = rank
        self._members = tuple(members)
        self._calls = 0
        index = store.add(f"{epoch}/gates", 1) - 1
        store.set(f"{epoch}/gate_name/{index}", json.dumps([self._scope, len(self._members)]))

    def gather(self, payload: str, deadline: Deadline, version: int = -1) -> list[str]:
        """Wait for all, and return what each said, in rank order.

        Args:
            payload: What this rank says.
            deadline: For all to come.
            version: What it comes for.

        Raises:
            EpochOver: Somebody came or went.
            RefitTimeout: A rank did not call in time; it is named.
            PeerError: A rank cannot take part in the refit to this version.
        """
        call, size, store = self._calls, len(self._members), self._store
        self._calls += 1
        keys = [f"{self._scope}/{call}/{rank}" for rank in range(size)]
        word = f"{self._scope}/{call}/word"
        store.set(keys[self._rank], payload)
        entered = store.add(f"{self._scope}/entered", 1)
        if store.check([f"{self._epoch}/over"]):
            reason = store.get(f"{self._epoch}/over").decode()
            store.compare_set(word, "", reason)
            raise _ending(reason, version)
        if entered == (call + 1) * size:
            store.compare_set(word, "", _ALL_HERE)
        if not wait_for_key(store, word, deadline):
            self._expire(word, keys, deadline)
        said = store.get(word).decode()
        if said != _ALL_HERE:
            raise _ending(said, version)
        told = _get_all(store, keys)
        self._forget(call - 2)
        return told

    def _expire(self, word: str, keys: Sequence[str], deadline: Deadline) -> None:
        """Name the silent to everyone, unless the last has come in this moment."""
        silent = [name for name, key in zip(self._members, keys, strict=True) if not self._store.check([key])]
        message = (
            f"{self._members[self._rank]} waited {deadline.seconds:g} s for {', '.join(silent) or 'nobody'} to call "
            f"refit. Look what is going on there."
        )
        facts = {"members": silent, "peer": self._members.index(silent[0]) if silent else None}
        self._store.compare_set(word, "", json.dumps({"message": message, "facts": facts}))

    def _forget(self, call: int) -> None:
        """Delete this rank's keys of a call that everyone has left: all have entered the one after it."""
        if call < 0:
            return
        keys = [f"{self._scope}/{call}/{self._rank}"]
        if self._rank == 0:
            keys.append(f"{self._scope}/{call}/word")
        for key in keys:
            with contextlib.suppress(RuntimeError):  # a store that cannot delete grows; that is all
                self._store.delete_key(key)


def _ending(said: str, version: int) -> Exception:
    """Why a gate does not open for the one who came for a version."""
    if not said.startswith("{"):
        return EpochOver(said)
    facts = json.loads(said)
    if "version" not in facts:
        return RefitTimeout(facts["message"], **facts["facts"])
    if facts["version"] == version:
        return PeerError(facts["message"])
    return EpochOver(facts["message"])  # it did not come for what was refused


def refusal(version: int, message: str) -> str:
    """The reason of an end that is an error for those who came for this version, and for no others."""
    return json.dumps({"version": version, "message": message})


def wake_gates(store: dist.Store, epoch: int, reason: str) -> None:
    """End an epoch: all who wait at its gates, or come to them, hear that it is over."""
    store.compare_set(f"{epoch}/over", "", reason)
    for index in range(store.add(f"{epoch}/gates", 0)):
        with contextlib.suppress(RuntimeError):  # who made it has died in between, or looks for the end now
            store.wait([f"{epoch}/gate_name/{index}"], _NAME_WAIT)
            scope, size = json.loads(store.get(f"{epoch}/gate_name/{index}"))
            call = store.add(f"{scope}/entered", 0) // size
            store.compare_set(f"{scope}/{call}/word", "", reason)


def _get_all(store: dist.Store, keys: Sequence[str]) -> list[str]:
    if getattr(store, "has_extended_api", lambda: False)():
        return [value.decode() for value in store.multi_get(list(keys))]
    return [store.get(key).decode() for key in keys]
