"""Published rows: each refit that others have published, planned and predicted here, as rows for people and tools."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.cli.shorthand import WorldText, parallelism_of
from reshard.models.catalogue import find_model
from reshard.models.worlds import manifest_of
from reshard.plan.plan import plan_refit
from reshard.simulate.costs import costs_for
from reshard.simulate.predict import predict, usual_payload_nbytes, usual_seconds
from reshard.simulate.published import PUBLISHED
from reshard.topology.presets import named
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.simulate.published import PublishedRefit

STAGING_NBYTES, BUCKET_NBYTES = 512 << 20, 8 << 20
"""Of a rank with a GPU. Buckets of 8 MiB take 160 us at 400 Gb/s: many times what a message costs."""

_MUCH = 2.0


def published_rows(published: Sequence[PublishedRefit] = PUBLISHED) -> list[dict[str, Any]]:
    """Plan and predict each of them.

    Returns:
        Plain data; times in seconds, from the moment at which all ranks are here.
    """
    return [_row(refit) for refit in published]


def _row(refit: PublishedRefit) -> dict[str, Any]:
    asked = refit.model, refit.cluster, refit.source, refit.destination
    predicted = dict(_predict(*asked))
    compared = [
        {
            "what": figure.what,
            "low_seconds": figure.low_seconds,
            "high_seconds": figure.high_seconds,
            "of_predicted": _of_predicted(predicted, figure.what, figure.low_seconds, figure.high_seconds),
        }
        for figure in refit.figures
    ]
    return {
        "title": refit.title,
        "model": refit.model,
        "cluster": refit.cluster,
        "source": refit.source,
        "destination": refit.destination,
        "layout": "published" if refit.is_layout_published else "not published; a candidate",
        "published": compared,
        "published_by": refit.where,
        **predicted,
        "assumptions": _assumptions(refit),
        "remark": refit.remark,
        "differs_because": _explain(compared),
    }


@lru_cache(maxsize=32)
def _predict(model_name: str, cluster: str, source: str, destination: str) -> tuple[tuple[str, Any], ...]:
    model = find_model(model_name)
    sides = [parallelism_of(WorldText.parse(text), is_source=at == 0) for at, text in enumerate((source, destination))]
    trainer = manifest_of(model, sides[0], world="trainer")
    engine = manifest_of(model, sides[1], world="engine")
    topology, costs = named(cluster, sides[0].size + sides[1].size), costs_for(cluster)
    plans = {name: plan_refit(trainer, engine, topology, strategy=name) for name in ("reshard", "point-to-point")}
    ours, direct = (
        predict(plan, costs, staging_nbytes=STAGING_NBYTES, bucket_nbytes=BUCKET_NBYTES, mode="totals")
        for plan in plans.values()
    )
    plan = plans["reshard"]
    return (
        ("ranks", [sides[0].size, sides[1].size]),
        ("mode", ours.mode),
        ("wire_bound_seconds", ours.bound_seconds),
        ("reshard_seconds", ours.seconds),
        ("reshard_busiest", ours.totals.busiest),
        ("point_to_point_seconds", direct.seconds),
        ("usual_way_seconds", usual_seconds(plan)),
        ("usual_way_seconds_all_ports_of_a_host", usual_seconds(plan, roots=_ROOTS)),
        ("one_copy_nbytes", sum(spec.nbytes for spec in plan.specs)),
        ("usual_way_payload_nbytes", usual_payload_nbytes(plan)),
        ("reshard_crossing_nbytes", plan.reach.crossing_nbytes),
    )


_ROOTS = 8
_PREDICTED = {"reshard": "reshard_seconds", "point-to-point": "point_to_point_seconds"}


def _of_predicted(predicted: dict[str, Any], what: str, low: float, high: float) -> float | None:
    """The middle of what was published, in times of what is predicted.

    For the usual way, of the nearer end of what is predicted for one root port and for eight; 1 inside.
    """
    middle = (low + high) / 2
    if what in _PREDICTED:
        return float(middle / predicted[_PREDICTED[what]])
    least, most = predicted["usual_way_seconds_all_ports_of_a_host"], predicted["usual_way_seconds"]
    return float(middle / min(max(middle, least), most))


def _explain(compared: Sequence[dict[str, Any]]) -> str:
    reasons = []
    for figure in compared:
        ratio = figure["of_predicted"]
        if ratio > _MUCH:
            reasons.append(
                f"{figure['what']}: {ratio:.1f} times what is predicted here. Predicted is the transfer alone with "
                f"every port at its full rate; published times may hold conversions of names and types, gathers of "
                f"what does not go shard to shard, one call a tensor, the start of each call, and a network that is "
                f"shared. Nobody has run our transfer on this machine."
            )
        elif ratio < 1 / _MUCH:
            reasons.append(
                f"{figure['what']}: {ratio:.2f} of what is predicted here. Fewer bytes may have moved (another data "
                f"type, fewer layers, or a part of the model), or another layout or domain size was used."
            )
    return " ".join(reasons)


def _assumptions(refit: PublishedRefit) -> list[str]:
    costs = costs_for(refit.cluster)
    return [
        "bfloat16; all tensors of the model move, in one refit, to ranks that are all here",
        "trainer and engine on GPUs of their own, numbered one after the other; full rate at every port, no congestion",
        f"rates and latencies: {costs.source}; a 400 Gb/s port for each GPU, each way",
        f"buckets of {format_nbytes(BUCKET_NBYTES)}; {costs.message_seconds * 1e6:.1f} us a message at each end",
        "added up by the busiest port, fast link and rank; not simulated message by message",
        f"the usual way: gathered on one root and broadcast from there, both at once, by one port or {_ROOTS} ports",
        *(["domains of 64 GPUs; the trainer's ranks come first"] if refit.cluster == "gb200-nvl72" else []),
    ]


def describe_rows(rows: Sequence[dict[str, Any]]) -> str:
    """The rows for people, a paragraph each."""
    parts = []
    for row in rows:
        figures = ", ".join(
            f"{figure['what']} {_span(figure['low_seconds'], figure['high_seconds'])}" for figure in row["published"]
        )
        lines = [
            f"{row['title']}: {row['source']} -> {row['destination']} ({row['layout']})",
            f"  published  {figures or 'nothing that we know'}" + (f" ({row['published_by']})" if figures else ""),
            f"  predicted  reshard {format_seconds(row['reshard_seconds'])}, "
            f"point-to-point {format_seconds(row['point_to_point_seconds'])}, usual way "
            f"{format_seconds(row['usual_way_seconds'])} by one port or "
            f"{format_seconds(row['usual_way_seconds_all_ports_of_a_host'])} by {_ROOTS}; "
            f"wire bound {format_seconds(row['wire_bound_seconds'])}",
        ]
        lines += [f"  {text}" for text in (row["remark"], row["differs_because"]) if text]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "Assumed: " + "; ".join(rows[0]["assumptions"]) + "."])


def _span(low: float, high: float) -> str:
    return format_seconds(low) if low == high else f"{format_seconds(low)} to {format_seconds(high)}"
