"""Case: the tensors of one scenario and what each rank holds of them; their values, poison, and the comparison.

Every scenario has two source ranks, which hold the tensors by rows, and four destination ranks, which want them by
columns, in one or more replicas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from reshard.errors import ConfigError, VerifyError
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.box import Box

SOURCES, DESTINATIONS = 2, 4
SIZE = SOURCES + DESTINATIONS
DTYPE = torch.bfloat16
WORD = (
    torch.int16
)  # values are compared as bits: half of all bit patterns of a float are equal to no other, or not at all
POISON = -1


@dataclass(frozen=True)
class Case:
    """Tensors that move together.

    Args:
        name: What the report calls it.
        shapes: Global shapes ``[rows, columns]``; even rows, columns that divide by the number of column blocks.
        replicas: How many copies of each tensor the destination holds; ``4 // replicas`` ranks share one.
    """

    name: str
    shapes: tuple[tuple[int, int], ...]
    replicas: int = 1

    def __post_init__(self) -> None:
        for rows, columns in self.shapes:
            if rows % SOURCES or columns % self.tp:
                raise ConfigError(
                    f"{self.name}: a tensor of {[rows, columns]} cannot be cut into {SOURCES} blocks of rows and "
                    f"{self.tp} of columns; both must divide. Choose another size."
                )

    @property
    def tp(self) -> int:
        """Ranks that share one copy."""
        return DESTINATIONS // self.replicas

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of all tensors."""
        return sum(rows * columns for rows, columns in self.shapes) * DTYPE.itemsize

    @cached_property
    def boxes(self) -> tuple[tuple[Box, ...], ...]:
        """By rank, then by tensor: what it holds or wants."""
        source = Mesh({"fsdp": SOURCES}, range(SOURCES))
        destination = Mesh({"dp": self.replicas, "tp": self.tp}, range(SOURCES, SIZE))
        boxes: list[list[Box]] = [[] for _ in range(SIZE)]
        for shape in self.shapes:
            rows, columns = (
                Layout(shape, DTYPE, source, ("fsdp", None)),
                Layout(shape, DTYPE, destination, (None, "tp")),
            )
            for rank, held in enumerate(boxes):
                held.extend((rows if rank < SOURCES else columns).boxes(rank))
        return tuple(tuple(held) for held in boxes)

    def numel(self, rank: int) -> int:
        """Elements of all tensors on one rank."""
        return sum(box.numel for box in self.boxes[rank])


class Memory:
    """One rank's memory of a case: the local parts of all tensors, end to end in buffers made before.

    Args:
        case: The case.
        rank: The rank.
        landing: Flat buffer of the destination, on a destination rank.
        private: Flat buffer of the source in private memory, on a source rank.
        shared: Flat buffers of all source ranks in shared memory; empty where shared memory is not measured.
    """

    def __init__(
        self,
        case: Case,
        rank: int,
        *,
        landing: torch.Tensor | None,
        private: torch.Tensor | None,
        shared: Sequence[torch.Tensor],
    ) -> None:
        self.case = case
        self.rank = rank
        self.wanted = [] if landing is None else self._cut(landing, rank)
        self.private = [] if private is None else self._cut(private, rank)
        self.lent = [self._cut(buffer, source) for source, buffer in enumerate(shared)]
        """By source rank: its tensors in shared memory, as they lie in this process."""
        self._expected: tuple[int, list[torch.Tensor]] = (0, [])

    def _cut(self, buffer: torch.Tensor, rank: int) -> list[torch.Tensor]:
        views, at = [], 0
        for box in self.case.boxes[rank]:
            views.append(buffer[at : at + box.numel].view(box.shape))
            at += box.numel
        return views

    def manifest(self, *, shared: bool) -> tuple[Manifest | None, Manifest | None]:
        """What this rank holds and wants, as a refit takes it."""
        if self.rank < SOURCES:
            return self._declare(self.lent[self.rank] if shared else self.private), None
        return None, self._declare(self.wanted)

    def _declare(self, views: Sequence[torch.Tensor]) -> Manifest:
        return Manifest.from_views(
            (f"tensor{at:04}", shape, box.start, view.view(DTYPE))
            for at, (shape, box, view) in enumerate(
                zip(self.case.shapes, self.case.boxes[self.rank], views, strict=True)
            )
        )

    def prepare(self, version: int) -> None:
        """Give the source the values of a version, and the destination none that could pass for it."""
        if self.rank >= SOURCES:
            for view in self.wanted:
                view.fill_(POISON)
            return
        for copy in (self.private, self.lent[self.rank] if self.lent else []):
            for view, values in zip(copy, self._values(version), strict=bool(copy)):
                view.copy_(values)

    def check(self, version: int, operation: str) -> int:
        """Compare every element of the destination with what it must be; returns how many there are.

        Raises:
            VerifyError: Names operation, rank, tensor and the first element that is wrong.
        """
        if self.rank < SOURCES:
            return 0
        if self._expected[0] != version:
            self._expected = (version, list(self._values(version)))
        for at, (view, values) in enumerate(zip(self.wanted, self._expected[1], strict=True)):
            if not torch.equal(view, values):
                wrong = torch.nonzero(view != values)
                row, column = wrong[0].tolist()
                raise VerifyError(
                    f"{self.case.name}, {operation}: rank {self.rank} holds a wrong value at [{row}, {column}] of its "
                    f"part of tensor {at}: {int(view[row, column]) & 0xFFFF:#06x} instead of "
                    f"{int(values[row, column]) & 0xFFFF:#06x} ({len(wrong)} of {view.numel()} differ).",
                    operation=operation,
                    rank=self.rank,
                )
        return sum(view.numel() for view in self.wanted)

    def forget(self) -> None:
        """Free what comparing needs."""
        self._expected = (0, [])

    def _values(self, version: int) -> Iterator[torch.Tensor]:
        """The right values of this rank's parts: each element's bits tell its tensor, row, column and version."""
        for at, box in enumerate(self.case.boxes[self.rank]):
            (row, column), (end_row, end_column) = box.start, box.stop
            rows, columns = torch.arange(row, end_row), torch.arange(column, end_column)
            salt = 64 * at + version
            yield _mix(rows * 2 + 1, salt)[:, None] ^ _mix(columns * 2, salt)[None, :]


def _mix(numbers: torch.Tensor, salt: int) -> torch.Tensor:
    """16 bits of each number that are far apart for near numbers."""
    mixed = (numbers + salt * 0x1F123) * 0x9E3779B1
    return ((mixed ^ (mixed >> 13)) >> 11).to(WORD)
