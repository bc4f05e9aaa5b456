"""Published rows: each refit that others have published, planned and predicted here, as rows for people and tools."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.cli.shorthand import WorldText, parallelism_of
from reshard.models.catalogue import STACKED, find_model
from reshard.models.summary import summary_of
from reshard.models.worlds import manifest_of
from reshard.plan.again import plan_again
from reshard.plan.plan import plan_refit
from reshard.simulate.costs import NCCL_LAUNCH, costs_for
from reshard.simulate.predict import least_seconds, predict, usual_payload_nbytes, usual_seconds
from reshard.simulate.published import PUBLISHED
from reshard.topology.presets import named
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.manifest import Manifest
    from reshard.plan.plan import Plan
    from reshard.simulate.published import PublishedRefit

STAGING_NBYTES, BUCKET_NBYTES = 512 << 20, 8 << 20
"""Of a rank with a GPU. Buckets of 8 MiB take 160 us at 400 Gb/s: many times what a message costs."""

_MUCH = 2.0


def published_rows(published: Sequence[PublishedRefit] = PUBLISHED) -> list[dict[str, Any]]:
    """Plan and predict each of them.

    Returns:
        Plain data; times in seconds, from the moment at which all ranks are here.
    """
    with _collecting_later():
        return [_row(refit) for refit in published]


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Plans hold many small values and no cycles; looking for cycles among them takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _row(refit: PublishedRefit) -> dict[str, Any]:
    asked = refit.model, refit.cluster, refit.source, refit.destination
    predicted = dict(_predict(*asked))
    counted = _also_counted(refit, predicted)
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
        "candidates": [] if refit.is_layout_published else _candidates(refit),
        "also_counted": counted,
        "differs_because": _explain(compared, counted),
    }


@lru_cache(maxsize=32)
def _predict(model_name: str, cluster: str, source: str, destination: str) -> tuple[tuple[str, Any], ...]:
    flat = _on_one_host(model_name, source, destination)
    topology, costs = named(cluster, flat.size), costs_for(cluster)
    # where nobody asks what joins the ranks, each is served directly
    plan, point_to_point = plan_again(flat, topology), replace(flat, topology=topology, strategy="point-to-point")
    bound = least_seconds(plan, costs)
    ours, direct = (
        predict(
            made,
            costs,
            staging_nbytes=STAGING_NBYTES,
            bucket_nbytes=BUCKET_NBYTES,
            mode="totals",
            bound_seconds=bound,
        )
        for made in (plan, point_to_point)
    )
    usual, payload = usual_seconds(plan), usual_payload_nbytes(plan)  # each goes through all tensors
    counted = summary_of(model_name.removesuffix(STACKED))  # of checkpoints, which name each expert
    return (
        ("ranks", [plan.src.size, *(side.size for side in plan.dst)]),
        ("mode", ours.mode),
        ("wire_bound_seconds", ours.bound_seconds),
        ("reshard_seconds", ours.seconds),
        ("reshard_busiest", ours.totals.busiest),
        ("point_to_point_seconds", direct.seconds),
        ("usual_way_seconds", usual),
        ("usual_way_seconds_all_ports_of_a_host", usual / _ROOTS),
        ("tensors", counted.tensors + counted.buffers),
        ("one_copy_nbytes", payload // 2),
        ("usual_way_payload_nbytes", payload),
        ("reshard_crossing_nbytes", plan.reach.crossing_nbytes),
        ("reshard_wire_nbytes", plan.wire_nbytes),
    )


@lru_cache(maxsize=2)
def _on_one_host(model_name: str, source: str, destination: str) -> Plan:
    """The plan of both sides, whose cells hold for every cluster."""
    return plan_refit(_side(model_name, source, True), _side(model_name, destination, False))


def _side(model_name: str, text: str, is_source: bool) -> Manifest:
    """A world of a model, the experts of a layer in one tensor each: the same bytes on the same ranks, named faster."""
    parallelism = parallelism_of(WorldText.parse(text), is_source=is_source)
    model = find_model(model_name.removesuffix(STACKED) + STACKED)
    return manifest_of(model, parallelism, world="trainer" if is_source else "engine")


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


def _candidates(refit: PublishedRefit) -> list[str]:
    """The layouts that stand for one that was not published, of all rows with the same figures."""
    same = (other for other in PUBLISHED if (other.title, other.where) == (refit.title, refit.where))
    return [f"{other.source} -> {other.destination}" for other in same if not other.is_layout_published]


def _also_counted(refit: PublishedRefit, predicted: dict[str, Any]) -> dict[str, float]:
    """What a published refit by parts may take beside the transfer that is predicted, in seconds, each by itself.

    A launch for every tensor, as where each parameter is a call of its own; and the part that does not go shard to
    shard, gathered on one rank and broadcast through its port, after the rest.
    """
    counted = {"one_launch_a_tensor": predicted["tensors"] * NCCL_LAUNCH}
    if refit.bulk_fraction is not None:
        counted["rest_by_one_port"] = (1 - refit.bulk_fraction) * predicted["usual_way_seconds"]
    return counted


def _explain(compared: Sequence[dict[str, Any]], counted: dict[str, float]) -> str:
    reasons = []
    for figure in compared:
        ratio = figure["of_predicted"]
        if ratio > _MUCH and figure["what"] == "usual way":
            reasons.append(
                f"usual way: {ratio:.1f} times what is predicted here, which counts the bytes alone, with every port "
                f"at its full rate. Published ways gather tensor by tensor, convert names and types in Python, and "
                f"broadcast each before the next one; none of that is predicted."
            )
        elif ratio > _MUCH:
            extra = sum(counted.values())
            middle = (figure["low_seconds"] + figure["high_seconds"]) / 2
            parts = [f"{format_seconds(counted['one_launch_a_tensor'])} for a launch a tensor"]
            if "rest_by_one_port" in counted:
                parts.append(
                    f"{format_seconds(counted['rest_by_one_port'])} for what does not go shard to shard, if one port "
                    f"broadcasts it afterwards"
                )
            left = middle - middle / ratio - extra
            beyond = (
                f"That leaves {format_seconds(left)} for what is not predicted: stacking and converting tensors, loops "
                f"in Python, staging through whole-shard buffers, chains of domains that are not pipelined, shared "
                f"networks."
                if left > 0
                else "That is more than the difference."
            )
            reasons.append(
                f"{figure['what']}: {ratio:.1f} times what is predicted here, which is the transfer alone with every "
                f"port at its full rate. Could be added: {' and '.join(parts)}. {beyond} Nobody has run our transfer "
                f"on this machine."
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


PAYLOAD_OF = ("generic-2.8t:stacked", "gb200-nvl72", "ep32 pp8", "ep64 tp8")
"""Of a model of 2.8T parameters: one copy is wanted, so that what crosses is what the model weighs."""


def payload_row() -> dict[str, Any]:
    """What the usual way moves logically for a model of 2.8T parameters in bfloat16, and what a refit of ours moves.

    The usual way counts both stages: every parameter is gathered whole, then broadcast whole to each receiver's group.
    """
    with _collecting_later():
        predicted = dict(_predict(*PAYLOAD_OF))
    model, cluster, source, destination = PAYLOAD_OF
    names = ("one_copy_nbytes", "usual_way_payload_nbytes", "reshard_crossing_nbytes", "reshard_wire_nbytes")
    return {
        "model": model.partition(":")[0],
        "parameters": predicted["one_copy_nbytes"] // 2,
        "cluster": cluster,
        "source": source,
        "destination": destination,
        **{name: predicted[name] for name in names},
    }


def describe_payload(row: dict[str, Any]) -> str:
    """The row in words."""
    usual, crossing, wire = (
        f"{row[name] / 1e12:.1f} TB"
        for name in ("usual_way_payload_nbytes", "reshard_crossing_nbytes", "reshard_wire_nbytes")
    )
    return (
        f"Payload of {row['model']} ({row['parameters'] / 1e12:.2f}T parameters in bfloat16), {row['source']} -> "
        f"{row['destination']} on {row['cluster']}:\n"
        f"  the usual way moves {usual} logically, gathered and then broadcast; ours takes {crossing} over the "
        f"network, {wire} over all links"
    )


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
        several = f"candidates: {'; '.join(row['candidates'])}" if len(row["candidates"]) > 1 else ""
        lines += [f"  {text}" for text in (row["remark"], several, row["differs_because"]) if text]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, "Assumed: " + "; ".join(rows[0]["assumptions"]) + "."])


def _span(low: float, high: float) -> str:
    return format_seconds(low) if low == high else f"{format_seconds(low)} to {format_seconds(high)}"
