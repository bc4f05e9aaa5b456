"""Leaf loads: what goes up from each leaf switch to the spine and comes down from it, beside what must."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.report.port_loads import PortLoads, Timed, spans_of, timed_chart
from reshard.units import count

if TYPE_CHECKING:
    from reshard.plan.plan import Plan


@dataclass(frozen=True)
class LeafLoads:
    """Columns upwards for what a leaf sends up to the spine, downwards for what comes down to it."""

    chart: PortLoads | None
    """None where nothing crosses the spine. Its line is the spine's own bound, or the plan's with full bisection."""

    crossing_nbytes: int
    is_blocking: bool
    """Whether the spine has less than full bisection, so that it can be the limit."""


def leaf_loads(plan: Plan) -> LeafLoads | None:
    """The loads of a plan; None where the topology has no leaf switches."""
    topology = plan.topology
    if not topology.leaves:
        return None
    up, down = _by_leaf(plan)
    crossing, blocking = sum(up), topology.is_blocking
    if not crossing:
        return LeafLoads(None, 0, blocking)
    timed = [
        Timed(
            leaf.name,
            count(len(leaf.ports), "port"),
            up[at],
            up[at] / leaf.up_bytes_per_second,
            down[at],
            down[at] / leaf.down_bytes_per_second,
        )
        for at, leaf in enumerate(topology.leaves)
    ]
    ranks_at = [[rank for at in leaf.ports for rank in topology.ports[at].ranks] for leaf in topology.leaves]
    used = [at for at, ranks in enumerate(ranks_at) if any(rank < plan.size for rank in ranks)]
    bound = float(plan.bound.spine_seconds if blocking else plan.bound.seconds)
    chart, kept = timed_chart(timed, used, bound, unit="leaf", ways=("up to the spine", "down from it"))
    loads = [replace(load, name=load.name.rpartition("/")[2]) for load in chart.loads]
    groups = [topology.leaves[at].name.rpartition("/")[0] for at in kept]
    chart = replace(chart, loads=tuple(loads), spans=spans_of(groups) if all(groups) else ())
    return LeafLoads(chart, crossing, blocking)


def spine_nbytes(plan: Plan) -> int:
    """Bytes that go from leaf to leaf; 0 where the topology has no leaf switches."""
    return sum(_by_leaf(plan)[0]) if plan.topology.leaves else 0


def _by_leaf(plan: Plan) -> tuple[list[int], list[int]]:
    """What goes up from each leaf, and what comes down to each."""
    topology = plan.topology
    up, down = [0] * len(topology.leaves), [0] * len(topology.leaves)
    for (a, b), nbytes in plan.pair_nbytes().items():
        if topology.domain_of(a) == topology.domain_of(b):
            continue
        if leaves := topology.crosses(topology.sends_for(a, b), b):
            up[leaves[0]] += nbytes
            down[leaves[1]] += nbytes
    return up, down
