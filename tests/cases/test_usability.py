"""US-02: what can be planned works, and what cannot is refused before any communication."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import TIMEOUT, arange, lands_right, refusals, split

import reshard
from reshard.errors import LayoutError, PeerError
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit


class Replicate:
    """Placements are read by name and attributes, as torch's own."""


class Shard:
    def __init__(self, dim):
        self.dim = dim


class Partial:
    reduce_op = "sum"


class Ragged:
    local_units = (1, 2)


@pytest.mark.parametrize(
    ("placement", "says"), [(Partial(), "partial sums"), (Ragged(), "is not one that reshard knows"), (None, "None")]
)
def test_US_02_placements_without_a_meaning_are_refused_when_they_are_described(placement, says):
    with pytest.raises(LayoutError, match=says) as caught:
        Layout.from_placements((4, 4), "float32", Mesh({"x": 2}), [placement], name="layers.0.w")
    assert "'layers.0.w'" in caught.value.message


CONV = (4, 2, 3, 3)


@pytest.mark.parametrize(
    ("shape", "src", "dst", "size"),
    [
        (CONV, split(CONV, [0, 1], ("x",)), split(CONV, [2, 3], (None, "x")), 4),  # four dims
        ((40, 3), split((40, 3), list(range(20)), ("x",)), split((40, 3), [20], ()), 21),  # 20 shards feed one
        ((6, 4), split((6, 4), [1, 3], ("x",)), split((6, 4), [0], ()), 4),  # a mesh with gaps
        ((6, 4), split((6, 4), [0, 1], ("x",)), split((6, 4), [1, 2], (None, "x")), 3),  # a rank in both meshes
        ((6, 4), split((6, 4), [0, 1], ("x",)), split((6, 4), [1, 0], ("x",)), 2),  # the same ranks, swapped
        (
            (6, 4),
            Layout.from_placements(
                (6, 4), "float32", Mesh({"x": 2}, [0, 1]), [Shard(-1)]
            ),  # a dim counted from the end
            split((6, 4), [2], ()),
            3,
        ),
    ],
    ids=["four dims", "fan-in 20", "mesh with gaps", "shared rank", "swapped ranks", "negative dim"],
)
def test_US_02_unusual_but_clear_layouts_work(transport, shape, src, dst, size):
    plan_refit(src, dst).proof()
    lands_right(arange(*shape), src, dst, size, transport=transport)


def test_US_02_a_negative_dim_counts_from_the_end():
    mesh = Mesh({"x": 2})
    assert Layout.from_placements((6, 4), "float32", mesh, [Shard(-1)]) == Layout.from_placements(
        (6, 4), "float32", mesh, [Shard(1)]
    )


def test_US_02_a_dim_that_is_not_there_is_refused():
    with pytest.raises(LayoutError, match="dim 2"):
        Layout.from_placements((6, 4), "float32", Mesh({"x": 2}), [Shard(2)])


def test_US_02_a_partial_tensor_on_one_rank_is_told_to_all_before_any_byte():
    """A DTensor is read inside the call, so that its fault is everybody's error."""

    class PartialTensor(torch.Tensor):
        placements = (Partial(),)

        class device_mesh:
            mesh = torch.tensor([0])
            mesh_dim_names = None

            @staticmethod
            def get_coordinate():
                return [0]

    target = torch.full((4,), -7.0)

    def call(rank, group):
        if rank == 0:
            reshard.reshard(torch.zeros(4).as_subclass(PartialTensor), group=group, timeout=TIMEOUT)
        reshard.reshard(dst=target, dst_layout=split((4,), [1], ()), group=group, timeout=TIMEOUT)

    mine, theirs = refusals(2, call)
    assert isinstance(mine, LayoutError)
    assert isinstance(theirs, PeerError)
    assert mine.message in theirs.message
    assert target.tolist() == [-7.0] * 4
