"""Predictions: totals beside every message simulated, the bound below both, and the usual way's two stages."""

import pytest
from tests.plan.worlds import random_refit
from tests.report.plans import many_experts, rows_to_columns

from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit
from reshard.simulate.costs import GB200, Costs, costs_for
from reshard.simulate.predict import MOST_MESSAGES, least_seconds, predict, usual_payload_nbytes, usual_seconds
from reshard.topology.presets import hosts

MIB = 1 << 20
COSTS = Costs(2e9, 1e-5, 1e-4, 1e10, 1e-5)


def big(hosts_of_ranks, rates):
    """16 MiB from two ranks by rows to two by columns, each rank of which has two replicas."""
    src = Layout((2048, 2048), "float32", Mesh({"f": 2}, [0, 1]), ("f",))
    dst = Layout((2048, 2048), "float32", Mesh({"dp": 2, "tp": 2}, range(2, 6)), (None, "tp"))
    return plan_refit(src, dst, hosts(hosts_of_ranks, port_bytes_per_second=rates))


@pytest.mark.parametrize("rate", [10**8, 10**9])
@pytest.mark.parametrize("where", [[[0, 1], [2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0], [1, 2], [3, 4], [5]]])
def test_totals_are_near_what_every_message_gives_where_buckets_are_many(where, rate):
    plan = big(where, rate)
    events, totals = (predict(plan, COSTS, mode=mode, bucket_nbytes=MIB // 4) for mode in ("events", "totals"))
    assert (events.mode, totals.mode, totals.trace) == ("events", "totals", None)
    assert events.trace.seconds == events.seconds
    assert events.bound_seconds <= totals.seconds
    assert totals.seconds == pytest.approx(events.seconds, rel=0.3)


@pytest.mark.parametrize("seed", range(20))
def test_neither_way_predicts_less_than_the_bound(seed):
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology, cut_nbytes=1)
    for mode in ("events", "totals"):
        made = predict(plan, Costs(), mode=mode, staging_nbytes=16384)
        assert made.seconds >= made.bound_seconds * (1 - 1e-9) == least_seconds(plan, Costs()) * (1 - 1e-9)
        assert made.fraction is None or made.fraction <= 1 + 1e-9


def test_one_domain_is_bound_by_what_the_neediest_rank_takes_in():
    # 8 x 8 in bfloat16 by columns over four ranks that hold none of it: 32 bytes each; two ranks send 64 each
    made = predict(rows_to_columns(), Costs(local_bytes_per_second=64))
    assert made.bound_seconds == 0.5
    assert made.seconds == 1.0
    assert made.mode == "events"


def test_a_large_plan_is_added_up_and_says_so():
    plan = many_experts()
    made = predict(plan, GB200)
    assert made.messages > MOST_MESSAGES
    assert (made.mode, made.trace) == ("totals", None)
    assert float(plan.reach.busiest_seconds) <= made.seconds
    assert made.to_json()["mode"] == "totals"


def test_small_buckets_cost_a_large_plan_messages():
    plan = many_experts()
    small, large = (predict(plan, GB200, bucket_nbytes=n, staging_nbytes=1 << 30) for n in (MIB // 4, 8 * MIB))
    assert small.messages > 3 * large.messages
    assert small.totals.message_seconds > 3 * large.totals.message_seconds
    assert small.totals.busiest == "copies and messages"


def test_the_usual_way_moves_a_copy_twice_and_takes_at_least_a_copy_through_a_port():
    plan = big([[0, 1], [2, 3, 4, 5]], 2**20)
    assert usual_payload_nbytes(plan) == 32 * MIB
    assert usual_seconds(plan) == 16.0
    assert usual_seconds(plan, roots=8) == 2.0


def test_costs_are_found_by_the_name_of_a_topology_and_are_those_of_cpu_hosts_otherwise():
    assert costs_for("gb200-nvl72") is GB200
    assert costs_for("hosts") is costs_for("one-host") is costs_for("cpu-host")
    assert all(costs_for(name).source != "" for name in ("dgx-h100", "gb200-nvl72", "hosts"))
