"""Cells: one set of holders and one of needers for every element, as a count over a dense array gives them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reshard.layouts.box import Box
from reshard.plan.cells import BoxIndex, Cell, find_cells, mask_of, ranks_of
from reshard.testing.strategies import boxes, shapes, source_pieces, wanted_pieces


def dense_masks(shape, claims):
    """For each element the mask of the ranks whose boxes hold it, by brute force."""
    masks = np.zeros(shape, int)
    for box, mask in claims:
        masks[tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))] |= mask
    return masks


def claims_of(pieces):
    by_box = {}
    for rank, held in pieces.items():
        for box in held:
            by_box[box] = by_box.get(box, 0) | 1 << rank
    return tuple(sorted(by_box.items()))


@given(shapes(max_dims=3), st.data())
def test_the_cells_say_of_every_element_who_holds_and_who_needs_it(shape, data):
    held = claims_of(data.draw(source_pieces(shape)))
    needed = claims_of(data.draw(wanted_pieces(shape)))
    holders, needers, times = np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, int)
    for cell in find_cells(shape, held, needed):
        at = tuple(slice(lo, hi) for lo, hi in zip(cell.box.start, cell.box.stop, strict=True))
        holders[at], needers[at] = cell.holders, cell.needers
        times[at] += 1
    expected_holders, expected_needers = dense_masks(shape, held), dense_masks(shape, needed)
    assert (holders == expected_holders).all()
    assert (needers == expected_needers).all()
    assert (times == ((expected_holders | expected_needers) != 0)).all(), "cells overlap, or one has nobody"


def test_two_row_shards_meeting_four_column_shards_make_eight_cells():
    rows = [(Box((4 * i, 0), (4 * i + 4, 8)), 1 << i) for i in range(2)]
    columns = [(Box((0, 2 * i), (8, 2 * i + 2)), 1 << i) for i in range(4)]
    cells = find_cells((8, 8), rows, columns)
    assert len(cells) == 8
    assert {cell.box.shape for cell in cells} == {(4, 2)}


def test_cut_points_that_change_nobody_make_no_cells():
    # The sources cut at row 2 and 6, but both parts have the same holder: one run, one cell.
    held = [(Box((0, 0), (2, 4)), 1), (Box((2, 0), (6, 4)), 1), (Box((6, 0), (8, 4)), 1)]
    assert find_cells((8, 4), held, [(Box((0, 0), (8, 4)), 2)]) == (Cell(Box((0, 0), (8, 4)), 1, 2),)


def test_a_scalar_is_one_cell():
    scalar = Box((), ())
    assert find_cells((), [(scalar, 1)], [(scalar, 6)]) == (Cell(scalar, 1, 6),)


def test_a_tensor_without_elements_has_no_cell():
    assert find_cells((0, 5), [], []) == ()
    assert find_cells((0,), [], []) == ()


@given(st.sets(st.integers(0, 300)))
def test_a_mask_is_read_back_as_the_ranks_it_was_made_of(ranks):
    assert ranks_of(mask_of(ranks)) == tuple(sorted(ranks))


@given(shapes(max_dims=3).filter(lambda shape: 0 not in shape), st.data())
def test_an_index_finds_the_same_overlaps_as_looking_at_every_box(shape, data):
    claims = [(box, at) for at, box in enumerate(data.draw(st.lists(boxes(shape), max_size=8)))]
    asked = data.draw(boxes(shape))
    found = BoxIndex(claims).overlapping(asked)
    expected = [(box.intersect(asked), box, at) for box, at in claims if box.intersect(asked)]
    assert sorted(found, key=lambda row: row[2]) == expected
