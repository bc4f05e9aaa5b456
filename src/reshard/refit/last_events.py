"""Last events: what each rank leaves in the store at the end of a call, for whoever looks after a failure.

A rank overwrites its one key: after a refit that completed with the events of that call, after one that failed with all
that its journal still has, compressed. So the store does not grow, and a rank that is silent now has left what it did
last.
"""

from __future__ import annotations

import base64
import json
import time
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

_PATIENCE_SECONDS = 1.0
"""How long a rank that has failed waits for what the others write down of the same failure."""

_PAUSE_SECONDS = 0.05


def leave(store: dist.Store, member: str, epoch: int, rows: Sequence[Mapping[str, Any]], *, failed: bool) -> None:
    """Leave this rank's last events.

    Args:
        store: The session's part of its store.
        member: Who.
        epoch: The epoch of the call.
        rows: Its events, oldest first.
        failed: Whether the call failed.
    """
    packed = base64.b85encode(zlib.compress(json.dumps(list(rows)).encode(), 1)).decode()
    store.set(f"events/{member}", json.dumps({"epoch": epoch, "failed": failed, "rows": packed}))


def collect(store: dist.Store, members: Sequence[str], epoch: int) -> list[dict[str, Any]]:
    """The last events of all members that can be reached, one member after the other, in at most about a second.

    Waits that long for those who have not yet said what they saw of a failure in this epoch; a rank that hangs or is
    dead shows with what it left before.
    """
    expiry = time.monotonic() + _PATIENCE_SECONDS
    found: dict[str, dict[str, Any]] = {}
    while True:
        for member in members:
            if not _is_of(found.get(member), epoch) and store.check([f"events/{member}"]):
                found[member] = json.loads(store.get(f"events/{member}"))
        if all(_is_of(found.get(member), epoch) for member in members) or time.monotonic() > expiry:
            break
        time.sleep(_PAUSE_SECONDS)
    return [row for member in members if member in found for row in _unpacked(found[member])]


def _is_of(left: Mapping[str, Any] | None, epoch: int) -> bool:
    return left is not None and bool(left["failed"]) and int(left["epoch"]) >= epoch


def _unpacked(left: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(zlib.decompress(base64.b85decode(left["rows"])))
    return rows
