"""Cases UN-*: sizes that do not divide, shard edges of any kind, and padding that belongs to nobody."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, lands_right, refit, rows, same_bits, split
from tests.cases.worlds import default_group, dtensor

import reshard
from reshard.layouts.box import Box
from reshard.layouts.manifest import Manifest
from reshard.layouts.piece import Piece, TensorSpec
from reshard.plan.plan import plan_refit


@pytest.mark.parametrize("dst_placement", [(), ("x",)])
def test_UN_01_no_padding_row_leaks_and_the_empty_rank_sends_nothing(transport, dst_placement):
    src = split((5, 10), [0, 1, 2, 3], ("x",))
    assert [src.local_shape(rank) for rank in range(4)] == [(2, 10), (2, 10), (1, 10), (0, 10)]
    reports = lands_right(arange(5, 10), src, split((5, 10), [4, 5], dst_placement), 6, transport=transport)
    assert (reports[3].sent_nbytes, reports[3].links) == (0, {})


def test_UN_02_two_mesh_axes_on_one_dim_own_every_row_once(transport):
    src = split((10,), list(range(8)), (("a", "b"),), axes={"a": 2, "b": 4})
    owned = [tuple(n for box in src.boxes(rank) for n in range(box.start[0], box.stop[0])) for rank in range(8)]
    assert owned == [(0, 1), (2, 3), (4,), (), (5, 6), (7, 8), (9,), ()]
    assert plan_refit(src, split((10,), [8], ())).proof().delivered_nbytes == 40
    lands_right(arange(10), src, split((10,), [8], ()), 9, transport=transport)


def test_UN_02_torch_s_placements_on_two_axes_own_the_same_rows():
    shard = type("Shard", (), {"dim": 0})()
    mesh = reshard.Mesh({"a": 2, "b": 4})
    ours = split((10,), list(range(8)), (("a", "b"),), axes={"a": 2, "b": 4})
    theirs = reshard.Layout.from_placements((10,), "float32", mesh, [shard, shard])
    assert [theirs.boxes(rank) for rank in range(8)] == [ours.boxes(rank) for rank in range(8)]


def test_UN_05_shard_edges_may_lie_anywhere(transport):
    full, wanted = arange(10, 4), {}
    edges, targets = [(0, 6), (6, 10)], [(0, 4), (4, 8), (8, 10)]

    def declare(rank):
        if rank < 2:
            lo, hi = edges[rank]
            return Manifest.from_views([("w", (10, 4), (lo, 0), full[lo:hi].clone())]), None
        lo, hi = targets[rank - 2]
        wanted[rank] = torch.full((hi - lo, 4), float(POISON))
        return None, Manifest.from_views([("w", (10, 4), (lo, 0), wanted[rank])])

    refit(5, declare, transport=transport)
    for rank, (lo, hi) in enumerate(targets, start=2):
        assert same_bits(wanted[rank], full[lo:hi])


def test_UN_05_boxes_given_by_hand_are_planned_with_as_they_are():
    spec = TensorSpec("w", (10, 4), "float32")
    src = Manifest.from_pieces(
        [spec], {0: [Piece("w", Box((0, 0), (6, 4)))], 1: [Piece("w", Box((6, 0), (10, 4)))]}, world="trainer"
    )
    plan = plan_refit(src, Manifest.from_layouts({"w": split((10, 4), [0, 1, 2], ("x",))}, world="engine"))
    plan.proof()
    assert {(t.src, t.dst): (t.box.start[0], t.box.stop[0]) for t in plan.transfers("w")} == {
        (0, 2): (0, 4),
        (0, 3): (4, 6),
        (1, 3): (6, 8),
        (1, 4): (8, 10),
    }


def test_UN_06_both_sides_pad_the_vocabulary_as_they_like(transport):
    """Ten rows of data; the trainer pads to 12 (6 a rank), the engine to 16 (4 a rank). Padding is nobody's piece."""
    full, engine = arange(10, 3), {}

    def declare(rank):
        first, have = (6 * rank, 6) if rank < 2 else (4 * (rank - 2), 4)
        data = max(0, min(10 - first, have))
        if rank < 2:
            local = torch.full((6, 3), float("nan"))
            local[:data] = full[first : first + data]
            return Manifest.from_views([("embed", (10, 3), (first, 0), local[:data])]), None
        engine[rank] = torch.full((4, 3), float(POISON))
        return None, Manifest.from_views([("embed", (10, 3), (first, 0), engine[rank][:data])])

    told = refit(6, declare, transport=transport)
    for rank, local in engine.items():
        first = 4 * (rank - 2)
        data = max(0, min(10 - first, 4))
        assert same_bits(local[:data], rows(full, range(first, first + data)))
        assert torch.equal(local[data:], torch.full((4 - data, 3), float(POISON))), "padding is left untouched"
    assert sum(report.wire_nbytes for report, _ in told) == full.nbytes


def _dtensor_vocabulary(ctx):
    with default_group(ctx):
        full = arange(10, 3)
        source = dtensor(full, [0, 1], ["S0"])
        if ctx.rank < 2:
            reshard.compile_refit(src=Manifest.from_torch({"embed": source}), timeout=TIMEOUT).run(TIMEOUT)
            return tuple(source.shape)
        local = torch.full((16, 3), float(POISON))
        wanted = Manifest.from_views([("embed", (10, 3), (0, 0), local[:10])])
        reshard.compile_refit(dst=wanted, timeout=TIMEOUT).run(TIMEOUT)
        return local


def test_UN_06_the_global_size_of_a_dtensor_is_taken_as_it_is(pool):
    first, _, local = pool.run(_dtensor_vocabulary, ranks=3)
    assert first == (10, 3)
    assert same_bits(local[:10], arange(10, 3))
    assert torch.equal(local[10:], torch.full((6, 3), float(POISON)))
