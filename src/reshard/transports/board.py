"""Board: where the ranks of one host say that they are here with the same value, in memory that they all map.

One rank, the root, compares and gives the word; everyone else writes its own place and sleeps::

    rank   writes (call, mark of its value)   rings the root   sleeps   reads the word
    root   sleeps   finds every place equal   writes the word  rings everyone

The bells are eventfds. A bell's system call orders memory, so what was written before a ring is seen after it; and it
wakes a sleeper wherever there is an idle core, while a socket would wake it on the core of the one who rings.

The board only ever says that all is well. On anything else (a value that differs, a rank that failed, a deadline)
it answers no on every rank, and they find out more by a slower way.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import select
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.transports.base import Deadline

_WORD = struct.Struct("<Q")
"""Twice the number of the call, and one more where all is well."""
_WORDS = 8
"""Words that are kept, each in its place by the number of its call: who is slow to wake still finds that of its own,
though others have gone on and one of them has failed in the next call."""
_PLACE = struct.Struct("<Q16s")
"""Number of the call, and a mark of what the rank says there."""
_PLACE_NBYTES = 64
"""A cache line each, so that ranks do not write to each other's."""
_TROUBLE = bytes(16)
_LOOK_SECONDS = 0.1
"""How often a sleeper looks whether another rank gave up; only the root is told of it."""


def board_nbytes(size: int) -> int:
    """Shared memory for a board of ``size`` ranks."""
    return (size + 1) * _PLACE_NBYTES


class Board:
    """One rank's view of the board.

    Args:
        rank: This rank; rank 0 is the root.
        size: Number of ranks.
        descriptor: A file of ``board_nbytes(size)`` zeros, the same for all ranks. The board maps it and closes it.
        bells: One eventfd, non-blocking, for every rank that this rank rings or listens at, by rank: all of them on
            the root, the root's and its own on the others. The board closes them.
    """

    def __init__(self, rank: int, size: int, descriptor: int, bells: Sequence[tuple[int, int]]) -> None:
        self.rank = rank
        self.size = size
        self._memory = mmap.mmap(descriptor, board_nbytes(size))
        os.close(descriptor)
        self._bells = dict(bells)
        self._own = self._bells[rank]
        self._sleeper = select.poll()
        self._sleeper.register(self._own, select.POLLIN)

    def all_say(self, call: int, value: bytes, deadline: Deadline) -> bool:
        """Wait until every rank has said ``value`` at this call; calls count upwards.

        Returns:
            True if all did. False on every rank that asks if one did not, refused the call, or gave up at its deadline.
        """
        mark = hashlib.blake2b(value, digest_size=16).digest()
        self._write(call, mark)
        return self._collect(call, mark, deadline) if self.rank == 0 else self._listen(call, deadline)

    def refuse(self, call: int) -> None:
        """Make ``all_say`` of this call answer no on every rank."""
        self._write(call, _TROUBLE)
        if self.rank == 0:
            self._give_word(call, well=False)

    def close(self) -> None:
        """Give back memory and descriptors."""
        for bell in self._bells.values():
            os.close(bell)
        self._bells.clear()
        self._memory.close()

    def _write(self, call: int, mark: bytes) -> None:
        _PLACE.pack_into(self._memory, (self.rank + 1) * _PLACE_NBYTES, call, mark)
        if self.rank:
            self._ring(0)

    def _collect(self, call: int, mark: bytes, deadline: Deadline) -> bool:
        while True:
            # A place that is being written may look as if it differed. That costs the slower way, and is no error.
            places = [_PLACE.unpack_from(self._memory, (rank + 1) * _PLACE_NBYTES) for rank in range(self.size)]
            well = all(place == (call, mark) for place in places)
            if well or any(there == call and said != mark for there, said in places) or deadline.expired:
                self._give_word(call, well=well)
                return well
            self._sleep(deadline)

    def _listen(self, call: int, deadline: Deadline) -> bool:
        while True:
            word = _WORD.unpack_from(self._memory, call % _WORDS * _WORD.size)[0]
            if word >= 2 * call:
                return bool(word == 2 * call + 1)
            if deadline.expired or (not self._sleep(deadline) and self._somebody_gave_up(call)):
                self._write(call, _TROUBLE)
                return False

    def _give_word(self, call: int, *, well: bool) -> None:
        _WORD.pack_into(self._memory, call % _WORDS * _WORD.size, 2 * call + well)
        for rank in self._bells:
            if rank:
                self._ring(rank)

    def _somebody_gave_up(self, call: int) -> bool:
        trouble = (call, _TROUBLE)
        return any(_PLACE.unpack_from(self._memory, (rank + 1) * _PLACE_NBYTES) == trouble for rank in range(self.size))

    def _ring(self, rank: int) -> None:
        with contextlib.suppress(BlockingIOError):  # a bell that rang 2^64 times unheard rings already
            os.eventfd_write(self._bells[rank], 1)

    def _sleep(self, deadline: Deadline) -> bool:
        """Sleep until the bell rings, for a while at most; tell whether it rang."""
        rang = bool(self._sleeper.poll(1000 * max(0.001, min(deadline.remaining(), _LOOK_SECONDS))))
        if rang:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._own)
        return rang
