"""Rounds in which buckets are forwarded: one send and one receive a step, and never before the bucket is there."""

import pytest
from tests.plan.worlds import random_refit

from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule


@pytest.fixture(scope="module", params=range(40))
def schedule(request):
    src, dst, topology = random_refit(request.param)
    return plan_schedule(plan_refit(src, dst, topology, cut_nbytes=1), staging_nbytes=16384)


def test_a_rank_sends_once_and_receives_once_a_step(schedule):
    seen = set()
    for hop in schedule.hops:
        sender, receiver = schedule.streams[hop.flow].edges[hop.edge]
        for end in (("send", sender), ("recv", receiver)):
            assert (hop.round, hop.step, *end) not in seen
            seen.add((hop.round, hop.step, *end))


def test_every_bucket_takes_every_edge_once_and_after_it_has_arrived(schedule):
    when = {}
    for hop in schedule.hops:
        assert (hop.flow, hop.bucket, hop.edge) not in when
        when[hop.flow, hop.bucket, hop.edge] = (hop.round, hop.step)
    for at, stream in enumerate(schedule.streams):
        brings = {receiver: edge for edge, (_, receiver) in enumerate(stream.edges)}
        for bucket in range(stream.count(schedule.size)):
            for edge, (sender, _) in enumerate(stream.edges):
                assert (at, bucket, edge) in when
                if sender in brings:
                    assert when[at, bucket, edge] > when[at, bucket, brings[sender]]


def test_the_network_has_step_0_to_itself(schedule):
    home = schedule.plan.topology.domain_of
    for hop in schedule.hops:
        sender, receiver = schedule.streams[hop.flow].edges[hop.edge]
        assert (hop.step == 0) == (home(sender) != home(receiver))


def test_both_ends_of_a_pair_see_the_same_order(schedule):
    if schedule.plan.topology.is_flat:
        pytest.skip("one domain")
    ranks = range(schedule.plan.size)
    sent, received = {}, {}
    for rank in ranks:
        for op in schedule.for_rank(rank):
            pair = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
            side = sent if op.kind == "send" else received
            side.setdefault(pair, []).append((op.bucket.stream, op.bucket.index))
    assert sent == received
