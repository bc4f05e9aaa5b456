"""Every layout of the matrix is moved for real, and every element compared with the dense copy."""

from __future__ import annotations

import pytest
from tests.conformance.matrix import move_rows, rows, uneven, whole

from reshard.layouts.bound import bind_shards
from reshard.layouts.layout import Layout
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.testing.memory_world import run_plan
from reshard.testing.oracle import check_landed, dense, local_shard, poisoned

GROUPS = sorted({row.group for row in rows()})


def numbers(world, group):
    return [row.number for row in rows() if row.world == world and row.group == group]


def sampled(world, group):
    """Every second row of a world and group, of those with large tensors every sixth: time is dear, and where a shard
    ends does not depend on how many elements it has."""
    found = [rows()[number] for number in numbers(world, group)]
    small = [row.number for row in found if row.src.nbytes < 1 << 21]
    large = [row.number for row in found if row.src.nbytes >= 1 << 21]
    return small[::2] + large[::6]


def runs(*worlds):
    return [
        pytest.param(world, group, id=f"{world} ranks, {group}")
        for world in worlds
        for group in GROUPS
        if numbers(world, group)
    ]


def test_the_matrix_has_all_its_rows():
    count = {}
    for row in rows():
        count[row.world] = count.get(row.world, 0) + 1
    assert count == {4: 55, 8: 195, 16: 195, 32: 183, 256: 1}


def test_our_layouts_give_the_local_shapes_that_the_matrix_says():
    for row in rows():
        for layout, shape in zip((row.src, row.dst), row.local_shapes, strict=True):
            assert {layout.local_shape(rank) for rank in layout.mesh.ranks} == {shape}, str(row)


def test_made_uneven_no_axis_divides_what_it_splits():
    some_rank_is_short = 0
    for row in map(uneven, rows()):
        for layout in (row.src, row.dst):
            shapes = {layout.local_shape(rank) for rank in layout.mesh.ranks}
            some_rank_is_short += len(shapes) > 1
            for size, steps in zip(layout.shape, layout.placement, strict=True):
                parts = [layout.mesh.axis_size(step) for step in steps]
                assert size <= 3 or all(size % n for n in parts if n > 1), str(row)
    assert some_rank_is_short > len(rows())


# -- over gloo -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "group"), runs(4, 8))
def test_every_layout_is_moved_between_processes(eight_processes, world, group):
    eight_processes.run(move_rows, numbers(world, group), False, ranks=world, timeout=90)


@pytest.mark.parametrize(("world", "group"), runs(4, 8))
def test_uneven_shards_are_moved_between_processes(eight_processes, world, group):
    eight_processes.run(move_rows, sampled(world, group), True, ranks=world, timeout=90)


# -- in one process ------------------------------------------------------------------------------------------------


def move_in_this_process(row, dense_copy, *, staging_nbytes=1 << 20):
    """Carry out a row with a thread for each rank; replicas share their expected (and source) shards."""
    shards = {}

    def shard(layout, rank):
        key = layout.boxes(rank)
        if key not in shards:
            shards[key] = local_shard(dense_copy, layout, rank)
        return shards[key]

    dst = {rank: poisoned(shard(row.dst, rank)) for rank in row.dst.mesh.ranks}
    run_plan(
        plan_refit(row.src, row.dst),
        {rank: bind_shards("tensor", row.src, rank, shard(row.src, rank)) for rank in row.src.mesh.ranks},
        {rank: bind_shards("tensor", row.dst, rank, local) for rank, local in dst.items()},
        staging_nbytes=staging_nbytes,
    )
    for rank, local in dst.items():
        check_landed(local, shard(row.dst, rank), f"{row}, rank {rank}")


@pytest.mark.parametrize(("world", "group"), runs(16, 32))
def test_every_layout_is_moved_between_threads(world, group):
    for number in numbers(world, group):
        row = rows()[number]
        move_in_this_process(row, whole(row.src.shape, row.src.dtype))


@pytest.mark.parametrize(("world", "group"), runs(16, 32))
def test_uneven_shards_are_moved_between_threads(world, group):
    for number in sampled(world, group):
        row = uneven(rows()[number])
        move_in_this_process(row, whole(row.src.shape, row.src.dtype))


def large_row():
    (row,) = (row for row in rows() if row.world == 256)
    return row


def test_256_ranks_are_moved_between_threads():
    # The row's tensor is 7.5 GB and its 256 shards are 90 GB together. What is moved here is a tensor with fewer
    # columns and a smaller last dim, split by the same mesh, placement and counts; the next test plans the row itself.
    row = large_row()
    sides = [Layout((256, 7, 96), "bfloat16", side.mesh, side.placement) for side in (row.src, row.dst)]
    small = type(row)(row.number, row.group, row.world, *sides, ((), ()))
    move_in_this_process(small, dense((256, 7, 96), "bfloat16"), staging_nbytes=1 << 16)


def test_256_ranks_are_planned_and_proven_at_full_size():
    row = large_row()
    plan = plan_refit(row.src, row.dst)
    copies = row.dst.mesh.axis_size("axis0")
    assert plan.proof().delivered_nbytes == copies * row.src.nbytes
    assert plan.wire_nbytes == copies * row.src.nbytes
    sent, received = set(plan.sent_nbytes().values()), set(plan.received_nbytes().values())
    assert sent == received == {copies * row.src.nbytes // 128}, "every rank sends, and receives, equally much"
    schedule = plan_schedule(plan)
    assert schedule.rounds == schedule.least_rounds
    assert max(schedule.staging_nbytes(rank) for rank in range(256)) <= 64 << 20
