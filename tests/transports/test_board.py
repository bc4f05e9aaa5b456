"""The board: all well only where every rank said the same, and an answer for everyone in every other case."""

from __future__ import annotations

import os
import time

import pytest

from reshard.testing.processes import threads
from reshard.transports.base import Deadline
from reshard.transports.board import Board, board_nbytes

SIZE = 4
"""Ranks of the boards here."""


@pytest.fixture
def boards():
    memory = os.memfd_create("test-board")
    os.ftruncate(memory, board_nbytes(SIZE))
    bells = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(SIZE)]
    of = [[0, rank] if rank else list(range(SIZE)) for rank in range(SIZE)]
    made = [Board(rank, SIZE, os.dup(memory), [(r, os.dup(bells[r])) for r in of[rank]]) for rank in range(SIZE)]
    for descriptor in (memory, *bells):
        os.close(descriptor)
    yield made
    for board in made:
        board.close()


def ask(boards, values, call=1, seconds=20.0, late=()):
    """What each rank that says a value at a call is answered; a value of None is a rank that does not come."""

    def scenario(context):
        rank = context.rank
        if values[rank] is None:
            return None
        time.sleep(0.05 * (rank in late))
        deadline = Deadline(seconds[rank] if isinstance(seconds, list) else seconds)
        return boards[rank].all_say(call, values[rank], deadline)

    return threads(SIZE, scenario)


@pytest.mark.parametrize("late", [(), (0,), (3,), (1, 2, 3)])
def test_all_is_well_where_every_rank_says_the_same(boards, late):
    assert ask(boards, [b"x"] * SIZE, late=late) == [True] * SIZE


@pytest.mark.parametrize("other", range(SIZE))
@pytest.mark.parametrize("late", [(), (0,), (3,)])
def test_one_other_value_is_no_on_every_rank(boards, other, late):
    values = [b"y" if rank == other else b"x" for rank in range(SIZE)]
    assert ask(boards, values, late=late) == [False] * SIZE
    assert ask(boards, [b"x"] * SIZE, call=2) == [True] * SIZE


@pytest.mark.parametrize("refuses", range(SIZE))
def test_a_rank_that_refuses_the_call_is_no_for_those_who_ask(boards, refuses):
    boards[refuses].refuse(1)
    values = [None if rank == refuses else b"x" for rank in range(SIZE)]
    assert ask(boards, values) == [None if rank == refuses else False for rank in range(SIZE)]
    assert ask(boards, [b"x"] * SIZE, call=2) == [True] * SIZE


@pytest.mark.parametrize("absent", range(SIZE))
def test_an_absent_rank_is_no_at_the_deadline(boards, absent):
    values = [None if rank == absent else b"x" for rank in range(SIZE)]
    before = time.monotonic()
    assert ask(boards, values, seconds=0.4) == [None if rank == absent else False for rank in range(SIZE)]
    assert time.monotonic() - before < 5
    assert not boards[absent].all_say(1, b"x", Deadline(20))  # who comes too late is told so


@pytest.mark.parametrize("absent", range(SIZE))
@pytest.mark.parametrize("hurries", range(SIZE))
def test_who_gives_up_takes_those_with_longer_deadlines_along(boards, absent, hurries):
    if absent == hurries:
        pytest.skip("a rank that is absent has no deadline")
    values = [None if rank == absent else b"x" for rank in range(SIZE)]
    seconds = [0.2 if rank == hurries else 60.0 for rank in range(SIZE)]
    assert ask(boards, values, seconds=seconds) == [None if rank == absent else False for rank in range(SIZE)]


def test_call_after_call(boards):
    def scenario(context):
        return [boards[context.rank].all_say(call, b"%d" % call, Deadline(20)) for call in range(1, 500)]

    assert threads(SIZE, scenario) == [[True] * 499] * SIZE


def test_nothing_is_left_open():
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    memory = os.memfd_create("test-board")
    os.ftruncate(memory, board_nbytes(1))
    board = Board(0, 1, memory, [(0, os.eventfd(0, os.EFD_NONBLOCK))])
    assert board.all_say(1, b"x", Deadline(1))
    assert open_files() > before
    board.close()
    assert open_files() == before


@pytest.mark.parametrize("refuses", [0, 1])
def test_who_is_slow_to_wake_still_finds_the_word_of_its_call_after_others_failed_in_the_next(boards, refuses):
    def scenario(context):
        rank, board = context.rank, boards[context.rank]
        if rank == SIZE - 1:
            board._write(1, board_mark(b"x"))  # here in time ...
            context.store.wait(["refused"])
            return board._listen(1, Deadline(20.0))  # ... and asleep while the others go on
        assert board.all_say(1, b"x", Deadline(20.0))
        if rank == refuses:
            board.refuse(2)
        elif rank == 0:
            assert not board.all_say(2, b"x", Deadline(20.0))
        if rank == 0:
            context.store.set("refused", "yes")
        return True

    assert threads(SIZE, scenario) == [True] * SIZE


def board_mark(value):
    import hashlib

    return hashlib.blake2b(value, digest_size=16).digest()
