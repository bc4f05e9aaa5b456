"""Rounds in which buckets are forwarded: one send and one receive a step, and never before the bucket is there."""

import pytest
from tests.plan.worlds import random_refit

from reshard.plan.plan import plan_refit
from reshard.schedule.hops import LAG, Flow, Ports, flow_rounds
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


def test_a_port_sends_and_receives_once_a_round_whoever_shares_it(schedule):
    topology = schedule.plan.topology
    if topology.is_flat:
        pytest.skip("one domain has no ports")
    fastest = max(max(port.out_bytes_per_second, port.in_bytes_per_second) for port in topology.ports)
    seen = {}
    for hop in schedule.hops:
        if hop.step == 0:
            sender, receiver = schedule.streams[hop.flow].edges[hop.edge]
            for end in (("out", topology.port_of(sender)), ("in", topology.port_of(receiver))):
                seen.setdefault(end, []).append(hop.round)
    for (way, at), rounds in seen.items():
        assert len(set(rounds)) == len(rounds)
        port = topology.ports[at]
        rate = port.out_bytes_per_second if way == "out" else port.in_bytes_per_second
        # n buckets after the first one take n times as long as one does at this port
        assert (max(rounds) - min(rounds) + 1) * rate >= (len(rounds) - 1) * fastest * (1 - 1 / 512)


def test_a_slow_port_has_fewer_buckets_a_round_and_does_not_hold_up_the_others():
    ports = Ports({0: 0, 1: 1, 2: 2, 3: 3}, (1024, 2048, 1024, 1024), (1024, 1024, 1024, 1024))
    flows = [Flow(((0, 2),), (False,), 40), Flow(((1, 3),), (False,), 20)]
    hops = flow_rounds(flows, ports, 1)
    assert [hop.round for hop in hops if hop.flow == 0] == list(range(40))
    assert [hop.round for hop in hops if hop.flow == 1] == list(range(0, 40, 2))
    assert ports.least_rounds({(0, 2): 40, (1, 3): 20}) == 40


def test_ranks_that_share_a_port_take_turns():
    ports = Ports({0: 0, 1: 0, 2: 1, 3: 2}, (1024,) * 3, (1024,) * 3)
    flows = [Flow(((0, 2),), (False,), 10), Flow(((1, 3),), (False,), 10)]
    hops = flow_rounds(flows, ports, 1)
    assert sorted(hop.round for hop in hops) == list(range(20))


def test_buckets_that_leave_by_the_port_of_another_rank_take_turns_there():
    ports = Ports({0: 0, 1: 1, 2: 2, 3: 3}, (1024,) * 4, (1024,) * 4, sends_for=lambda sender, receiver: receiver - 2)
    flows = [Flow(((0, 3),), (False,), 10), Flow(((1, 3),), (False,), 10), Flow(((1, 2),), (False,), 20)]
    hops = flow_rounds(flows, ports, 1)
    assert sorted(hop.round for hop in hops if hop.flow < 2) == list(range(20))  # both over port 1
    assert sorted(hop.round for hop in hops if hop.flow == 2) == list(range(20))  # over port 0 meanwhile
    assert ports.least_rounds({(0, 3): 10, (1, 3): 10, (1, 2): 20}) == 20


def test_a_rate_between_whole_rounds_is_kept_on_the_average():
    ports = Ports({0: 0, 1: 1}, (1536, 1024), (1024, 1024))
    hops = flow_rounds([Flow(((0, 1),), (False,), 100)], ports, 1)
    assert hops[-1].round in (148, 149, 150)


def test_what_is_relayed_is_offered_some_rounds_after_it_has_come():
    ports = Ports({0: 0, 1: 1, 2: 2}, (1024,) * 3, (1024,) * 3)
    first, second = flow_rounds([Flow(((0, 1), (1, 2)), (False, False), 1)], ports, 1)
    assert (first.round, second.round) == (0, LAG)


def test_a_large_plan_is_placed_in_runs_of_buckets_and_every_rank_sees_the_same_order(monkeypatch):
    monkeypatch.setattr("reshard.schedule.schedule._MOST_HOPS", 40)
    src, dst, topology = random_refit(3)
    plan = plan_refit(src, dst, topology, cut_nbytes=1)
    schedule = plan_schedule(plan, staging_nbytes=16384, bucket_nbytes=64)
    assert max(hop.count for hop in schedule.hops) > 1
    sent, received = {}, {}
    for rank in range(plan.size):
        here = {}
        for op in schedule.for_rank(rank):
            bucket = (op.bucket.stream, op.bucket.index)
            assert op.round < schedule.rounds
            if op.kind == "recv":
                here[bucket] = (op.round, op.step)
                received.setdefault((op.peer, rank), []).append(bucket)
            else:
                assert not op.forwarded or here[bucket] < (op.round, op.step)
                sent.setdefault((rank, op.peer), []).append(bucket)
    assert sent == received
    assert {pair: len(buckets) for pair, buckets in sent.items()} == schedule.pair_buckets
