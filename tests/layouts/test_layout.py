"""Layouts: shape, mesh and placement give the boxes of every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.layouts.placement import Strided
from reshard.testing.strategies import layouts, shapes

DP2_TP2 = Mesh({"dp": 2, "tp": 2})


def rows(layout, rank):
    """The row numbers that a rank of a 1-D layout holds, in local order."""
    return [row for box in layout.boxes(rank) for row in range(box.start[0], box.stop[0])]


def layout_of(size, mesh, placement, split="ceil"):
    return Layout((size,), "float32", mesh, placement, split)


@pytest.mark.parametrize(
    ("size", "mesh", "entry", "split", "held"),
    [
        (8, Mesh({"tp": 4}), "tp", "even", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (10, Mesh({"tp": 4}), "tp", "ceil", [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),  # the last is short
        (5, Mesh({"tp": 4}), "tp", "ceil", [[0, 1], [2, 3], [4], []]),  # the last is empty
        (10, Mesh({"tp": 4}), "tp", "balanced", [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]),  # the first get one more
        (3, Mesh({"tp": 4}), "tp", "balanced", [[0], [1], [2], []]),  # fewer rows than ranks
        (8, DP2_TP2, "tp", "even", [[0, 1, 2, 3], [4, 5, 6, 7]] * 2),  # dp holds replicas
        (8, DP2_TP2, ("dp", "tp"), "even", [[0, 1], [2, 3], [4, 5], [6, 7]]),  # dp cuts first
        (8, DP2_TP2, ("tp", "dp"), "even", [[0, 1], [4, 5], [2, 3], [6, 7]]),  # tp cuts first, as FSDP2 over TP
        (  # two axes and a remainder: nested chunks, not chunks of the product
            10,
            Mesh({"a": 2, "b": 4}),
            ("a", "b"),
            "ceil",
            [[0, 1], [2, 3], [4], [], [5, 6], [7, 8], [9], []],
        ),
        (8, Mesh({"x": 2}), Strided("x", 2), "even", [[0, 1, 4, 5], [2, 3, 6, 7]]),  # a part of each of two runs
        (5, Mesh({"x": 2}), Strided("x", 2), "ceil", [[0, 1, 3], [2, 4]]),  # uneven runs
        (8, Mesh({"x": 2, "y": 2}), (Strided("x", 2), "y"), "even", [[0, 1], [4, 5], [2, 3], [6, 7]]),
        (0, Mesh({"tp": 2}), "tp", "even", [[], []]),  # no rows at all
    ],
)
def test_each_rank_holds_the_rows_that_the_rule_gives_it(size, mesh, entry, split, held):
    layout = layout_of(size, mesh, (entry,), split)
    assert [rows(layout, rank) for rank in mesh.ranks] == held
    assert [layout.local_shape(rank) for rank in mesh.ranks] == [(len(r),) for r in held]


@given(shapes(), st.data())
def test_all_ranks_together_hold_every_element_as_often_as_it_has_replicas(shape, data):
    layout = data.draw(layouts(shape, "float32"))
    count = np.zeros(shape, int)
    for rank in layout.mesh.ranks:
        for box in layout.boxes(rank):
            count[tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))] += 1
    used = {step.axis if isinstance(step, Strided) else step for entry in layout.placement for step in entry}
    replicas = int(np.prod([size for name, size in layout.mesh.axes if name not in used]))
    assert (count == replicas).all()


@given(shapes(), st.data())
def test_the_boxes_of_a_rank_fill_its_local_tensor_without_overlap(shape, data):
    layout = data.draw(layouts(shape, "float32"))
    for rank in layout.mesh.ranks:
        local = np.zeros(layout.local_shape(rank), int)
        for shard in layout.shards(rank):
            stop = [at + size for at, size in zip(shard.local_start, shard.box.shape, strict=True)]
            local[tuple(slice(lo, hi) for lo, hi in zip(shard.local_start, stop, strict=True))] += 1
        assert (local == 1).all()


@given(shapes(), st.data())
def test_holders_name_the_same_boxes_as_the_ranks_do(shape, data):
    layout = data.draw(layouts(shape, "float32"))
    by_holders = {(rank, box) for box, ranks in layout.holders() for rank in ranks}
    assert by_holders == {(rank, box) for rank in layout.mesh.ranks for box in layout.boxes(rank)}


@given(shapes(), st.data())
def test_a_layout_survives_json(shape, data):
    layout = data.draw(layouts(shape, "bfloat16"))
    assert Layout.from_json(layout.to_json()) == layout


def test_a_rank_outside_the_mesh_holds_nothing():
    layout = layout_of(8, Mesh({"tp": 2}, [4, 9]), ("tp",))
    assert layout.boxes(0) == ()
    assert rows(layout, 9) == [4, 5, 6, 7]


def test_a_scalar_is_replicated_everywhere():
    layout = Layout((), torch.float32, Mesh({"tp": 3}))
    assert [layout.boxes(rank) for rank in range(3)] == [(Box((), ()),)] * 3


def test_dims_without_an_entry_are_whole():
    layout = Layout((4, 6, 2), "int8", Mesh({"tp": 2}), (None, "tp"))
    assert layout.boxes(1) == (Box((0, 3, 0), (4, 6, 2)),)
    assert layout.nbytes == 48


def test_blocks_are_cut_only_at_their_edges():
    layout = Layout((10,), "uint8", Mesh({"tp": 2}), ("tp",), "ceil", granule=(5,))
    assert rows(layout, 0) == [0, 1, 2, 3, 4]
    short_last = Layout((10,), "uint8", Mesh({"tp": 3}), ("tp",), "ceil", granule=(4,))
    assert rows(short_last, 2) == [8, 9], "the end of the tensor may be a part of a block"


@pytest.mark.parametrize(
    ("shape", "mesh", "placement", "options", "message"),
    [
        (
            (11008,),
            Mesh({"tp": 3}),
            ("tp",),
            {},
            "'w': dim 0 has 11008 rows and mesh axis 'tp' (size 3) splits it, but the rule 'even' needs 11008 to be "
            "divisible by 3. Use the rule 'ceil' or 'balanced', or another 'tp' size.",
        ),
        (  # the second axis has what the first has left
            (12,),
            Mesh({"a": 2, "b": 4}),
            (("a", "b"),),
            {},
            "'w': dim 0 has 6 rows and mesh axis 'b' (size 4) splits it, but the rule 'even' needs 6 to be divisible "
            "by 4. Use the rule 'ceil' or 'balanced', or another 'b' size.",
        ),
        (
            (4,),
            Mesh({"tp": 2}),
            ("pp",),
            {},
            "'w': the placement names axis 'pp'; the mesh has ('tp',). Name one of these, or give the mesh that axis.",
        ),
        (
            (4, 4),
            Mesh({"tp": 2}),
            ("tp", "tp"),
            {},
            "'w': mesh axis 'tp' splits more than one dim; an axis splits one dim.",
        ),
        (
            (4,),
            Mesh({"tp": 2}),
            ("tp", None),
            {},
            "'w': the placement has 2 entries for a tensor of 1 dims (4,). Give one entry a dim.",
        ),
        (
            (4,),
            Mesh({"tp": 2}),
            ("tp",),
            {"split": "equal"},
            "'w': split rule 'equal' is unknown; use one of ('even', 'ceil', 'balanced').",
        ),
        (
            (8,),
            Mesh({"tp": 2}),
            ("tp",),
            {"granule": (3,)},
            "'w': a shard edge at index 4 of dim 0 cuts a block of 3 (size 8, split by ['tp']). Blocks travel whole: "
            "move the edge to a multiple of 3, or quantise again after the refit.",
        ),
        (
            (8,),
            Mesh({"tp": 2}),
            ("tp",),
            {"granule": (3, 1)},
            "'w': granule (3, 1) needs one positive size for each dim of (8,).",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_way_out(shape, mesh, placement, options, message):
    with pytest.raises(LayoutError) as caught:
        Layout(shape, "float32", mesh, placement, name="w", **options)
    assert str(caught.value) == message
