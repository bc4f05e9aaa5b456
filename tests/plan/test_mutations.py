"""Mutations: a thousand seeded ways of breaking one route of a plan over several domains, and the proof finds each."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from tests.plan.worlds import GB, random_refit

from reshard.errors import ProofError
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.cells import ranks_of
from reshard.plan.plan import plan_refit
from reshard.plan.proof import prove
from reshard.topology import presets

SEEDS = 60
EACH = 200
"""Mutations of each way; six ways."""


@cache
def plans():
    """Plans over one and several domains: random ones, and some in which domains relay."""
    made = []
    rows = Layout((64, 96), "float32", Mesh({"f": 2}, [0, 1]), ("f",))
    for hosts in (2, 3, 6):
        wanted = Layout((64, 96), "float32", Mesh({"dp": hosts, "tp": 2}, range(2, 2 + 2 * hosts)), (None, "tp"))
        cluster = presets.hosts([[0, 1], *([2 + 2 * at, 3 + 2 * at] for at in range(hosts))], port_bytes_per_second=GB)
        made += [plan_refit(rows, wanted, cluster, cut_nbytes=64), plan_refit(rows, wanted)]
    return [*made, *(plan_refit(*random_refit(seed), cut_nbytes=1) for seed in range(SEEDS))]


def has_before(plan, at, step):
    """Who has all bytes of route ``at`` when its edge ``step`` moves, byte for byte."""
    route = plan.routes[at]
    has = {rank: set(range(route.start, route.stop)) for rank in ranks_of(plan.classes[route.route_class].holders)}
    for before, other in enumerate(plan.routes[: at + 1]):
        if other.route_class == route.route_class:
            edges = other.edges[:step] if before == at else other.edges
            for _, receiver in edges:
                has.setdefault(receiver, set()).update(range(other.start, other.stop))
    return {rank for rank, got in has.items() if got.issuperset(range(route.start, route.stop))}


# Each way breaks edge ``step`` of route ``at``, whose receiver needs the bytes, and gives the routes that stand in for
# it; None where this edge cannot be broken so.


def drop(plan, at, step, dice):
    route = plan.routes[at]
    return [replace(route, edges=(*route.edges[:step], *route.edges[step + 1 :]))]


def repeat(plan, at, step, dice):
    route = plan.routes[at]
    later = dice.randint(step + 1, len(route.edges))
    return [replace(route, edges=(*route.edges[:later], route.edges[step], *route.edges[later:]))]


def shift(plan, at, step, dice):
    route = plan.routes[at]
    by = 4 * dice.choice((-3, -2, -1, 1, 2, 3))
    lo, hi = route.start + dice.choice((0, by)), route.stop + by
    return [replace(route, start=lo, stop=hi)] if lo < hi else None


def wrong_sender(plan, at, step, dice):
    route = plan.routes[at]
    others = sorted(set(range(plan.size)) - has_before(plan, at, step))
    if not others:
        return None
    edge = (dice.choice(others), route.edges[step][1])
    return [replace(route, edges=(*route.edges[:step], edge, *route.edges[step + 1 :]))]


def wrong_receiver(plan, at, step, dice):
    route = plan.routes[at]
    sender, receiver = route.edges[step]
    edge = (sender, dice.choice([rank for rank in range(plan.size) if rank != receiver]))
    return [replace(route, edges=(*route.edges[:step], edge, *route.edges[step + 1 :]))]


def forward_too_early(plan, at, step, dice):
    route = plan.routes[at]
    sender, _ = edge = route.edges[step]
    if plan.classes[route.route_class].holders >> sender & 1:
        return None
    got = next(place for place, (_, receiver) in enumerate(route.edges) if receiver == sender)
    rest = [other for place, other in enumerate(route.edges) if place != step]
    rest.insert(dice.randint(0, got), edge)
    return [replace(route, edges=tuple(rest))]


WAYS = (drop, repeat, shift, wrong_sender, wrong_receiver, forward_too_early)


def mutated(break_it, dice):
    """Distinct broken plans: (plan, routes)."""
    seen = set()
    while len(seen) < EACH:
        number = dice.randrange(len(plans()))
        plan = plans()[number]
        at = dice.randrange(len(plan.routes))
        route = plan.routes[at]
        step = dice.randrange(len(route.edges))
        if not plan.classes[route.route_class].needers >> route.edges[step][1] & 1:
            continue
        broken = break_it(plan, at, step, dice)
        if broken is None or (number, at, *broken) in seen:
            continue
        seen.add((number, at, *broken))
        yield plan, (*plan.routes[:at], *broken, *plan.routes[at + 1 :])


def test_the_plans_to_be_broken_are_right_and_some_relay():
    assert all(plan.proof().delivered_nbytes == plan.needed_nbytes for plan in plans())
    assert {len(plan.topology.domains) > 1 for plan in plans()} == {True, False}
    assert {"inside", "direct", "striped", "relayed"} <= {route.rule for plan in plans() for route in plan.routes}


@pytest.mark.parametrize("break_it", WAYS, ids=lambda way: way.__name__)
def test_two_hundred_broken_plans_of_each_way_are_caught(break_it):
    for plan, routes in mutated(break_it, random.Random(break_it.__name__)):
        with pytest.raises(ProofError):
            prove(plan.specs, plan.patterns, plan.classes, routes)


def test_a_relay_that_sends_on_what_comes_later_is_named_with_the_bytes():
    plan = next(plan for plan in plans() if any(route.rule == "relayed" for route in plan.routes))
    at, route = next((at, route) for at, route in enumerate(plan.routes) if route.rule == "relayed")
    holders = ranks_of(plan.classes[route.route_class].holders)
    step = next(step for step, (sender, _) in enumerate(route.edges) if sender not in holders)
    early = replace(route, edges=(route.edges[step], *route.edges[:step], *route.edges[step + 1 :]))
    with pytest.raises(ProofError, match=rf"rank {route.edges[step][0]} sends bytes .* does not hold at that moment"):
        replace(plan, routes=(*plan.routes[:at], early, *plan.routes[at + 1 :])).proof()
