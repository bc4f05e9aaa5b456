"""``reshard simulate``: what a refit would cost on hardware that is not here, by strategy, beside the bound."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from reshard.cli.json_files import made_from, read_json
from reshard.cli.output import emit_json, json_option, seconds, size, size_above_zero, stderr_console, write_text
from reshard.cli.problem import problem_options, read_problem
from reshard.cli.published_rows import describe_payload, describe_rows, payload_row, published_rows
from reshard.errors import ConfigError
from reshard.plan.plan import STRATEGIES
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES
from reshard.simulate.calibration import Calibration
from reshard.simulate.costs import PRESETS, costs_for
from reshard.simulate.predict import predict
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.schedule.trace import Trace
    from reshard.simulate.costs import Costs
    from reshard.simulate.predict import Mode, Prediction


@click.command(
    epilog="Example: reshard simulate --model qwen3-235b-a22b --source 'tp2 cp2 ep16 pp4' --destination 'tp8 dp8' "
    "--cluster gb200-nvl72"
)
@problem_options
@click.option("--strategy", type=click.Choice((*STRATEGIES, "all")), help="Which to simulate.  [default: all]")
@click.option(
    "--staging",
    type=size,
    metavar="SIZE",
    default=format_nbytes(DEFAULT_STAGING_NBYTES).replace(" ", ""),
    show_default=True,
    help="The most staging memory a rank may use.",
)
@click.option(
    "--bucket", type=size_above_zero, metavar="SIZE", help="How large buckets are.  [default: chosen from --staging]"
)
@click.option(
    "--costs",
    "asked_costs",
    metavar="COSTS",
    help=f"Of copies and messages: {', '.join(sorted(PRESETS))}, or a file that --calibrate wrote.  [default: those of "
    "--cluster]",
)
@click.option(
    "--transport",
    type=click.Choice(("gloo", "shm")),
    default="shm",
    show_default=True,
    help="Between ranks of one host, where --costs is a file.",
)
@click.option(
    "--copy-rate", type=size_above_zero, metavar="SIZE", help="Bytes that a rank packs or unpacks in a second (10GB)."
)
@click.option(
    "--message-seconds", type=seconds, metavar="SECONDS", help="What a message costs each end beside its bytes."
)
@click.option("--latency-seconds", type=seconds, metavar="SECONDS", help="Of a message over the network.")
@click.option(
    "--mode",
    type=click.Choice(("events", "totals")),
    help="Every message, or what the busiest ends have to do.  [default: events where messages are few]",
)
@click.option(
    "--step-seconds",
    type=seconds,
    metavar="SECONDS",
    help="Say what share of a training step of this length the refit takes.",
)
@click.option("--trace", "trace_file", metavar="FILE", help="Write what moves when, for 'reshard report --trace'.")
@click.option("--published", is_flag=True, help="The refits that others have published, beside what is predicted.")
@click.option(
    "--calibrate", metavar="FILE", help="Measure copies, messages and links of this machine, for --costs, and no more."
)
@json_option
@click.pass_context
def simulate(
    ctx: click.Context,
    /,
    strategy: str | None,
    staging: int,
    bucket: int | None,
    asked_costs: str | None,
    transport: Literal["gloo", "shm"],
    copy_rate: int | None,
    message_seconds: float | None,
    latency_seconds: float | None,
    mode: Mode | None,
    step_seconds: float | None,
    trace_file: str | None,
    published: bool,
    calibrate: str | None,
    as_json: bool,
    **problem: Any,
) -> None:
    """Predict how long a refit takes, by strategy, and what the bound is.

    Small plans are simulated message by message; of large ones, the work of the busiest port, leaf, fast link and rank
    is added up (the column 'mode' says which). Where leaf switches join the ports, 'busiest leaf' says which one's way
    to or from the spine carries most, and for what part of the time. Nothing is fitted: rates are those of data
    sheets, and each can be given.

    What is to be planned is said as for 'reshard plan'. With --published nothing else is asked: the refits that others
    have published are planned and predicted, and their figures stand beside ours. With --calibrate this machine is
    measured, for predictions of what it would do itself.
    """
    if published:
        _refuse_others(ctx, "--published", "plans what was published")
        rows, payload = published_rows(), payload_row()
        if as_json:
            emit_json({"rows": rows, "payload": payload})
        else:
            click.echo(f"{describe_rows(rows)}\n\n{describe_payload(payload)}")
        return
    if calibrate is not None:
        _refuse_others(ctx, "--calibrate", "measures this machine")
        _calibrate(calibrate)
        if as_json and calibrate != "-":
            emit_json({"output": calibrate})
        return
    if step_seconds == 0:
        raise click.UsageError("--step-seconds is a length of time; give more than 0.")
    names = STRATEGIES if strategy in (None, "all") else (strategy,)
    if trace_file is not None and mode == "totals":
        raise click.UsageError("--trace needs every message; leave '--mode totals' out.")
    asked = read_problem(**problem)
    plans = [asked.plan(name) for name in names]
    costs = _costs(asked_costs, plans[0].topology.name, transport)
    given = {"copy_bytes_per_second": copy_rate, "message_seconds": message_seconds, "latency_seconds": latency_seconds}
    if any(value is not None for value in given.values()):
        own = {name: value for name, value in given.items() if value is not None}
        costs = replace(costs, source=f"{costs.source}; given: {', '.join(sorted(own))}", **own)  # type: ignore[arg-type]
    predictions = [
        predict(
            plan,
            costs,
            staging_nbytes=staging,
            bucket_nbytes=bucket,
            mode="events" if trace_file is not None and at == 0 and mode is None else mode,
        )
        for at, plan in enumerate(plans)
    ]
    if trace_file is not None:
        trace = predictions[0].trace
        assert trace is not None, "every message of the first strategy was simulated"
        _write(trace, trace_file)
    asked.remark()
    if as_json:
        emit_json(_facts(plans[0].topology.name, predictions, costs, step_seconds))
    else:
        click.echo(_table(predictions, step_seconds))
        click.echo(f"costs: {costs.source}", err=True)


_A_CALIBRATION = "a calibration ('reshard simulate --calibrate FILE' writes one)"


def _refuse_others(ctx: click.Context, option: str, does: str) -> None:
    """Raise click.UsageError where an option is given that would have no effect beside this one."""
    others = [
        param.opts[0]
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if not {option, "--json"} & set(param.opts)
    ]
    if others:
        raise click.UsageError(f"{option} {does}, and nothing else; leave {' and '.join(others)} out.")


def _calibrate(path: str) -> None:
    from reshard.bench.calibrate import calibrate  # loads torch

    write_text(json.dumps(calibrate(stderr_console().print).to_json(), sort_keys=True) + "\n", path)


def _costs(asked: str | None, cluster: str, transport: Literal["gloo", "shm"]) -> Costs:
    """The costs of a preset, or of a calibration in a file.

    Raises:
        ConfigError: It is neither.
    """
    if asked is None or asked in PRESETS:
        return costs_for(asked or cluster)
    if asked != "-" and not Path(asked).exists():
        raise ConfigError(
            f"--costs {asked}: there is no such file, and no preset of this name; presets are "
            f"{', '.join(sorted(PRESETS))}. 'reshard simulate --calibrate FILE' writes a file."
        )
    calibration = made_from(read_json(asked), asked, Calibration.from_json, _A_CALIBRATION, ConfigError)
    return calibration.costs(transport)


def _share(prediction: Prediction, step_seconds: float) -> float:
    """The part of a step's time, the refit's own included, that is the refit's."""
    return prediction.seconds / (prediction.seconds + step_seconds)


