"""Topologies: domains and ports over any ranks, checked when they are made."""

import pytest

from reshard.errors import ConfigError
from reshard.topology import presets
from reshard.topology.topology import ONE_HOST, Domain, Leaf, Port, Topology

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


def four_hosts(*leaves, **more):
    """Hosts 0 to 3 of one rank each, and these leaves of (name, ports, up, down)."""
    plain = presets.hosts([[0], [1], [2], [3]], port_bytes_per_second=GB)
    return Topology("leaves", plain.domains, plain.ports, leaves=tuple(Leaf(*leaf) for leaf in leaves), **more)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ([("a", (0, 1), GB, GB), ("b", (1, 2, 3), GB, GB)], r"Port 'host1' is at leaf 'a' and at leaf 'b'"),
        ([("a", (0, 1), GB, GB), ("b", (2,), GB, GB)], r"port 'host3' is at no leaf"),
        ([("a", (0, 1, 2, 3), GB, 0)], r"Leaf 'a' has a rate below 1"),
        ([("a", (0, 1, 2, 4), GB, GB)], r"lists port 4 of 4"),
    ],
)
def test_leaves_that_make_no_sense_are_refused(leaves, message):
    with pytest.raises(ConfigError, match=message):
        four_hosts(*leaves)
    with pytest.raises(ConfigError, match="use one of spine, local"):
        four_hosts(cross_rail="around")


def test_a_leaf_blocks_where_its_ports_are_faster_than_its_way_to_the_spine_or_from_it():
    assert not four_hosts().is_blocking
    assert not four_hosts(("a", (0, 1), 2 * GB, 2 * GB), ("b", (2, 3), 2 * GB, 3 * GB)).is_blocking
    assert four_hosts(("a", (0, 1), 2 * GB, 2 * GB), ("b", (2, 3), 2 * GB, GB)).is_blocking
    assert not four_hosts(("a", (0, 1, 2, 3), 1, 1)).is_blocking  # nothing leaves the only one


def test_what_goes_from_leaf_to_leaf_crosses_the_spine_and_nothing_else_does():
    topology = four_hosts(("a", (0, 3), GB, GB), ("b", (1, 2), GB, GB))
    assert [topology.crosses(0, rank) for rank in (1, 2, 3)] == [(0, 1), (0, 1), None]
    assert four_hosts().crosses(0, 1) is None


def test_presets_are_rail_optimised_and_have_full_bisection():
    h100 = presets.dgx_h100(8 * 33)
    assert not h100.is_blocking
    assert [leaf.name for leaf in h100.leaves[7:10]] == ["group0/rail7", "group1/rail0", "group1/rail1"]
    assert h100.leaves[3].ports == tuple(range(3, 256, 8))  # NIC 3 of each of 32 hosts
    assert h100.crosses(3, 251) is None
    assert h100.crosses(3, 4) == (3, 4)
    nvl72 = presets.gb200_nvl72(128)
    assert [len(leaf.ports) for leaf in nvl72.leaves] == [32] * 4
    assert nvl72.leaf_of(nvl72.port_of(6)) == nvl72.leaf_of(nvl72.port_of(66))


def test_an_oversubscribed_spine_has_so_much_less_than_the_ports_of_a_leaf_and_is_read_back():
    half = presets.oversubscribed(presets.dgx_h100(32), 2, "local")
    assert half.name == "dgx-h100 spine=2 cross-rail=local"
    assert {(leaf.up_bytes_per_second, leaf.down_bytes_per_second) for leaf in half.leaves} == {(100 * GB, 100 * GB)}
    assert half.is_blocking
    assert Topology.from_json(half.to_json()) == half
    with pytest.raises(ConfigError, match="full bisection is 1 to 1"):
        presets.oversubscribed(half, 0.5)
    with pytest.raises(ConfigError, match="has no leaf switches"):
        presets.oversubscribed(presets.hosts([[0], [1]], port_bytes_per_second=GB), 2)


def test_groups_of_domains_can_share_a_leaf():
    grouped = presets.with_leaves(presets.hosts([[0, 1], [2], [3]], port_bytes_per_second=8), domains=2)
    assert [(leaf.ports, leaf.up_bytes_per_second) for leaf in grouped.leaves] == [((0, 1), 16), ((2,), 8)]


def test_over_the_fast_link_first_the_rank_at_the_receivers_leaf_sends():
    spine = presets.oversubscribed(presets.dgx_h100(16), 2)
    local = presets.oversubscribed(presets.dgx_h100(16), 2, "local")
    assert [spine.sends_for(1, rank) for rank in (8, 9, 15)] == [1, 1, 1]
    assert [local.sends_for(1, rank) for rank in (8, 9, 15)] == [0, 1, 7]
    assert local.crosses(local.sends_for(1, 8), 8) is None
    racks = presets.oversubscribed(presets.gb200_nvl72(128), 2, "local")
    assert [racks.sends_for(rank, 64) for rank in (1, 5, 6)] == [4, 20, 24]  # dealt out over the 16 ranks of rail 0
    few = presets.with_leaves(presets.grid("few", 3, 2, local_bytes_per_second=9, port_bytes_per_second=9), rails=2)
    alone = Topology("few", few.domains, few.ports, leaves=few.leaves, cross_rail="local")
    assert alone.sends_for(2, 1) == 2  # nobody in its domain is on the receiver's rail
