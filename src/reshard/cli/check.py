"""``reshard check``: prove a saved plan, or one that is made from two sides."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from reshard.cli.json_files import MALFORMED, read_json
from reshard.cli.output import emit_json, json_option
from reshard.cli.problem import plan_of, problem_options, read_problem
from reshard.errors import ManifestError, PlanError, ProofError, ReshardError
from reshard.plan.plan import FIRST_FORMAT, PLAN_FORMAT, STRATEGIES
from reshard.version import __version__

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.plan.proof import Proof

EXIT_NO = 1


@click.command(epilog="Example: reshard check plan.json")
@click.argument("file", required=False)
@problem_options
@click.option("--strategy", type=click.Choice(STRATEGIES), help="Of a plan that is made here.")
@json_option
def check(file: str | None, strategy: str | None, as_json: bool, **problem: Any) -> None:
    """Prove that a plan delivers every wanted byte exactly once, from a rank that holds it.

    FILE is a plan that 'reshard plan -o FILE' saved ('-' is stdin). Its routes are replayed as they are, and it must
    still be the plan that was saved. Without FILE a plan is made from both sides and proved. Exit code 1 if the answer
    is no, with the reason.
    """
    if file is not None and (strategy is not None or any(problem.values())):
        raise click.UsageError("FILE already says what both sides hold; leave the other options out.")
    asked = None if file is not None else read_problem(**problem)
    try:
        if asked is None:
            plan, proof = prove_saved(file or "-")
        else:
            plan = asked.plan(strategy)
            proof = plan.proof()
    except (ManifestError, ProofError) as error:
        if as_json:
            emit_json({"proven": False, "error": type(error).__name__, "reason": error.message})
        else:
            click.echo(f"not proven: {error.message}")
        raise click.exceptions.Exit(EXIT_NO) from None
    if asked is not None:
        asked.remark()
    if as_json:
        emit_json({"proven": True, "digest": plan.digest, **asdict(proof)})
    else:
        click.echo(f"{proof}\ndigest {plan.digest}")


def prove_saved(file: str) -> tuple[Plan, Proof]:
    """Replay a saved plan, and compare its digest with the one it was saved with.

    Raises:
        ConfigError: The file cannot be read.
        PlanError: It is not a saved plan.
        ProofError: It is one, but it does not deliver every wanted byte exactly once, or was changed since.
    """
    data = read_json(file)
    if not isinstance(data, dict) or data.get("format") not in (PLAN_FORMAT, FIRST_FORMAT):
        raise PlanError(
            f"{file} is not a saved plan of the format {PLAN_FORMAT!r} or {FIRST_FORMAT!r}. 'reshard plan -o FILE' "
            f"saves one."
        )
    try:
        plan = plan_of(data, file)
        proof = plan.proof()
    except ProofError:
        raise
    except ReshardError as error:
        raise ProofError(f"The plan cannot be replayed. {error.message}") from error
    except MALFORMED as error:
        raise ProofError(
            f"The plan cannot be replayed: a route names what the plan does not have ({error})."
        ) from error
    if data.get("version") != __version__:
        click.echo(f"Saved by version {data.get('version')}, whose digests differ; digests are not compared.", err=True)
    elif plan.digest != data.get("digest"):
        raise ProofError(
            f"The plan delivers every byte, but it is not the one that was saved: its digest is {plan.digest[:16]}, "
            f"the file says {str(data.get('digest'))[:16]}. It was changed after it was planned; plan again."
        )
    return plan, proof
