"""Shell completion: the names that options take, and ``reshard completion``, which prints the shell's part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem, get_completion_class

from reshard.cli.output import emit_json, json_option
from reshard.models.catalogue import CATALOGUE, STACKED
from reshard.topology.presets import PRESETS

if TYPE_CHECKING:
    from collections.abc import Iterable

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_RESHARD_COMPLETE"


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a model of the catalogue; ``:stacked`` is offered once a name is whole. Files complete as files."""
    del ctx, param
    names = [(name, known.title) for name, known in CATALOGUE.items()]
    if incomplete.split(":")[0] in CATALOGUE:
        name = incomplete.split(":")[0]
        names.append((name + STACKED, "the experts of a layer in one tensor"))
    return _offer(names, incomplete)


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete a preset's name. Files complete as files."""
    del ctx, param
    return _offer([(name, (make.__doc__ or "").strip().splitlines()[0]) for name, make in PRESETS.items()], incomplete)


def _offer(names: Iterable[tuple[str, str]], incomplete: str) -> list[CompletionItem]:
    found = [CompletionItem(name, help=help_text) for name, help_text in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


@click.command(epilog="Example: reshard completion bash >> ~/.bashrc")
@click.argument("shell", type=click.Choice(SHELLS))
@json_option
def completion(shell: str, as_json: bool) -> None:
    """Print what makes SHELL complete verbs, options, models, clusters and strategies.

    Put it where the shell reads it at its start: ~/.bashrc, ~/.zshrc after compinit, or
    ~/.config/fish/completions/reshard.fish. It asks 'reshard' itself, so it needs no change when that changes.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(click.Command("reshard"), {}, "reshard", VARIABLE).source()
    if as_json:
        emit_json({"shell": shell, "script": script})
    else:
        click.echo(script)
