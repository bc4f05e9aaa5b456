"""Plans over several domains: one copy into each, from all who can send, within the bound."""

import json
from fractions import Fraction

import pytest
from click.testing import CliRunner
from tests.plan.worlds import copies_of_each_byte_into_each_domain, port_seconds, random_refit

from reshard.cli.main import main
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.balance import PortFlow
from reshard.plan.plan import plan_refit
from reshard.topology import presets
from reshard.topology.topology import Domain, Port, Topology

GB = 10**9
ROWS = Layout((4096, 4096), "bfloat16", Mesh({"f": 2}, [0, 1]), ("f",))


def columns(dp, tp, first=2):
    return Layout((4096, 4096), "bfloat16", Mesh({"dp": dp, "tp": tp}, range(first, first + dp * tp)), (None, "tp"))


@pytest.mark.parametrize("seed", range(120))
def test_every_byte_enters_every_domain_once_and_the_plan_is_proven(seed):
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology, cut_nbytes=seed % 3 * 4096 + 1)
    plan.proof()
    for (cls, _), intervals in copies_of_each_byte_into_each_domain(plan).items():
        at = 0
        for start, stop in sorted(intervals):
            assert start == at
            at = stop
        assert at == plan.classes[cls].nbytes
    assert plan.reach.busiest_seconds == port_seconds(plan)
    assert all(copies == 1 for _, copies in plan.reach.copies_into)


@pytest.mark.parametrize("seed", range(120))
def test_the_busiest_port_is_within_two_percent_of_the_bound_and_a_row_a_class(seed):
    src, dst, topology = random_refit(seed)
    plan = plan_refit(src, dst, topology, cut_nbytes=1)
    slowest = min(min(p.out_bytes_per_second, p.in_bytes_per_second) for p in topology.ports)
    rounding = Fraction(len(plan.classes) * len(topology.domains) * 4, slowest)  # an element for each cut of each class
    assert plan.reach.busiest_seconds <= plan.bound.seconds * Fraction(102, 100) + rounding
    assert plan.reach.busiest_seconds >= max(plan.bound.out_seconds, plan.bound.in_seconds) - rounding


@pytest.mark.parametrize(
    ("what", "dst", "hosts", "rule", "senders"),
    [
        ("replicas on one host: striped over both", columns(2, 2), [[0, 1], [2, 3, 4, 5]], "striped", {0, 1}),
        (
            "a replica on each of two hosts: relayed",
            columns(2, 2),
            [[0, 1], [2, 3], [4, 5]],
            "relayed",
            {0, 1, 2, 3, 4, 5},
        ),
        ("tensor parallel across hosts", columns(2, 2), [[0, 1], [2, 4], [3, 5]], "striped", {0, 1}),
    ],
)
def test_the_route_follows_from_where_the_replicas_are(what, dst, hosts, rule, senders):
    plan = plan_refit(ROWS, dst, presets.hosts(hosts, port_bytes_per_second=GB))
    assert {route.rule for route in plan.routes} == {rule}
    home = plan.topology.domain_of
    assert {a for route in plan.routes for a, b in route.edges if home(a) != home(b)} == senders
    assert plan.reach.busiest_seconds == plan.bound.seconds


def test_one_source_host_sends_about_one_copy_to_six_hosts():
    hosts = [[0, 1], *([2 + 2 * k, 3 + 2 * k] for k in range(6))]
    plan = plan_refit(ROWS, columns(6, 2), presets.hosts(hosts, port_bytes_per_second=GB))
    sent = sum(n for (a, _), n in plan.pair_nbytes().items() if a in (0, 1))
    assert sent <= 1.02 * ROWS.nbytes
    assert plan.reach.busiest_seconds == Fraction(ROWS.nbytes, GB)


