"""``reshard plan``: plan the way from one layout to another, prove it, add it up, and save it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import emit_json, json_in_lines, json_option, size, write_text
from reshard.cli.problem import problem_options, read_problem
from reshard.errors import ProofError
from reshard.plan.plan import STRATEGIES
from reshard.report.totals import compare_strategies, describe_plan, total
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.cli.problem import Problem
    from reshard.plan.plan import Plan
    from reshard.plan.proof import Proof
    from reshard.report.totals import Totals

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
    metavar="SIZE",
    default=format_nbytes(DEFAULT_STAGING_NBYTES).replace(" ", ""),
    show_default=True,
    help="The most staging memory a rank may use.",
)
@click.option("-o", "--output", metavar="FILE", help="Write the plan there, for explain and check; '-' is stdout.")
@json_option
def plan(strategy: str | None, staging: int, output: str | None, as_json: bool, **problem: Any) -> None:
    """Plan the way from one layout to another and prove the plan.

    Prints what goes over the wire and in how many rounds. With --json everything but plan_seconds (plan, bound and
    proof) and order_seconds (rounds), which are measured, is the same for the same question.

    A shorthand names mesh axes with their sizes and, in brackets, what splits each dim of the tensor:

    \b
      fsdp=2 [fsdp, -]            rows over 2 ranks
      dp=2 tp=4 [-, tp] @8        columns over 4, twice, on ranks 8 to 15
      fsdp=2 tp=2 [tp+fsdp, -]    rows cut by tp, each part again by fsdp
      fsdp=2 [fsdp/4, -]          rows cut into 4 runs, each run by fsdp
      dp=2 []                     a copy on each of 2 ranks

    Without @ the source's ranks count from 0 and the destination's follow. With --model only axes are given, as in
    ep16 pp4 dp2, tp8 dp16 or fsdp8; what each tensor is for says what they split.
    """
    if output is not None and strategy == "all":
        raise click.UsageError("--output writes one plan; choose one --strategy.")
    if output == "-" and as_json:
        raise click.UsageError("--json and '--output -' both write to stdout; choose one.")
    asked = read_problem(**problem)
    try:
        plans, proofs, plan_seconds = _plan(asked, STRATEGIES if strategy == "all" else (strategy,))
    except ProofError as error:
        click.echo(f"not proven: {error}", err=True)
        raise click.exceptions.Exit(EXIT_NO) from None
    started = time.perf_counter()
    totals = [total(made, staging_nbytes=staging, proof=proof) for made, proof in zip(plans, proofs, strict=True)]
    order_seconds = time.perf_counter() - started
    if output is not None:
        _write(plans[0], output)
    asked.remark()
    if as_json:
        emit_json({**_facts(plans[0], totals), "plan_seconds": plan_seconds, "order_seconds": order_seconds})
        return
    text = compare_strategies(totals) if strategy == "all" else describe_plan(plans[0], totals[0])
    click.echo(text, err=output == "-")
    click.echo(
        f"planned and proved in {format_seconds(plan_seconds)}, put in order in {format_seconds(order_seconds)}",
        err=True,
    )


def _plan(asked: Problem, strategies: Sequence[str | None]) -> tuple[list[Plan], list[Proof], float]:
    """Plan, bound and prove; the seconds are those of all strategies together."""
    started = time.perf_counter()
    plans = [asked.plan(name) for name in strategies]
    proofs = [made.proof() for made in plans]
    for made in plans:
        assert made.reach.busiest_seconds >= made.bound.seconds, "no plan beats its bound"
    return plans, proofs, time.perf_counter() - started


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
        **{name: getattr(totals[0], name) for name in _OF_THE_FIRST},
        "strategies": [row.to_json() for row in totals],
    }


_OF_THE_FIRST = ("bound_seconds", "busiest_of_bound", "rounds_of_bound", "crossings", "relayed_nbytes")
"""What is told of the first strategy beside all that is told of each."""


def _write(made: Plan, output: str) -> None:
    write_text(json_in_lines(made.to_json()) + "\n", output)
