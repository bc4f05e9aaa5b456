"""Process groups on a store, beside a default group that they leave alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from datetime import timedelta


def gloo_group(store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Make a gloo group over a store; every one of its ranks calls it.

    Args:
        store: Shared by the ranks.
        name: Fresh on that store.
        rank: This process's rank in the group.
        size: Number of ranks.
        timeout: Of the meeting, and of collectives that are given no other.
    """
    prefixed = dist.PrefixStore(f"group/{name}", store)
    # The constructor that takes no options looks up the name of the host; the demo stays on loopback.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    backend = dist.ProcessGroupGloo(prefixed, rank, size, options)
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(prefixed, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group
