"""Page: a plan, and a trace of it where there is one, as one HTML file that needs no network and no scripts.

All that is drawn is drawn here, as SVG and tables; the scripts of the page only add to it (hover, search, one rank's
peers, zoom). Text is escaped in one place, by the templates. Equal plans give equal pages, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from reshard.report.families import Family, find_families
from reshard.report.flows import kinds_of_pattern
from reshard.report.leaf_loads import LeafLoads, leaf_loads
from reshard.report.pair_matrix import PairMatrix, pair_matrix
from reshard.report.port_loads import PortLoads, port_loads
from reshard.report.strategies import Row, compare
from reshard.report.tensor_figure import TensorFigure, draw_tensor
from reshard.report.timeline import Timeline, draw_timeline
from reshard.units import format_nbytes, format_seconds
from reshard.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.plan.plan import Plan
    from reshard.plan.proof import Proof
    from reshard.schedule.trace import Trace

MOST_DRAWN = 6
"""Kinds of tensors that are drawn unless the caller names some."""

MOST_FAMILIES = 1_000
"""Rows of the table of tensors; the families with the fewest wanted bytes are left out."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number at the head of the page, and what it is."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """All that the page says, before it is HTML."""

    title: str
    sides: tuple[str, str]
    plan: Plan
    proof: Proof
    tiles: tuple[Tile, ...]
    figures: tuple[TensorFigure, ...]
    undrawn: int
    """Kinds of tensors that are not drawn."""

    matrix: PairMatrix | None
    ports: PortLoads | None
    leaves: LeafLoads | None
    timeline: Timeline | None
    strategies: tuple[str, ...]
    comparison: tuple[Row, ...]
    families: tuple[Family, ...]
    figure_of_pattern: dict[int, int]
    left_out: int
    """Tensors in families that the table leaves out."""

    about: str = ""
    """What was asked, in the caller's words."""


def make_page(
    plan: Plan,
    *,
    others: Sequence[Plan] = (),
    tensors: Sequence[str] = (),
    trace: Trace | None = None,
    staging_nbytes: int | None = None,
    about: str = "",
) -> Page:
    """Gather what the page shows.

    Args:
        plan: What is shown.
        others: Plans of the same refit under other strategies, to stand beside it in the table of strategies.
        tensors: The tensors to draw; if none are given, one of each of the kinds that weigh most.
        trace: What moved when; without one the page has no timeline.
        staging_nbytes: Put the plans in order within this much staging memory a rank, and show rounds; None: leave
            them out.
        about: What was asked, in the caller's words; stands below the title.

    Raises:
        PlanError: The plan has no tensor of a given name, or the trace is one of another plan.
        ProofError: A plan does not deliver every wanted byte exactly once.
        ScheduleError: The buckets do not fit into the staging memory.
    """
    proof = plan.proof()
    for other in others:
        other.proof()
    kinds = kinds_of_pattern(plan)
    names = list(dict.fromkeys(tensors)) or [_first_name(plan, kind) for kind in kinds[:MOST_DRAWN]]
    kind_of = {pattern: at for at, kind in enumerate(kinds) for pattern in kind}
    pattern_of = {plan.specs[tensor].name: at for at, pattern in enumerate(plan.patterns) for tensor in pattern.tensors}
    sizes = [sum(len(plan.patterns[at].tensors) for at in kind) for kind in kinds]
    drawn = [draw_tensor(plan, n, others=sizes[kind_of[pattern_of[n]]] - 1 if n in pattern_of else 0) for n in names]
    figure_of_kind = {kind_of[pattern_of[name]]: at for at, name in reversed(list(enumerate(names)))}
    families = find_families(plan)
    shown = sorted(families, key=lambda family: -family.wanted_nbytes)[:MOST_FAMILIES]
    sides = _sides(plan)
    return Page(
        title=" to ".join(sides),
        sides=sides,
        plan=plan,
        proof=proof,
        tiles=_tiles(plan),
        figures=tuple(drawn),
        undrawn=len(kinds) - len(figure_of_kind),
        matrix=pair_matrix(plan),
        ports=port_loads(plan),
        leaves=leaf_loads(plan),
        timeline=None if trace is None else draw_timeline(plan, trace),
        strategies=tuple(each.strategy for each in (plan, *others)),
        comparison=compare([plan, *others], staging_nbytes=staging_nbytes),
        families=tuple(shown),
        figure_of_pattern={p: figure_of_kind[kind] for p, kind in kind_of.items() if kind in figure_of_kind},
        about=about,
        left_out=sum(family.count for family in families) - sum(family.count for family in shown),
    )


