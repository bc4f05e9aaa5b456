from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from reshard.bench.cluster import HOST_AWARE, POINT_TO_POINT, RESHARD, STRATEGIES, USUAL, run_cluster
from reshard.bench.cluster_memory import Memory
from reshard.bench.cluster_scenarios import FULL_NBYTES, SCENARIO_NAMES, scenario_named, side_of
from reshard.bench.cluster_text import render
from reshard.bench.cluster_ways import chunks_of, raw_socket_ends
from reshard.cli.main import main
from reshard.errors import ConfigError, EnvironmentNotSupported, VerifyError
from reshard.testing.hosts import supported

NBYTES, RATE = 32 << 20, "2Gbit"


@pytest.fixture(scope="session")
def allowed():
    reason = supported()
    if reason is not None:
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


# -- scenarios ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "host", "copies", "leaves"), [
    ("one-host", "A", 1.0, True),          # A sends one copy; so much comes to B too, and what leaves is named first
    ("replica-per-host", "A", 1.0, True),  # B and C can give each other what they lack
    ("tp-across-hosts", "A", 1.0, True),   # only half a copy comes to each of B and C
    ("six-hosts", "A", 1.0, True),         # more receivers take no longer
    ("slow-port", "A", 2 / 3, True),       # A and S together have 1.5 times A's rate
])  # fmt: skip
def test_no_way_is_faster_than_the_link_that_must_carry_most(name, host, copies, leaves):
    bound = scenario_named(name).bound(FULL_NBYTES, 250e6)
    assert (bound.host, bound.leaves) == (host, leaves)
    assert bound.nbytes == pytest.approx(copies * FULL_NBYTES, abs=1)
    assert bound.seconds == pytest.approx(copies * FULL_NBYTES / 250e6)


@pytest.mark.parametrize("name", SCENARIO_NAMES)
def test_every_element_has_a_holder_and_one_sender_in_the_usual_way(name):
    scenario, side = scenario_named(name), side_of(FULL_NBYTES)
    rows = {chunk.rows for chunk in chunks_of(scenario, side) if chunk.tensor == 0}
    assert [lo for lo, _ in sorted(rows)] == [0, *(hi for _, hi in sorted(rows))][:-1]
    assert max(hi for _, hi in rows) == side
    for chunk in chunks_of(scenario, side):
        box = scenario.box(chunk.source, side)
        assert box.start[0] <= chunk.rows[0] < chunk.rows[1] <= box.stop[0]


def test_the_bare_socket_goes_over_the_busiest_link():
    scenario = scenario_named("slow-port")
    sender, receiver = raw_socket_ends(scenario, scenario.bound(FULL_NBYTES, 250e6))
    assert (scenario.host_of[sender], scenario.host_of[receiver]) == ("A", "B")


def test_the_full_size_is_512_mib():
    assert 16 * side_of(FULL_NBYTES) ** 2 * 2 == FULL_NBYTES
    assert side_of(1) == 64


def test_a_scenario_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(ConfigError, match="no scenario 'three'; choose from one-host, replica-per-host"):
        scenario_named("three")


def test_a_wrong_element_is_named():
    memory = Memory(scenario_named("one-host"), 3, 64)
    for tensor, view in enumerate(memory.views):
        view.copy_(memory._values(tensor))
    assert memory.check("reshard") == 16 * 64 * 32
    memory.views[5][7, 2] ^= 1
    with pytest.raises(VerifyError, match=r"one-host, reshard: rank 3 .* at \[7, 2\] of its part of tensor 5: .*1 of"):
        memory.check("reshard")
    memory.poison()
    with pytest.raises(VerifyError, match=r"at \[0, 0\] of its part of tensor 0: 0xffff instead of"):
        memory.check("reshard")


# -- measured ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_host(allowed):
    (scenario,) = run_cluster(scenarios=["one-host"], rate=RATE, nbytes=NBYTES, repeat=1)["scenarios"]
    return scenario


