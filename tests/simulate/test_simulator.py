"""The simulator against times worked out by hand, and what every trace must keep to."""

from itertools import pairwise

import pytest
from tests.plan.worlds import random_refit

from reshard.errors import ConfigError
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.simulate.costs import Costs
from reshard.simulate.predict import least_seconds
from reshard.simulate.simulator import simulate
from reshard.topology.presets import hosts
from reshard.topology.topology import Domain, Port, Topology

KIB = 1024
FREE = Costs()
UNEVEN = Costs(3e9, 2e-6, 5e-6, 1e10, 1e-6)


def refit(moves, topology, bucket_nbytes=KIB, strategy="reshard"):
    """The schedule of one KiB for each (holder, needers)."""

    def side(of):
        return Manifest.from_layouts(
            {
                f"t{at}": Layout((KIB,), "uint8", Mesh({"copies": len(of(move))}, of(move)))
                for at, move in enumerate(moves)
            }
        )

    plan = plan_refit(side(lambda move: [move[0]]), side(lambda move: move[1]), topology, strategy=strategy)
    return plan_schedule(plan, bucket_nbytes=bucket_nbytes, staging_nbytes=1 << 20)


def spans(trace, kind, rank=None):
    """Start and stop of a kind's events, of one rank or of all."""
    return [
        (event.start_seconds, event.stop_seconds)
        for event in trace.events
        if event.kind == kind and rank in (None, event.rank)
    ]


def apart(ranks, rate=KIB):
    """Each rank on a host of its own."""
    return hosts([[rank] for rank in range(ranks)], port_bytes_per_second=rate)


def test_one_message_is_packed_posted_sent_and_after_the_latency_received_and_unpacked():
    costs = Costs(copy_bytes_per_second=4 * KIB, message_seconds=0.25, latency_seconds=0.5)
    trace = simulate(refit([(0, [1])], apart(2)), apart(2), costs)
    assert spans(trace, "pack") == [(0.0, 0.25)]
    assert spans(trace, "send") == [(0.5, 1.5)]
    assert spans(trace, "recv") == [(1.0, 2.0)]
    assert spans(trace, "unpack") == [(2.25, 2.5)]
    assert spans(trace, "wait") == [(0.0, 2.0)]
    assert trace.seconds == 2.5


