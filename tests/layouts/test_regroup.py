"""Explicit pieces of many ranks as rules: found where a rule says the same, and never where it says something else."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.layouts.box import Box
from reshard.layouts.holding import Entry, Pieces, Rule
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import TensorSpec
from reshard.layouts.placement import Strided
from reshard.layouts.regroup import find_rule, regroup
from reshard.testing import strategies as ours


def exploded(layout):
    """The boxes of every rank of a layout, written out; ranks that hold nothing among them."""
    return Pieces(tuple((rank, tuple(sorted(layout.boxes(rank)))) for rank in sorted(layout.mesh.ranks)))


def by_rank(holding, spec):
    found = {}
    for box, ranks in holding.boxes(spec):
        for rank in ranks:
            found.setdefault(rank, set()).add(box)
    return found


@given(st.data())
def test_a_rule_that_is_found_gives_each_rank_exactly_its_boxes(data):
    shape = data.draw(ours.shapes(max_dims=3, max_size=12))
    layout = data.draw(ours.layouts(shape, "uint8", world=12))
    spec, pieces = TensorSpec("w", shape, "uint8"), exploded(layout)
    rule = find_rule(shape, pieces)
    if rule is not None:
        assert by_rank(rule, spec) == by_rank(pieces, spec)


@given(st.data())
def test_pieces_cut_by_hand_are_never_said_to_be_others(data):
    shape = data.draw(ours.shapes(max_dims=2, max_size=6))
    held = data.draw(st.one_of(ours.source_pieces(shape), ours.wanted_pieces(shape)))
    pieces = Pieces(tuple((rank, tuple(sorted(boxes))) for rank, boxes in sorted(held.items())))
    spec = TensorSpec("w", shape, "uint8")
    (entry,) = regroup(Manifest((Entry(spec, (pieces,)),))).entries
    assert by_rank(entry.holdings[0], spec) == by_rank(pieces, spec)


PER_DIM = (  # (shape, mesh, placement, split): what traced engines and trainers really have
    ((8, 4), Mesh({"tp": 4}), ("tp",), "even"),
    ((8, 6), Mesh({"dp": 2, "tp": 3}), (None, "tp"), "even"),  # replicas, columns
    ((8, 6), Mesh({"tp": 3, "dp": 2}), (None, "tp"), "even"),  # replicas on neighbouring ranks
    ((8, 4), Mesh({"dp": 4}), (), "even"),  # whole on every rank
    ((), Mesh({"dp": 3}), (), "even"),  # a scalar
    ((10, 4), Mesh({"tp": 4}), ("tp",), "ceil"),  # 3, 3, 3, 1
    ((9,), Mesh({"fsdp": 8}), ("fsdp",), "ceil"),  # the last three ranks hold nothing
    ((10, 4), Mesh({"tp": 4}), ("tp",), "balanced"),  # 3, 3, 2, 2
    ((8, 8), Mesh({"a": 2, "b": 4}, [5, 3, 9, 0, 1, 2, 7, 8]), ("b", "a"), "even"),  # both dims, ranks in any order
    ((2, 12, 4), Mesh({"tp": 3}), (None, Strided("tp", 2)), "even"),  # stacked experts: gate rows, then up rows
    ((7, 3), Mesh({"dp": 3, "tp": 2}), (("tp", "dp"),), "ceil"),  # FSDP2 over TP: 2, 2, and 2, 1 of what TP left
    ((14, 3), Mesh({"dp": 2, "tp": 2}), (("tp", "dp"),), "ceil"),  # 4, 3, 4, 3
    ((6, 1, 4), Mesh({"ep": 6}), ("ep",), "even"),
)


@pytest.mark.parametrize(("shape", "mesh", "placement", "split"), PER_DIM)
def test_the_placements_of_engines_and_trainers_are_found(shape, mesh, placement, split):
    layout, spec = Layout(shape, "uint8", mesh, placement, split), TensorSpec("w", shape, "uint8")
    rule = find_rule(shape, exploded(layout))
    assert rule is not None
    assert by_rank(rule, spec) == by_rank(exploded(layout), spec)


@pytest.mark.parametrize(
    "held",
    [
        ((0, (Box((0,), (5,)),)), (1, (Box((5,), (6,)),))),  # 5 and 1 rows: no rule cuts so
        ((0, (Box((0,), (3,)),)),),  # a part of the tensor, and nobody has the rest
        ((0, (Box((0,), (3,)),)), (1, (Box((3,), (6,)),)), (2, (Box((3,), (6,)),))),  # one half twice, the other once
        ((0, (Box((0,), (2,)), Box((2,), (3,)))), (1, (Box((3,), (6,)),))),  # boxes that touch stay as they are
        ((0, (Box((0,), (4,)),)), (1, (Box((2,), (6,)),))),  # overlapping
        ((0, ()),),
    ],
)
def test_what_no_rule_says_stays_explicit(held):
    entry = Entry(TensorSpec("w", (6,), "uint8"), (Pieces(held),))
    assert find_rule((6,), Pieces(held)) is None
    assert regroup(Manifest((entry,))).entries == (entry,)


CEIL, BALANCED, EITHER = (0, 3, 6, 9, 10), (0, 3, 6, 8, 10), (0, 2, 4, 6, 7)  # cut points of 4 ranks


@pytest.mark.parametrize(
    ("rows", "columns", "split"),
    [(CEIL, EITHER, "ceil"), (BALANCED, EITHER, "balanced"), (EITHER, CEIL, "ceil"), (CEIL, BALANCED, None)],
)
def test_both_dims_must_follow_one_split_rule(rows, columns, split):
    places = product(pairwise(rows), pairwise(columns))
    held = tuple((rank, (Box((a, c), (b, d)),)) for rank, ((a, b), (c, d)) in enumerate(places))
    found = find_rule((rows[-1], columns[-1]), Pieces(held))
    placement = (("dim0",), ("dim1",))
    assert found == (None if split is None else Rule(Mesh({"dim0": 4, "dim1": 4}), placement, split))


def test_tensors_of_equal_placement_share_one_rule_and_the_size_of_the_world_stays():
    def halves(name, half):
        held = ((0, (Box((0,), (half,)),)), (1, (Box((half,), (2 * half,)),)), (5, ()))
        return Entry(TensorSpec(name, (2 * half,), "uint8"), (Pieces(held),))

    made = regroup(Manifest((halves("a", 2), halves("b", 2), halves("c", 3)), "engine", 9))
    a, b, c = (entry.holdings[0] for entry in made.entries)
    assert a is b is c
    assert a.ranks == (0, 1)
    assert (made.size, made.world) == (9, "engine")
    assert len(made.to_json()["holdings"]) == 1
