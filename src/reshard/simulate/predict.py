"""Predict: the seconds that a plan would take, beside the bound; event by event where that is possible in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from reshard.plan.bound import find_bound
from reshard.plan.cells import ranks_of
from reshard.schedule.bucket import size_buckets
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES, plan_schedule
from reshard.simulate.simulator import simulate
from reshard.simulate.totals import add_up

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.schedule.trace import Trace
    from reshard.simulate.costs import Costs
    from reshard.simulate.totals import Totals

Mode = Literal["events", "totals"]

MOST_MESSAGES = 20_000
"""More than so many messages are not simulated one by one: it takes about 0.2 ms each, and a schedule before that."""


@dataclass(frozen=True)
class Prediction:
    """What a plan would cost.

    Args:
        strategy: Of the plan.
        mode: ``events``: every message was simulated; ``totals``: what the busiest port, leaf, link and rank do.
        seconds: From the moment at which all ranks are here to the end.
        bound_seconds: The least time of any plan that brings each domain each slice once.
        wire_nbytes: Bytes from rank to rank.
        messages: About how many, all ranks together.
        totals: What the busiest ends of each kind have to do.
        trace: Who did what when; None for ``totals``.
    """

    strategy: str
    mode: Mode
    seconds: float
    bound_seconds: float
    wire_nbytes: int
    messages: int
    totals: Totals
    trace: Trace | None = None

    @property
    def fraction(self) -> float | None:
        """The part of the predicted time that the bound is; None where nothing has to move."""
        return self.bound_seconds / self.seconds if self.seconds else None

    @property
    def busiest_leaf_share(self) -> float | None:
        """The part of the predicted time in which the busiest leaf's way to the spine, or from it, is in use.

        None where nothing crosses a spine.
        """
        return self.totals.spine_seconds / self.seconds if self.totals.busiest_leaf else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the trace."""
        return {
            "strategy": self.strategy,
            "mode": self.mode,
            "seconds": self.seconds,
            "bound_seconds": self.bound_seconds,
            "fraction_of_bound": self.fraction,
            "wire_nbytes": self.wire_nbytes,
            "messages": self.messages,
            "busiest": self.totals.busiest,
            "port_seconds": self.totals.port_seconds,
            "spine_seconds": self.totals.spine_seconds,
            "busiest_leaf": self.totals.busiest_leaf or None,
            "busiest_leaf_share": self.busiest_leaf_share,
            "link_seconds": self.totals.link_seconds,
            "copy_seconds": self.totals.copy_seconds,
            "message_seconds": self.totals.message_seconds,
        }


def predict(
    plan: Plan,
    costs: Costs,
    *,
    staging_nbytes: int = DEFAULT_STAGING_NBYTES,
    bucket_nbytes: int | None = None,
    mode: Mode | None = None,
    bound_seconds: float | None = None,
) -> Prediction:
    """Predict what a plan takes on the topology that it was made for.

    Args:
        plan: What moves.
        costs: Of copies and messages.
        staging_nbytes: The most staging memory of a rank.
        bucket_nbytes: Nominal bucket size; chosen from the limit if not given.
        mode: How; event by event if not given and there are few messages.
        bound_seconds: What ``least_seconds`` gives, where it is known: it is the same for every strategy.

    Raises:
        ScheduleError: The buckets do not fit into the limit.
    """
    size = size_buckets(staging_nbytes, bucket_nbytes, network=not plan.topology.is_flat)
    totals = add_up(plan, size, plan.topology, costs)
    messages = _count_messages(plan, size.nbytes)
    bound = least_seconds(plan, costs) if bound_seconds is None else bound_seconds
    mode = mode or ("events" if messages <= MOST_MESSAGES else "totals")
    if mode == "totals":
        seconds = max(totals.seconds, bound)
        return Prediction(plan.strategy, mode, seconds, bound, plan.wire_nbytes, messages, totals)
    schedule = plan_schedule(plan, staging_nbytes=staging_nbytes, bucket_nbytes=bucket_nbytes)
    trace = simulate(schedule, plan.topology, costs)
    return Prediction(plan.strategy, mode, trace.seconds, bound, plan.wire_nbytes, schedule.messages, totals, trace)


def least_seconds(plan: Plan, costs: Costs) -> float:
    """The plan's bound; where one domain holds everybody, what the neediest rank takes in over its fast link."""
    topology = plan.topology
    if not topology.is_flat:
        return float(find_bound(plan.classes, topology).seconds)
    needed: dict[int, int] = {}
    for cls in plan.classes:
        for rank in ranks_of(cls.needers & ~cls.holders):
            needed[rank] = needed.get(rank, 0) + cls.nbytes
    rate = topology.domains[0].bytes_per_second if topology.domains else costs.local_bytes_per_second
    return max(needed.values(), default=0) / rate


def usual_seconds(plan: Plan, *, roots: int = 1) -> float:
    """The usual way over the network: gather on one root, broadcast to everybody, both stages at once.

    The root's ports take in a copy of the model and send one, and a chain of receivers hands it on at their rate. With
    ``roots`` ports of the root's host, each carries its part. Nothing else is counted: it is the least of its kind.
    """
    one_copy = sum(spec.nbytes for spec in plan.specs)
    slowest = min(min(port.out_bytes_per_second, port.in_bytes_per_second) for port in plan.topology.ports)
    return float(Fraction(one_copy, slowest * roots))


def usual_payload_nbytes(plan: Plan) -> int:
    """What the usual way moves logically: one copy to the root, and one copy on from there."""
    return 2 * sum(spec.nbytes for spec in plan.specs)


def _count_messages(plan: Plan, bucket_nbytes: int) -> int:
    streams: dict[tuple[tuple[int, int], ...], int] = {}
    for route in plan.routes:
        edges = tuple(edge for edge in route.edges if edge[0] != edge[1])
        streams[edges] = streams.get(edges, 0) + route.nbytes
    return sum(-(-nbytes // bucket_nbytes) * len(edges) for edges, nbytes in streams.items())
