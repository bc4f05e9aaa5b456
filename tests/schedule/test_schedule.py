"""Schedules: both ends agree on what comes next, and whatever a rank may hold open, all of it gets through."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.schedule.hops import Flow
from reshard.schedule.schedule import _shortest_run, plan_schedule
from reshard.testing.strategies import cases

# -- simulators: which operations are done, by rank, until all are or nothing moves any more ---------------------------


def drain_in_windows(schedule, window):
    """Ranks open ``window`` operations at a time, and the next ones only when all of these are done.

    An operation is done when both ends have had it open at one time, as in a library that copies nothing ahead.

    Raises:
        AssertionError: Nothing moves, though operations are left.
    """
    left = {
        rank: [
            (*((rank, op.peer) if op.kind == "send" else (op.peer, rank)), *_facts(op))
            for op in schedule.for_rank(rank)
        ]
        for rank in range(schedule.plan.size)
    }
    done = set()
    while any(left.values()):
        opened = [key for ops in left.values() for key in ops[:window]]
        new = {key for key in opened if key not in done and opened.count(key) == 2}
        done |= new
        closed = [rank for rank, ops in left.items() if ops and done.issuperset(ops[:window])]
        assert new or closed, f"stuck; the next of each rank: { {rank: ops[0] for rank, ops in left.items() if ops} }"
        for rank in closed:
            left[rank] = left[rank][window:]


def _facts(op):
    return op.round, op.bucket.stream, op.bucket.index


def drain_with_slots(schedule, depth):
    """Ranks go through their operations in order, as the programs do: a send waits only for a free slot, a receive for
    its bytes; a slot is free when the receiver is done with it.

    Raises:
        AssertionError: Nothing moves, though operations are left.
    """
    queues = {rank: list(schedule.for_rank(rank)) for rank in range(schedule.plan.size)}
    sent, received = set(), set()
    in_slots = {rank: [] for rank in queues}
    while any(queues.values()):
        moved = False
        for rank, queue in queues.items():
            while queue:
                op = queue[0]
                if op.kind == "send":
                    in_slots[rank] = [key for key in in_slots[rank] if key not in received]
                    if len(in_slots[rank]) >= depth:
                        break
                    key = (rank, op.peer, *_facts(op))
                    sent.add(key)
                    in_slots[rank].append(key)
                else:
                    key = (op.peer, rank, *_facts(op))
                    if key not in sent:
                        break
                    received.add(key)
                queue.pop(0)
                moved = True
        assert moved, f"stuck: { {rank: (q[0].kind, q[0].peer, q[0].round) for rank, q in queues.items() if q} }"
    assert sent == received


# -- the order -----------------------------------------------------------------------------------------------------


def od02():
    """Two sources, four destinations, 600 tensors of mixed sizes; names and sizes sort differently."""
    dice = random.Random(2)
    shapes = {f"layers.{at}.w": (dice.choice((4, 12, 40)), dice.choice((4, 8, 64))) for at in range(600)}
    src = {
        name: Layout(shape, "bfloat16", Mesh({"x": 2}, [0, 1]), dice.choice((("x",), (None, "x"), ())))
        for name, shape in shapes.items()
    }
    by_size = sorted(shapes, key=lambda name: shapes[name])
    dst = {
        name: Layout(shapes[name], "bfloat16", Mesh({"y": 4}, [2, 3, 4, 5]), dice.choice((("y",), (None, "y"), ())))
        for name in by_size
    }
    return plan_refit(Manifest.from_layouts(src), Manifest.from_layouts(dst))


@pytest.fixture(scope="module")
def many_tensors():
    return plan_schedule(od02(), staging_nbytes=1 << 14)


@pytest.mark.parametrize("window", [1, 2, 3, 64])
def test_any_number_of_open_operations_drains_many_tensors(many_tensors, window):
    assert many_tensors.messages > 64
    drain_in_windows(many_tensors, window)


@settings(max_examples=80)
@given(cases(odd_memory=False), st.sampled_from(STRATEGIES), st.sampled_from((1, 2, 3, 64)))
def test_random_schedules_drain_with_any_number_of_slots(case, strategy, depth):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=16)
    drain_with_slots(plan_schedule(plan, staging_nbytes=512), depth)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("depth", [1, 4])
def test_ranks_that_exchange_with_each_other_do_not_wait_in_a_ring(ranks, depth):
    mesh = Mesh({"x": ranks})
    rows, columns = Layout((48, 48), "float32", mesh, ("x",)), Layout((48, 48), "float32", mesh, (None, "x"))
    drain_with_slots(plan_schedule(plan_refit(rows, columns), staging_nbytes=1024), depth)


@settings(max_examples=80)
@given(cases(odd_memory=False), st.sampled_from(STRATEGIES))
def test_both_ends_of_a_pair_see_the_same_buckets_in_the_same_rounds(case, strategy):
    plan = plan_refit(case.src, case.dst, strategy=strategy, cut_nbytes=16)
    schedule = plan_schedule(plan, staging_nbytes=512)
    sent, received = {}, {}
    for rank in range(plan.size):
        rounds = {}
        for op in schedule.for_rank(rank):
            assert rounds.setdefault((op.round, op.kind), op) is op, "two sends or two receives in one round"
            pair = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
            (sent if op.kind == "send" else received).setdefault(pair, []).append((op.round, op.bucket))
    assert sent == received
    assert all([r for r, _ in rows] == sorted(r for r, _ in rows) for rows in sent.values())
    assert {pair: len(rows) for pair, rows in sent.items()} == schedule.pair_buckets
    assert schedule.rounds == schedule.least_rounds


def test_early_tensors_travel_early(many_tensors):
    first_tensors = [bucket.items[0][0] for bucket in many_tensors.pair_sequence(0, 2)]
    assert first_tensors == sorted(first_tensors)


def test_a_bucket_for_several_receivers_is_the_same_for_all_of_them():
    src = Layout((64, 64), "float32", Mesh({"x": 1}))
    dst = Layout((64, 64), "float32", Mesh({"dp": 3}, [1, 2, 3]))
    schedule = plan_schedule(plan_refit(src, dst), staging_nbytes=4096)
    sequences = [schedule.pair_sequence(0, rank) for rank in (1, 2, 3)]
    assert sequences[0] == sequences[1] == sequences[2]
    assert len(schedule.streams) == 1


def test_nothing_to_send_makes_an_empty_schedule():
    layout = Layout((8,), "float32", Mesh({"x": 2}), ("x",))
    schedule = plan_schedule(plan_refit(layout, layout))
    assert (schedule.rounds, schedule.messages, schedule.for_rank(0)) == (0, 0, ())
    assert schedule.staging_nbytes(0) == 0


def test_other_bucket_sizes_have_another_digest(many_tensors):
    again = plan_schedule(od02(), staging_nbytes=1 << 14)
    assert again.digest == many_tensors.digest
    assert plan_schedule(od02(), staging_nbytes=1 << 15).digest != many_tensors.digest


def test_the_numbers_for_people_are_those_of_the_schedule(many_tensors):
    facts = many_tensors.to_json()
    assert facts["messages"] == many_tensors.messages
    assert facts["rounds"] == facts["least_rounds"] == many_tensors.rounds
    assert facts["staging_nbytes"] <= 1 << 14
    assert facts["plan"] == many_tensors.plan.digest


def test_runs_longer_than_most_flows_are_halved_as_long_as_they_hardly_grow_in_number():
    def flows(*counts):
        return [Flow(((0, 1),), (False,), count) for count in counts]

    assert _shortest_run(flows(*[10] * 40), 800) == 12  # one run each, until they would be two
    assert _shortest_run(flows(8000), 800) == 800
    assert _shortest_run(flows(1), 1) == 1
