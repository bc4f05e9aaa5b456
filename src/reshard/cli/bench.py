"""``reshard bench``: refits beside the usual way and bare copies, measured in one run on this machine."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from rich.console import Console
from rich.table import Table

from reshard.bench import RATIOS, SCENARIOS, TRANSPORTS
from reshard.bench.cluster_scenarios import SCENARIO_NAMES
from reshard.cli.output import emit_json, json_in_lines, json_option, size, stderr_console, write_text
from reshard.errors import VerifyError
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reshard.schedule.trace import Trace

Verb = TypeVar("Verb", bound="Callable[..., Any]")


def _several(name: str, choices: Sequence[str], what: str) -> Callable[[Verb], Verb]:
    """An option that may be given more than once, and stands for all choices where it is not given."""
    text = f"{what}; may be given more than once. All if not given."
    return click.option(f"--{name}", f"{name}s", multiple=True, type=click.Choice(choices), help=text)


def _repeat(default: int) -> Callable[[Verb], Verb]:
    text = "Measured runs of each operation."
    return click.option("--repeat", default=default, show_default=True, type=click.IntRange(1), help=text)


@contextmanager
def _wrong_bytes_exit_1(ctx: click.Context) -> Iterator[None]:
    try:
        yield
    except VerifyError as error:
        click.echo(f"{type(error).__name__}: {error}", err=True)
        ctx.exit(1)


@click.group()
def bench() -> None:
    """Measure strategies on this machine."""


@bench.command(epilog="Example: reshard bench local --scenario tp4 --size 1024 --repeat 3")
@_several("scenario", SCENARIOS, "What to measure")
@_several("transport", TRANSPORTS, "How refits move bytes")
@_repeat(7)
@click.option(
    "--size", default=8192, show_default=True, type=click.IntRange(8), help="The tensor is bf16 [size, size]."
)
@click.option(
    "--timeout", default=900.0, show_default=True, type=click.FloatRange(min=1), help="Seconds for all of it."
)
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE",
    help="Write what moved when in one more refit, for 'reshard report --trace'.",
)
@click.option("--plan", "plan_file", metavar="FILE", help="Write the plan that was followed then; report asks for it.")
@json_option
@click.pass_context
def local(
    ctx: click.Context,
    scenarios: tuple[str, ...],
    transports: tuple[str, ...],
    repeat: int,
    size: int,
    timeout: float,
    trace_file: str | None,
    plan_file: str | None,
    as_json: bool,
) -> None:
    """Two source ranks and four destination ranks on this host, a process each.

    The source holds the tensor by rows, the destination wants it by columns: in 4 parts (tp4), in 2 parts twice
    (tp2dp2). small-tensors compares 2,000 tensors with one of as many bytes. All operations run interleaved; every
    result is compared element by element before the measured runs and after them. Exit code 1 if an element is wrong.
    """
    from reshard.bench.local import run_local

    kept: list[tuple[Trace, dict[str, Any]]] = []
    with _wrong_bytes_exit_1(ctx):
        report = run_local(
            scenarios=scenarios or SCENARIOS,
            transports=transports or TRANSPORTS,
            size=size,
            repeat=repeat,
            timeout_seconds=timeout,
            progress=stderr_console().print,
            keep_trace=None if (trace_file, plan_file) == (None, None) else lambda *made: kept.append(made),
        )
    for trace, plan in kept:
        for text, path in ((json.dumps(trace.to_json()), trace_file), (json_in_lines(plan), plan_file)):
            if path is not None:
                write_text(text + "\n", path)
    if as_json:
        emit_json(report)
    else:
        _print(report)


def _print(report: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    for name in (name for name in SCENARIOS if name in report["scenarios"]):
        scenario = report["scenarios"][name]
        replicas = f", {scenario['replicas']} replicas" if scenario["replicas"] > 1 else ""
        tensors = f"{scenario['tensors']} tensors" if scenario["tensors"] > 1 else f"bf16 {report['shape']}"
        console.print(
            f"\n{name}: {tensors}, {format_nbytes(scenario['nbytes'])}{replicas}; "
            f"medians of {report['repeat']} interleaved runs",
            style="bold",
        )
        console.print(_ratios(scenario))
        console.print(_operations(scenario))
        if "fastest_usual_way" in scenario:
            console.print(f"gather_broadcast is the fastest usual way on gloo: {scenario['fastest_usual_way']}.")


def _ratios(scenario: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="dim")
    reach = scenario.get("reach", {})
    for kind, ratio in scenario.get("cpu_seconds_ratio", {}).items():
        table.add_row(f"CPU seconds, many_{kind} / one_{kind}", f"{ratio:.2f}", _aim(reach.get("cpu_seconds_ratio")))
    known = [f"{a} / {b}" for a, b in RATIOS]
    for label, ratio in sorted(scenario["ratios"].items(), key=lambda row: (*known, row[0]).index(row[0])):
        table.add_row(label, f"{ratio:.2f}", _aim(reach.get(label)))
    return table


def _aim(reach: Mapping[str, float] | None) -> str:
    return "".join(f"{bound.replace('_', ' ')} {value:g} is the aim" for bound, value in (reach or {}).items())


def _operations(scenario: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("median ms", "least", "most", "CPU ms", "wire MiB", "extra MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, seconds in scenario["seconds"].items():
        times = (seconds, *scenario["seconds_range"][name], scenario["cpu_seconds"][name])
        sizes = (scenario["wire_nbytes"][name], scenario["peak_extra_nbytes"][name])
        table.add_row(name, *(f"{1e3 * value:.2f}" for value in times), *(f"{size / 2**20:.1f}" for size in sizes))
    return table


@bench.command(epilog="Example: reshard bench cluster --scenario one-host --rate 2Gbit --nbytes 64MiB")
@_several("scenario", SCENARIO_NAMES, "What to measure")
@click.option("--rate", default="2Gbit", show_default=True, help="Of every host's link, in each direction.")
@click.option("--nbytes", default="512MiB", show_default=True, type=size, help="Bytes of all tensors together.")
@_repeat(3)
@json_option
@click.pass_context
def cluster(ctx: click.Context, scenarios: tuple[str, ...], rate: str, nbytes: int, repeat: int, as_json: bool) -> None:
    """Source and destination ranks on hosts made of namespaces, joined by links of a limited rate.

    Refits run beside the usual way (also with one copy into each host) and a bare socket that moves as many bytes over
    the busiest link, interleaved. Bytes are read from the network interfaces. What every strategy brings is compared
    element by element first; exit code 1 if one is wrong. Needs Linux, root or user namespaces, iproute2.
    """
    from reshard.bench.cluster import run_cluster
    from reshard.bench.cluster_text import render

    with _wrong_bytes_exit_1(ctx):
        report = run_cluster(
            scenarios=scenarios or SCENARIO_NAMES,
            rate=rate,
            nbytes=nbytes,
            repeat=repeat,
            progress=stderr_console().print,
        )
    if as_json:
        emit_json(report)
    else:
        Console(highlight=False).print(*render(report), sep="\n")