def _facts(cluster: str, predictions: Sequence[Prediction], costs: Costs, step_seconds: float | None) -> dict[str, Any]:
    rows = [
        prediction.to_json() | ({} if step_seconds is None else {"share_of_step": _share(prediction, step_seconds)})
        for prediction in predictions
    ]
    return {"cluster": cluster, "costs": costs.source, "step_seconds": step_seconds, "strategies": rows}


def _table(predictions: Sequence[Prediction], step_seconds: float | None) -> str:
    head = ["strategy", "predicted", "bound", "bound/predicted", "on the wire", "busiest", "mode"]
    crosses = any(prediction.totals.busiest_leaf for prediction in predictions)
    if crosses:
        head.append("busiest leaf")
    rows = [head if step_seconds is None else [*head, f"of {format_seconds(step_seconds)} + refit"]]
    for prediction in predictions:
        row = [
            prediction.strategy,
            format_seconds(prediction.seconds),
            format_seconds(prediction.bound_seconds),
            "-" if prediction.fraction is None else f"{prediction.fraction:.2f}",
            format_nbytes(prediction.wire_nbytes),
            prediction.totals.busiest,
            prediction.mode,
        ]
        if crosses:
            share = prediction.busiest_leaf_share
            row.append("-" if share is None else f"{prediction.totals.busiest_leaf} {share:.0%}")
        rows.append(row if step_seconds is None else [*row, f"{_share(prediction, step_seconds):.2%}"])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _write(trace: Trace, path: str) -> None:
    text = json.dumps(trace.to_json()) + "\n"
    write_text(text, path)
