"""Scenarios of the cluster benchmark: which ranks on which hosts hold and want what, and the time that no way can beat.

All tensors of a scenario have one shape. Sources hold blocks of their rows, destinations want blocks of their columns;
edges lie on quarters, so that a scenario is a grid of 4 x 4 cells, each with holders and needers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import combinations, product

from reshard.errors import ConfigError
from reshard.layouts.box import Box

QUARTERS = 4
TENSORS = 16
ITEMSIZE = 2
FULL_NBYTES = 512 << 20

Span = tuple[int, int]
"""From one quarter up to another."""

WHOLE: Span = (0, 4)
FIRST_HALF: Span = (0, 2)
SECOND_HALF: Span = (2, 4)


@dataclass(frozen=True, slots=True)
class Source:
    """A source rank."""

    host: str
    holds: Span
    """Rows."""
    sends: Span
    """Rows that it sends in the usual way, which knows no replicas: every row has one sender."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A destination rank."""

    host: str
    wants: Span
    """Columns."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What no way of moving the bytes can beat."""

    seconds: float
    host: str
    """Whose link decides; of several the one that carries most."""
    nbytes: int
    """What that link carries then."""
    leaves: bool
    """Whether the bytes leave the host or come to it."""


@dataclass(frozen=True)
class Scenario:
    """Source ranks, then destination ranks, in order of rank.

    Args:
        name: What the report calls it.
        shows: What it is for, in a sentence.
        sources: Source ranks.
        destinations: Destination ranks.
        slow: Hosts whose link has a part of the rate only, with that part.
    """

    name: str
    shows: str
    sources: tuple[Source, ...]
    destinations: tuple[Destination, ...]
    slow: tuple[tuple[str, Fraction], ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.sources) + len(self.destinations)

    @cached_property
    def host_of(self) -> tuple[str, ...]:
        """The host of each rank."""
        return (*(source.host for source in self.sources), *(wanting.host for wanting in self.destinations))

    @cached_property
    def hosts(self) -> dict[str, tuple[int, ...]]:
        """Hosts in order of their first ranks, with their ranks."""
        return {h: tuple(r for r, at in enumerate(self.host_of) if at == h) for h in dict.fromkeys(self.host_of)}

    @property
    def source_hosts(self) -> tuple[str, ...]:
        """Hosts with source ranks."""
        return tuple(dict.fromkeys(source.host for source in self.sources))

    @property
    def destination_hosts(self) -> tuple[str, ...]:
        """Hosts with destination ranks."""
        return tuple(dict.fromkeys(destination.host for destination in self.destinations))

    def part_of_rate(self, host: str) -> Fraction:
        """What part of the common rate the host's link has."""
        return dict(self.slow).get(host, Fraction(1))

    def is_source(self, rank: int) -> bool:
        return rank < len(self.sources)

    def box(self, rank: int, side: int) -> Box:
        """What a rank holds or wants of every tensor ``[side, side]``."""
        if self.is_source(rank):
            return rows_of(self.sources[rank].holds, side)
        lo, hi = self.destinations[rank - len(self.sources)].wants
        return Box((0, lo * side // QUARTERS), (side, hi * side // QUARTERS))

    def bound(self, nbytes: int, bytes_per_second: float) -> Bound:
        """The least time for ``nbytes`` of tensors over links of a rate.

        A host takes in all that it wants and does not hold. Bytes that only some source hosts hold leave these hosts
        once, over all their links together: whatever set of them takes longest decides. Further copies may come from
        other destination hosts.
        """
        rate = {host: float(self.part_of_rate(host)) * bytes_per_second for host in self.hosts}
        cell = nbytes / QUARTERS**2
        bounds = []
        for count in range(1, len(self.source_hosts) + 1):
            for some in combinations(self.source_hosts, count):
                cells = sum(set(holders) <= set(some) and set(needers) > set() for holders, needers in self._cells)
                seconds = cells * cell / sum(rate[host] for host in some)
                fastest = max(some, key=lambda host: rate[host])
                bounds.append(Bound(seconds, fastest, math.ceil(seconds * rate[fastest]), True))
        for host in self.destination_hosts:
            cells = sum(host in needers for _, needers in self._cells)
            bounds.append(Bound(cells * cell / rate[host], host, math.ceil(cells * cell), False))
        return max(bounds, key=lambda bound: bound.seconds)  # the first of equals: what leaves a source

    @cached_property
    def _cells(self) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """By cell: the hosts that hold it, and the hosts that want it and do not hold it."""
        cells = []
        for row, column in product(range(QUARTERS), repeat=2):
            holders = tuple(dict.fromkeys(s.host for s in self.sources if s.holds[0] <= row < s.holds[1]))
            wanting = (d.host for d in self.destinations if d.wants[0] <= column < d.wants[1])
            cells.append((holders, tuple(host for host in dict.fromkeys(wanting) if host not in holders)))
        return cells


def rows_of(span: Span, side: int) -> Box:
    """Rows of a tensor ``[side, side]``."""
    return Box((span[0] * side // QUARTERS, 0), (span[1] * side // QUARTERS, side))


def side_of(nbytes: int) -> int:
    """The side of square bf16 tensors, of which ``TENSORS`` have about ``nbytes``, at least 64 and a multiple of 64."""
    return max(64, round(math.sqrt(nbytes / (TENSORS * ITEMSIZE)) / 64) * 64)


_TWO_ON_A = (Source("A", FIRST_HALF, FIRST_HALF), Source("A", SECOND_HALF, SECOND_HALF))

SCENARIOS = (
    Scenario(
        "one-host",
        "Sources on A; TP2 x DP2 on B: one copy crosses, the second replica is served inside B.",
        _TWO_ON_A,
        tuple(Destination("B", half) for half in (FIRST_HALF, SECOND_HALF) * 2),
    ),
    Scenario(
        "replica-per-host",
        "Sources on A; a TP2 replica on B and one on C: A sends one copy, B and C give each other what they lack.",
        _TWO_ON_A,
        tuple(Destination(host, half) for host in "BC" for half in (FIRST_HALF, SECOND_HALF)),
    ),
    Scenario(
        "tp-across-hosts",
        "Sources on A; TP2 across B and C, DP2 inside each: half a copy goes to each.",
        _TWO_ON_A,
        tuple(Destination(host, half) for host, half in (("B", FIRST_HALF), ("C", SECOND_HALF)) for _ in range(2)),
    ),
    Scenario(
        "six-hosts",
        "Sources on A; a replica on each of six hosts: the time stays near that of one.",
        _TWO_ON_A,
        tuple(Destination(host, WHOLE) for host in "BCDEFG"),
    ),
    Scenario(
        "slow-port",
        "Sources on A (all rows) and S (three quarters of them, at half the rate); B wants the left half three times, "
        "C the right half once: A and S send in the proportion of their rates.",
        (Source("A", WHOLE, SECOND_HALF), Source("S", (0, 3), FIRST_HALF)),
        (*(Destination("B", FIRST_HALF),) * 3, Destination("C", SECOND_HALF)),
        slow=(("S", Fraction(1, 2)),),
    ),
)

SCENARIO_NAMES = tuple(scenario.name for scenario in SCENARIOS)


def scenario_named(name: str) -> Scenario:
    """Raises ConfigError where there is no such scenario."""
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    raise ConfigError(f"There is no scenario {name!r}; choose from {', '.join(SCENARIO_NAMES)}.")