@pytest.mark.slow
def test_every_strategy_brings_every_element_and_is_told_beside_bound_and_socket(one_host):
    nbytes = one_host["nbytes"]
    assert nbytes == NBYTES
    assert one_host["bound_seconds"] == pytest.approx(nbytes / 250e6)
    assert list(one_host["strategies"]) == list(STRATEGIES)
    for figures in one_host["strategies"].values():
        assert figures["compared"] == 2 * nbytes // 2  # two replicas of elements of two bytes
        assert figures["of_bound"] == pytest.approx(figures["seconds"] / one_host["bound_seconds"])
        assert figures["of_raw_socket"] == pytest.approx(figures["seconds"] / one_host["raw_socket_seconds"])
        assert figures["busiest_link"] == "A out"
        assert figures["busiest_link_nbytes"] == figures["source_host_out_nbytes"]
    assert one_host["strategies"]["gather_broadcast"]["part_after_network"] is None  # it has no schedule of ours
    assert 0 < one_host["strategies"]["reshard"]["part_after_network"] < 0.5
    least = (nbytes - (1 << 20)) / 250e6  # what an idle link lets pass at once is far below a MiB
    assert one_host["raw_socket_seconds"] >= least
    assert all(figures["seconds"] >= least for figures in one_host["strategies"].values())


@pytest.mark.slow
def test_interfaces_count_one_copy_for_those_who_know_hosts(one_host):
    copies = {name: figures["source_host_out_copies"] for name, figures in one_host["strategies"].items()}
    assert copies[RESHARD] == pytest.approx(1, abs=0.02)
    assert copies[HOST_AWARE] == pytest.approx(1, abs=0.02)
    assert copies[POINT_TO_POINT] == pytest.approx(2, abs=0.02)
    assert copies[USUAL] == pytest.approx(3, abs=0.02)


@pytest.mark.slow
def test_the_report_for_people_has_a_row_for_every_strategy(one_host):
    lines = list(render({"scenarios": [one_host], "rate": RATE, "repeat": 1}))
    assert "one-host[/bold]: 32 MiB over links of 2Gbit" in lines[0]
    assert lines[1].row_count == len(STRATEGIES)


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_source_host_sends_one_copy_to_two_hosts_that_relay():
    report = run_cluster(scenarios=["replica-per-host"], strategies=[RESHARD], rate=RATE, nbytes=NBYTES, repeat=1)
    (scenario,) = report["scenarios"]
    figures = scenario["strategies"][RESHARD]
    assert figures["source_host_out_copies"] == pytest.approx(1, abs=0.02)
    for host in "BC":
        assert figures["in_payload_nbytes"][host] == pytest.approx(scenario["nbytes"], rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_a_slow_port_sends_its_share_of_the_rates():
    report = run_cluster(scenarios=["slow-port"], strategies=[RESHARD], rate=RATE, nbytes=NBYTES, repeat=1)
    balance = report["scenarios"][0]["balance"]
    assert balance["S"]["share_of_rates"] == pytest.approx(1 / 3)
    assert balance["S"]["share_of_bytes"] == pytest.approx(1 / 3, abs=0.02)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("allowed")
def test_the_command_prints_one_line_of_json():
    options = ["--scenario", "tp-across-hosts", "--rate", RATE, "--nbytes", "4MiB", "--repeat", "1", "--json"]
    done = CliRunner().invoke(main, ["bench", "cluster", *options])
    assert done.exit_code == 0, done.output
    (scenario,) = json.loads(done.stdout)["scenarios"]
    assert scenario["name"] == "tp-across-hosts"
    assert set(scenario["strategies"]) == set(STRATEGIES)


def test_a_machine_that_does_not_allow_it_is_told_why_and_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentNotSupported, match="missing here: ip, tc"):
        run_cluster(scenarios=["one-host"], nbytes=NBYTES)
    done = CliRunner().invoke(main, ["bench", "cluster", "--scenario", "one-host"])
    assert done.exit_code == 2
    assert "EnvironmentNotSupported: Hosts in namespaces need programs that are missing here" in done.stderr


def test_a_rate_without_a_unit_is_a_wrong_question():
    done = CliRunner().invoke(main, ["bench", "cluster", "--rate", "2"])
    assert done.exit_code == 2
    assert "'2' is not a rate" in done.stderr
