"""A part of the sweep over layout pairs and clusters: ``benchmarks/sweep.py`` goes through all of it."""

import dataclasses

import pytest
from tests.plan.worlds import random_refit

from reshard.errors import PlanError
from reshard.models.catalogue import CATALOGUE
from reshard.plan.again import plan_again
from reshard.plan.plan import plan_refit
from reshard.testing.sweep import CLUSTERS, PAIRS, most_entries, sweep

# one pair of each kind that is planned in a second: dense from FSDP and from a pipeline; experts one by one and
# stacked, dealt out in turn, cut besides, sharded besides; the layouts that are published for DeepSeek-V3
PART = [
    pair
    for pair in PAIRS
    if (pair.model, pair.source)
    in {
        ("llama-3-70b", "fsdp128"),
        ("llama-3-70b", "tp4 pp4 vpp2 dp4"),
        ("qwen3-0.6b", "dp64"),
        ("qwen3-30b-a3b:stacked", "ep8 dp8"),
        ("qwen3-235b-a22b:stacked", "tp4 etp2 ep8 pp4"),
        ("qwen3-235b-a22b:stacked", "fsdp64 ep16"),
        ("deepseek-v3", "ep16 pp4 dp2"),
    }
]


@pytest.mark.parametrize("pair", PART, ids=str)
def test_a_pair_keeps_to_the_bound_and_enters_each_domain_once_on_every_cluster(pair):
    rows = list(sweep([pair]))
    assert [row.cluster for row in rows] == list(CLUSTERS)
    assert [row for row in rows if not row.passes] == []
    assert all(row.of_bound >= 1 and row.entries == 1 for row in rows if row.of_bound is not None)
    assert any(row.of_bound is not None for row in rows)


def test_a_plan_that_serves_every_rank_directly_does_not_pass():
    (row,) = sweep([PART[0]], ["gb200-nvl72"], strategy="point-to-point")
    assert not row.passes
    assert row.of_bound > 2
    assert row.entries > 2  # a rack holds replicas, and each of them fetches its own


def test_forty_pairs_of_every_model_of_the_catalogue_on_four_clusters():
    assert len(set(PAIRS)) == len(PAIRS) == 40
    assert len(CLUSTERS) == 4
    assert {pair.model.removesuffix(":stacked") for pair in PAIRS} == set(CATALOGUE)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("strategy", ["reshard", "point-to-point"])
def test_a_plan_routed_again_equals_one_made_anew(seed, strategy):
    src, dst, topology = random_refit(seed)
    anew = plan_refit(src, dst, topology, strategy=strategy)
    again = plan_again(plan_refit(src, dst), topology, strategy=strategy)
    assert again.routes == anew.routes
    assert again.digest == anew.digest


def test_whole_tensors_are_not_routed_again():
    src, dst, topology = random_refit(0)
    with pytest.raises(PlanError, match="plan_refit"):
        plan_again(plan_refit(src, dst, topology), strategy="gather-broadcast")
    with pytest.raises(PlanError, match="gather-broadcast"):
        plan_again(plan_refit(src, dst, topology, strategy="gather-broadcast"))


def test_a_copy_that_enters_a_domain_twice_is_counted_twice():
    src, dst, topology = random_refit(3)
    plan = plan_refit(src, dst, topology)
    home = topology.domain_of
    crossing = next(route for route in plan.routes if any(home(a) != home(b) for a, b in route.edges))
    assert most_entries(plan) == 1
    assert most_entries(dataclasses.replace(plan, routes=(*plan.routes, crossing))) == 2