def test_a_bucket_is_packed_while_the_one_before_is_on_its_way_and_unpacked_while_the_next_one_is():
    trace = simulate(refit([(0, [1])], apart(2), KIB // 2), apart(2), Costs(copy_bytes_per_second=4 * KIB))
    assert spans(trace, "pack") == [(0.0, 0.125), (0.125, 0.25)]
    assert spans(trace, "send") == [(0.125, 0.625), (0.625, 1.125)]
    assert spans(trace, "unpack") == [(0.625, 0.75), (1.125, 1.25)]
    assert trace.seconds == 1.25


def test_two_ranks_that_share_a_port_take_turns():
    topology = hosts([[0, 1], [2], [3]], port_bytes_per_second=KIB)
    trace = simulate(refit([(0, [2]), (1, [3])], topology), topology, FREE)
    assert sorted(spans(trace, "send")) == [(0.0, 1.0), (1.0, 2.0)]
    alone = simulate(refit([(0, [2]), (1, [3])], apart(4)), apart(4), FREE)
    assert spans(alone, "send") == [(0.0, 1.0), (0.0, 1.0)]


def test_two_ranks_that_share_a_port_receive_in_turns():
    topology = hosts([[0], [1], [2, 3]], port_bytes_per_second=KIB)
    trace = simulate(refit([(0, [2]), (1, [3])], topology), topology, FREE)
    assert spans(trace, "send") == [(0.0, 1.0), (0.0, 1.0)]
    assert sorted(spans(trace, "recv")) == [(0.0, 1.0), (1.0, 2.0)]


def test_a_fast_port_takes_in_what_two_slow_ones_send_at_once():
    topology = hosts([[0], [1], [2]], port_bytes_per_second=[KIB, KIB, 2 * KIB])
    trace = simulate(refit([(0, [2]), (1, [2])], topology), topology, FREE)
    assert spans(trace, "send") == [(0.0, 1.0), (0.0, 1.0)]
    assert spans(trace, "recv") == [(0.5, 1.0), (1.0, 1.5)]


def test_a_slow_port_takes_longer_than_the_fast_one_that_sends():
    topology = hosts([[0], [1]], port_bytes_per_second=[2 * KIB, KIB])
    trace = simulate(refit([(0, [1])], topology), topology, FREE)
    assert spans(trace, "send") == [(0.0, 0.5)]
    assert spans(trace, "recv") == [(0.0, 1.0)]


def test_what_is_relayed_goes_on_only_when_it_is_there():
    topology = apart(3)
    whole = simulate(refit([(0, [1, 2])], topology), topology, FREE)
    hops = [(event.rank, event.peer, event.start_seconds, event.stop_seconds) for event in whole.events]
    sends = [hop for hop, event in zip(hops, whole.events, strict=True) if event.kind == "send"]
    first, second = sends
    assert first[0] == 0
    assert second[:1] == first[1:2]  # who received it hands it on
    assert (first[2:], second[2:]) == ((0.0, 1.0), (1.0, 2.0))
    quarters = simulate(refit([(0, [1, 2])], topology, KIB // 4), topology, FREE)
    assert quarters.seconds == 1.25  # a quarter is handed on while the next one comes


def test_a_bucket_for_two_receivers_is_packed_once():
    schedule = refit([(0, [1, 2])], apart(3), strategy="point-to-point")
    trace = simulate(schedule, apart(3), Costs(copy_bytes_per_second=2 * KIB))
    assert spans(trace, "pack") == [(0.0, 0.5)]
    assert spans(trace, "send") == [(0.5, 1.5), (1.5, 2.5)]


def test_inside_a_domain_the_fast_link_counts_and_not_the_port():
    inside = Topology("inside", (Domain("d", (0, 1), 4 * KIB),), (Port("p", (0, 1), 1, 1),))
    trace = simulate(refit([(0, [1])], inside), inside, Costs(latency_seconds=9.0, local_latency_seconds=0.5))
    assert spans(trace, "send") == [(0.0, 0.25)]
    assert trace.seconds == 0.75


def test_what_a_rank_keeps_is_copied_within_it():
    trace = simulate(refit([(0, [0])], apart(1)), apart(1), Costs(copy_bytes_per_second=2 * KIB))
    assert [(event.rank, event.kind, event.seconds, event.nbytes) for event in trace.events] == [(0, "copy", 0.5, KIB)]


def test_the_latency_of_the_topology_counts_where_it_says_one():
    topology = Topology("far", apart(2).domains, apart(2).ports, latency_seconds=3.0)
    trace = simulate(refit([(0, [1])], topology), topology, Costs(latency_seconds=1.0))
    assert trace.seconds == 4.0


def test_a_rank_that_the_topology_does_not_list_is_named():
    with pytest.raises(ConfigError, match="rank 1"):
        simulate(refit([(0, [1])], apart(2)), hosts([[0], [2]], port_bytes_per_second=1), FREE)


@pytest.mark.parametrize("wrong", [{"copy_bytes_per_second": 0}, {"message_seconds": -1}, {"latency_seconds": 1e999}])
def test_costs_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Costs(**wrong)


@pytest.fixture(scope="module", params=[(seed, strategy) for seed in range(12) for strategy in STRATEGIES], ids=str)
def simulated(request):
    """(plan, schedule, trace) of a random refit."""
    seed, strategy = request.param
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology, cut_nbytes=1, strategy=strategy)
    schedule = plan_schedule(plan, staging_nbytes=16384)
    return plan, schedule, simulate(schedule, topology, UNEVEN, post_early=False)


@pytest.mark.parametrize("staging_nbytes", [4096, 16384, 1 << 20])
@pytest.mark.parametrize("seed", range(60))
def test_no_ranks_wait_for_each_other_though_a_send_waits_until_its_receiver_has_posted(seed, staging_nbytes):
    src, dst, topology = random_refit(seed)
    for strategy in ("reshard", "point-to-point"):
        plan = plan_refit(src, dst, topology, cut_nbytes=1, strategy=strategy)
        bucket_nbytes = 1024 if staging_nbytes == 1 << 20 else None
        schedule = plan_schedule(plan, staging_nbytes=staging_nbytes, bucket_nbytes=bucket_nbytes)
        simulate(schedule, topology, UNEVEN)  # it would raise


@pytest.mark.parametrize("seed", range(6))
def test_posting_early_moves_the_same_bytes(seed):
    src, dst, topology = random_refit(seed)
    schedule = plan_schedule(plan_refit(src, dst, topology, cut_nbytes=1), staging_nbytes=1 << 20, bucket_nbytes=4096)
    traces = [simulate(schedule, topology, UNEVEN, post_early=early) for early in (True, False)]
    moved = [sorted((e.rank, e.peer, e.round, e.nbytes) for e in trace.events if e.kind == "send") for trace in traces]
    assert moved[0] == moved[1]
    assert ("early" in traces[0].origin, "early" in traces[1].origin) == (True, False)


def test_an_equal_question_has_an_equal_answer(simulated):
    plan, schedule, trace = simulated
    assert simulate(schedule, plan.topology, UNEVEN, post_early=False) == trace


def test_no_trace_is_shorter_than_the_bound(simulated):
    plan, _, trace = simulated
    assert trace.seconds >= least_seconds(plan, UNEVEN) * (1 - 1e-9)
    assert trace.seconds >= float(plan.reach.busiest_seconds) * (1 - 1e-9)


def test_free_copies_and_messages_take_no_longer_than_others_and_no_less_than_the_busiest_port(simulated):
    plan, schedule, trace = simulated
    free = simulate(schedule, plan.topology, Costs(local_bytes_per_second=1e10), post_early=False)
    assert float(plan.reach.busiest_seconds) * (1 - 1e-9) <= free.seconds <= trace.seconds * (1 + 1e-9)


def test_a_trace_moves_the_bytes_of_the_plan_between_the_pairs_of_the_plan(simulated):
    plan, _, trace = simulated
    sent, received, copied = {}, {}, 0
    for event in trace.events:
        if event.kind == "send":
            sent[event.rank, event.peer] = sent.get((event.rank, event.peer), 0) + event.nbytes
        if event.kind == "recv":
            received[event.peer, event.rank] = received.get((event.peer, event.rank), 0) + event.nbytes
        copied += event.nbytes if event.kind == "copy" else 0
    assert sent == received == plan.pair_nbytes()
    assert copied == plan.local_nbytes


def test_a_rank_and_a_port_do_one_thing_at_a_time_in_each_direction(simulated):
    plan, _, trace = simulated
    topology, lines = plan.topology, {}
    for event in trace.events:
        if event.kind in ("send", "recv"):
            is_local = topology.domain_of(event.rank) == topology.domain_of(event.peer)
            end = ("rank", event.rank) if is_local else ("port", topology.port_of(event.rank))
            lines.setdefault((event.kind, *end), []).append(event)
        else:
            lines.setdefault(("busy", event.rank), []).append(event)
    for line in lines.values():
        for before, after in pairwise(line):
            assert after.start_seconds >= before.stop_seconds - 1e-12
