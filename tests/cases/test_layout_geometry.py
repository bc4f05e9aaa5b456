"""Cases LG-*: replication, groups, scalars, and plain tensors among distributed ones."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, lands_right, move, refit, same_bits, split
from tests.cases.worlds import default_group, dtensor

import reshard
from reshard.errors import LayoutError
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit


class Replicate:
    """Read by its name, as torch's own."""


class Shard:
    def __init__(self, dim):
        self.dim = dim


def test_LG_01_full_replication_can_be_spelled_on_a_one_axis_mesh(transport):
    full = arange(6, 4)
    src = split((6, 4), [0, 1], ("x",))
    one_axis = reshard.Layout.from_placements((6, 4), "float32", Mesh({"x": 3}, [2, 3, 4]), [Replicate()])
    two_axes = reshard.Layout.from_placements(
        (6, 4), "float32", Mesh({"a": 1, "b": 3}, [2, 3, 4]), [Replicate(), Replicate()]
    )
    copies = split((6, 4), [0, 1], ())
    wire = []
    for source, wanted in ((src, one_axis), (src, two_axes), (copies, one_axis)):
        reports = lands_right(full, source, wanted, 5, transport=transport)
        wire.append(sum(report.wire_nbytes for report in reports))
    assert wire == [3 * 96] * 3


def _subgroup(ctx, members, numbered_by_group):
    """Refit (8,) between the two members of a subgroup of a world of four."""
    with default_group(ctx):
        group = torch.distributed.new_group(members)
        if ctx.rank not in members:
            return None
        world = list(range(2)) if numbered_by_group else members
        src, dst = (split((8,), [rank], ("x",)) for rank in world)
        if numbered_by_group:
            source, target = 100.0 * ctx.rank + arange(8), torch.full((8,), float(POISON))
            sides = (source, None) if ctx.rank == members[0] else (None, target)
            layouts = {"src_layout": src} if ctx.rank == members[0] else {"dst_layout": dst}
            reshard.reshard(*sides, **layouts, group=group, timeout=TIMEOUT)
            return target
        view = [("w", (8,), (0,), 100.0 * ctx.rank + arange(8) if ctx.rank == members[0] else torch.zeros(8))]
        manifest = Manifest.from_views(view)
        sides = {"src": manifest} if ctx.rank == members[0] else {"dst": manifest}
        reshard.compile_refit(group, **sides, timeout=TIMEOUT).run(TIMEOUT)
        return view[0][3]


@pytest.mark.parametrize("numbered_by_group", [True, False])
@pytest.mark.parametrize("members", [[2, 3], [1, 3]])
def test_LG_03_bytes_reach_the_right_member_of_a_subgroup_and_nobody_else_takes_part(pool, members, numbered_by_group):
    told = pool.run(_subgroup, members, numbered_by_group, ranks=4)
    assert torch.equal(told[members[1]], 100.0 * members[0] + arange(8))
    assert [told[rank] for rank in range(4) if rank not in members] == [None, None]


def _subgroup_of_dtensors(ctx, members):
    """The same with DTensors, whose meshes count ranks of the world and not of the group."""
    with default_group(ctx):
        group = torch.distributed.new_group(members)
        source = dtensor(100.0 * ctx.rank + arange(8), [members[0]], ["R"])
        target = dtensor(torch.full((8,), float(POISON)), [members[1]], ["R"])
        if ctx.rank not in members:
            return None
        mine = (source, None) if ctx.rank == members[0] else (None, target)
        reshard.reshard(*mine, group=group, timeout=TIMEOUT)
        return target.to_local().clone() if ctx.rank == members[1] else None


@pytest.mark.parametrize("members", [[2, 3], [1, 3]])
def test_LG_03_meshes_of_dtensors_count_ranks_of_the_world(pool, members):
    told = pool.run(_subgroup_of_dtensors, members, ranks=4)
    assert torch.equal(told[members[1]], 100.0 * members[0] + arange(8))


