"""Entries: which classes of bytes must be brought into which domains from outside, each domain once.

Only what crosses between domains costs. A domain with a holder inside is served there; every other domain that needs a
class takes exactly one copy in. How much of it comes from whom, and goes in by whom, is decided in ``supply``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.plan.cells import mask_of, ranks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.plan.classes import RouteClass
    from reshard.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class Entry:
    """A class and the domains that it must be brought into from outside."""

    route_class: int
    nbytes: int
    holders: tuple[int, ...]
    needers: int
    """The mask of all ranks that it is brought to; ``domains`` follows from it."""

    domains: tuple[tuple[int, tuple[int, ...]], ...]
    """(domain, its needers)"""

    @property
    def relays(self) -> tuple[int, ...]:
        """Ranks that have the class once it has come in."""
        return ranks_of(self.needers) if len(self.domains) > 1 else ()


def find_entries(classes: Sequence[RouteClass], topology: Topology) -> list[Entry]:
    """The classes that cross into a domain, with the domains they cross into."""
    members = [mask_of(domain.ranks) for domain in topology.domains]
    served: dict[int, int] = {}  # by holders: all ranks of their domains
    rows: dict[int, tuple[tuple[int, tuple[int, ...]], ...]] = {}
    entries = []
    for at, cls in enumerate(classes):
        if cls.holders not in served:
            homes = {topology.domain_of(rank) for rank in ranks_of(cls.holders)}
            served[cls.holders] = mask_of(rank for home in homes for rank in topology.domains[home].ranks)
        needers = cls.needers & ~served[cls.holders]
        if not needers:
            continue
        if needers not in rows:
            homes = {topology.domain_of(rank) for rank in ranks_of(needers)}
            rows[needers] = tuple((home, ranks_of(needers & members[home])) for home in sorted(homes))
        entries.append(Entry(at, cls.nbytes, ranks_of(cls.holders), needers, rows[needers]))
    return entries