def _first_name(plan: Plan, kind: Sequence[int]) -> str:
    return plan.specs[min(plan.patterns[at].tensors[0] for at in kind)].name


def _sides(plan: Plan) -> tuple[str, str]:
    """What both sides are called; where they count the same ranks, by what they are."""
    worlds = list(dict.fromkeys(manifest.world for manifest in plan.dst))
    return ("source", "destination") if worlds == [plan.src.world] else (plan.src.world, " and ".join(worlds))


def _tiles(plan: Plan) -> tuple[Tile, ...]:
    needers = {rank for manifest in plan.dst for entry in manifest.entries for h in entry.holdings for rank in h.ranks}
    one_copy = sum(spec.nbytes for spec in plan.specs)
    tiles = [
        Tile(format_nbytes(one_copy), "in one copy", _many(len(plan.specs), "tensor")),
        Tile(format_nbytes(plan.needed_nbytes), "wanted", f"by {_many(len(needers), 'rank')}"),
    ]
    if plan.topology.is_flat:
        sent = plan.sent_nbytes()
        tiles += [
            Tile(format_nbytes(plan.wire_nbytes), "on the wire", f"{format_nbytes(plan.local_nbytes)} stay in a rank"),
            Tile(format_nbytes(max(sent.values(), default=0)), "from the busiest sender", ""),
        ]
        return tuple(tiles)
    bound, reach = plan.bound.seconds, plan.reach
    copies = f"{max((float(copies) for _, copies in reach.copies_into), default=0.0):.3g}"
    into = "one copy into each" if copies == "1" else f"up to {copies} copies into one"
    tiles += [
        Tile(format_nbytes(reach.crossing_nbytes), "between domains", into),
        Tile(
            format_seconds(float(reach.busiest_seconds)),
            f"at the busiest {reach.busiest_kind}",
            f"{float(reach.busiest_seconds / bound):.3f} of the bound, {format_seconds(float(bound))}" if bound else "",
        ),
    ]
    return tuple(tiles)


def _many(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# -- HTML ----------------------------------------------------------------------------------------------------------


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reshard.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["nbytes"] = format_nbytes
    environment.filters["seconds"] = format_seconds
    environment.filters["many"] = _many
    return environment


def _shipped(*path: str) -> Markup:
    """A file of this package, put into the page as it is."""
    return Markup(files("reshard.report").joinpath(*path).read_text("utf-8"))


def render_page(page: Page) -> str:
    """The page as HTML."""
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            plan=page.plan,
            version=__version__,
            data=_data(page),
            style=_shipped("templates", "page.css"),
            script=_shipped("templates", "page.js"),
            libraries=[
                (name, _shipped("vendor", file), _shipped("vendor", licence))
                for name, file, licence in (
                    ("d3", "d3.min.js", "d3.LICENSE"),
                    ("Observable Plot", "plot.umd.min.js", "plot.LICENSE"),
                )
            ],
        )
    )


def _data(page: Page) -> dict[str, Any]:
    """What the scripts read; everything else they need is in the document."""
    matrix = page.matrix
    return {
        "feeds": [[row.feeds for row in figure.rows] for figure in page.figures],
        "matrix": None
        if matrix is None
        else {
            "senders": matrix.senders,
            "receivers": matrix.receivers,
            "cells": list(chain.from_iterable(matrix.cells)),
        },
        "bars": [] if page.timeline is None else [bar.title for bar in page.timeline.bars],
        "seconds": 0 if page.timeline is None else page.timeline.seconds,
        "spans": [[list(span) for span in family.spans] for family in page.families],
        "parts": [list(family.parts) for family in page.families],
    }
