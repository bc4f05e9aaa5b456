"""Mapped memory: files that lie in memory, as tensors of all processes that map them."""

from __future__ import annotations

import ctypes
import errno
import os
import weakref

import torch

from reshard.errors import EnvironmentNotSupported, TransportError
from reshard.units import format_nbytes

_HUGEPAGE, POPULATE_READ, _POPULATE_WRITE = 14, 22, 23
"""What madvise can be told; the second enters pages that exist into the page table."""

# Python's mmap keeps a descriptor open for every mapping (until 3.13), one a borrowed tensor; so libc is asked.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_READ_WRITE, _MAP_SHARED = 3, 1


def map_file(descriptor: int, nbytes: int, *advice: int) -> torch.Tensor:
    """Map a file whole as uint8 `[nbytes]`; it is unmapped when the last tensor over it is gone."""
    address = _libc.mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, descriptor, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise TransportError(
            f"{format_nbytes(nbytes)} of a peer's memory could not be mapped: {os.strerror(number)}. "
            "Look at the limits of address space and mappings (ulimit -v, vm.max_map_count)."
        )
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    unmap = weakref.finalize(buffer, _libc.munmap, address, nbytes)
    unmap.atexit = False  # at the interpreter's end tensors may still be alive; the kernel unmaps then
    for kind in advice:
        if _libc.madvise(address, nbytes, kind) and ctypes.get_errno() == errno.ENOMEM:
            raise EnvironmentNotSupported(
                f"There is no memory for {format_nbytes(nbytes)} of staging. Lower the staging size."
            )
    return torch.frombuffer(buffer, dtype=torch.uint8)


def make_arena(descriptor: int, nbytes: int) -> torch.Tensor:
    """Give a file its size and map it, uint8 `[nbytes]`."""
    os.ftruncate(descriptor, nbytes)
    # All pages are made now: faults during the first refit would halve its speed.
    return map_file(descriptor, nbytes, _HUGEPAGE, _POPULATE_WRITE)


def memory_file(name: str, content: bytes) -> int:
    """A new file in memory with some content; returns its descriptor."""
    descriptor = os.memfd_create(name)
    os.write(descriptor, content)
    return descriptor


def reads(descriptor: int, nonce: bytes) -> bool:
    """Tell whether the file, mapped here, holds the nonce; what decides is that mapping it works."""
    if os.fstat(descriptor).st_size < len(nonce):
        return False
    return bytes(map_file(descriptor, len(nonce)).tolist()) == nonce


def enter_pages(memory: torch.Tensor) -> None:
    """Enter the pages of mapped memory that exist into the page table, rather than one fault at a time later."""
    _libc.madvise(memory.data_ptr(), memory.numel(), POPULATE_READ)
