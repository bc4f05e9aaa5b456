"""Ranks that act on whichever bucket comes first: which do, what that changes, and that all of them get to the end."""

import dataclasses

import pytest
from tests.plan.worlds import random_refit
from tests.simulate.test_shared_cores import MACHINE
from tests.simulate.test_simulator import KIB, UNEVEN, refit

from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.simulate.arrivals import OPEN_TO_ONE_PEER, Arrivals, give_slots
from reshard.simulate.costs import CPU_HOST, H100, Costs, CpuCosts
from reshard.simulate.simulator import simulate
from reshard.topology.presets import hosts
from reshard.transports import mover

IN_ORDER = Costs(cpu=CpuCosts(1000.0))
"""With so many cores nothing waits for one; runs of memory are sent as they are."""


def five(*rates):
    return hosts([[0], [1], [2], [3], [4]], port_bytes_per_second=[int(KIB * rate) for rate in rates])


def last_send(trace, rank):
    return max(event.start_seconds for event in trace.events if event.kind == "send" and event.rank == rank)


def watching(trace):
    """Ranks that have waited for anything, and not for a certain message."""
    return {event.rank for event in trace.events if event.kind == "wait" and event.peer is None}


def test_a_late_bucket_does_not_hold_up_what_a_relay_has_from_others():
    # two slow sources send to three hosts, which relay; then the first source is slower still
    schedule = refit([(0, [2, 3, 4]), (1, [2, 3, 4])], five(0.5, 0.5, 1, 1, 1), KIB // 8)
    slow = five(0.125, 0.5, 1, 1, 1)
    in_order, at_once = (
        simulate(schedule, slow, dataclasses.replace(IN_ORDER, watched=watched)) for watched in ("none", "all")
    )
    assert watching(in_order) == set()
    assert watching(at_once) >= {2, 3, 4}
    assert last_send(at_once, 3) < 3 < 5 < last_send(in_order, 3)  # rank 3 relays what the faster source has
    assert at_once.seconds <= in_order.seconds


def test_a_rank_that_packs_or_has_peers_over_another_transport_waits_in_order():
    topology = hosts([[0], [1, 2], [3]], port_bytes_per_second=KIB)
    schedule = refit([(0, [1, 2, 3])], topology, KIB // 4)
    network, everything = (
        watching(simulate(schedule, topology, dataclasses.replace(IN_ORDER, watched=watched)))
        for watched in ("network", "all")
    )
    assert network <= {0, 3}  # ranks 1 and 2 share a host
    assert everything & {1, 2}
    packs = dataclasses.replace(UNEVEN, watched="all")  # without a processor's costs, every bucket is packed
    assert 0 not in watching(simulate(schedule, topology, packs))


def test_costs_say_whose_messages_are_watched():
    assert (MACHINE.costs("gloo").watched, MACHINE.costs("shm").watched) == ("all", "network")
    assert (CPU_HOST.watched, H100.watched) == ("all", "none")


def test_the_rule_is_the_movers():
    assert mover._OPEN_TO_ONE_PEER == OPEN_TO_ONE_PEER


@pytest.mark.parametrize("staging_nbytes", [4096, 16384, 1 << 20])
@pytest.mark.parametrize("seed", range(40))
def test_no_ranks_wait_for_each_other_and_all_bytes_move(seed, staging_nbytes):
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology, cut_nbytes=1)
    bucket_nbytes = 1024 if staging_nbytes == 1 << 20 else None
    schedule = plan_schedule(plan, staging_nbytes=staging_nbytes, bucket_nbytes=bucket_nbytes)
    for costs in (dataclasses.replace(UNEVEN, watched="all"), dataclasses.replace(IN_ORDER, watched="all")):
        trace = simulate(schedule, topology, costs)  # it would raise
        sent = {}
        for event in trace.events:
            if event.kind == "send":
                sent[event.rank, event.peer] = sent.get((event.rank, event.peer), 0) + event.nbytes
        assert sent == plan.pair_nbytes()


def test_a_slot_is_taken_again_only_when_all_that_was_handed_on_from_it_has_left():
    topology = five(0.5, 0.5, 1, 1, 1)
    schedule = refit([(0, [2, 3, 4]), (1, [2, 3, 4])], topology, KIB // 8)
    operations = next(
        ops for ops in map(schedule.for_rank, (2, 3, 4)) if any(op.kind == "send" and op.forwarded for op in ops)
    )
    slots, kept = give_slots(operations, 3, lambda op: False)
    assert kept
    arrivals = Arrivals(operations, 3, slots)
    posted = []
    while (op := arrivals.next_receive()) is not None:
        posted.append(op)
    assert 0 < len(posted) <= 3  # one a slot
    for op in posted:
        arrivals.has_come(op)
    sends = []
    while (op := arrivals.next_send()) is not None:
        sends.append(op)
    assert sends
    held = arrivals.next_receive()
    for op in sends:
        arrivals.has_left(op)
    while (op := arrivals.next_send()) is not None:
        arrivals.has_left(op)
    assert held is None
    assert arrivals.next_receive() is not None
