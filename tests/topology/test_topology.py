"""Topologies: domains and ports over any ranks, checked when they are made."""

import pytest

from reshard.errors import ConfigError
from reshard.topology import presets
from reshard.topology.topology import ONE_HOST, Domain, Port, Topology

GB = 10**9


def test_ranks_of_a_domain_and_a_port_need_not_follow_each_other():
    topology = presets.hosts([[0, 3], [1, 4, 2]], port_bytes_per_second=GB)
    assert [topology.domain_of(rank) for rank in range(5)] == [0, 1, 1, 0, 1]
    assert [topology.port_of(rank) for rank in range(5)] == [0, 1, 1, 0, 1]


def test_without_domains_all_ranks_share_one():
    assert ONE_HOST.is_flat
    assert ONE_HOST.domain_of(12345) == 0


@pytest.mark.parametrize(
    ("domains", "ports", "message"),
    [
        ([("a", (0, 1)), ("b", (1, 2))], [], r"Rank 1 is in domain 'a' and in domain 'b'"),
        ([("a", (0,)), ("b", (1,))], [("p", (0,)), ("q", (0, 1))], r"Rank 0 is in port 'p' and in port 'q'"),
        ([("a", (0,)), ("b", (1,))], [("p", (0, 1))], r"Port 'p' serves ranks of domains \['a', 'b'\]"),
        ([("a", (0,)), ("b", (1,))], [("p", (0,))], r"rank 1 is at no port"),
        ([("a", (0,)), ("b", (1,))], [("p", (0, 2))], r"puts rank 2 in no domain"),
    ],
)
def test_a_topology_that_makes_no_sense_is_refused(domains, ports, message):
    with pytest.raises(ConfigError, match=message):
        Topology(
            "odd",
            tuple(Domain(name, ranks, GB) for name, ranks in domains),
            tuple(Port(name, ranks, GB, GB) for name, ranks in ports),
        )


def test_a_port_without_a_rate_is_refused():
    with pytest.raises(ConfigError, match="rate below 1"):
        presets.hosts([[0], [1]], port_bytes_per_second=[GB, 0])


def test_a_topology_is_read_back_as_it_was_written():
    topology = presets.dgx_h100(20)
    assert Topology.from_json(topology.to_json()) == topology
    assert [len(domain.ranks) for domain in topology.domains] == [8, 8, 4]


def test_presets_have_the_published_rates():
    h100, nvl72 = presets.named("dgx-h100", 16), presets.named("gb200-nvl72", 128)
    assert {port.out_bytes_per_second for port in (*h100.ports, *nvl72.ports)} == {50 * GB}
    assert h100.domains[0].bytes_per_second == 450 * GB
    assert nvl72.domains[1].ranks == tuple(range(64, 128))


def test_an_unknown_preset_names_those_there_are():
    with pytest.raises(ConfigError, match="dgx-h100, gb200-nvl72, one-host"):
        presets.named("cray", 4)
