"""One rank's memory of a scenario of the cluster benchmark: its parts of all tensors, their values, the comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reshard.bench.case import DTYPE, POISON, WORD
from reshard.bench.cluster_scenarios import TENSORS
from reshard.errors import VerifyError
from reshard.layouts.manifest import Manifest

if TYPE_CHECKING:
    from reshard.bench.cluster_scenarios import Scenario


class Memory:
    """The same box of every tensor, in one flat buffer.

    Args:
        scenario: The scenario.
        rank: The rank.
        side: Of the tensors, ``[side, side]``.
    """

    def __init__(self, scenario: Scenario, rank: int, side: int) -> None:
        self.scenario, self.rank, self.side = scenario, rank, side
        self.box = scenario.box(rank, side)
        flat = torch.full((TENSORS * self.box.numel,), POISON, dtype=WORD)
        self.views = list(flat.view(TENSORS, *self.box.shape).unbind())
        """By tensor, ``[rows, columns]``."""
        if scenario.is_source(rank):
            for tensor, view in enumerate(self.views):
                view.copy_(self._values(tensor))

    def manifest(self) -> tuple[Manifest | None, Manifest | None]:
        """What this rank holds and wants, as a refit takes it."""
        declared = Manifest.from_views(
            (f"tensor{at:02}", (self.side, self.side), self.box.start, view.view(DTYPE))
            for at, view in enumerate(self.views)
        )
        return (declared, None) if self.scenario.is_source(self.rank) else (None, declared)

    def poison(self) -> None:
        """Leave nothing in a destination that could pass for the right value."""
        if not self.scenario.is_source(self.rank):
            for view in self.views:
                view.fill_(POISON)

    def check(self, operation: str) -> int:
        """Compare every element of a destination with what it must be; returns how many there are.

        Raises:
            VerifyError: Names operation, rank, tensor and the first element that is wrong.
        """
        if self.scenario.is_source(self.rank):
            return 0
        for tensor, view in enumerate(self.views):
            values = self._values(tensor)
            if not torch.equal(view, values):
                row, column = torch.nonzero(view != values)[0].tolist()
                raise VerifyError(
                    f"{self.scenario.name}, {operation}: rank {self.rank} holds a wrong value at [{row}, {column}] of "
                    f"its part of tensor {tensor}: {int(view[row, column]) & 0xFFFF:#06x} instead of "
                    f"{int(values[row, column]) & 0xFFFF:#06x} ({int((view != values).sum())} of {view.numel()} "
                    "differ).",
                    operation=operation,
                    rank=self.rank,
                )
        return len(self.views) * self.box.numel

    def _values(self, tensor: int) -> torch.Tensor:
        """The right values of this rank's part: an element's bits tell its tensor, row and column."""
        (row, column), (end_row, end_column) = self.box.start, self.box.stop
        rows, columns = torch.arange(row, end_row), torch.arange(column, end_column)
        return _mix(rows * 2 + 1, tensor)[:, None] ^ _mix(columns * 2, tensor)[None, :]


def _mix(numbers: torch.Tensor, salt: int) -> torch.Tensor:
    """16 bits of each number that are far apart for near numbers."""
    mixed = (numbers + salt * 0x1F123) * 0x9E3779B1
    return ((mixed ^ (mixed >> 13)) >> 11).to(WORD)
