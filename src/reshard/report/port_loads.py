"""Port loads: what each port sends and takes in beside the bound; in one domain, what each rank does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.report.ranks import short_ranks
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.plan.plan import Plan

MOST_NAMED = 12
_MOST_COLUMNS = 512


@dataclass(frozen=True, slots=True)
class Load:
    """One port (or rank): bytes out and in, and what share of the chart's height each makes."""

    name: str
    """Of the port; a rank's number in its world, which the span below it names."""

    out_nbytes: int
    in_nbytes: int
    out_share: float
    in_share: float
    title: str


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring columns of one domain or world, ``first`` and ``last`` included."""

    name: str
    first: int
    last: int


@dataclass(frozen=True)
class PortLoads:
    """Columns upwards for what goes out, downwards for what comes in; shares of the taller of bound and busiest."""

    loads: tuple[Load, ...]
    spans: tuple[Span, ...]
    unit: str
    bound_share: float
    """0 where there is no bound: all ranks share one fast link."""

    top: str
    """What the full height stands for."""

    left_out: int
    """Columns beyond those that are drawn, the least busy."""

    prefix: str = ""
    """What the names of all spans begin with, and is said once: ``gb200-nvl72/``."""

    @property
    def is_named(self) -> bool:
        return len(self.loads) <= MOST_NAMED


def port_loads(plan: Plan) -> PortLoads | None:
    """The loads of a plan; None where no byte leaves its rank."""
    return _of_ranks(plan) if plan.topology.is_flat else _of_ports(plan)


def _of_ports(plan: Plan) -> PortLoads | None:
    topology = plan.topology
    out, into = [0] * len(topology.ports), [0] * len(topology.ports)
    for (a, b), nbytes in plan.pair_nbytes().items():
        if topology.domain_of(a) != topology.domain_of(b):
            out[topology.port_of(topology.sends_for(a, b))] += nbytes
            into[topology.port_of(b)] += nbytes
    used = [at for at, port in enumerate(topology.ports) if any(rank < plan.size for rank in port.ranks)]
    if not used or not any(out):
        return None
    timed = [
        Timed(
            port.name,
            short_ranks(plan, port.ranks),
            out[at],
            out[at] / port.out_bytes_per_second,
            into[at],
            into[at] / port.in_bytes_per_second,
        )
        for at, port in enumerate(topology.ports)
    ]
    chart, kept = timed_chart(timed, used, float(plan.bound.seconds), unit="port", ways=("out", "in"))
    homes = [topology.domains[topology.domain_of(topology.ports[at].ranks[0])].name for at in kept]
    if homes == [load.name for load in chart.loads]:  # one port a host, called like the host
        return chart
    prefix = _common_prefix(homes)
    return replace(chart, spans=spans_of([home.removeprefix(prefix) for home in homes]), prefix=prefix)


def _of_ranks(plan: Plan) -> PortLoads | None:
    sent, received = plan.sent_nbytes(), plan.received_nbytes()
    top = max([*sent.values(), *received.values()], default=0)
    if not top:
        return None
    kept, left_out = _busiest(range(plan.size), [max(sent.get(r, 0), received.get(r, 0)) for r in range(plan.size)])
    loads = []
    for rank in kept:
        out, into = sent.get(rank, 0), received.get(rank, 0)
        title = f"{plan.rank_name(rank)}\nsends {format_nbytes(out)}\nreceives {format_nbytes(into)}"
        world = max((w for w in plan.worlds if w.first <= rank), key=lambda w: w.first)
        loads.append(Load(str(rank - world.first), out, into, out / top, into / top, title))
    homes = [next(w.name for w in plan.worlds if w.first <= r < w.first + w.size) for r in kept]
    spans = spans_of(homes) if len(plan.worlds) > 1 else ()
    return PortLoads(tuple(loads), spans, "rank", 0.0, format_nbytes(top), left_out)


@dataclass(frozen=True, slots=True)
class Timed:
    """What goes out of a port or a leaf switch and into it, in bytes and in seconds at its rates."""

    name: str
    what: str
    """It is, in a few words."""

    out_nbytes: int
    out_seconds: float
    in_nbytes: int
    in_seconds: float


def timed_chart(
    timed: Sequence[Timed], used: Sequence[int], bound: float, *, unit: str, ways: tuple[str, str]
) -> tuple[PortLoads, list[int]]:
    """A chart as high as the slowest column or the bound, without spans, and which columns it has.

    Args:
        timed: All that could be a column; something goes out of one at least.
        used: Which of them to draw, if there is room.
        bound: Seconds, where the line is drawn.
        unit: What a column stands for.
        ways: Words for what goes out and what comes in.
    """
    top = max([bound, *(seconds for one in timed for seconds in (one.out_seconds, one.in_seconds))])
    kept, left_out = _busiest(used, [max(one.out_seconds, one.in_seconds) for one in timed])
    loads = []
    for one in (timed[at] for at in kept):
        title = (
            f"{one.name} ({one.what})\n"
            f"{ways[0]} {format_nbytes(one.out_nbytes)}, {format_seconds(one.out_seconds)}\n"
            f"{ways[1]} {format_nbytes(one.in_nbytes)}, {format_seconds(one.in_seconds)}"
        )
        shares = one.out_seconds / top, one.in_seconds / top
        loads.append(Load(one.name, one.out_nbytes, one.in_nbytes, *shares, title))
    return PortLoads(tuple(loads), (), unit, bound / top, format_seconds(top), left_out), kept


def _busiest(columns: Sequence[int], weight: Sequence[float]) -> tuple[list[int], int]:
    """At most as many columns as can be told apart, in their own order."""
    kept = sorted(columns, key=lambda at: (-weight[at], at))[:_MOST_COLUMNS]
    return sorted(kept), len(columns) - len(kept)


def _common_prefix(names: Sequence[str]) -> str:
    """What all names have before their last slash, slash included; nothing where they differ in it or are one."""
    prefixes = {name[: name.rfind("/") + 1] for name in names}
    return prefixes.pop() if len(prefixes) == 1 and len(set(names)) > 1 else ""


def spans_of(homes: Sequence[str]) -> tuple[Span, ...]:
    """Neighbours of one home as spans."""
    spans: list[Span] = []
    for at, home in enumerate(homes):
        if spans and spans[-1].name == home:
            spans[-1] = Span(home, spans[-1].first, at)
        else:
            spans.append(Span(home, at, at))
    return tuple(spans)
