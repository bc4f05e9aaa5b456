"""Shares: the busiest sender sends as little as any choice allows; scipy's flow is the judge."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_flow

from reshard.plan.balance import PortFlow, deal, share_out


def random_demands(seed):
    """Up to eight demands on up to seven ranks; zero and huge ones are among them."""
    dice = random.Random(seed)
    ranks = range(dice.randint(1, 7))
    most = dice.choice((3, 100, 10**9))
    demands = {}
    for _ in range(dice.randint(1, 8)):
        key = tuple(sorted(dice.sample(ranks, dice.randint(1, len(ranks)))))
        demands[key] = dice.randint(0, most)
    return demands


def loads(shares):
    load = {}
    for ranks, parts in shares.items():
        for rank, part in zip(ranks, parts, strict=True):
            load[rank] = load.get(rank, 0) + part
    return load


def can_carry(demands, limit):
    """Whether every rank can stay at or below ``limit``, by scipy's maximum flow."""
    keys, ranks = list(demands), sorted({rank for key in demands for rank in key})
    size = 2 + len(keys) + len(ranks)
    capacity = np.zeros((size, size), np.int32)
    for at, key in enumerate(keys):
        capacity[0, 1 + at] = demands[key]
        for rank in key:
            capacity[1 + at, 1 + len(keys) + ranks.index(rank)] = demands[key]
    capacity[1 + len(keys) : size - 1, size - 1] = limit
    return maximum_flow(csr_matrix(capacity), 0, size - 1).flow_value == sum(demands.values())


@pytest.mark.parametrize("seed", range(150))
def test_the_busiest_rank_carries_the_least_possible(seed):
    demands = random_demands(seed)
    shares = share_out(demands)
    assert {key: sum(parts) for key, parts in shares.items()} == demands
    assert all(part >= 0 for parts in shares.values() for part in parts)
    busiest = max(loads(shares).values())
    assert can_carry(demands, busiest)
    assert busiest == 0 or not can_carry(demands, busiest - 1)


@pytest.mark.parametrize("seed", range(200, 230))
def test_no_fractional_choice_beats_the_busiest_rank_by_a_byte(seed):
    demands = random_demands(seed)
    keys, ranks = list(demands), sorted({rank for key in demands for rank in key})
    edges = [(at, rank) for at, key in enumerate(keys) for rank in key]
    # Variables: the bytes over each edge, and the load of the busiest rank, which is made as small as can be.
    equal = np.array([[float(e[0] == at) for e in edges] + [0.0] for at in range(len(keys))])
    below = np.array([[float(e[1] == rank) for e in edges] + [-1.0] for rank in ranks])
    goal = [0.0] * len(edges) + [1.0]
    best = linprog(goal, A_ub=below, b_ub=np.zeros(len(ranks)), A_eq=equal, b_eq=[demands[key] for key in keys])
    assert max(loads(share_out(demands)).values()) == pytest.approx(np.ceil(best.fun - 1e-6), abs=1)


@pytest.mark.parametrize(
    ("demands", "shares"),
    [
        ({(3,): 7}, {(3,): (7,)}),  # one holder has no choice
        ({(0, 1, 2): 10}, {(0, 1, 2): (4, 3, 3)}),  # what does not divide goes to the first
        ({(0, 1): 90, (1,): 50}, {(0, 1): (70, 20), (1,): (50,)}),  # rank 1 has its own to do
        ({(0, 1): 20, (1,): 50}, {(0, 1): (20, 0), (1,): (50,)}),  # and may have enough with it
        ({}, {}),
    ],
)
def test_shares_go_round_those_that_have_no_choice(demands, shares):
    assert share_out(demands) == shares


def test_equal_demands_in_another_order_give_equal_shares():
    demands = random_demands(7)
    backwards = dict(reversed(list(demands.items())))
    assert share_out(backwards) == share_out(demands)
    assert list(share_out(backwards)) == list(backwards)


@pytest.mark.parametrize("seed", range(60))
def test_a_pool_of_ports_carries_what_its_ports_would_carry_listed_one_by_one(seed):
    dice = random.Random(seed)
    rates = {port: dice.choice((1, 2, 7)) for port in range(dice.randint(2, 8))}
    pools = {-1 - at: dice.sample(sorted(rates), dice.randint(1, len(rates))) for at in range(dice.randint(1, 3))}
    demands = []
    for _ in range(dice.randint(1, 6)):
        own = dice.sample(sorted(rates), dice.randint(1, 2))
        demands.append((dice.randint(0, 1000), (*own, *dice.sample(sorted(pools), dice.randint(0, 1)))))
    listed = [(n, sorted({p for at in places for p in pools.get(at, [at])})) for n, places in demands]
    seconds = PortFlow.least_seconds(demands, rates, pools)
    assert seconds == PortFlow.least_seconds(listed, rates)
    flow = PortFlow(demands, rates, seconds, pools)
    assert flow.run() == sum(nbytes for nbytes, _ in demands)
    load = dict.fromkeys(rates, 0)
    for at in range(len(demands)):
        for place, nbytes in flow.share(at).items():
            if place >= 0:
                load[place] += nbytes
    for pool in pools:
        for port, nbytes in flow.share_of_pool(pool).items():
            load[port] += nbytes
    assert sum(load.values()) == sum(nbytes for nbytes, _ in demands)
    assert all(nbytes <= np.ceil(float(rates[port] * seconds) + 1e-9) for port, nbytes in load.items())


def test_most_amounts_are_dealt_from_one_place():
    dealt = deal([4, 4, 0, 4, 4], {7: 9, 8: 0, 9: 7})
    assert dealt == [{7: 4}, {7: 4}, {}, {7: 1, 9: 3}, {9: 4}]
