"""Sharing: torch's own storages moved to where other processes can map them, and the files behind those."""

from __future__ import annotations

import os
import resource
from typing import TYPE_CHECKING

import torch
import torch.multiprocessing

from reshard.errors import ConfigError, EnvironmentNotSupported, TransportError
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable


def share_memory_(tensors: Iterable[torch.Tensor]) -> int:
    """Move the storages of CPU tensors into shared memory, in place, so that `ShmTransport.lend` can lend them.

    Tensors that alias a storage follow, because the storage itself is moved; its address changes once.

    Returns:
        Bytes moved; 0 if all lay there already.

    Raises:
        EnvironmentNotSupported: There is too little room in /dev/shm, or the limit of open files is too low.
        ConfigError: A tensor is not on the CPU.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ConfigError(
                f"A tensor of shape {list(tensor.shape)} is on {tensor.device}; only CPU tensors can be moved to "
                "shared memory."
            )
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.is_shared():
            storages[storage.data_ptr()] = storage
    nbytes = sum(storage.nbytes() for storage in storages.values())
    if storages:
        _check_room(nbytes, len(storages))
    for storage in storages.values():
        storage.share_memory_()
    return nbytes


def _check_room(nbytes: int, files: int) -> None:
    room = os.statvfs("/dev/shm")
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise EnvironmentNotSupported(
            f"{format_nbytes(nbytes)} of weights do not fit into /dev/shm, which has {format_nbytes(free)} free. Make "
            "it larger (docker: --shm-size; Kubernetes: an emptyDir with medium Memory), or leave the weights in "
            "private memory, which costs a second copy.",
            nbytes=nbytes,
            free=free,
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd"))
    if limit != resource.RLIM_INFINITY and opened + files + 64 > limit:
        raise EnvironmentNotSupported(
            f"{files} storages need one open file each to lie in shared memory; {opened} files are open and the limit "
            f"is {limit}. Raise it (ulimit -n), or leave the weights in private memory, which costs a second copy.",
            files=files,
            limit=limit,
        )


def check_lendable(tensor: torch.Tensor, rank: int) -> None:
    storage = tensor.untyped_storage()
    shared = tensor.device.type == "cpu" and (storage.is_shared() or not storage.nbytes())
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if not shared or strategy != "file_descriptor":
        raise TransportError(
            f"Rank {rank} (shm): a tensor of shape {list(tensor.shape)} on {tensor.device} does not lie in shared "
            "memory that has a file descriptor, so it cannot be lent. Move it there with "
            "reshard.transports.shm.share_memory_, under torch's sharing strategy 'file_descriptor'.",
            rank=rank,
        )


def descriptor_of(storage: torch.UntypedStorage) -> int:
    """Return the descriptor behind a shared storage; it stays the storage's. The one place that knows torch's name."""
    descriptor, _ = storage._share_fd_cpu_()
    return int(descriptor)