def test_a_slow_port_carries_less_where_others_can_send():
    # two hosts hold a replica each, one at half the rate: it sends half of what the other sends
    src = Layout((4096, 4096), "bfloat16", Mesh({"dp": 2}, [0, 1]))
    dst = Layout((4096, 4096), "bfloat16", Mesh({"tp": 2}, [2, 3]), ("tp",))
    topology = presets.hosts([[0], [1], [2, 3]], port_bytes_per_second=[GB, GB // 2, 4 * GB])
    sent = plan_refit(src, dst, topology).sent_nbytes()
    assert sent[0] == pytest.approx(2 * sent[1], rel=0.02)


def test_a_domain_with_a_holder_inside_is_served_there():
    src = Layout((64, 64), "float32", Mesh({"dp": 2}, [0, 3]))
    dst = Layout((64, 64), "float32", Mesh({"dp": 4}, [1, 2, 4, 5]))
    plan = plan_refit(src, dst, presets.hosts([[0, 1, 2], [3, 4, 5]], port_bytes_per_second=GB))
    assert {route.rule for route in plan.routes} == {"inside"}
    assert plan.reach.crossing_nbytes == 0


def test_a_holder_in_another_domain_sends_nothing_where_there_is_one_inside():
    # the holder on the first host has nothing else to do, and would even out what the ranks send
    src = Layout((4096, 64), "float32", Mesh({"dp": 2}, [0, 1]))
    dst = Layout((4096, 64), "float32", Mesh({"dp": 3}, [2, 3, 4]))
    plan = plan_refit(src, dst, presets.hosts([[0], [1, 2, 3, 4]], port_bytes_per_second=GB))
    assert set(plan.sent_nbytes()) == {1}
    assert plan.reach.crossing_nbytes == 0


def test_all_ports_of_a_domain_take_in_equally_much_beside_a_busier_domain():
    # one needer on the first host, four on the second: what the busiest port needs is no reason to load two of four
    src = Layout((4096, 1024), "float32", Mesh({"x": 1}, [0]))
    dst = Layout((4096, 1024), "float32", Mesh({"dp": 5}, [1, 2, 3, 4, 5]))
    domains = [(0,), (1,), (2, 3, 4, 5)]
    topology = Topology(
        "uneven",
        tuple(Domain(f"d{at}", ranks, 100 * GB) for at, ranks in enumerate(domains)),
        tuple(Port(f"n{rank}", (rank,), GB, GB) for rank in range(6)),
    )
    plan = plan_refit(src, dst, topology)
    taken = dict.fromkeys(range(1, 6), 0)
    for (a, b), nbytes in plan.pair_nbytes().items():
        if topology.domain_of(a) != topology.domain_of(b):
            taken[b] += nbytes
    assert taken[1] == src.nbytes
    assert max(taken[rank] for rank in (2, 3, 4, 5)) <= 1.02 * src.nbytes / 4


def test_a_part_goes_from_a_holder_to_one_domain_and_from_there_to_all_others():
    wanted = Layout((4096, 4096), "bfloat16", Mesh({"dp": 16}, range(2, 18)))
    cluster = presets.hosts([[0, 1], *([rank] for rank in range(2, 18))], port_bytes_per_second=GB)
    plan = plan_refit(ROWS, wanted, cluster)
    assert {route.rule for route in plan.routes} == {"relayed"}
    for route in plan.routes:
        (holder, relay), *others = route.edges
        assert holder in (0, 1)
        assert {sender for sender, _ in others} == {relay}
        assert {receiver for _, receiver in route.edges} == set(range(2, 18))


def test_a_port_that_takes_in_many_classes_takes_some_of_them_whole():
    # 1,024 classes into a domain of 4 ranks: a thin stripe of each to everybody would be four times as many messages
    experts = 1024
    src = Layout((experts, 64, 64), "bfloat16", Mesh({"ep": experts}), ("ep",))
    dst = Layout((experts, 64, 64), "bfloat16", Mesh({"dp": 4}, range(experts, experts + 4)))
    topology = Topology(
        "wide",
        (Domain("s", tuple(range(experts)), GB), Domain("d", tuple(range(experts, experts + 4)), GB)),
        tuple(Port(f"n{rank}", (rank,), GB, GB) for rank in range(experts + 4)),
    )
    plan = plan_refit(src, dst, topology, cut_nbytes=1)
    assert len(plan.routes) == len(plan.classes) == experts
    assert plan.reach.busiest_seconds == plan.bound.in_seconds


def test_reshard_plan_prints_how_often_each_strategy_enters_a_domain():
    asked = ["plan", "--shape", "64x64", "--source", "tp=2 [tp, -]", "--destination", "dp=2 []", "--strategy", "all"]
    printed = CliRunner().invoke(main, [*asked, "--cluster", "0-1 / 2-3 @ 2Gbit", "--json"])
    counts = {row["strategy"]: row["crossings"] for row in json.loads(printed.stdout)["strategies"]}
    assert (counts["point-to-point"], counts["reshard"]) == (4, 2)
    text = CliRunner().invoke(main, [*asked, "--cluster", "0-1 / 2-3 @ 2Gbit"]).stdout
    assert "(2 boxes)" in text
    assert "(4 boxes)" in text


def test_tensor_parallel_to_data_parallel_takes_half_the_transfers_of_point_to_point():
    src = Layout((64, 64), "bfloat16", Mesh({"tp": 2}, [0, 1]), ("tp",))
    dst = Layout((64, 64), "bfloat16", Mesh({"dp": 2}, [2, 3]))
    topology = presets.hosts([[0, 1], [2, 3]], port_bytes_per_second=GB)
    counts = {s: plan_refit(src, dst, topology, strategy=s).crossings for s in ("point-to-point", "reshard")}
    assert counts == {"point-to-point": 4, "reshard": 2}


@pytest.mark.parametrize(
    ("replicas", "tp", "dp", "domain", "why"),  # the rows of the field's own table, and one that is larger
    [
        (8, 8, 8, 64, "the field's rules cross 8 times, or leave 7 of 8 senders idle"),
        (1, 8, 8, 8, "one source, eight domains"),
        (1, 8, 16, 8, "one source, sixteen domains: fifteen copies of each byte are relayed"),
        (2, 8, 16, 64, "two domains of two replicas"),
        (4, 2, 8, 8, "more senders than domains"),
        (8, 1, 16, 8, "no tensor parallel at all"),
        (16, 4, 8, 8, "many senders, few domains"),
    ],
)
def test_all_replicas_of_the_source_send_and_each_domain_takes_one_copy(replicas, tp, dp, domain, why):
    shape = (2048, 4096)
    src = Layout(shape, "bfloat16", Mesh({"dp": replicas}))
    dst = Layout(shape, "bfloat16", Mesh({"dp": dp, "tp": tp}, range(replicas, replicas + dp * tp)), (None, "tp"))
    wanted = range(replicas, replicas + dp * tp)
    domains = [tuple(range(replicas)), *(tuple(wanted[k : k + domain]) for k in range(0, dp * tp, domain))]
    topology = Topology(
        "field",
        tuple(Domain(f"d{at}", ranks, 100 * GB) for at, ranks in enumerate(domains)),
        tuple(Port(f"n{rank}", (rank,), GB, GB) for ranks in domains for rank in ranks),
    )
    plan = plan_refit(src, dst, topology, cut_nbytes="4KiB")
    plan.proof()
    assert all(copies == 1 for _, copies in plan.reach.copies_into)
    sent = plan.sent_nbytes()
    senders = [sent.get(rank, 0) for rank in range(replicas)]
    assert max(senders) <= 1.02 * sum(senders) / replicas, "all replicas are evenly busy"
    assert sum(senders) >= src.nbytes
    assert plan.reach.busiest_seconds <= plan.bound.seconds * Fraction(102, 100)
    if replicas == 1:
        assert sum(senders) <= 1.02 * src.nbytes, "the only source sends one copy, whatever the number of domains"


def test_many_experts_on_many_ranks_reach_few_tensor_parallel_ranks():
    # 32 and 64 sources a destination shard: more than the 16 that the field's collective can take
    for experts, tp in ((32, 8), (64, 32)):
        src = Layout((experts, 128, 64), "bfloat16", Mesh({"ep": experts}), ("ep",))
        dst = Layout((experts, 128, 64), "bfloat16", Mesh({"tp": tp}, range(experts, experts + tp)), (None, "tp"))
        plan = plan_refit(src, dst, presets.dgx_h100(experts + tp))
        plan.proof()
        assert plan.reach.busiest_seconds == plan.bound.seconds


def test_least_seconds_is_that_of_the_tightest_set_of_demands():
    # demand 0 can only use port 0; together they could use both: 60/1 is the answer, not 80/3
    assert PortFlow.least_seconds([(60, (0,)), (20, (0, 1))], {0: 1, 1: 2}) == 60
    assert PortFlow.least_seconds([(60, (0, 1)), (20, (0, 1))], {0: 1, 1: 3}) == 20
