"""Mesh: ranks arranged on named axes; rank <-> coordinate, the last axis varies fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Ranks on named axes, in row-major order over any list of ranks.

    Args:
        axes: Axis names and sizes, outermost first; the last axis varies fastest.
        ranks: The ranks of one world, any numbers in any order; ``range(size)`` if not given.

    Raises:
        LayoutError: Sizes below 1, a rank twice, or another number of ranks than the axes make.

    >>> mesh = Mesh({"dp": 2, "tp": 2}, ranks=[4, 5, 8, 9])
    >>> mesh.coordinate(8), mesh.shape
    ((1, 0), (2, 2))
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]], ranks: Iterable[int] | None = None) -> None:
        pairs = tuple(axes.items()) if isinstance(axes, Mapping) else tuple((name, size) for name, size in axes)
        size = prod(n for _, n in pairs)
        listed = tuple(range(size)) if ranks is None else tuple(int(r) for r in ranks)
        object.__setattr__(self, "axes", tuple((str(name), int(n)) for name, n in pairs))
        object.__setattr__(self, "ranks", listed)
        self._check(size)

    def _check(self, size: int) -> None:
        if any(n < 1 for _, n in self.axes) or len({name for name, _ in self.axes}) != len(self.axes):
            raise LayoutError(f"Mesh axes {dict(self.axes)}: every axis needs its own name and a size of at least 1.")
        if len(self.ranks) != size:
            raise LayoutError(
                f"Mesh axes {dict(self.axes)} make {size} places, but {len(self.ranks)} ranks were given. "
                f"Give one rank for each place."
            )
        if len(set(self.ranks)) != len(self.ranks):
            twice = sorted(r for r in set(self.ranks) if self.ranks.count(r) > 1)
            raise LayoutError(f"Mesh ranks {twice} are listed more than once; a rank has one place in a mesh.")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def axis_size(self, name: str) -> int:
        """The number of places on the axis ``name``; KeyError where there is none."""
        return dict(self.axes)[name]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Where ``rank`` sits, an index an axis; ValueError where it is not in the mesh."""
        return self.place(self.ranks.index(rank))

    def place(self, position: int) -> tuple[int, ...]:
        """The coordinate of the ``position``-th rank of the list."""
        coordinate = []
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def shifted(self, by: int) -> Mesh:
        """The same mesh with ``by`` added to every rank."""
        return Mesh(self.axes, (r + by for r in self.ranks))
