"""The spine in plans: the bound by hand, never above what any plan does, and what plans keep off it."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from tests.plan.worlds import random_refit

from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.topology import presets
from reshard.topology.topology import Leaf

KIB = 1024


def one_tensor(holders, needers, topology, **options):
    """A KiB that some ranks hold whole and others need whole."""
    src, dst = (Layout((KIB,), "uint8", Mesh({"copies": len(ranks)}, ranks)) for ranks in (holders, needers))
    return plan_refit(src, dst, topology, cut_nbytes=1, **options)


def two_leaves(up, down, hosts=4, rate=KIB):
    """Hosts of one rank; the first two at one leaf, all others at another one."""
    plain = presets.hosts([[rank] for rank in range(hosts)], port_bytes_per_second=rate)
    leaves = (Leaf("near", (0, 1), up, up), Leaf("far", tuple(range(2, hosts)), down, down))
    return replace(plain, leaves=leaves)


def test_what_no_rank_of_a_leaf_holds_comes_to_it_once():
    plan = one_tensor([0], [2, 3], two_leaves(up=KIB // 4, down=KIB // 8))
    assert plan.bound.spine_seconds == plan.bound.seconds == 8  # one copy, though two hosts need it
    plan = one_tensor([0], [2, 3], two_leaves(up=KIB // 16, down=KIB))
    assert plan.bound.seconds == 16


def test_what_a_rank_of_the_leaf_holds_need_not_cross():
    assert one_tensor([0], [1], two_leaves(1, 1)).bound.spine_seconds == 0
    assert one_tensor([0, 2], [1, 3], two_leaves(1, 1)).bound.spine_seconds == 0


def test_with_full_bisection_the_spine_bounds_nothing_and_changes_no_plan():
    plain = replace(two_leaves(1, 1), leaves=())
    full = two_leaves(2 * KIB, 2 * KIB)
    plans = [one_tensor([0], [2, 3], topology) for topology in (plain, full)]
    assert plans[1].bound == plans[0].bound
    assert plans[1].routes == plans[0].routes
    assert plans[1].reach == plans[0].reach


def test_over_the_fast_link_first_a_holders_domain_sends_from_the_rails_of_those_who_need_it():
    topology = presets.with_leaves(
        presets.grid("rails", 4, 2, local_bytes_per_second=9 * KIB, port_bytes_per_second=KIB),
        rails=2,
        domains=2,
        oversubscription=2,
    )
    assert one_tensor([0], [3], topology).bound.seconds == 1  # a leaf of two ports has one port's rate to the spine
    local = replace(topology, cross_rail="local")
    plan = one_tensor([0], [3], local)
    assert plan.bound.spine_seconds == 0
    assert plan.bound.out_seconds == 1
    assert plan.reach.busiest_port.endswith("nic3") or plan.reach.busiest_port.endswith("nic1")
    plan = one_tensor([0], [2, 3], local)
    assert plan.reach.busiest_seconds == plan.bound.out_seconds == Fraction(1, 2)  # half of it on each rail


def test_over_the_fast_link_first_no_port_sends_what_all_of_its_domain_hold():
    hosts = presets.grid("rails", 8, 2, local_bytes_per_second=9 * KIB, port_bytes_per_second=KIB)
    topology = presets.with_leaves(hosts, rails=2, domains=4, cross_rail="local")
    rows = Layout((4, KIB), "uint8", Mesh({"fsdp": 4}), ("fsdp",))
    halves = Layout((4, KIB), "uint8", Mesh({"dp": 2, "tp": 2}, range(4, 8)), ("tp",))
    plan = plan_refit(rows, halves, topology, cut_nbytes=1)
    plan.proof()
    # all that host 0 holds is for rail 0, so its port there sends one copy and an engine's host hands on the other
    assert plan.reach.busiest_seconds == plan.bound.seconds == 2
    assert plan.reach.relayed_nbytes == 4 * KIB


def test_where_holders_would_send_each_copy_over_a_slow_spine_relays_send_on_their_own_leaf():
    slow, fast = (one_tensor([0, 1], [2, 3, 4, 5], two_leaves(rate, rate, hosts=6)) for rate in (KIB // 2, 9 * KIB))
    assert slow.reach.busiest_port in ("up from near", "down to far")
    assert slow.reach.busiest_seconds == slow.bound.seconds == 2  # one copy crosses
    assert slow.reach.relayed_nbytes == 3 * KIB
    assert fast.reach.relayed_nbytes < 3 * KIB  # where the spine is no limit, holders send as much as they can


@pytest.mark.parametrize("seed", range(80))
def test_no_plan_is_faster_than_the_bound_whatever_the_leaves(seed):
    r = random.Random(seed)
    src, dst, topology = random_refit(seed)
    if topology.is_flat:
        pytest.skip("one domain has no spine")
    home = [r.randrange(3) for _ in topology.ports]
    leaves = [
        Leaf(f"leaf{at}", tuple(p for p, h in enumerate(home) if h == at), r.choice([1, 4]) * 10**8, 10**8)
        for at in sorted(set(home))
    ]
    topology = replace(topology, leaves=tuple(leaves), cross_rail=r.choice(["spine", "local"]))
    for strategy in STRATEGIES:
        plan = plan_refit(src, dst, topology, strategy=strategy, cut_nbytes=1)
        plan.proof()
        assert plan.reach.busiest_seconds >= plan.bound.seconds or plan.bound.seconds == plan.bound.rank_seconds
