"""The cluster benchmark's report for people: a table a scenario."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType


def render(report: Mapping[str, Any]) -> Iterator[RenderableType]:
    """What to print of ``run_cluster``'s report, in order."""
    for scenario in report["scenarios"]:
        yield (
            f"\n[bold]{scenario['name']}[/bold]: {format_nbytes(scenario['nbytes'])} over links of {report['rate']}, "
            f"medians of {report['repeat']} interleaved runs\n{scenario['shows']}\n"
            f"bound {format_seconds(scenario['bound_seconds'])} (link of {scenario['bound_host']}), "
            f"bare socket {format_seconds(scenario['raw_socket_seconds'])}"
        )
        yield _strategies(scenario)
        if "usual_forms" in scenario:
            fastest = min(scenario["usual_forms"], key=scenario["usual_forms"].__getitem__)
            yield f"gather_broadcast is the fastest of its forms: {fastest}."
        for host, balance in scenario.get("balance", {}).items():
            yield (
                f"{host} sends {balance['share_of_bytes']:.1%} of the bytes and has {balance['share_of_rates']:.1%} "
                "of the rates."
            )
        reached = scenario["strategies"].get("reshard", {})
        for name, aim in scenario.get("reach", {}).items() if reached else ():
            yield f"reshard {name} {reached[name]:.3f}; at most {aim:g} is the aim."


def _strategies(scenario: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("seconds", "of bound", "of socket", "busiest link", "MiB there", "copies from sources", "CPU s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, figures in scenario["strategies"].items():
        table.add_row(
            name,
            f"{figures['seconds']:.3f}",
            f"{figures['of_bound']:.3f}",
            f"{figures['of_raw_socket']:.3f}",
            figures["busiest_link"],
            f"{figures['busiest_link_nbytes'] / 2**20:.1f}",
            f"{figures['source_host_out_copies']:.3f}",
            f"{figures['cpu_seconds']:.2f}",
        )
    return table
