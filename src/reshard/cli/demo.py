"""``reshard demo``: the main job on this machine, told to a person or as JSON."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from reshard.cli.output import emit_json, json_option, stderr_console
from reshard.errors import EnvironmentNotSupported
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.demo.outcome import Outcome

_WAYS = (
    ("gather_broadcast", "usual way on gloo, {form}"),
    ("gather_broadcast_same_transport", "usual way on reshard's transport"),
    ("point_to_point", "point to point"),
    ("reshard", "reshard"),
)


@click.command(epilog='Example: reshard demo --source "fsdp2 tp2" --destination tp4')
@click.option(
    "--model",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A Hugging Face checkpoint folder (Llama, Mistral, Qwen2 or Qwen3); SmolLM2-135M from a package if not given.",
)
@click.option("--source", default="fsdp2", show_default=True, help="The trainer's ranks: fsdp and tp with their sizes.")
@click.option("--destination", default="tp2 dp2", show_default=True, help="The engine's ranks: tp and dp.")
@click.option("--question", default="What is the capital of France?", show_default=True, help="Asked of both worlds.")
@click.option(
    "--max-tokens", default=24, show_default=True, type=click.IntRange(1, 512), help="Length of an answer at most."
)
@click.option(
    "--timeout", default=240.0, show_default=True, type=click.FloatRange(min=1), help="Seconds for all of it."
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where the packaged model is kept once it is converted; ~/.cache/reshard if not given.",
)
@json_option
@click.pass_context
def demo(
    ctx: click.Context,
    folder: Path | None,
    source: str,
    destination: str,
    question: str,
    max_tokens: int,
    timeout: float,
    cache_dir: Path | None,
    as_json: bool,
) -> None:
    """Refit a real model between two worlds of processes on this machine, prove it and time it.

    The source world holds the model as a trainer does, the destination world as an inference engine does. Exit code 1
    if an element or an answer differs from the source's.
    """
    from reshard.demo.worlds import DestinationWorld, SourceWorld, check_ranks

    worlds = SourceWorld.parse(source), DestinationWorld.parse(destination)
    check_ranks(*worlds)
    progress = _progress()
    try:
        from reshard.demo.checkpoint import Checkpoint, cache_folder, packaged_checkpoint
        from reshard.demo.run import Story, run_demo
    except ImportError as error:
        raise EnvironmentNotSupported(
            f"The demo needs more than the library: {error}. Install it with pip install 'reshard[demo]'."
        ) from error
    checkpoint = (
        packaged_checkpoint(cache_dir or cache_folder(), progress) if folder is None else Checkpoint.open(folder)
    )
    story = Story(checkpoint, *worlds, question, max_tokens=max_tokens, timeout=timeout)
    outcome = run_demo(story, progress)
    if as_json:
        emit_json(outcome.to_json())
    else:
        show(outcome, Console(highlight=False))
    if not outcome.ok:
        ctx.exit(1)


def _progress() -> Callable[[str], None]:
    console, begun = stderr_console(), time.monotonic()

    def tell(text: str) -> None:
        console.print(Text(f"{time.monotonic() - begun:6.1f} s  {text}", style="dim"))

    return tell


def show(outcome: Outcome, console: Console) -> None:
    """Tell a person what came out."""
    console.print(
        f"\n[bold]{outcome.model}[/], {outcome.parameters:,} parameters, "
        f"{format_nbytes(outcome.model_nbytes)} in bf16\n"
        f"source       {outcome.source}: transformers, FSDP2\n"
        f"destination  {outcome.destination}: engine with fused buffers, poisoned at start\n"
    )
    console.print(_answers(outcome))
    console.print(_timings(outcome))
    console.print(_movements(outcome))
    console.print(_copies(outcome))
    if outcome.verified:
        console.print("[green]Every element equals the source's, after both refits and after every timed run.[/]")
    else:
        console.print(Text("Elements differ from the source's:", style="red"))
        for line in outcome.mismatches[:20]:
            console.print(Text(f"  {line}"))
    if not all(answer.agree for answer in outcome.answers):
        console.print(Text("An answer of the destination differs from the source's.", style="red"))
    for note in outcome.notes:
        console.print(Text(f"Note: {note}"))


def _answers(outcome: Outcome) -> Table:
    table = Table(title=Text(outcome.question), title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("destination, poisoned", Text(outcome.before or "(nothing)", style="red"))
    for answer in outcome.answers:
        if answer.version > 1:
            table.add_row("", Text(f"optimizer step: {outcome.step_changed:,} weights changed", style="dim"))
        table.add_row(f"source, version {answer.version}", Text(answer.source))
        style = "green" if answer.agree else "red"
        table.add_row(f"destination, refit {answer.version}", Text(answer.destination, style=style))
    return table


def _timings(outcome: Outcome) -> Table:
    table = Table(title="\nOne version to all destination ranks", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("way")
    table.add_column("seconds", justify="right")
    table.add_column("reshard is faster", justify="right")
    seconds = dict(outcome.seconds)
    for name, text in _WAYS:
        ratio = seconds[name] / seconds["reshard"]
        words = text.format(form=outcome.usual_form.replace("_", " "))
        table.add_row(words, f"{seconds[name]:.4f}", "" if name == "reshard" else f"{ratio:.2f} x")
    table.add_section()
    for refit in outcome.refits:
        note = (
            f"first, after {format_seconds(outcome.compile_seconds)} of planning"
            if refit.version == 1
            else "no new plan"
        )
        table.add_row(f"refit {refit.version} ({note})", f"{refit.seconds:.4f}", "")
    return table


def _short(how: str) -> str:
    """``"shm: read in place, one copy, since ..."`` -> ``"shm, one copy"``."""
    transport, _, rest = how.split(", since ")[0].partition(": ")
    return f"{transport}, {rest.removeprefix('read in place, ').removesuffix(' through staging')}"


def _movements(outcome: Outcome) -> Table:
    moved = outcome.refits[0].nbytes
    table = Table(
        title=f"\nMoved in a refit: {format_nbytes(moved)}, {moved / outcome.model_nbytes:.2f} copies of the model",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for column in ("rank", "own pieces", "staging", "given", "taken", "how"):
        table.add_column(column, justify="left" if column in ("rank", "how") else "right")
    for rank in outcome.ranks:
        ways = sorted({_short(how) for _, how in rank.links})
        sizes = (rank.holds, rank.staging, rank.sent, rank.received)
        table.add_row(
            f"{rank.world} {rank.rank}", *(format_nbytes(n) if n else "-" for n in sizes), Text("; ".join(ways))
        )
    return table


def _copies(outcome: Outcome) -> Text:
    ours, theirs = dict(outcome.copies_per_domain)["destination"], dict(outcome.copies_point_to_point)["destination"]
    return Text(
        f"\nWith each world on a host of its own, {ours:.2f} copies of the model entered the destination's host\n"
        f"(point to point: {theirs:.2f}); they were shared out inside it.\n"
    )
