"""``reshard plan``: plan the way from one layout to another, prove it, add it up, and save it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import emit_json, json_option, size
from reshard.cli.problem import problem_options, read_problem
from reshard.errors import ConfigError, ProofError
from reshard.plan.plan import STRATEGIES
from reshard.report.text import compare_strategies, describe_plan, total
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.report.text import Totals

EXIT_NO = 1


@click.command(
    epilog="Example: reshard plan --shape 8x8 --source 'fsdp=2 [fsdp, -]' --destination 'tp=4 [-, tp]' --strategy all"
)
@problem_options
@click.option(
    "--strategy",
    type=click.Choice((*STRATEGIES, "all")),
    help="How bytes get where they are wanted; 'all' compares.  [default: reshard]",
)
@click.option(
    "--staging",
    type=size,
    default=format_nbytes(DEFAULT_STAGING_NBYTES).replace(" ", ""),
    show_default=True,
    help="The most staging memory a rank may use.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan there, for explain and check; '-' is stdout.")
@json_option
def plan(strategy: str | None, staging: int, output: str | None, as_json: bool, **problem: Any) -> None:
    """Plan the way from one layout to another and prove the plan.

    Prints what goes over the wire and in how many rounds. With --json everything but plan_seconds, which is measured,
    is the same for the same question.

    A shorthand names mesh axes with their sizes and, in brackets, what splits each dim of the tensor:

    \b
      fsdp=2 [fsdp, -]            rows over 2 ranks
      dp=2 tp=4 [-, tp] @8        columns over 4, twice, on ranks 8 to 15
      fsdp=2 tp=2 [tp+fsdp, -]    rows cut by tp, each part again by fsdp
      fsdp=2 [fsdp/4, -]          rows cut into 4 runs, each run by fsdp
      dp=2 []                     a copy on each of 2 ranks

    Without @ the source's ranks count from 0 and the destination's follow. With --model only axes are given, fsdp and
    tp and dp; the names of a dense Llama-like model say what tp splits.
    """
    if output is not None and strategy == "all":
        raise click.UsageError("--output writes one plan; choose one --strategy.")
    if output == "-" and as_json:
        raise click.UsageError("--json and '--output -' both write to stdout; choose one.")
    asked = read_problem(**problem)
    asked.remark()
    started = time.perf_counter()
    plans = [asked.plan(name) for name in (STRATEGIES if strategy == "all" else (strategy,))]
    try:
        totals = [total(made, staging_nbytes=staging) for made in plans]
    except ProofError as error:
        click.echo(f"not proven: {error}", err=True)
        raise click.exceptions.Exit(EXIT_NO) from None
    seconds = time.perf_counter() - started
    if output is not None:
        _write(plans[0], output)
    if as_json:
        emit_json({**_facts(plans[0], totals), "plan_seconds": seconds})
        return
    text = compare_strategies(totals) if strategy == "all" else describe_plan(plans[0], totals[0])
    click.echo(text, err=output == "-")
    click.echo(f"planned, proved and put in order in {format_seconds(seconds)}", err=True)


def _facts(first: Plan, totals: list[Totals]) -> dict[str, Any]:
    proof = totals[0].to_json()["proof"]
    return {
        "digest": first.digest,
        "proof": {"passed": True, **proof},
        "ranks": first.size,
        "worlds": [{"name": world.name, "first": world.first, "size": world.size} for world in first.worlds],
        "tensors": len(first.specs),
        "patterns": len(first.patterns),
        "one_copy_nbytes": sum(spec.nbytes for spec in first.specs),
        "strategies": [row.to_json() for row in totals],
    }


def _write(made: Plan, output: str) -> None:
    text = json.dumps(made.to_json(), sort_keys=True, ensure_ascii=False) + "\n"
    if output == "-":
        sys.stdout.write(text)
        return
    try:
        Path(output).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.") from error
