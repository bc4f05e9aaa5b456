"""``reshard explain``: one tensor or one rank; who sends what to whom, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from reshard.cli.output import emit_json, json_option
from reshard.cli.problem import problem_options, read_problem
from reshard.errors import ConfigError
from reshard.plan.plan import STRATEGIES
from reshard.report.explained import describe_tensor, explain_transfers
from reshard.report.rank_part import describe_rank, explain_rank

if TYPE_CHECKING:
    from reshard.plan.plan import Plan


@click.command(epilog="Example: reshard explain --shape 8x8 --source 'fsdp=2 [fsdp, -]' --destination 'tp=4 [-, tp]'")
@click.argument("name", required=False)
@problem_options
@click.option("--strategy", type=click.Choice(STRATEGIES), help="How bytes get where they are wanted.")
@click.option("--rank", metavar="RANK", help="Only this rank; WORLD:RANK where the worlds count apart.")
@click.option("--limit", type=click.IntRange(min=0), default=60, show_default=True, help="Most lines; 0 for all.")
@json_option
def explain(
    name: str | None, strategy: str | None, rank: str | None, limit: int, as_json: bool, **problem: Any
) -> None:
    """Say who sends which box of tensor NAME to whom, and why; or what one --rank does.

    NAME may be left out where the plan has one tensor. Tensors of one or two dims are drawn: each cell says which rank
    sends it to which. Boxes are half-open and count from 0: [0:4, 2:8) is rows 0 to 3 of columns 2 to 7.
    """
    asked = read_problem(**problem)
    plan = asked.plan(strategy)
    number = None if rank is None else read_rank(plan, rank)
    if name is None and number is None:
        if len(plan.specs) != 1:
            shown = ", ".join(spec.name for spec in plan.specs[:3])
            raise click.UsageError(f"The plan has {len(plan.specs)} tensors ({shown}, ...); name one, or a --rank.")
        name = plan.specs[0].name
    if as_json:
        facts = _facts(plan, name, number)
        asked.remark()
        emit_json(facts)
        return
    if name is None:
        assert number is not None
        text = describe_rank(plan, number, limit=limit)
    else:  # click takes the colours out again where stdout is no terminal or NO_COLOR is set
        text = describe_tensor(plan, name, number, limit=limit, colour=True)
    asked.remark()
    click.echo(text)


def _facts(plan: Plan, name: str | None, number: int | None) -> dict[str, Any]:
    if name is None:
        assert number is not None
        boxes = [row.to_json() for row in explain_rank(plan, number)]
        return {**_head(plan), "rank": number, "boxes": boxes}
    transfers = [row.to_json() for row in explain_transfers(plan, name, number)]  # refuses unknown names
    spec = next(spec for spec in plan.specs if spec.name == name)
    tensor = {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "nbytes": spec.nbytes}
    return {**_head(plan), "tensor": tensor, "rank": number, "transfers": transfers}


def _head(plan: Plan) -> dict[str, Any]:
    worlds = [{"name": world.name, "first": world.first, "size": world.size} for world in plan.worlds]
    return {"digest": plan.digest, "strategy": plan.strategy, "worlds": worlds}


def read_rank(plan: Plan, text: str) -> int:
    """A rank in the plan's numbers: ``3`` where there is one world, ``trainer:3`` where there are more.

    Raises:
        ConfigError: The plan has no such world or rank.
    """
    world, _, number = text.rpartition(":")
    known = {w.name: w for w in plan.worlds}
    choices = ", ".join(f"{w.name}:0 to {w.name}:{w.size - 1}" for w in plan.worlds)
    if len(known) == 1 and not world:
        choices = f"0 to {plan.size - 1}"
        world = plan.worlds[0].name
    if world not in known or not number.isdecimal() or int(number) >= known[world].size:
        raise ConfigError(f"--rank {text}: the plan has no such rank. It has {choices}.", value=text)
    return known[world].first + int(number)
