"""What is to be planned, as the command line gives it: a saved plan, two manifests, one tensor, or a whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from reshard.cli.cluster_text import read_topology
from reshard.cli.completion import complete_cluster, complete_model
from reshard.cli.json_files import called, made_from, read_json
from reshard.cli.model_files import read_model
from reshard.cli.shorthand import WorldText, number_worlds, one_tensor, parallelism_of, parse_shape
from reshard.errors import ConfigError, ManifestError, PlanError
from reshard.layouts.manifest import Manifest
from reshard.layouts.placement import SPLITS, Split
from reshard.models.parallelism import describe
from reshard.models.worlds import manifest_of
from reshard.plan.match import place_worlds
from reshard.plan.plan import STRATEGIES, Plan, plan_refit

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.topology.topology import Topology

Verb = TypeVar("Verb", bound="Callable[..., Any]")

FORMS = (
    "Give --source and --destination (manifest files, or shorthands with --shape or --model), or --plan with a saved "
    "plan."
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What was asked: both sides, and the plan itself where a saved one was given; remarks go to stderr."""

    source: Manifest
    destinations: tuple[Manifest, ...]
    saved: Plan | None = None
    remarks: tuple[str, ...] = ()
    cluster: str | None = None

    def plan(self, strategy: str | None) -> Plan:
        """The saved plan as it is, or a new one; a strategy that differs from the saved plan's makes a new one.

        Raises:
            ManifestError, CoverageError: The two sides do not fit together.
        """
        if self.saved is not None and strategy in (None, self.saved.strategy):
            return self.saved
        return plan_refit(self.source, self.destinations, self._topology(), strategy=strategy or STRATEGIES[0])

    def _topology(self) -> Topology | None:
        if self.cluster is None:
            return None if self.saved is None else self.saved.topology
        worlds = place_worlds(self.source, self.destinations)
        return read_topology(self.cluster, max(world.first + world.size for world in worlds))

    def remark(self) -> None:
        """Say on stderr what the caller should know."""
        for remark in self.remarks:
            click.echo(remark, err=True)


_OPTIONS = (
    click.option(
        "--source",
        metavar="WORLD",
        help="The side that has the weights: a manifest file, or a shorthand such as 'fsdp=2 [fsdp, -]'.",
    ),
    click.option(
        "--destination",
        "destinations",
        metavar="WORLD",
        multiple=True,
        help="The side that needs them, likewise; several for several worlds.",
    ),
    click.option("--shape", metavar="SHAPE", help="One tensor of this shape (8192x8192); both sides are shorthands."),
    click.option("--dtype", metavar="DTYPE", help="Its dtype.  [default: bfloat16]"),
    click.option("--rule", type=click.Choice(SPLITS), help="How sizes that do not divide are cut.  [default: ceil]"),
    click.option(
        "--model",
        metavar="MODEL",
        help="A whole model: a name that 'reshard models' lists (deepseek-v3), a folder with safetensors files or a "
        "config.json, one such file, or a JSON file of names and shapes; both sides are shorthands such as "
        "'ep16 pp4 dp2' and 'tp8 dp16'.",
        shell_complete=complete_model,
    ),
    click.option("--same-ranks", is_flag=True, help="The destination's ranks are the source's; else they follow."),
    click.option(
        "--cluster",
        metavar="CLUSTER",
        help="What joins the ranks: dgx-h100, gb200-nvl72, 'dgx-h100 spine=2' (oversubscribed), hosts such as "
        "'0-1 / 2-5 @ 2Gbit', or a topology file.  [default: one host]",
        shell_complete=complete_cluster,
    ),
    click.option("--plan", "saved", metavar="FILE", help="A saved plan instead."),
)


def problem_options(verb: Verb) -> Verb:
    """Add the options by which a verb is told what to plan."""
    for option in reversed(_OPTIONS):
        verb = option(verb)
    return verb


@dataclass(frozen=True, slots=True)
class Question:
    """The values of ``problem_options``, as the caller gave them."""

    source: str | None
    destinations: tuple[str, ...]
    shape: str | None
    dtype: str | None
    rule: str | None
    model: str | None
    same_ranks: bool
    cluster: str | None
    saved: str | None

    def refuse_mixed(self) -> None:
        """Raise click.UsageError where options do not go together."""
        sides = (self.source, self.destinations, self.shape, self.dtype, self.rule, self.model, self.same_ranks)
        if self.saved is not None and any(sides):
            raise click.UsageError("--plan already says what both sides hold; leave the other options out.")
        if self.shape is not None and self.model is not None:
            raise click.UsageError("--shape is one tensor and --model many; give one of them.")
        if self.shape is None and (self.dtype or self.rule):
            raise click.UsageError("--dtype and --rule describe the tensor of --shape; give that too.")
        if [self.source, *self.destinations, self.saved].count("-") > 1:
            raise click.UsageError("Stdin ('-') can be read once.")


