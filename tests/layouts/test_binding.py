"""Bindings: where pieces lie in memory, and whether two of them may share a byte."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from reshard.layouts.binding import Binding


def bytes_of(binding):
    """Every byte that the region touches, by brute force."""
    touched = set()
    for index in itertools.product(*(range(n) for n in binding.shape)):
        first = binding.offset_nbytes + binding.itemsize * sum(
            i * s for i, s in zip(index, binding.strides, strict=True)
        )
        touched.update(range(first, first + binding.itemsize))
    return touched


def matrix_part(row_items, rows, columns, itemsize=2):
    """Some rows and columns of a matrix of ``row_items`` columns that begins at byte 0."""
    at = (rows.start * row_items + columns.start) * itemsize
    return Binding(0, at, (len(rows), len(columns)), (row_items, 1), itemsize)


@st.composite
def bindings(draw):
    ndim = draw(st.integers(0, 3))
    shape = tuple(draw(st.integers(1, 4)) for _ in range(ndim))
    strides = tuple(draw(st.integers(0, 14)) for _ in range(ndim))
    itemsize = draw(st.sampled_from((1, 2, 4)))
    return Binding(0, draw(st.integers(0, 30)), shape, strides, itemsize)


@st.composite
def columns_of_a_matrix(draw):
    """What pieces of one fused buffer look like: blocks of one row-strided matrix."""
    row = draw(st.integers(2, 9))
    lo = draw(st.integers(0, row - 1))
    hi = draw(st.integers(lo + 1, row))
    first = draw(st.integers(0, 3))
    return matrix_part(row, range(first, first + draw(st.integers(1, 4))), range(lo, hi), draw(st.sampled_from((1, 2))))


@settings(max_examples=400)
@given(st.one_of(st.tuples(bindings(), bindings()), st.tuples(columns_of_a_matrix(), columns_of_a_matrix())))
@example((Binding(0, 0, (2, 2), (4, 1), 1), Binding(0, 2, (2, 2), (4, 1), 1)))
def test_two_regions_that_share_a_byte_are_never_said_to_be_apart(pair):
    a, b = pair
    if bytes_of(a) & bytes_of(b):
        assert a.may_overlap(b)
        assert b.may_overlap(a)


@given(st.integers(2, 9), st.data())
def test_blocks_of_one_matrix_are_told_apart_exactly(row_items, data):
    blocks = []
    for _ in range(2):
        lo = data.draw(st.integers(0, row_items - 1))
        columns = range(lo, data.draw(st.integers(lo + 1, row_items)))
        blocks.append(matrix_part(row_items, range(3), columns))
    a, b = blocks
    assert a.may_overlap(b) == bool(bytes_of(a) & bytes_of(b))


@given(bindings())
def test_a_span_is_the_first_and_the_last_byte(binding):
    touched = bytes_of(binding)
    assert binding.span == (min(touched), max(touched) + 1)


@pytest.mark.parametrize(
    ("shape", "strides", "contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),  # transposed
        ((2, 3), (4, 1), False),  # with a gap after each row
        ((1, 3), (99, 1), True),  # the stride of a dim of one element does not matter
        ((), (), True),  # a scalar
    ],
)
def test_contiguous_means_c_order_without_gaps(shape, strides, contiguous):
    assert Binding(0, 0, shape, strides, 4).is_contiguous is contiguous


def test_regions_of_different_buffers_never_overlap():
    assert not Binding(0, 0, (4,), (1,), 4).may_overlap(Binding(1, 0, (4,), (1,), 4))
