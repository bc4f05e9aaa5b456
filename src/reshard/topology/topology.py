"""Topology: domains joined by a fast link inside, the ports by which their ranks reach the slow network, its switches.

A domain is what shares the fast link: one host's memory, an NVLink domain. A port is where ranks attach to the slow
network: a NIC for each GPU, or one NIC that all ranks of a host share. A leaf is the switch that ports attach to; what
goes from leaf to leaf crosses the spine. Domains and leaves may be of any size and hold any ranks; nothing is derived
from rank numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

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


@dataclass(frozen=True, slots=True)
class Leaf:
    """A switch that some ports attach to, and its rate to the spine and from it.

    A rail is one: it has the ports of one number in each of its domains. So is the switch of a group of domains, which
    has all ports of these. What goes between two ports of a leaf stays on it, at the rate of the ports.
    """

    name: str
    ports: tuple[int, ...]
    """Their places in ``Topology.ports``."""

    up_bytes_per_second: int
    down_bytes_per_second: int


CrossRail = Literal["spine", "local"]
"""How bytes reach a port at another leaf: over the spine; or over the fast link first, to a rank of the sender's domain
whose port is at that leaf, which sends them on (NCCL calls it PXN). Where the domain has no such rank: the spine."""


@dataclass(frozen=True)
class Topology:
    """What joins the ranks of a plan.

    Args:
        name: For people.
        domains: Who shares a fast link; each rank in exactly one. Empty: one domain for all ranks.
        ports: Where the ranks of each domain attach to the network; each rank at exactly one. One domain needs none.
        latency_seconds: Of a message over the slow network.
        leaves: The switches that ports attach to; each port at exactly one. Empty: ports are all that bounds the
            network.
        cross_rail: How bytes reach a port at another leaf.

    Raises:
        ConfigError: A rank in two domains or at two ports or at none, a port across domains, at two leaves or at none,
            a rate below 1.
    """

    name: str = "one-host"
    domains: tuple[Domain, ...] = ()
    ports: tuple[Port, ...] = ()
    latency_seconds: float = 0.0
    leaves: tuple[Leaf, ...] = ()
    cross_rail: CrossRail = "spine"

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
        self._check_leaves()

    def _check_leaves(self) -> None:
        if self.cross_rail not in get_args(CrossRail):
            raise ConfigError(
                f"Topology {self.name!r}: cross_rail is {self.cross_rail!r}; use one of "
                f"{', '.join(get_args(CrossRail))}."
            )
        home: dict[int, str] = {}
        for leaf in self.leaves:
            if min(leaf.up_bytes_per_second, leaf.down_bytes_per_second) < 1:
                raise ConfigError(f"Leaf {leaf.name!r} has a rate below 1 byte a second.", leaf=leaf.name)
            for port in leaf.ports:
                if not 0 <= port < len(self.ports):
                    raise ConfigError(
                        f"Leaf {leaf.name!r} lists port {port} of {len(self.ports)}; ports count from 0.",
                        leaf=leaf.name,
                    )
                if port in home:
                    raise ConfigError(
                        f"Port {self.ports[port].name!r} is at leaf {home[port]!r} and at leaf {leaf.name!r}; a port "
                        f"attaches to one.",
                        port=self.ports[port].name,
                    )
                home[port] = leaf.name
        missing = [port.name for at, port in enumerate(self.ports) if at not in home]
        if self.leaves and missing:
            raise ConfigError(
                f"Topology {self.name!r}: port {missing[0]!r} is at no leaf. Name each port at one leaf, or leave the "
                f"leaves out.",
                port=missing[0],
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

    # -- leaves and spine ------------------------------------------------------------------------------------------

    @cached_property
    def _leaf_by_port(self) -> dict[int, int]:
        return {port: at for at, leaf in enumerate(self.leaves) for port in leaf.ports}

    def leaf_of(self, port: int) -> int:
        """The index of a port's leaf; KeyError where there are no leaves."""
        return self._leaf_by_port[port]

    @cached_property
    def is_blocking(self) -> bool:
        """Whether the spine can be the limit: some leaf's ports together are faster than its way to the spine is.

        Otherwise the spine has full bisection, and ports are all that bounds the network.
        """
        return len(self.leaves) > 1 and any(
            sum(self.ports[at].out_bytes_per_second for at in leaf.ports) > leaf.up_bytes_per_second
            or sum(self.ports[at].in_bytes_per_second for at in leaf.ports) > leaf.down_bytes_per_second
            for leaf in self.leaves
        )

    def sends_for(self, sender: int, receiver: int) -> int:
        """The rank whose port sends what goes from one rank to another one in another domain: mostly the sender itself.

        Where ``cross_rail`` is ``"local"``: a rank of the sender's domain at the receiver's leaf. Ranks of the domain
        that are not there themselves are dealt out over those that are.
        """
        if self.cross_rail != "local" or not self.leaves:
            return sender
        leaf, domain = self._leaf_by_port[self.port_of(receiver)], self.domain_of(sender)
        ranks = self._ranks_at.get((domain, leaf), ())
        if not ranks or self._leaf_by_port[self.port_of(sender)] == leaf:
            return sender
        return ranks[self._place_in_domain[sender] % len(ranks)]

    @cached_property
    def _ranks_at(self) -> dict[tuple[int, int], list[int]]:
        """By domain and leaf."""
        ranks: dict[tuple[int, int], list[int]] = {}
        for at, domain in enumerate(self.domains):
            for rank in domain.ranks:
                ranks.setdefault((at, self._leaf_by_port[self.port_of(rank)]), []).append(rank)
        return ranks

    @cached_property
    def _place_in_domain(self) -> dict[int, int]:
        return {rank: at for domain in self.domains for at, rank in enumerate(domain.ranks)}

    def crosses(self, sender: int, receiver: int) -> tuple[int, int] | None:
        """The leaves from and to which bytes cross the spine on their way between two domains; None where they do not.

        Args:
            sender: The rank whose port sends them (``sends_for``).
            receiver: The rank that they are for.
        """
        if not self.leaves:
            return None
        a, b = self._leaf_by_port[self.port_of(sender)], self._leaf_by_port[self.port_of(receiver)]
        return None if a == b else (a, b)

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back."""
        data = {
            "name": self.name,
            "domains": [[d.name, list(d.ranks), d.bytes_per_second] for d in self.domains],
            "ports": [[p.name, list(p.ranks), p.out_bytes_per_second, p.in_bytes_per_second] for p in self.ports],
            "latency_seconds": self.latency_seconds,
        }
        if not self.leaves:
            return data
        leaves = [[x.name, list(x.ports), x.up_bytes_per_second, x.down_bytes_per_second] for x in self.leaves]
        return data | {"leaves": leaves, "cross_rail": self.cross_rail}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        return cls(
            data["name"],
            tuple(Domain(name, tuple(ranks), rate) for name, ranks, rate in data["domains"]),
            tuple(Port(name, tuple(ranks), out, into) for name, ranks, out, into in data["ports"]),
            data["latency_seconds"],
            tuple(Leaf(name, tuple(ports), up, down) for name, ports, up, down in data.get("leaves", ())),
            data.get("cross_rail", "spine"),
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
