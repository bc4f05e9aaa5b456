"""Bare transfers, written for this benchmark alone: what the machine gives to someone who moves just these bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reshard.bench.case import SIZE, SOURCES, WORD
from reshard.bench.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.bench.case import Case, Memory
    from reshard.bench.tokens import Tokens


class BarePull(Operation):
    """One copy: sources say that their shared memory may be read, every destination copies its columns out of it."""

    def __init__(self, name: str, tokens: Tokens, memory: Memory) -> None:
        super().__init__(name)
        self._tokens, self._rank = tokens, memory.rank
        if memory.rank < SOURCES:
            return
        box = memory.case.boxes[memory.rank][0]
        self._copies = []
        for source, (shard,) in enumerate(memory.lent):
            rows = memory.case.boxes[source][0]
            target = memory.wanted[0][rows.start[0] : rows.stop[0]]
            self._copies.append((target, shard[:, box.start[1] : box.stop[1]]))
        self.wire_nbytes = sum(target.numel() * 2 for target, _ in self._copies)

    def run(self) -> None:
        tokens, rank = self._tokens, self._rank
        if rank < SOURCES:
            for peer in range(SOURCES, SIZE):
                tokens.give(rank, peer)
            for peer in range(SOURCES, SIZE):
                tokens.take(rank, peer)
            return
        for source, (target, shard) in enumerate(self._copies):
            tokens.take(rank, source)
            target.copy_(shard)
            tokens.give(rank, source)


@dataclass(frozen=True)
class Ring:
    """Slots of one source for the columns that some destinations want."""

    columns: tuple[int, int]
    readers: tuple[int, ...]


def rings_of(case: Case) -> list[Ring]:
    """One ring for every distinct block of columns; the same for every source."""
    readers: dict[tuple[int, int], list[int]] = {}
    for rank in range(SOURCES, SIZE):
        box = case.boxes[rank][0]
        readers.setdefault((box.start[1], box.stop[1]), []).append(rank)
    return [Ring(columns, tuple(ranks)) for columns, ranks in readers.items()]


class BareStaged(Operation):
    """Two copies, pipelined: sources pack into shared slots what destinations copy out behind them.

    Args:
        name: What the report calls it.
        tokens: A token to a reader is a full slot, one back is a free one.
        memory: A case of one tensor, its source private.
        arenas: Shared memory of every source for its slots, at least ``arena_numel(case)`` words each.
    """

    SLOT_NBYTES = 4 << 20
    SLOTS = 2

    def __init__(self, name: str, tokens: Tokens, memory: Memory, arenas: Sequence[torch.Tensor]) -> None:
        super().__init__(name)
        self._tokens, self._memory = tokens, memory
        self._rows = memory.case.shapes[0][0] // SOURCES
        self._rings = rings_of(memory.case)
        width = self._rings[0].columns[1] - self._rings[0].columns[0]
        self._chunk = max(1, min(self._rows, self.SLOT_NBYTES // (2 * width)))
        self._count = -(-self._rows // self._chunk)
        shape = (len(self._rings), self.SLOTS, self._chunk, width)
        numel = torch.Size(shape).numel()
        self._slots = [arena[:numel].view(shape) for arena in arenas]
        if memory.rank < SOURCES:
            self.buffer_nbytes = numel * 2
        else:
            self.wire_nbytes = memory.wanted[0].numel() * 2

    @classmethod
    def arena_numel(cls, case: Case) -> int:
        """Words of shared memory that one source needs."""
        rows, columns = case.shapes[0]
        width = columns // case.tp
        return case.tp * cls.SLOTS * max(1, min(rows // SOURCES, cls.SLOT_NBYTES // (2 * width))) * width

    def run(self) -> None:
        if self._memory.rank < SOURCES:
            self._pack()
        else:
            self._unpack()

    def _pack(self) -> None:
        tokens, rank = self._tokens, self._memory.rank
        shard, slots = self._memory.private[0], self._slots[self._memory.rank]
        for index in range(self._count):
            lo, hi = index * self._chunk, min(self._rows, (index + 1) * self._chunk)
            for at, ring in enumerate(self._rings):
                if index >= self.SLOTS:
                    for reader in ring.readers:
                        tokens.take(rank, reader)
                left, right = ring.columns
                slots[at, index % self.SLOTS, : hi - lo].copy_(shard[lo:hi, left:right])
                for reader in ring.readers:
                    tokens.give(rank, reader)
        for ring in self._rings:
            for reader in ring.readers:
                for _ in range(min(self.SLOTS, self._count)):
                    tokens.take(rank, reader)

    def _unpack(self) -> None:
        tokens, rank, wanted = self._tokens, self._memory.rank, self._memory.wanted[0]
        at = next(at for at, ring in enumerate(self._rings) if rank in ring.readers)
        for index in range(self._count):
            lo, hi = index * self._chunk, min(self._rows, (index + 1) * self._chunk)
            for source in range(SOURCES):
                start = source * self._rows
                tokens.take(rank, source)
                wanted[start + lo : start + hi].copy_(self._slots[source][at, index % self.SLOTS, : hi - lo])
                tokens.give(rank, source)


class Memcpy(Operation):
    """One process copies as many bytes as land in all, from warm memory to warm memory, in one piece."""

    brings = False

    def __init__(self, name: str, memory: Memory) -> None:
        super().__init__(name)
        self.takes_part = memory.rank == 0
        numel = sum(memory.case.numel(rank) for rank in range(SOURCES, SIZE)) if self.takes_part else 0
        self._source, self._target = torch.zeros(numel, dtype=WORD), torch.zeros(numel, dtype=WORD)

    def run(self) -> None:
        self._target.copy_(self._source)