def _without_default_group(ctx):
    assert not torch.distributed.is_initialized()
    source, target = (arange(6), None) if ctx.rank == 0 else (None, torch.full((6,), float(POISON)))
    layout = {"src_layout": split((6,), [0], ())} if ctx.rank == 0 else {"dst_layout": split((6,), [1], ())}
    reshard.reshard(source, target, **layout, group=ctx.process_group("alone"), timeout=TIMEOUT)
    assert not torch.distributed.is_initialized()
    return target


def test_LG_03_a_group_works_in_processes_that_have_no_default_group(pool):
    assert torch.equal(pool.run(_without_default_group, ranks=2)[1], arange(6))


def test_LG_05_scalars_and_empty_tensors_travel_like_all_others(transport):
    values = {"logit_scale": torch.tensor(3.5), "empty": torch.empty(0, 5), "w": arange(4, 4)}
    wanted = {}

    def declare(rank):
        if rank < 2:
            half = values["w"][2 * rank : 2 * rank + 2]
            views = [("w", (4, 4), (2 * rank, 0), half.clone()), ("empty", (0, 5), (0, 0), torch.empty(0, 5))]
            return Manifest.from_views([("logit_scale", (), (), values["logit_scale"].clone()), *views]), None
        mine = wanted[rank] = {name: torch.full_like(full, POISON) for name, full in values.items()}
        return None, Manifest.from_torch(mine)

    told = refit(5, declare, transport=transport)
    for rank in (2, 3, 4):
        for name, full in values.items():
            assert same_bits(wanted[rank][name], full), (rank, name)
    _, compiled = told[0]
    assert list(compiled.plan.transfers("empty")) == []


@pytest.mark.parametrize(
    ("shape", "src_placement", "dst_placement"),
    [((), (), ()), ((0, 5), ("x",), (None, "x"))],  # a scalar to all; an empty tensor from rows to columns
)
def test_LG_05_the_collective_takes_a_scalar_and_an_empty_tensor(transport, shape, src_placement, dst_placement):
    full = torch.full(shape, 3.5)
    reports = lands_right(
        full, split(shape, [0, 1], src_placement), split(shape, [2, 3, 4], dst_placement), 5, transport=transport
    )
    assert sum(report.wire_nbytes for report in reports) == 3 * full.nbytes


def test_LG_05_a_shard_of_a_scalar_is_refused_when_it_is_described():
    with pytest.raises(LayoutError, match=r"'logit_scale'.*scalar can only be replicated"):
        reshard.Layout.from_placements((), "float32", Mesh({"x": 2}), [Shard(0)], name="logit_scale")


def test_LG_05_an_empty_tensor_needs_no_message():
    plan = plan_refit(split((0, 5), [0, 1], ("x",)), split((0, 5), [2, 3, 4], (None, "x")))
    assert (reshard.plan_schedule(plan).messages, plan.wire_nbytes) == (0, 0)


def _mixed_state(ctx):
    with default_group(ctx):
        a = dtensor(arange(8, 4), [0, 1], ["S0"])
        if ctx.rank == 2:
            wanted = {"a": torch.zeros(8, 4), "b": torch.zeros(4), "c": torch.zeros(2)}
            reshard.compile_refit(dst=Manifest.from_torch(wanted), timeout=TIMEOUT).run(TIMEOUT)
            return wanted
        state = {"a": a, "b": 10 + arange(4), "c": 20 + arange(2)}
        reshard.compile_refit(src=Manifest.from_torch(state), timeout=TIMEOUT).run(TIMEOUT)
        return None


def test_LG_07_plain_tensors_among_dtensors_are_replicas_of_their_publishers(pool):
    landed = pool.run(_mixed_state, ranks=3)[2]
    assert same_bits(landed["a"], arange(8, 4))
    assert same_bits(landed["b"], 10 + arange(4))
    assert same_bits(landed["c"], 20 + arange(2))


def test_a_rank_outside_both_meshes_calls_and_moves_nothing(transport):
    landed, reports = move(arange(4, 4), split((4, 4), [0], ("x",)), split((4, 4), [2], ()), 3, transport=transport)
    assert torch.equal(landed[2], arange(4, 4))
    assert (reports[1].sent_nbytes, reports[1].wire_nbytes, reports[1].local_nbytes) == (0, 0, 0)
