"""Tokens between processes: how ranks of a benchmark meet before a measured run, apart from all that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import RefitTimeout

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext


class Tokens:
    """Counting tokens for every ordered pair of ranks, in semaphores that the processes share.

    A token costs some microseconds, and orders memory: what the giver wrote before is seen by the taker.

    Args:
        context: The processes are made with it.
        size: Number of ranks.
        timeout_seconds: How long one wait may last.
    """

    def __init__(self, context: SpawnContext, size: int, timeout_seconds: float) -> None:
        self.size = size
        self._timeout_seconds = timeout_seconds
        self._given = [[context.Semaphore(0) for _ in range(size)] for _ in range(size)]

    def give(self, rank: int, peer: int) -> None:
        """As ``rank``, give ``peer`` one token."""
        self._given[rank][peer].release()

    def take(self, rank: int, peer: int) -> None:
        """As ``rank``, wait for one token of ``peer``.

        Raises:
            RefitTimeout: It did not come.
        """
        if not self._given[peer][rank].acquire(timeout=self._timeout_seconds):
            raise RefitTimeout(
                f"Rank {rank} waited {self._timeout_seconds:g} s for rank {peer} between two measured runs.", peer=peer
            )

    def meet(self, rank: int) -> None:
        """Wait until every rank is here."""
        others = range(1, self.size)
        if rank:
            self.give(rank, 0)
            self.take(rank, 0)
            return
        for peer in others:
            self.take(0, peer)
        for peer in others:
            self.give(0, peer)
