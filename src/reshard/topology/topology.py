"""Topology: which ranks share a fast link. One domain for all of them until a cluster is described."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """Ranks in domains; the members of a domain are joined by the fast link (an NVLink domain, one host).

    ``name`` is for people. Ranks that no domain lists are in the first one.
    """

    name: str = "one-host"
    domains: tuple[tuple[int, ...], ...] = ((),)


ONE_HOST = Topology()
"""All ranks on one host: the topology that is planned for where none is given."""
