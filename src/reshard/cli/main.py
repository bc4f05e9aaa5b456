"""``reshard``: the group that finds a verb's module when the verb is used, and turns errors into exit codes.

Results go to stdout, everything else to stderr. Exit codes: 0 done; 1 it ran, and the answer is no; 2 the question was
wrong. A verb lives in ``reshard.cli.<verb>`` as the click command named like it.
"""

from __future__ import annotations

import difflib
import importlib
import os
import traceback
from importlib.util import find_spec

import click

from reshard.errors import ReshardError
from reshard.version import __version__

# Their one-line helps stand here, so that `reshard --help` imports none of them.
VERBS = {
    "demo": "The main job on this machine: a real model, both worlds, proof and timings.",
    "plan": "Plan the way from one world's layout to another's.",
    "explain": "One tensor or one rank: who sends what to whom, and why.",
    "check": "Prove a plan.",
    "diff": "Two saved plans: what changed, in bytes and routes.",
    "simulate": "What a refit would take on hardware that is not here, by strategy.",
    "report": "A plan, or a trace of it, as one HTML page.",
    "models": "Public models that are known by name, with their sizes.",
    "bench": "Measure strategies on this machine.",
    "status": "A running session, from any shell: who serves what, and who waits for whom.",
    "doctor": "What this machine can do, and what to fix.",
    "completion": "What makes a shell complete verbs, options and names.",
}

EXIT_WRONG_QUESTION = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class VerbGroup(click.Group):
    """A group whose commands are modules: only the one that is used is imported."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the verbs that this installation has, in the order in which a reader meets them."""
        return [verb for verb in VERBS if find_spec(f"reshard.cli.{verb}") is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one verb; None if there is no such verb."""
        if cmd_name not in self.list_commands(ctx):
            return None
        command = getattr(importlib.import_module(f"reshard.cli.{cmd_name}"), cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"reshard.cli.{cmd_name} has no click command named {cmd_name!r}, but {command!r}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb that is asked for; one that is misspelt is answered with the nearest."""
        verbs = self.list_commands(ctx)
        close = [] if args[0] in verbs else difflib.get_close_matches(args[0], verbs, n=1)
        if close:
            ctx.fail(f"No such command {args[0]!r}. Is {close[0]!r} meant?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of verbs without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(verb, VERBS[verb]) for verb in self.list_commands(ctx)])

    def invoke(self, ctx: click.Context) -> object:
        """Run the verb; our own errors become one message and exit code 2."""
        try:
            return super().invoke(ctx)
        except ReshardError as error:
            if ctx.params["debug"]:
                click.echo(traceback.format_exc(), err=True, nl=False)
            else:
                click.echo(f"{type(error).__name__}: {error}", err=True)
            return ctx.exit(EXIT_WRONG_QUESTION)
        except KeyboardInterrupt:
            return ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=VerbGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--debug", is_flag=True, envvar="RESHARD_DEBUG", help="Show the traceback of an error (or RESHARD_DEBUG=1)."
)
@click.version_option(__version__, prog_name="reshard", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Bring a model's weights from one distributed layout to another, every needed byte once."""
    del debug  # read by VerbGroup.invoke, from the context
    if os.environ.get("NO_COLOR"):
        ctx.color = False
