"""``reshard report``: a plan, and a trace of it where there is one, as one HTML file to look at and to send on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.cli.json_files import called, made_from, read_json
from reshard.cli.output import emit_json, json_option, size, write_text
from reshard.cli.problem import problem_options, read_problem
from reshard.errors import ConfigError, ProofError
from reshard.plan.plan import STRATEGIES
from reshard.report.html import make_page, render_page
from reshard.report.strategies import are_ordered_quickly
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES
from reshard.schedule.trace import Trace
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.plan.plan import Plan

EXIT_NO = 1
_DEFAULT_STAGING = format_nbytes(DEFAULT_STAGING_NBYTES).replace(" ", "")


@click.command(
    epilog="Example: reshard report --shape 8x8 --source 'fsdp=2 [fsdp, -]' --destination 'tp=4 [-, tp]' -o page.html"
)
@problem_options
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Of the plan that is shown.  [default: reshard]")
@click.option("--alone", is_flag=True, help="Leave out the other strategies, which are planned for comparison.")
@click.option("--tensor", "tensors", metavar="NAME", multiple=True, help="Draw this tensor; several for several.")
@click.option("--trace", "trace_file", metavar="FILE", help="What moved when, as a timeline; '-' is stdin.")
@click.option(
    "--staging",
    type=size,
    metavar="SIZE",
    help=f"The most staging memory a rank may use, for the rounds.  [default: {_DEFAULT_STAGING}, where they are "
    "found quickly]",
)
@click.option("-o", "--output", metavar="FILE", default="report.html", show_default=True, help="'-' is stdout.")
@json_option
def report(
    strategy: str | None,
    alone: bool,
    tensors: tuple[str, ...],
    trace_file: str | None,
    staging: int | None,
    output: str,
    as_json: bool,
    **problem: Any,
) -> None:
    """Write a plan as one self-contained HTML page.

    It shows both layouts over some tensors, who sends to whom, ports against the bound, strategies side by side, and a
    searchable table of tensors; with --trace a timeline by rank. The page needs no network, and is readable in print
    and without scripts. Without --tensor one tensor of each of the kinds that weigh most is drawn.

    What is planned is said as for 'reshard plan'; --plan takes a saved plan. Exit code 1 if it cannot be proved.
    """
    if output == "-" and as_json:
        raise click.UsageError("--json and '--output -' both write to stdout; choose one.")
    asked = read_problem(**problem)
    plan = asked.plan(strategy)
    trace = None if trace_file is None else read_trace(trace_file, plan)
    others = [] if alone else [asked.plan(name) for name in STRATEGIES if name != plan.strategy]
    if staging is None and are_ordered_quickly([plan, *others], DEFAULT_STAGING_NBYTES):
        staging = DEFAULT_STAGING_NBYTES
    try:
        page = make_page(
            plan, others=others, tensors=tensors, trace=trace, staging_nbytes=staging, about=_about(problem)
        )
    except ProofError as error:
        click.echo(f"not proven: {error}", err=True)
        raise click.exceptions.Exit(EXIT_NO) from None
    text = render_page(page)
    nbytes = len(text.encode())
    write_text(text, output)
    asked.remark()
    if staging is None:
        click.echo(f"Rounds are left out, to be quick; --staging {_DEFAULT_STAGING} shows them.", err=True)
    if as_json:
        drawn = [figure.name for figure in page.figures]
        emit_json({"digest": plan.digest, "nbytes": nbytes, "output": output, "tensors_drawn": drawn})
    elif output != "-":
        click.echo(f"{output}: {format_nbytes(nbytes)}, open it in a browser")


def _about(problem: Mapping[str, Any]) -> str:
    """The question as it was put, where it was put in shorthands."""
    what = problem["model"] or problem["shape"]
    return f"{what}: {problem['source']} → {' and '.join(problem['destinations'])}" if what else ""


def read_trace(path: str, plan: Plan) -> Trace:
    """Read a trace that ``Trace.to_json`` wrote.

    Raises:
        ConfigError: The file cannot be read, it is not a trace, or it is the trace of another plan.
    """
    trace = made_from(read_json(path), path, Trace.from_json, "a trace (Trace.to_json)", ConfigError)
    if trace.plan_digest not in (None, plan.digest):
        raise ConfigError(
            f"{called(path)} is the trace of plan {str(trace.plan_digest)[:16]}, and this is plan {plan.digest[:16]}. "
            f"Give the plan that was followed: --plan FILE.",
            plan=plan.digest,
        )
    return trace
