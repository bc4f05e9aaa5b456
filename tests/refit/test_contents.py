"""What is checked of a rank's own memory: which source pieces its destination would overwrite."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from reshard.layouts.binding import Binding
from reshard.layouts.bound import BoundPiece
from reshard.layouts.box import Box
from reshard.layouts.piece import Piece
from reshard.refit.contents import clashing


def bound(at, offset, shape, strides, *, buffer=1, itemsize=2):
    box = Box((at,), (at + 1,))
    return BoundPiece(Piece("w", box), Binding(buffer, offset * itemsize, shape, strides, itemsize), None)


def by_comparing_all(src, dst):
    return [
        at
        for at, source in enumerate(src)
        if any(
            (source.binding, source.piece) != (d.binding, d.piece) and source.binding.may_overlap(d.binding)
            for d in dst
        )
    ]


@st.composite
def pieces(draw):
    """Blocks of a matrix of 12 columns, in one of two buffers; each is a few rows of a few columns."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    offset = 12 * draw(st.integers(0, 6)) + draw(st.integers(0, 12 - columns))
    return bound(draw(st.integers(0, 2)), offset, (rows, columns), (12, 1), buffer=draw(st.integers(1, 2)))


@given(st.lists(pieces(), max_size=8), st.lists(pieces(), max_size=8))
def test_a_source_piece_clashes_if_any_destination_piece_would_overwrite_it(src, dst):
    assert clashing(src, dst) == by_comparing_all(src, dst)


def test_a_piece_that_stays_where_it_is_does_not_clash():
    piece = bound(0, 0, (4,), (1,))
    assert clashing([piece], [piece]) == []
    assert clashing([piece], [bound(0, 3, (4,), (1,))]) == [0]


def test_ten_thousand_pieces_of_one_buffer_are_looked_through_in_well_under_a_second():
    src = [bound(at, 8 * at, (8,), (1,)) for at in range(10_000)]
    dst = [*src[:5_000], *(bound(at, 8 * at + 4, (8,), (1,)) for at in range(5_000, 10_000))]
    began = time.process_time()
    found = clashing(src, dst)
    assert time.process_time() - began < 1
    assert found == list(range(5_000, 10_000))
