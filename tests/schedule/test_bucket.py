"""Buckets: every byte of every stream is in exactly one, none is larger than its slot."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import ScheduleError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.schedule.bucket import BucketSize, size_buckets
from reshard.schedule.schedule import plan_schedule
from reshard.testing.strategies import cases

KIB, MIB = 1 << 10, 1 << 20


def one_to_one(shape, dtype, granule=None):
    src, dst = (Layout(shape, dtype, Mesh({"x": 1}, [rank]), granule=granule) for rank in (0, 1))
    return plan_refit(src, dst)


def mixed(seed):
    """Some tensors of many dtypes and odd sizes, from one rank to another."""
    dice = random.Random(seed)
    layouts = {
        f"t{at}": Layout(
            (dice.randint(1, 300),),
            dice.choice(("bfloat16", "float32", "int64", "uint8", "complex128")),
            Mesh({"x": 1}),
        )
        for at in range(dice.randint(1, 5))
    }
    return plan_refit(Manifest.from_layouts(layouts, world="a"), Manifest.from_layouts(layouts, world="b"))


def moved(schedule):
    """(edge, tensor, box) of everything that the buckets carry, and a check of each bucket's size."""
    carried = []
    for at, stream in enumerate(schedule.streams):
        buckets = schedule.buckets(at)
        assert [bucket.index for bucket in buckets] == list(range(stream.count(schedule.size)))
        assert sum(bucket.nbytes for bucket in buckets) == stream.nbytes
        for bucket in buckets:
            size = sum(box.numel * schedule.plan.specs[tensor].itemsize for tensor, box in bucket.items)
            assert size == bucket.nbytes
            assert 0 < bucket.nbytes <= schedule.size.slot_nbytes
            carried += [(edge, tensor, box) for edge in stream.edges for tensor, box in bucket.items]
    return carried


def elements(rows):
    """Every element that is carried, as often as it is."""
    count = {}
    for edge, tensor, box in rows:
        for index in _indices(box):
            count[edge, tensor, index] = count.get((edge, tensor, index), 0) + 1
    return count


def _indices(box):
    places = [()]
    for lo, hi in zip(box.start, box.stop, strict=True):
        places = [(*place, index) for place in places for index in range(lo, hi)]
    return places


@settings(max_examples=100)
@given(cases(odd_memory=False), st.sampled_from(STRATEGIES), st.sampled_from((256, KIB, 4 * KIB)))
def test_the_buckets_carry_each_byte_of_the_plan_once_over_each_edge(case, strategy, staging_nbytes):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=32)
    schedule = plan_schedule(plan, staging_nbytes=staging_nbytes)
    planned = [
        ((rank, peer), tensor, box) for rank in range(plan.size) for peer, tensor, box in plan.for_rank(rank).sends
    ]
    carried = elements(moved(schedule))
    assert carried == elements(planned)
    assert set(carried.values()) <= {1}


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("staging_nbytes", [KIB, 5000, 64 * KIB])
def test_dtypes_of_different_sizes_share_buckets(seed, staging_nbytes):
    schedule = plan_schedule(mixed(seed), staging_nbytes=staging_nbytes)
    assert set(elements(moved(schedule)).values()) == {1}


