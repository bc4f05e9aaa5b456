"""Spine: what must cross between leaf switches, whatever plan is chosen, and the least time that takes.

A byte stays on a leaf where a port that sends it and a port that takes it in attach to the same one. Take a class and
the leaves at which it can be taken in or handed on, and join those of one domain: groups of leaves that have nothing in
common. Where a holder's port is at a leaf of a group, nothing need cross for that group. Into every other group at
least one copy comes down from the spine, through some leaf of the group: whoever sends it first is outside. It goes up
from a leaf of a holder, or, behind the first such copy, of a holder or a needer. These are demands as ports have them,
so the least time of the busiest leaf is a flow again (``balance``), and no plan in which each domain takes one copy is
faster.

It is not always reached: plans are made for ports, and bring a class into each domain from whoever has time to send it.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from reshard.plan.balance import PortFlow

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.plan.entries import Entry
    from reshard.topology.topology import Topology

Leaves = tuple[int, ...]
Crossings = tuple[tuple[Leaves, ...], Leaves, Leaves]
"""Groups of leaves that a copy must come down to, leaves that can send the first one up, and those that the others."""


def least_spine_seconds(entries: Sequence[Entry], topology: Topology) -> Fraction:
    """The least time in which leaves can send up and down what must cross; 0 where the spine has full bisection."""
    if not topology.is_blocking:
        return Fraction(0)
    known: dict[tuple[tuple[int, ...], int], Crossings] = {}
    up: dict[Leaves, int] = {}
    down: dict[Leaves, int] = {}
    for entry in entries:
        key = entry.holders, entry.needers
        if key not in known:
            known[key] = _crossings(entry, topology)
        groups, first, others = known[key]
        for group in groups:
            down[group] = down.get(group, 0) + entry.nbytes
        if groups:
            up[first] = up.get(first, 0) + entry.nbytes
        if len(groups) > 1:
            up[others] = up.get(others, 0) + entry.nbytes * (len(groups) - 1)
    rates_up = {at: leaf.up_bytes_per_second for at, leaf in enumerate(topology.leaves)}
    rates_down = {at: leaf.down_bytes_per_second for at, leaf in enumerate(topology.leaves)}
    return max(
        PortFlow.least_seconds([(nbytes, leaves) for leaves, nbytes in demands.items()], rates)
        for demands, rates in ((up, rates_up), (down, rates_down))
    )


def _crossings(entry: Entry, topology: Topology) -> Crossings:
    first = _sending(entry.holders, topology)
    groups: list[tuple[set[int], set[int]]] = []  # leaves joined so far, and those of them that take the class in
    others = set(first)
    for _, needers in entry.domains:
        takes, sends = _leaves(needers, topology), _sending(needers, topology)
        others |= sends
        joined = takes | sends
        apart = []
        for group in groups:
            if group[0].isdisjoint(joined):
                apart.append(group)
            else:
                joined, takes = joined | group[0], takes | group[1]
        groups = [*apart, (joined, takes)]
    crossing = sorted(tuple(sorted(takes)) for joined, takes in groups if joined.isdisjoint(first))
    return tuple(crossing), tuple(sorted(first)), tuple(sorted(others))


def _leaves(ranks: Iterable[int], topology: Topology) -> set[int]:
    return {topology.leaf_of(topology.port_of(rank)) for rank in ranks}


def _sending(ranks: Iterable[int], topology: Topology) -> set[int]:
    """The leaves at which ranks can send: their own; those of all of their domains if they send over others' ports."""
    if topology.cross_rail == "spine":
        return _leaves(ranks, topology)
    homes = {topology.domain_of(rank) for rank in ranks}
    return {leaf for home in homes for leaf in _leaves(topology.domains[home].ranks, topology)}
