"""``reshard models``: the models that are known by name, and how much of each is in feed-forward projections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reshard.cli.completion import complete_model
from reshard.cli.model_files import read_model
from reshard.cli.output import emit_json, json_option
from reshard.models.catalogue import CATALOGUE, STACKED
from reshard.models.summary import Summary, summarize, summary_of
from reshard.units import format_nbytes


@click.command(epilog="Example: reshard models qwen3-4b")
@click.argument("names", metavar="[MODEL]...", nargs=-1, shell_complete=complete_model)
@json_option
def models(names: tuple[str, ...], as_json: bool) -> None:
    """List the models that --model knows by name, or describe each MODEL.

    A MODEL is one of these names (with ':stacked' behind it, all experts of a layer are one tensor), or what --model
    takes else: a folder with safetensors files or a config.json, or a file. Bytes are of one copy; the share is that
    of the projections of feed-forward blocks (gate, up and down, of experts and shared experts too).
    """
    rows = [_facts(name, _summary(name)) for name in names or CATALOGUE]
    if as_json:
        emit_json({"models": rows})
        return
    table = [("model", "parameters", "tensors", "one copy", "layers", "experts", "feed-forward", "")]
    table += [
        (
            row["name"],
            f"{row['parameters']:,}",
            f"{row['tensors']:,}",
            format_nbytes(row["nbytes"]),
            str(row["layers"]),
            str(row["experts"] or "-"),
            f"{row['feed_forward_share']:.1%}",
            row["note"],
        )
        for row in rows
    ]
    widths = [max(len(line[at]) for line in table) for at in range(len(table[0]))]
    for line in table:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:-1], widths[1:-1], strict=True)),
        ]
        click.echo("  ".join([*cells, line[-1]]).rstrip())


def _summary(name: str) -> Summary:
    """Of a model as ``--model`` takes it; one of the catalogue is added up without naming each of its tensors."""
    if Path(name).exists() or name.removesuffix(STACKED) not in CATALOGUE:
        return summarize(read_model(name))
    return summary_of(name)


def _facts(name: str, model: Summary) -> dict[str, Any]:
    known = CATALOGUE.get(name.removesuffix(STACKED))
    return {
        "name": name,
        "title": name if known is None else known.title,
        "note": "" if known is None else known.note,
        "parameters": model.parameters,
        "tensors": model.tensors,
        "buffers": model.buffers,
        "nbytes": model.nbytes,
        "layers": model.layers,
        "experts": model.experts,
        "feed_forward_share": model.feed_forward_share,
    }
