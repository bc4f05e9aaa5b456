"""Again: the plan of the same sides over another topology, or by another strategy, without finding the cells anew."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reshard.errors import PlanError
from reshard.plan.plan import STRATEGIES, Plan, Strategy
from reshard.plan.routes import choose_routes

if TYPE_CHECKING:
    from reshard.topology.topology import Topology


def plan_again(plan: Plan, topology: Topology | None = None, *, strategy: Strategy | None = None) -> Plan:
    """Route what a plan routes once more.

    Equal to ``plan_refit`` with the same manifests; cells and classes, which take most of its time for a large model,
    do not depend on topology or strategy and are kept.

    Args:
        plan: Whose sides, tensors and options stay.
        topology: What joins the ranks; as before if not given.
        strategy: ``"reshard"`` or ``"point-to-point"``; as before if not given.

    Raises:
        PlanError: ``gather-broadcast`` on either side, whose classes are others (whole tensors), or no strategy.
        ConfigError: The topology leaves out a rank.
    """
    wanted = strategy or plan.strategy
    if wanted not in STRATEGIES or "gather-broadcast" in (wanted, plan.strategy):
        raise PlanError(
            f"A plan of the strategy {plan.strategy!r} cannot be routed again by {wanted!r}: only 'reshard' and "
            f"'point-to-point' cut tensors alike. Use plan_refit."
        )
    joined = plan.topology if topology is None else topology
    routes = choose_routes(
        plan.classes, plan.patterns, plan.specs, cut_nbytes=plan.cut_nbytes, topology=joined, strategy=wanted
    )
    return replace(plan, topology=joined, strategy=wanted, routes=routes)
