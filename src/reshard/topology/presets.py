"""Topologies by name, from published link rates. Ranks fill domains in order; give your own domains where they do not.

Sources: NVIDIA DGX H100 (8 GPUs, NVLink 900 GB/s both directions together, one 400 Gb/s NIC a GPU) and GB200 NVL72
(72 GPUs in one NVLink domain, 1.8 TB/s both directions together, one 400 Gb/s NIC a GPU) data sheets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.topology.topology import ONE_HOST, Domain, Port, Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

GBIT = 10**9 // 8
"""Bytes a second in a gigabit a second."""


def dgx_h100(size: int) -> Topology:
    """Hosts of 8 GPUs: NVLink 450 GB/s a direction inside, a 400 Gb/s NIC for each GPU."""
    return grid("dgx-h100", size, 8, local_bytes_per_second=450 * 10**9, port_bytes_per_second=400 * GBIT)


def gb200_nvl72(size: int, per_domain: int = 64) -> Topology:
    """NVLink domains of 72 GPUs, of which jobs commonly use 64: 900 GB/s a direction, a 400 Gb/s NIC for each GPU."""
    return grid("gb200-nvl72", size, per_domain, local_bytes_per_second=900 * 10**9, port_bytes_per_second=400 * GBIT)


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
