"""Byte strings: boxes end to end, cut where an element, a row or a block ends."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.plan.worlds import random_refit

from reshard.layouts.box import Box
from reshard.layouts.piece import TensorSpec
from reshard.plan.plan import plan_refit
from reshard.plan.strings import ByteString
from reshard.testing.strategies import boxes, shapes


@st.composite
def strings(draw):
    specs, items = [], []
    for at in range(draw(st.integers(1, 4))):
        shape = draw(shapes(max_dims=3).filter(lambda shape: 0 not in shape))
        specs.append(TensorSpec(f"t{at}", shape, draw(st.sampled_from(("uint8", "bfloat16", "float32", "complex128")))))
        items.append((at, draw(boxes(shape))))
    return ByteString(items, specs), items, specs


def elements(items):
    """(tensor, element) in the order of the string."""
    listed = []
    for tensor, box in items:
        places = [()]
        for lo, hi in zip(box.start, box.stop, strict=True):
            places = [(*place, index) for place in places for index in range(lo, hi)]
        listed += [(tensor, place) for place in places]
    return listed


@given(strings(), st.data())
def test_the_parts_between_cuts_make_up_the_string_in_order(drawn, data):
    string, items, _ = drawn
    slack = data.draw(st.sampled_from((0, 1, 8, 64)))
    wanted = sorted(data.draw(st.lists(st.integers(0, string.nbytes), max_size=5)))
    cuts = [0, *(string.floor(offset, slack) for offset in wanted), string.nbytes]
    assert cuts == sorted(cuts)
    parts = [string.between(lo, hi) for lo, hi in pairwise(cuts) if lo < hi]
    assert elements([item for part in parts for item in part]) == elements(items)


@given(strings(), st.data())
def test_a_cut_is_never_after_the_place_asked_for_and_near_it(drawn, data):
    string, _, specs = drawn
    offset, slack = data.draw(st.integers(0, string.nbytes)), data.draw(st.sampled_from((0, 8, 64)))
    cut = string.floor(offset, slack)
    assert offset - max(slack, max(spec.itemsize for spec in specs)) < cut <= offset


@given(strings(), st.data())
def test_a_part_has_as_many_bytes_as_lie_between_its_cuts(drawn, data):
    string, _, specs = drawn
    lo, hi = sorted(string.floor(data.draw(st.integers(0, string.nbytes))) for _ in range(2))
    assume(lo < hi)
    assert sum(box.numel * specs[tensor].itemsize for tensor, box in string.between(lo, hi)) == hi - lo


def test_a_cut_prefers_the_end_of_a_row_within_the_slack():
    string = ByteString([(0, Box((0, 0), (8, 10)))], [TensorSpec("w", (8, 10), "uint8")])
    assert [string.floor(47, slack) for slack in (0, 7, 8)] == [47, 47, 40]


def test_a_cut_prefers_the_end_of_a_box_within_the_slack():
    items = [(0, Box((0,), (10,))), (1, Box((0,), (10,)))]
    string = ByteString(items, [TensorSpec("a", (10,), "uint8"), TensorSpec("b", (10,), "uint8")])
    assert [string.floor(13, slack) for slack in (0, 3, 4)] == [13, 13, 10]


@given(st.data())
def test_no_block_is_cut_in_two(data):
    ndim = data.draw(st.integers(1, 3))
    granule = tuple(data.draw(st.sampled_from((1, 2, 3))) for _ in range(ndim))
    blocks = tuple(data.draw(st.integers(1, 3)) for _ in range(ndim))
    short = tuple(data.draw(st.integers(0, g - 1)) for g in granule)  # the last block may be a part of one
    shape = tuple(n * g - less for n, g, less in zip(blocks, granule, short, strict=True))
    start = tuple(data.draw(st.integers(0, n - 1)) * g for n, g in zip(blocks, granule, strict=True))
    string = ByteString([(0, Box(start, shape))], [TensorSpec("w", shape, "bfloat16", granule)])
    cut = string.floor(data.draw(st.integers(0, string.nbytes)), data.draw(st.sampled_from((0, 8)))) // 2
    block_of = [
        tuple(index // g for index, g in zip(place, granule, strict=True)) for _, place in elements(string.items)
    ]
    assert not set(block_of[:cut]) & set(block_of[cut:])


@pytest.mark.parametrize(
    ("granule", "offset", "cut"),
    [
        ((4, 1), 47, 40),  # four rows of ten bytes
        ((4, 5), 79, 40),  # rows of blocks: their blocks do not lie one after the other
        ((8, 5), 47, 0),  # one row of blocks: no cut before its end
    ],
)
def test_blocks_of_several_rows_are_cut_only_between_rows_of_blocks(granule, offset, cut):
    string = ByteString([(0, Box((0, 0), (8, 10)))], [TensorSpec("w", (8, 10), "uint8", granule)])
    assert string.floor(offset) == cut


def test_blocks_inside_a_row_are_cut_inside_the_row():
    string = ByteString([(0, Box((0, 0), (8, 10)))], [TensorSpec("w", (8, 10), "uint8", (1, 5))])
    assert string.floor(47) == 45


@pytest.mark.parametrize("seed", range(40))
def test_the_string_of_a_class_is_that_of_its_items_wherever_it_is_asked(seed):
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology)
    dice = random.Random(seed)
    for at, cls in enumerate(plan.classes):
        listed = ByteString(
            sorted(
                ((t, box) for p, boxes in cls.parts for t in plan.patterns[p].tensors for box in boxes),
                key=lambda item: (item[0], item[1].start),
            ),
            plan.specs,
        )
        string = plan.string(at)
        assert list(string.items) == listed.items
        assert string.nbytes == listed.nbytes == cls.nbytes
        cuts = {0, cls.nbytes}
        for _ in range(20):
            offset, slack = dice.randrange(cls.nbytes + 1), dice.choice((0, 1, 64, 4096))
            assert string.floor(offset, slack) == listed.floor(offset, slack)
            cuts.add(string.floor(offset, slack))
        for lo, hi in pairwise(sorted(cuts)):
            assert string.between(lo, hi) == listed.between(lo, hi)
