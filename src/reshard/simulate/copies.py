"""Copies: how long a rank packs and unpacks a bucket, by where its boxes lie in the pieces of the rank.

A piece is taken to lie in one run of memory. A box that covers whole rows of it is a run too, and where the transport
sends from anywhere and lands anywhere, a bucket of one run is not copied at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.plan.strings import Item
    from reshard.simulate.costs import Costs


class Copies:
    """The copies of a plan's ranks under some costs.

    Args:
        plan: Says where the pieces of each rank are.
        costs: Of copies. Without ``cpu`` every byte of a bucket is copied at one rate.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self._specs, self._costs, self._patterns = plan.specs, costs, plan.patterns
        self._pattern_of = {tensor: at for at, pattern in enumerate(plan.patterns) for tensor in pattern.tensors}
        self._known: dict[tuple[int, int, bool, Box], int] = {}

    def pack_seconds(self, rank: int, items: Iterable[Item], nbytes: int, *, is_network: bool) -> float:
        """Of a bucket of these items that a source sends."""
        return self._through_staging(rank, list(items), nbytes, is_network, is_source=True)

    def unpack_seconds(
        self, rank: int, items: Iterable[Item], nbytes: int, *, is_network: bool, is_handed_on: bool
    ) -> float:
        """Of a bucket that has come to a rank; what is handed on lands in staging memory first."""
        boxes = list(items)
        if is_handed_on:
            return self._costs.copy_seconds(nbytes, "staging", boxes=len(boxes))
        return self._through_staging(rank, boxes, nbytes, is_network, is_source=False)

    def read_seconds(self, sender: int, receiver: int, items: Iterable[Item]) -> float:
        """Of items that a rank reads where they lie in another one's memory."""
        by_run: dict[int, tuple[int, int]] = {}
        for item in items:
            tensor, box = item
            run = min(self._run_numel(sender, item, is_source=True), self._run_numel(receiver, item, is_source=False))
            itemsize = self._specs[tensor].itemsize
            run_nbytes = 0 if run == box.numel else run * itemsize
            nbytes, boxes = by_run.get(run_nbytes, (0, 0))
            by_run[run_nbytes] = nbytes + box.numel * itemsize, boxes + 1
        seconds = (
            self._costs.copy_seconds(nbytes, "lent", boxes=boxes, run_nbytes=run_nbytes)
            for run_nbytes, (nbytes, boxes) in sorted(by_run.items())
        )
        return sum(seconds, 0.0)

    def is_in_place(self, rank: int, items: Sequence[Item], *, is_source: bool) -> bool:
        """Whether a bucket is one run of the rank's memory, so that it can be sent from there, or can land there."""
        return self._costs.cpu is not None and len(items) == 1 and self._is_run(rank, items[0], is_source=is_source)

    def _through_staging(
        self, rank: int, items: list[Item], nbytes: int, is_network: bool, *, is_source: bool
    ) -> float:
        cpu = self._costs.cpu
        moves_runs = cpu is not None and (is_network or not cpu.stages_runs)
        if moves_runs and self.is_in_place(rank, items, is_source=is_source):
            return 0.0
        return self._costs.copy_seconds(nbytes, "staging", boxes=len(items))

    def _is_run(self, rank: int, item: Item, *, is_source: bool) -> bool:
        return self._run_numel(rank, item, is_source=is_source) == item[1].numel

    def _run_numel(self, rank: int, item: Item, *, is_source: bool) -> int:
        """Elements of each run that a box is in the rank's piece; all of it, as far as known, where it is in none."""
        tensor, box = item
        at = self._pattern_of[tensor]
        key = rank, at, is_source, box
        if key not in self._known:
            pattern = self._patterns[at]
            pieces = pattern.held if is_source else pattern.needed
            piece = next((p for p, ranks in pieces if ranks >> rank & 1 and p.intersect(box) == box), None)
            self._known[key] = box.numel if piece is None else run_numel(piece, box)
        return self._known[key]


def run_numel(piece: Box, box: Box) -> int:
    """Elements of each run that a box inside a piece is, where the piece lies in one run of memory.

    >>> from reshard.layouts.box import Box
    >>> run_numel(Box((0, 0), (4, 8)), Box((1, 0), (3, 8))), run_numel(Box((0, 0), (4, 8)), Box((1, 0), (3, 4)))
    (16, 4)
    """
    numel = 1
    for mine, whole in zip(reversed(box.shape), reversed(piece.shape), strict=True):
        numel *= mine
        if mine != whole:
            break
    return numel
