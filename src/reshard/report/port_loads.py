"""Port loads: what each port sends and takes in beside the bound; in one domain, what each rank does."""

from __future__ import annotations

from dataclasses import dataclass
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
    seconds = [
        (out[at] / port.out_bytes_per_second, into[at] / port.in_bytes_per_second)
        for at, port in enumerate(topology.ports)
    ]
    bound = float(plan.bound.seconds)
    top = max([bound, *(value for pair in seconds for value in pair)])
    used = [at for at, port in enumerate(topology.ports) if any(rank < plan.size for rank in port.ranks)]
    if not top or not used:
        return None
    kept, left_out = busiest_columns(used, [max(pair) for pair in seconds])
    loads = []
    for at in kept:
        port, (sends, takes) = topology.ports[at], seconds[at]
        title = (
            f"{port.name} ({short_ranks(plan, port.ranks)})\n"
            f"out {format_nbytes(out[at])}, {format_seconds(sends)}\n"
            f"in {format_nbytes(into[at])}, {format_seconds(takes)}"
        )
        loads.append(Load(port.name, out[at], into[at], sends / top, takes / top, title))
    homes = [topology.domains[topology.domain_of(topology.ports[at].ranks[0])].name for at in kept]
    if homes == [load.name for load in loads]:  # one port a host, called like the host
        return PortLoads(tuple(loads), (), "port", bound / top, format_seconds(top), left_out)
    prefix = _common_prefix(homes)
    spans = spans_of([home.removeprefix(prefix) for home in homes])
    return PortLoads(tuple(loads), spans, "port", bound / top, format_seconds(top), left_out, prefix)


def _of_ranks(plan: Plan) -> PortLoads | None:
    sent, received = plan.sent_nbytes(), plan.received_nbytes()
    top = max([*sent.values(), *received.values()], default=0)
    if not top:
        return None
    kept, left_out = busiest_columns(
        range(plan.size), [max(sent.get(r, 0), received.get(r, 0)) for r in range(plan.size)]
    )
    loads = []
    for rank in kept:
        out, into = sent.get(rank, 0), received.get(rank, 0)
        title = f"{plan.rank_name(rank)}\nsends {format_nbytes(out)}\nreceives {format_nbytes(into)}"
        world = max((w for w in plan.worlds if w.first <= rank), key=lambda w: w.first)
        loads.append(Load(str(rank - world.first), out, into, out / top, into / top, title))
    homes = [next(w.name for w in plan.worlds if w.first <= r < w.first + w.size) for r in kept]
    spans = spans_of(homes) if len(plan.worlds) > 1 else ()
    return PortLoads(tuple(loads), spans, "rank", 0.0, format_nbytes(top), left_out)


def busiest_columns(columns: Sequence[int], weight: Sequence[float]) -> tuple[list[int], int]:
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
