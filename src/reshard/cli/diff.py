"""``reshard diff``: two saved plans, and what changed from one to the other in layouts, bytes and routes."""

from __future__ import annotations

import click

from reshard.cli.output import emit_json, json_option
from reshard.cli.problem import read_plan
from reshard.report.difference import compare_plans, describe_difference

EXIT_DIFFERENT = 1


@click.command(epilog="Example: reshard diff before.json after.json")
@click.argument("before")
@click.argument("after")
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Most lines a list; 0: all.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@json_option
def diff(before: str, after: str, limit: int, exit_code: bool, as_json: bool) -> None:
    """Say what changed from plan BEFORE to plan AFTER.

    Both are files that 'reshard plan -o FILE' saved; '-' is stdin. Shows the options, worlds and layouts that differ,
    totals side by side, bytes from world to world, and the pairs of ranks that carry more or less.
    """
    if before == after == "-":
        raise click.UsageError("Stdin ('-') can be read once.")
    difference = compare_plans(read_plan(before), read_plan(after))
    if as_json:
        emit_json(difference.to_json())
    else:
        click.echo(describe_difference(difference, limit=limit))
    if exit_code and not difference.equal:
        raise click.exceptions.Exit(EXIT_DIFFERENT)
