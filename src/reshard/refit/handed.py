"""Handed: in debug mode, the copies that an engine's loaders and install hook were given, and who still holds one."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    import torch


class Handed:
    """Copies that were handed out, each with memory of its own, so that a view of one that is kept is found too."""

    def __init__(self) -> None:
        self._given: list[tuple[str, StorageWeakRef]] = []

    def copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy to hand out in the tensor's place.

        Args:
            name: What it is called.
            tensor: Memory of the session.
        """
        copied = tensor.detach().clone()
        self._given.append((name, StorageWeakRef(copied.untyped_storage())))  # type: ignore[no-untyped-call]
        return copied

    @property
    def held(self) -> tuple[str, ...]:
        """The names of those that somebody still holds, or a view of them."""
        if self._still():
            gc.collect()  # what only a cycle holds is nobody's
        return tuple(dict.fromkeys(name for name, _ in self._still()))

    def _still(self) -> list[tuple[str, StorageWeakRef]]:
        self._given = [row for row in self._given if not row[1].expired()]  # type: ignore[no-untyped-call]
        return self._given
