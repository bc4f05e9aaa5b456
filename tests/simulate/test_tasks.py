"""Tasks by hand, on shared cores and over links, against times worked out by hand."""

import pytest

from reshard.simulate.costs import Costs, CpuCosts
from reshard.simulate.tasks import Tasks
from reshard.topology.presets import hosts
from reshard.topology.topology import ONE_HOST

KIB = 1024
TWO_CORES = Costs(cpu=CpuCosts(cores=2, local_send=1 / KIB, local_receive=1 / KIB, network_send=0.25 / KIB))


def test_copies_of_a_rank_keep_their_order_and_those_of_different_ranks_share_the_cores():
    tasks = Tasks(ONE_HOST, TWO_CORES)
    for rank in (0, 0, 1, 2):
        tasks.copy(rank, 1.0)
    assert tasks.seconds() == pytest.approx(2.5)  # three at two thirds of a core each, then one alone
    alone = Tasks(ONE_HOST, TWO_CORES)
    for _ in range(3):
        alone.copy(0, 1.0)
    assert alone.seconds() == pytest.approx(3.0)


def test_a_message_inside_a_host_takes_a_core_of_both_ends_at_once():
    tasks = Tasks(ONE_HOST, TWO_CORES)
    tasks.message(0, 1, KIB)
    assert tasks.seconds() == pytest.approx(1.0)
    tasks.message(2, 3, KIB)  # four threads on two cores
    assert tasks.seconds() == pytest.approx(2.0)


def test_a_message_between_hosts_takes_as_long_as_its_link_where_that_is_slower_than_the_cores():
    topology = hosts([[0], [1]], port_bytes_per_second=KIB)
    tasks = Tasks(topology, TWO_CORES)
    tasks.message(0, 1, 3 * KIB)
    assert tasks.seconds() == pytest.approx(3.0)
    busy = Costs(cpu=CpuCosts(cores=2, network_send=2 / KIB))
    slow = Tasks(topology, busy)
    slow.message(0, 1, 3 * KIB)
    assert slow.seconds() == pytest.approx(6.0)


def test_a_task_waits_for_those_it_comes_after():
    tasks = Tasks(ONE_HOST, TWO_CORES)
    packed = tasks.copy(0, 0.5)
    sent = tasks.message(0, 1, KIB, [packed])
    tasks.copy(1, 0.25, [sent, packed])
    assert tasks.seconds() == pytest.approx(1.75)


def test_an_equal_question_has_an_equal_answer():
    tasks = Tasks(ONE_HOST, TWO_CORES)
    before = []
    for at in range(40):
        before.append(tasks.message(at % 3, 3 + at % 2, 100 + at, before[-2:]))
    assert tasks.seconds() == tasks.seconds()
