"""Topology: domains joined by a fast link inside, and the ports by which their ranks reach the slow network.

A domain is what shares the fast link: one host's memory, an NVLink domain. A port is where ranks attach to the slow
network: a NIC for each GPU, or one NIC that all ranks of a host share. Domains may be of any size and hold any ranks;
nothing is derived from rank numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Domain:
    """Ranks that share a fast link of ``bytes_per_second`` for each of them, in each direction."""

    name: str
    ranks: tuple[int, ...]
    bytes_per_second: int


@dataclass(frozen=True, slots=True)
class Port:
    """Where some ranks of one domain attach to the slow network, with its rate in each direction."""

    name: str
    ranks: tuple[int, ...]
    out_bytes_per_second: int
    in_bytes_per_second: int


@dataclass(frozen=True)
class Topology:
    """What joins the ranks of a plan.

    Args:
        name: For people.
        domains: Who shares a fast link; each rank in exactly one. Empty: one domain for all ranks.
        ports: Where the ranks of each domain attach to the network; each rank at exactly one. One domain needs none.
        latency_seconds: Of a message over the slow network.

    Raises:
        ConfigError: A rank in two domains or at two ports or at none, a port across domains, a rate below 1.
    """

    name: str = "one-host"
    domains: tuple[Domain, ...] = ()
    ports: tuple[Port, ...] = ()
    latency_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check_once("domain", [(d.name, d.ranks) for d in self.domains])
        _check_once("port", [(p.name, p.ranks) for p in self.ports])
        for port in self.ports:
            homes = {self.domain_of(rank) for rank in port.ranks}
            if len(homes) > 1:
                names = sorted(self.domains[home].name for home in homes)
                raise ConfigError(
                    f"Port {port.name!r} serves ranks of domains {names}; a port belongs to one domain. Give each "
                    f"domain its own port.",
                    port=port.name,
                )
            if min(port.out_bytes_per_second, port.in_bytes_per_second) < 1:
                raise ConfigError(f"Port {port.name!r} has a rate below 1 byte a second.", port=port.name)
        if len(self.domains) > 1:
            at_port = {rank for port in self.ports for rank in port.ranks}
            missing = sorted(rank for domain in self.domains for rank in domain.ranks if rank not in at_port)
            if missing:
                raise ConfigError(
                    f"Topology {self.name!r}: rank {missing[0]} is at no port, so nothing can reach it from another "
                    f"domain. Give each rank of each domain a port.",
                    rank=missing[0],
                )

    @property
    def is_flat(self) -> bool:
        """Whether all ranks share one fast link."""
        return len(self.domains) <= 1

    @cached_property
    def _domain_by_rank(self) -> dict[int, int]:
        return {rank: at for at, domain in enumerate(self.domains) for rank in domain.ranks}

    @cached_property
    def _port_by_rank(self) -> dict[int, int]:
        return {rank: at for at, port in enumerate(self.ports) for rank in port.ranks}

    def domain_of(self, rank: int) -> int:
        """The index of the rank's domain; 0 for all where there is one domain.

        Raises:
            ConfigError: No domain lists the rank.
        """
        if not self.domains:
            return 0
        if rank not in self._domain_by_rank:
            raise ConfigError(
                f"Topology {self.name!r} puts rank {rank} in no domain; it lists ranks "
                f"{min(self._domain_by_rank)} to {max(self._domain_by_rank)}. Describe every rank of the plan.",
                rank=rank,
            )
        return self._domain_by_rank[rank]

    def port_of(self, rank: int) -> int:
        """The index of the rank's port; KeyError in a flat topology without ports."""
        return self._port_by_rank[rank]

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back."""
        return {
            "name": self.name,
            "domains": [[d.name, list(d.ranks), d.bytes_per_second] for d in self.domains],
            "ports": [[p.name, list(p.ranks), p.out_bytes_per_second, p.in_bytes_per_second] for p in self.ports],
            "latency_seconds": self.latency_seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        return cls(
            data["name"],
            tuple(Domain(name, tuple(ranks), rate) for name, ranks, rate in data["domains"]),
            tuple(Port(name, tuple(ranks), out, into) for name, ranks, out, into in data["ports"]),
            data["latency_seconds"],
        )


def _check_once(kind: str, listed: Sequence[tuple[str, Iterable[int]]]) -> None:
    home: dict[int, str] = {}
    for name, ranks in listed:
        for rank in ranks:
            if rank in home:
                raise ConfigError(
                    f"Rank {rank} is in {kind} {home[rank]!r} and in {kind} {name!r}; a rank has one.", rank=rank
                )
            home[rank] = name


ONE_HOST = Topology()
"""All ranks on one host: the topology that is planned for where none is given."""