def read_problem(**options: Any) -> Problem:
    """Read what is to be planned from the values of ``problem_options``.

    Raises:
        click.UsageError: Options that do not go together, or too few.
        ReshardError: A file or a shorthand that does not say what it should.
    """
    question = Question(**options)
    question.refuse_mixed()
    if question.saved is None:
        return replace(_read_sides(question), cluster=question.cluster)
    plan = read_plan(question.saved)
    return Problem(plan.src, plan.dst, plan if question.cluster is None else None, (), question.cluster)


def _read_sides(question: Question) -> Problem:
    if question.source is None or not question.destinations:
        raise click.UsageError(FORMS)
    if question.shape is None and question.model is None:
        return _from_files(question.source, question.destinations, question.same_ranks)
    worlds = [WorldText.parse(text) for text in (question.source, *question.destinations)]
    if question.model is not None:
        return _whole_model(worlds, question.model, question.same_ranks)
    assert question.shape is not None
    shape, dtype = parse_shape(question.shape), question.dtype or "bfloat16"
    split = cast("Split", question.rule or "ceil")
    firsts = number_worlds(worlds, [world.size for world in worlds], same_ranks=question.same_ranks)
    sides = [
        one_tensor(world, world.mesh(first), shape, dtype, split) for world, first in zip(worlds, firsts, strict=True)
    ]
    return Problem(sides[0], tuple(sides[1:]))


def _whole_model(worlds: list[WorldText], name: str, same_ranks: bool) -> Problem:
    model = read_model(name)
    spread = [parallelism_of(world, is_source=at == 0) for at, world in enumerate(worlds)]
    for world, side in zip(worlds, spread, strict=True):
        if side.ep > 1 and not model.experts:
            raise ConfigError(f"{world.text!r}: {name} has no experts, so nothing is spread by ep. Leave it out.")
    firsts = number_worlds(worlds, [side.size for side in spread], same_ranks=same_ranks)
    sides = [manifest_of(model, side, first=first) for side, first in zip(spread, firsts, strict=True)]
    remarks = [
        f"{world.text}: {describe(side, model.layers, model.experts)}"
        for world, side in zip(worlds, spread, strict=True)
    ]
    if model.heads is None and any(side.tp > 1 for side in spread):
        remarks.append(f"No config.json beside {name}: tp cuts q, k and v into equal rows, wherever their heads begin.")
    return Problem(sides[0], tuple(sides[1:]), None, tuple(remarks))


def _from_files(source: str, destinations: tuple[str, ...], same_ranks: bool) -> Problem:
    if same_ranks:
        raise click.UsageError("--same-ranks is for shorthands; manifests of the same processes name the same world.")
    for text in (source, *destinations):
        if not Path(text).exists() and _is_shorthand(text):
            raise click.UsageError(f"{text!r} is no file. A shorthand needs --shape or --model too.")
    return Problem(read_manifest(source), tuple(read_manifest(path) for path in destinations))


def _is_shorthand(text: str) -> bool:
    try:
        WorldText.parse(text)
    except ConfigError:
        return "=" in text
    return True


def read_manifest(path: str) -> Manifest:
    """Read a manifest that ``Manifest.to_json`` wrote.

    Raises:
        ConfigError: The file cannot be read.
        ManifestError: It is not a manifest, or one that only its own rank can read.
    """
    manifest = made_from(read_json(path), path, Manifest.from_json, "a manifest (Manifest.to_json)", ManifestError)
    for entry in manifest.entries:
        if any(rank < 0 for holding in entry.holdings for rank in holding.ranks):
            raise ManifestError(
                f"{called(path)}: {entry.spec.name!r} is held by the rank that wrote the file, whose number it does "
                f"not say. Save what all ranks have agreed on: the manifests of a compiled refit's plan (.plan.src).",
                tensor=entry.spec.name,
            )
    return manifest


def read_plan(path: str) -> Plan:
    """Read a plan that ``Plan.to_json`` wrote; its routes are taken as they are.

    Raises:
        ConfigError: The file cannot be read.
        PlanError: It is not a saved plan.
    """
    return plan_of(read_json(path), path)


def plan_of(data: Any, path: str) -> Plan:
    """The plan in a file's JSON.

    Raises:
        PlanError: It is not a saved plan.
        ManifestError, CoverageError: The two sides that it says it is for do not fit together.
    """
    return made_from(data, path, Plan.from_json, "a saved plan (Plan.to_json)", PlanError)
