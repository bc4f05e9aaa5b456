"""Offered: what the source world has, told through the store, so that an engine can say what it wants of it.

Each process of the source writes the digest of its tensors' names, shapes and dtypes under its own mark; the list
itself is kept once for all ranks that offer the same. A process that was restarted has another mark, so nothing of its
predecessor is read.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from base64 import b85decode, b85encode
from datetime import timedelta
from typing import TYPE_CHECKING

from reshard.errors import ManifestError, RefitTimeout
from reshard.layouts.piece import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch.distributed as dist

    from reshard.refit.membership import Comer, Member
    from reshard.transports.base import Deadline

_LOOK_AGAIN_SECONDS = 0.5
"""How often to look whether a silent process was restarted under another mark."""


def say_mark(store: dist.Store, me: Comer) -> None:
    """Say which process this rank of the source is now."""
    store.set(_mark_key(me.member), me.mark)


def publish(store: dist.Store, me: Comer, specs: Iterable[TensorSpec]) -> None:
    """Tell what this rank of the source offers, in place of what it offered before."""
    rows = [[spec.name, list(spec.shape), spec.dtype] for spec in specs]
    text = json.dumps(rows, separators=(",", ":")).encode()
    digest = hashlib.sha256(text).hexdigest()
    if not store.check([f"offered/{digest}"]):
        store.set(f"offered/{digest}", b85encode(zlib.compress(text)).decode())
    store.set(_offer_key(me.mark), digest)


def read_offered(store: dist.Store, sources: Sequence[Member], deadline: Deadline) -> tuple[TensorSpec, ...]:
    """Wait for all ranks of the source, and merge what they offer.

    Returns:
        Names, global shapes and dtypes, in plan order.

    Raises:
        RefitTimeout: A rank has offered nothing by the deadline; all such are named.
        ManifestError: Two ranks offer different shapes or dtypes under one name.
    """
    digests: dict[Member, str] = {}
    for member in sources:
        while (digest := _digest_of(store, member, deadline)) is None:
            if deadline.expired:
                silent = [m for m in sources if m not in digests and _digest_of(store, m, deadline) is None]
                raise RefitTimeout(
                    f"{', '.join(map(str, silent or [member]))} offered nothing for {deadline.seconds:g} s. "
                    f"Call session.offer there.",
                    members=tuple(map(str, silent)),
                )
        digests[member] = digest
    lists: dict[str, list[tuple[str, list[int], str]]] = {
        digest: json.loads(zlib.decompress(b85decode(store.get(f"offered/{digest}"))))
        for digest in set(digests.values())
    }
    return _merged(digests, lists)


def _digest_of(store: dist.Store, member: Member, deadline: Deadline) -> str | None:
    """What the process that is this member now offers; None if that takes longer than a moment."""
    moment = timedelta(seconds=max(0.001, min(_LOOK_AGAIN_SECONDS, deadline.remaining())))
    try:
        store.wait([_mark_key(member)], moment)
        key = _offer_key(store.get(_mark_key(member)).decode())
        store.wait([key], moment)
    except RuntimeError:
        store.check([_mark_key(member)])  # raises if the store is lost: that was no moment too short
        return None
    return store.get(key).decode()


def _merged(
    digests: Mapping[Member, str], lists: Mapping[str, list[tuple[str, list[int], str]]]
) -> tuple[TensorSpec, ...]:
    specs: dict[str, tuple[Member, TensorSpec]] = {}
    read: set[str] = set()
    for member, digest in digests.items():
        if digest in read:
            continue
        read.add(digest)
        for name, shape, dtype in lists[digest]:
            spec = TensorSpec(name, tuple(shape), dtype)
            first, known = specs.setdefault(name, (member, spec))
            if known != spec:
                raise ManifestError(
                    f"{name!r}: {first} offers {known.dtype} {list(known.shape)} and {member} {spec.dtype} "
                    f"{list(spec.shape)}. All ranks of a world declare the global shape and the same dtype.",
                    tensor=name,
                    member=str(member),
                )
    return tuple(sorted((spec for _, spec in specs.values()), key=lambda spec: spec.order))


def _mark_key(member: Member) -> str:
    return f"offers/{member.world}/{member.rank}"


def _offer_key(mark: str) -> str:
    return f"offer/{mark}"
