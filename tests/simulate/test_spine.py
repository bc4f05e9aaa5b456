"""Rails and spine against times worked out by hand: who shares a leaf's rate, what goes over the fast link first."""

import json
import random
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.plan.worlds import random_refit
from tests.simulate.test_simulator import FREE, KIB, UNEVEN, apart, refit, spans

from reshard.cli.main import main
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.simulate.costs import Costs
from reshard.simulate.predict import least_seconds, predict
from reshard.simulate.simulator import simulate
from reshard.topology import presets
from reshard.topology.topology import Leaf

DEEPSEEK = ("--model", "qwen3-30b-a3b:stacked", "--source", "ep8 dp8", "--destination", "tp2 dp32")


def joined(leaves, hosts=4, **more):
    """Hosts of one rank each whose ports attach to leaves: (ports, rate to the spine and from it)."""
    return replace(
        apart(hosts),
        leaves=tuple(Leaf(f"leaf{at}", ports, rate, rate) for at, (ports, rate) in enumerate(leaves)),
        **more,
    )


def test_two_messages_that_cross_one_leaf_share_its_rate():
    topology = joined([((0, 1), KIB), ((2, 3), KIB)])
    trace = simulate(refit([(0, [2]), (1, [3])], topology), topology, FREE)
    assert spans(trace, "send") == [(0.0, 1.0), (0.0, 1.0)]
    assert sorted(stop for _, stop in spans(trace, "recv")) == [1.0, 2.0]
    quarters = simulate(refit([(0, [2]), (1, [3])], topology, KIB // 4), topology, FREE)
    last = {rank: max(stop for _, stop in spans(quarters, "recv", rank)) for rank in (2, 3)}
    assert sorted(last.values()) == [1.75, 2.0]  # bucket by bucket: both end late, and together as late as before


def test_a_slow_spine_takes_as_long_as_its_rate_says():
    topology = joined([((0, 1), KIB // 4), ((2, 3), 9 * KIB)])
    assert simulate(refit([(0, [2])], topology), topology, FREE).seconds == 4.0
    back = joined([((0, 1), 9 * KIB), ((2, 3), KIB // 4)])
    assert simulate(refit([(0, [2])], back), back, FREE).seconds == 4.0


def test_what_stays_on_a_leaf_and_full_bisection_change_nothing():
    moves = [(0, [1]), (2, [3])]
    plain = simulate(refit(moves, apart(4)), apart(4), UNEVEN)
    slow = joined([((0, 1), 1), ((2, 3), 1)])
    assert simulate(refit(moves, slow), slow, UNEVEN).events == plain.events
    crossing = [(0, [2]), (1, [3])]
    full = joined([((0, 1), 2 * KIB), ((2, 3), 2 * KIB)])
    assert (
        simulate(refit(crossing, full), full, UNEVEN).events
        == simulate(refit(crossing, apart(4)), apart(4), UNEVEN).events
    )


def test_over_the_fast_link_first_the_other_ranks_port_is_in_use_and_not_the_spine():
    rails = presets.with_leaves(
        presets.grid("rails", 4, 2, local_bytes_per_second=4 * KIB, port_bytes_per_second=KIB),
        rails=2,
        domains=2,
        oversubscription=8,
    )
    schedule = refit([(0, [3])], rails)
    assert simulate(schedule, rails, FREE).seconds == 4.0  # a leaf of two ports has a quarter of a port to the spine
    local = replace(rails, cross_rail="local")
    costs = Costs(latency_seconds=0.5, local_latency_seconds=0.25)
    trace = simulate(schedule, local, costs)
    assert spans(trace, "send") == [(0.0, 0.25)]  # over the fast link
    assert trace.seconds == pytest.approx(1.75)  # at the port's rate, after both latencies
    both = simulate(refit([(0, [3]), (1, [3])], local), local, FREE)
    assert both.seconds == 2.0  # ranks 0 and 1 send over one port


@pytest.mark.parametrize("seed", range(20))
def test_neither_way_predicts_less_than_the_bound_whatever_the_leaves(seed):
    r = random.Random(seed)
    src, dst, topology = random_refit(seed)
    if topology.is_flat:
        pytest.skip("one domain has no spine")
    home = [r.randrange(2) for _ in topology.ports]
    leaves = [
        Leaf(f"leaf{at}", tuple(p for p, h in enumerate(home) if h == at), r.choice([1, 4]) * 10**8, 2 * 10**8)
        for at in sorted(set(home))
    ]
    plan = plan_refit(src, dst, replace(topology, leaves=tuple(leaves)), cut_nbytes=1)
    schedule = plan_schedule(plan, staging_nbytes=16384)
    least = max(least_seconds(plan, UNEVEN), float(plan.reach.busiest_seconds)) * (1 - 1e-9)
    assert simulate(schedule, plan.topology, UNEVEN).seconds >= least
    totals = predict(plan, UNEVEN, mode="totals", staging_nbytes=16384)
    assert totals.seconds >= least
    if plan.reach.busiest_port.startswith(("up from", "down to")):
        assert totals.totals.spine_seconds == pytest.approx(float(plan.reach.busiest_seconds))
        assert totals.totals.busiest_leaf in (f"up from {x.name}" for x in leaves) or totals.totals.busiest_leaf in (
            f"down to {x.name}" for x in leaves
        )


def simulated(cluster, *more):
    result = CliRunner().invoke(
        main, ["simulate", *DEEPSEEK, "--cluster", cluster, "--strategy", "reshard", "--json", *more]
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["strategies"][0]


def test_the_command_says_which_leaf_is_busiest_and_for_what_part_of_the_time():
    full, quarter, local = map(simulated, ("dgx-h100", "dgx-h100 spine=4", "dgx-h100 spine=4 cross-rail=local"))
    assert full["busiest_leaf"].startswith(("up from rail", "down to rail"))
    assert full["spine_seconds"] <= full["port_seconds"]
    assert quarter["busiest"] == "spine"
    assert quarter["spine_seconds"] > 2 * full["spine_seconds"]
    assert quarter["busiest_leaf_share"] == pytest.approx(1, abs=0.02)
    assert (local["busiest_leaf"], local["busiest_leaf_share"]) == (None, None)  # every host has a port on every rail
    assert local["spine_seconds"] == 0
    assert local["seconds"] < quarter["seconds"]
    table = CliRunner().invoke(main, ["simulate", *DEEPSEEK, "--cluster", "dgx-h100 spine=4", "--strategy", "reshard"])
    assert "busiest leaf" in table.stdout
    assert quarter["busiest_leaf"] in table.stdout


@pytest.mark.parametrize("cluster", ["dgx-h100 spine=fast", "dgx-h100 spin=2", "dgx-h100 cross-rail=around"])
def test_a_word_about_the_network_that_says_nothing_is_named(cluster):
    result = CliRunner().invoke(main, ["plan", *DEEPSEEK, "--cluster", cluster])
    assert result.exit_code == 2
    assert cluster.split()[1] in result.stderr
