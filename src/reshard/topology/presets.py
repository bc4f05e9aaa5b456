"""Topologies by name, from published link rates. Ranks fill domains in order; give your own domains where they do not.

Sources: NVIDIA DGX H100 (8 GPUs, NVLink 900 GB/s both directions together, one 400 Gb/s NIC a GPU) and GB200 NVL72
(72 GPUs in one NVLink domain, 1.8 TB/s both directions together, one 400 Gb/s NIC a GPU) data sheets. Their networks
are rail-optimised with full bisection in NVIDIA's reference architectures: the NICs of one number in every host, or in
every compute tray of 4 GPUs, attach to the leaf switches of one rail; a scalable unit of 32 hosts (DGX SuperPOD H100),
or of 8 racks (DGX SuperPOD GB200), has a leaf for each rail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.topology.topology import ONE_HOST, Domain, Leaf, Port, Topology
from reshard.units import count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.topology.topology import CrossRail

GBIT = 10**9 // 8
"""Bytes a second in a gigabit a second."""


def dgx_h100(size: int) -> Topology:
    """Hosts of 8 GPUs: NVLink 450 GB/s a direction inside, a 400 Gb/s NIC for each GPU, 8 rails."""
    hosts_of_8 = grid("dgx-h100", size, 8, local_bytes_per_second=450 * 10**9, port_bytes_per_second=400 * GBIT)
    return with_leaves(hosts_of_8, rails=8, domains=32)


def gb200_nvl72(size: int, per_domain: int = 64) -> Topology:
    """NVLink domains of 72 GPUs, of which jobs commonly use 64: 900 GB/s a direction, a 400 Gb/s NIC each, 4 rails."""
    racks = grid("gb200-nvl72", size, per_domain, local_bytes_per_second=900 * 10**9, port_bytes_per_second=400 * GBIT)
    return with_leaves(racks, rails=4, domains=8)


def with_leaves(
    topology: Topology,
    *,
    rails: int = 1,
    domains: int = 1,
    oversubscription: float = 1.0,
    cross_rail: CrossRail = "spine",
) -> Topology:
    """A topology whose ports attach to leaf switches, in place of those that it had.

    Args:
        topology: Domains and ports; one domain needs no leaves and stays as it is.
        rails: The n-th port of every domain is on rail ``n % rails``; 1: all ports of a domain are at one leaf.
        domains: How many domains, in order, share the leaves of their rails.
        oversubscription: What a leaf's ports can send together, in times of its rate to the spine; 1: full bisection.
        cross_rail: How bytes reach a port at another leaf.

    Raises:
        ConfigError: No rail, no domain, or less than full bisection's share of a rate.

    >>> spine = with_leaves(hosts([[0, 1], [2, 3]], port_bytes_per_second=100), oversubscription=2)
    >>> [(leaf.name, leaf.ports, leaf.up_bytes_per_second) for leaf in spine.leaves], spine.is_blocking
    ([('leaf0', (0,), 50), ('leaf1', (1,), 50)], True)
    """
    if rails < 1 or domains < 1 or not 1 <= oversubscription < float("inf"):
        raise ConfigError(
            f"A network of {rails} rails over {domains} domains, oversubscribed {oversubscription} to 1: there is at "
            f"least one of each, and full bisection is 1 to 1."
        )
    if topology.is_flat:
        return topology
    members: dict[tuple[int, int], list[int]] = {}
    seen = [0] * len(topology.domains)
    for at, port in enumerate(topology.ports):
        domain = topology.domain_of(port.ranks[0])
        members.setdefault((domain // domains, seen[domain] % rails), []).append(at)
        seen[domain] += 1
    leaves = []
    for number, ((group, rail), ports) in enumerate(sorted(members.items())):
        up = sum(topology.ports[at].out_bytes_per_second for at in ports) / oversubscription
        down = sum(topology.ports[at].in_bytes_per_second for at in ports) / oversubscription
        several = f"group{group}/" if len(topology.domains) > domains else ""
        name = f"leaf{number}" if rails == 1 else f"{several}rail{rail}"
        leaves.append(Leaf(name, tuple(ports), max(1, int(up)), max(1, int(down))))
    return replace(topology, leaves=tuple(leaves), cross_rail=cross_rail)


def oversubscribed(topology: Topology, ratio: float = 1.0, cross_rail: CrossRail = "spine") -> Topology:
    """The same leaves with a spine of so much less than full bisection; its name says so.

    Raises:
        ConfigError: A ratio below 1, or a topology without leaves: ``with_leaves`` adds them.
    """
    if not 1 <= ratio < float("inf"):
        raise ConfigError(f"A spine is oversubscribed {ratio} to 1; full bisection is 1 to 1. Give 1 or more.")
    if not topology.leaves:
        raise ConfigError(
            f"Topology {topology.name!r} of {count(len(topology.domains) or 1, 'domain')} has no leaf switches, so "
            f"there is no spine. Use a preset with rails and ranks of several domains."
        )
    leaves = tuple(
        replace(
            leaf,
            up_bytes_per_second=max(1, int(leaf.up_bytes_per_second / ratio)),
            down_bytes_per_second=max(1, int(leaf.down_bytes_per_second / ratio)),
        )
        for leaf in topology.leaves
    )
    name = f"{topology.name} spine={ratio:g}" + (" cross-rail=local" if cross_rail == "local" else "")
    return replace(topology, name=name, leaves=leaves, cross_rail=cross_rail)


def grid(name: str, size: int, per_domain: int, *, local_bytes_per_second: int, port_bytes_per_second: int) -> Topology:
    """Domains of ``per_domain`` ranks in order, a port for each rank."""
    domains = tuple(
        Domain(
            f"{name}/{first // per_domain}", tuple(range(first, min(first + per_domain, size))), local_bytes_per_second
        )
        for first in range(0, size, per_domain)
    )
    ports = tuple(Port(f"nic{r}", (r,), port_bytes_per_second, port_bytes_per_second) for r in range(size))
    return Topology(name, domains, ports)


def hosts(
    ranks: Sequence[Sequence[int]],
    *,
    port_bytes_per_second: int | Sequence[int],
    local_bytes_per_second: int = 10 * 10**9,
    names: Sequence[str] | None = None,
) -> Topology:
    """Hosts on a LAN: one port a host, shared by its ranks.

    Args:
        ranks: The ranks of each host.
        port_bytes_per_second: Of every host's port, or one rate a host.
        local_bytes_per_second: Memory rate for each rank inside a host.
        names: Of the hosts.
    """
    rates = [port_bytes_per_second] * len(ranks) if isinstance(port_bytes_per_second, int) else port_bytes_per_second
    if len(rates) != len(ranks):
        raise ConfigError(f"{len(rates)} port rates for {len(ranks)} hosts; give one rate a host, or one for all.")
    called = names or [f"host{i}" for i in range(len(ranks))]
    return Topology(
        "hosts",
        tuple(Domain(n, tuple(r), local_bytes_per_second) for n, r in zip(called, ranks, strict=True)),
        tuple(Port(n, tuple(r), rate, rate) for n, r, rate in zip(called, ranks, rates, strict=True)),
    )


def gpus(domains: Sequence[Sequence[int]]) -> Topology:
    """GPUs as they were found: who shares a fast link is known, and every GPU is taken to have a NIC of its own.

    Rates are those of an H100 with NVLink 4 and a 400 Gb/s NIC; only what they are to each other matters.

    >>> gpus([[0, 1]]).is_flat
    True
    """
    if len(domains) == 1:
        return ONE_HOST
    ranks = sorted(rank for domain in domains for rank in domain)
    return Topology(
        "gpus",
        tuple(Domain(f"domain{at}", tuple(domain), _NVLINK_4) for at, domain in enumerate(domains)),
        tuple(Port(f"gpu{rank}", (rank,), _NIC_400, _NIC_400) for rank in ranks),
    )


_NVLINK_4, _NIC_400 = 450 * 10**9, 50 * 10**9


def one_host(size: int) -> Topology:
    """One domain of any number of ranks: memory, or one NVLink domain."""
    del size
    return ONE_HOST


PRESETS: Mapping[str, Callable[[int], Topology]] = {
    "one-host": one_host,
    "dgx-h100": dgx_h100,
    "gb200-nvl72": gb200_nvl72,
}


def named(name: str, size: int) -> Topology:
    """A preset by its name, for ``size`` ranks.

    Raises:
        ConfigError: No preset has this name.
    """
    if name not in PRESETS:
        raise ConfigError(f"Topology {name!r} is unknown; use one of {', '.join(sorted(PRESETS))}.")
    return PRESETS[name](size)
