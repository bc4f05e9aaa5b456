"""Boxes: what two of them share, what is left of one, and the C order of its elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.layouts.box import Box
from reshard.testing.strategies import boxes, shapes


@st.composite
def boxes_of_one_shape(draw, count):
    shape = draw(shapes().filter(lambda shape: 0 not in shape))
    return shape, [draw(boxes(shape)) for _ in range(count)]


def elements(box):
    return set(itertools.product(*(range(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))))


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (Box((0,), (4,)), Box((2,), (6,)), Box((2,), (4,))),  # partial overlap
        (Box((0,), (4,)), Box((1,), (2,)), Box((1,), (2,))),  # one inside the other
        (Box((0,), (4,)), Box((4,), (8,)), None),  # neighbours share no element
        (Box((0, 0), (4, 4)), Box((2, 4), (4, 8)), None),  # overlap on one dim is not enough
        (Box((0, 0), (4, 8)), Box((2, 4), (6, 8)), Box((2, 4), (4, 8))),  # a corner
        (Box((), ()), Box((), ()), Box((), ())),  # a scalar is one element
    ],
)
def test_intersect_keeps_exactly_the_shared_elements(a, b, shared):
    assert a.intersect(b) == shared
    assert b.intersect(a) == shared


@given(boxes_of_one_shape(2))
def test_intersect_and_subtract_divide_the_elements_of_a_box(drawn):
    _, (a, b) = drawn
    shared, rest = a.intersect(b), a.subtract(b)
    parts = [elements(box) for box in rest] + ([elements(shared)] if shared else [])
    assert sum(map(len, parts)) == a.numel, "the parts overlap, or some elements are missing"
    assert set().union(*parts) == elements(a)
    assert not set().union(*map(elements, rest)) & elements(b)
    assert len(rest) <= 2 * a.ndim


def test_a_scalar_minus_itself_leaves_nothing():
    assert Box((), ()).subtract(Box((), ())) == ()


@given(boxes_of_one_shape(2))
def test_a_box_contains_another_if_all_its_elements_are_inside(drawn):
    _, (a, b) = drawn
    assert a.contains(b) == (elements(b) <= elements(a))


@given(boxes_of_one_shape(1), st.data())
def test_linear_range_names_the_same_elements_as_numpy_in_c_order(drawn, data):
    shape, (box,) = drawn
    lo = data.draw(st.integers(0, box.numel - 1))
    hi = data.draw(st.integers(lo + 1, box.numel))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    cut = lambda b: whole[tuple(slice(x, y) for x, y in zip(b.start, b.stop, strict=True))].ravel()  # noqa: E731
    parts = box.linear_range(lo, hi)
    assert np.concatenate([cut(part) for part in parts]).tolist() == cut(box)[lo:hi].tolist()
    assert len(parts) <= max(1, 2 * box.ndim - 1)


@pytest.mark.parametrize(
    ("box", "lo", "hi", "parts"),
    [
        (Box((), ()), 0, 1, (Box((), ()),)),  # a scalar has one element
        (Box((0, 0), (3, 4)), 0, 12, (Box((0, 0), (3, 4)),)),  # all of it stays one box
        (Box((0, 0), (3, 4)), 4, 8, (Box((1, 0), (2, 4)),)),  # one whole row
        (Box((2, 2), (5, 6)), 5, 7, (Box((3, 3), (3 + 1, 5)),)),  # inside one row, away from the origin
        (
            Box((0, 0), (3, 4)),  # a tail, a row, a head
            2,
            9,
            (Box((0, 2), (1, 4)), Box((1, 0), (2, 4)), Box((2, 0), (3, 1))),
        ),
    ],
)
def test_linear_range_cuts_into_few_boxes(box, lo, hi, parts):
    assert box.linear_range(lo, hi) == parts


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (2, 2), (0, 13), (3, 1)])
def test_linear_range_refuses_what_is_not_a_part_of_the_box(lo, hi):
    with pytest.raises(ValueError, match=r"is not a range of the 12 elements"):
        Box((0, 0), (3, 4)).linear_range(lo, hi)


@given(boxes_of_one_shape(1))
def test_a_box_seen_from_its_own_start_begins_at_zero(drawn):
    _, (box,) = drawn
    seen = box.relative_to(box.start)
    assert seen == Box((0,) * box.ndim, box.shape)
    assert seen.shift(box.start) == box


@pytest.mark.parametrize(
    ("start", "stop", "why"),
    [
        ((0,), (0,), "holds at least one element"),  # empty
        ((3, 0), (2, 4), "holds at least one element"),  # inside out
        ((0, 0), (4,), "start has 2 dims, stop has 1"),  # not of one tensor
    ],
)
def test_a_box_without_elements_cannot_be_made(start, stop, why):
    with pytest.raises(ValueError, match=why):
        Box(start, stop)


def test_the_whole_of_a_tensor_without_elements_is_no_box():
    assert Box.whole((3, 0, 2)) is None
    assert Box.whole((3, 2)) == Box((0, 0), (3, 2))
    assert Box.whole(()) == Box((), ())


def test_messages_show_a_box_as_half_open_ranges():
    assert str(Box((0, 2), (4, 8))) == "[0:4, 2:8)"
