"""Piece: one box of a named tensor. Pieces are what worlds exchange, and what plans are made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import LayoutError
from reshard.layouts.dtype import ITEMSIZE, dtype_name

if TYPE_CHECKING:
    from reshard.layouts.box import Box


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """A box, in global coordinates, of the tensor ``name``."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What both sides must agree on for one tensor.

    Args:
        name: The name in the checkpoint.
        shape: Global shape; any number of dims.
        dtype: Torch's name of it.
        granule: Per dim the least run that a route may cut between; ``()`` means single elements.
        group: The install group: what an engine installs together; ``""`` for none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    granule: tuple[int, ...] = ()
    group: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        granule = tuple(int(g) for g in self.granule)
        if granule and (len(granule) != len(self.shape) or min(granule) < 1):
            raise LayoutError(f"{self.name!r}: granule {granule} needs one positive size for each dim of {self.shape}.")
        object.__setattr__(self, "granule", () if set(granule) <= {1} else granule)
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"{self.name!r}: shape {self.shape} has a negative size.")

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy."""
        return prod(self.shape) * self.itemsize

    @property
    def order(self) -> tuple[object, ...]:
        """Where this tensor comes in every plan: by install group, then by name, numbers by value."""
        return (natural_key(self.group), natural_key(self.name))


@lru_cache(maxsize=1 << 17)
def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key by which ``layers.2`` comes before ``layers.10``.

    >>> sorted(["layers.10.w", "layers.2.w", "layers"], key=natural_key)
    ['layers', 'layers.2.w', 'layers.10.w']
    """
    parts = re.split(r"(\d+)", text)
    return tuple((0, int(part), part) if part.isdigit() else (1, 0, part) for part in parts)