@pytest.mark.parametrize("limit", [KIB, 4 * KIB, 5000, 64 * KIB, 100_000, MIB, 3 * MIB, 64 * MIB, 1 << 30])
def test_the_staging_of_both_directions_stays_within_the_limit(limit):
    size = size_buckets(limit)
    assert size.staging_nbytes <= limit
    assert size.staging_nbytes == 2 * size.depth * size.slot_nbytes
    # What a limit allows is used, up to the size above which larger buckets bring nothing.
    assert size.slot_nbytes >= min(3 * MIB, limit // (2 * size.depth) // 2)


@settings(max_examples=300)
@given(st.integers(64, 1 << 24))
def test_every_limit_has_buckets_that_fit(limit):
    assert size_buckets(limit).staging_nbytes <= limit


@pytest.mark.parametrize("limit", [KIB, 64 * KIB, MIB, 64 * MIB])
def test_no_rank_stages_more_than_the_limit(limit):
    src = Layout((64, 4096), "float32", Mesh({"x": 4}), ("x",))
    dst = Layout((64, 4096), "float32", Mesh({"y": 4}, [4, 5, 6, 7]), (None, "y"))
    schedule = plan_schedule(plan_refit(src, dst), staging_nbytes=limit)
    assert all(0 < schedule.staging_nbytes(rank) <= limit // 2 for rank in range(8)), "each has one direction only"
    same = Layout((64, 4096), "float32", Mesh({"y": 4}), (None, "y"))
    both = plan_schedule(plan_refit(src, same), staging_nbytes=limit)
    assert all(limit // 4 < both.staging_nbytes(rank) <= limit or limit > MIB for rank in range(4))


def test_a_tensor_larger_than_a_bucket_is_cut():
    # MB-03: 16 KiB of one tensor, and two small ones, with 1 KiB of staging.
    layouts = {
        "large": Layout((512, 8), "float32", Mesh({"x": 1})),
        "odd": Layout((3,), "float32", Mesh({"x": 1})),
        "half": Layout((1000,), "bfloat16", Mesh({"x": 1})),
    }
    plan = plan_refit(Manifest.from_layouts(layouts, world="a"), Manifest.from_layouts(layouts, world="b"))
    schedule = plan_schedule(plan, staging_nbytes=KIB)
    assert set(elements(moved(schedule)).values()) == {1}
    assert schedule.staging_nbytes(0) <= KIB


def test_small_tensors_share_a_bucket():
    layouts = {f"layers.{at}.norm": Layout((8,), "float32", Mesh({"x": 1})) for at in range(50)}
    plan = plan_refit(Manifest.from_layouts(layouts, world="a"), Manifest.from_layouts(layouts, world="b"))
    assert plan_schedule(plan).messages == 1


def test_column_shards_travel_as_one_message_a_pair():
    # PC-01: 4096 rows of four column shards to two, not one message a row.
    src = Layout((4096, 64), "float32", Mesh({"x": 4}), (None, "x"))
    dst = Layout((4096, 64), "float32", Mesh({"x": 2}, [4, 5]), (None, "x"))
    assert plan_schedule(plan_refit(src, dst)).messages == 4


def blocks_cut(schedule, spec):
    """Blocks of which two buckets carry a part."""
    where = {}
    for at in range(len(schedule.streams)):
        for bucket in schedule.buckets(at):
            for _, box in bucket.items:
                for place in _indices(box):
                    block = tuple(index // g for index, g in zip(place, spec.granule, strict=True))
                    where.setdefault(block, set()).add((at, bucket.index))
    return [block for block, buckets in where.items() if len(buckets) > 1]


@pytest.mark.parametrize(
    ("shape", "granule"),
    [
        ((24, 20), (4, 1)),  # rows of blocks
        ((24, 20), (1, 5)),  # blocks in a row
        ((24, 20), (4, 5)),  # blocks of several rows and columns
        ((4, 60), (4, 5)),  # one row of blocks
        ((22, 18), (4, 5)),  # the last blocks are parts of one
        ((6, 4, 10), (1, 2, 5)),
    ],
)
@pytest.mark.parametrize("staging_nbytes", [2 * KIB, 4 * KIB])
def test_no_bucket_ends_inside_a_block(shape, granule, staging_nbytes):
    plan = one_to_one(shape, "uint8", granule)
    schedule = plan_schedule(plan, staging_nbytes=staging_nbytes)
    assert set(elements(moved(schedule)).values()) == {1}
    assert blocks_cut(schedule, plan.specs[0]) == []


def test_blocks_that_are_large_beside_a_bucket_still_fill_it():
    # A row of blocks is 3 MiB, a bucket nominally 4 MiB: a bucket may hold one such row, never one and a half.
    plan = one_to_one((1024, 24576), "float8_e4m3fn", (128, 128))
    schedule = plan_schedule(plan)
    buckets = schedule.buckets(0)
    assert sum(bucket.nbytes for bucket in buckets) == 1024 * 24576
    assert all(box.start[0] % 128 == 0 for bucket in buckets for _, box in bucket.items)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_buckets_that_do_not_fit_are_refused_with_a_size_that_does():
    with pytest.raises(ScheduleError) as caught:
        size_buckets(64 * MIB, bucket_nbytes=8 * MIB, depth=6)
    assert str(caught.value) == (
        "12 open operations of up to 9 MiB need 108 MiB of staging; the limit is 64 MiB. Raise staging_nbytes, or "
        "lower bucket_nbytes to 4.74 MiB or less."
    )
    assert caught.value.staging_nbytes == 64 * MIB


def test_the_size_that_is_advised_fits():
    limit, depth = 64 * MIB, 6
    assert size_buckets(limit, int(4.74 * MIB), depth).staging_nbytes <= limit


def test_a_limit_below_one_byte_a_slot_is_refused():
    with pytest.raises(ScheduleError, match=r"need (at least )?4 B of staging; the limit is 3 B"):
        size_buckets(3)


def test_an_element_that_no_bucket_can_hold_is_refused_by_name():
    with pytest.raises(ScheduleError, match=r"'tensor': .* Raise staging_nbytes"):
        plan_schedule(one_to_one((4,), "complex128"), staging_nbytes=32).for_rank(0)


def test_a_row_of_blocks_that_no_bucket_can_hold_is_refused_with_its_size():
    with pytest.raises(ScheduleError, match=r"'tensor': .*4 KiB.* Raise staging_nbytes"):
        plan_schedule(one_to_one((64, 64), "uint8", (64, 1)), staging_nbytes=KIB).for_rank(0)


def test_a_bucket_size_counts_its_slack():
    assert BucketSize(1000, 24, 3).slot_nbytes == 1024
    assert BucketSize(1000, 24, 3).staging_nbytes == 6 * 1024
    assert Box((0,), (1,)).numel == 1


@pytest.mark.parametrize("limit", [2**k for k in range(12, 31)])
@pytest.mark.parametrize("bucket_nbytes", [None, 64 << 10])
def test_over_a_network_there_are_more_and_smaller_buckets_within_the_same_limit(limit, bucket_nbytes):
    if bucket_nbytes and limit < 2 * 2 * bucket_nbytes * 9 // 8:
        pytest.skip("two buckets in each direction do not fit")
    size = size_buckets(limit, bucket_nbytes, network=True)
    assert size.staging_nbytes <= limit
    assert size.nbytes == bucket_nbytes or size.nbytes <= size_buckets(limit).nbytes
    assert size.depth >= 2
    if limit >= 64 * MIB:
        assert (size.depth, size.nbytes) == (24, bucket_nbytes or MIB)
