"""Difference: what changed from one plan to another, in layouts, bytes and routes, with ranks named by their worlds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reshard.plan.cells import ranks_of
from reshard.report.cut_text import describe_cut
from reshard.report.families import find_families
from reshard.units import count, format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.layouts.holding import Entry
    from reshard.plan.plan import Plan
    from reshard.report.families import Family

Pair = tuple[str, str]
Sides = dict[str, "dict[str, Entry]"]


@dataclass(frozen=True, slots=True)
class Change:
    """One number before and after; ``unit`` is ``bytes``, ``seconds``, ``ranks`` or nothing."""

    label: str
    before: float
    after: float
    unit: str = ""

    @property
    def text(self) -> str:
        """Both numbers, and how many per cent more or less the second is; how many times as much, if that is 10."""
        say = {"bytes": lambda n: format_nbytes(int(n)), "seconds": format_seconds}.get(self.unit, lambda n: f"{n:,g}")
        ratio = self.after / self.before if self.before else 1.0
        more = "" if ratio == 1 else f" ({ratio:.3g} times)" if ratio >= 10 else f" ({100 * (ratio - 1):+.3g}%)"
        return f"{say(self.before)} -> {say(self.after)}{more}" if self.before != self.after else say(self.before)


@dataclass(frozen=True, slots=True)
class FamilyChange:
    """Tensors whose boxes, or the ranks that have them, are others than before on one side or both."""

    name: str
    count: int
    source: bool
    destination: bool
    cuts: tuple[tuple[str, str, str], ...] = ()
    """(side, before, after): how the first such tensor was cut and is cut now, for each side that changed."""


@dataclass(frozen=True, slots=True)
class WorldChange:
    """How many of a world's ranks get their bytes from other peers, or other amounts, than before."""

    world: str
    ranks: int
    changed: int


@dataclass(frozen=True)
class Difference:
    """All that differs; equal plans have an empty one."""

    equal: bool
    digests: tuple[str, str]
    options: tuple[tuple[str, str, str], ...]
    """(option, before, after) of those that differ: strategy, topology, cut size."""

    worlds: tuple[Change, ...]
    """Worlds whose number of ranks differs; 0 where there is no such world."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    retyped: tuple[str, ...]
    """Tensors of another shape or dtype."""

    layouts: tuple[FamilyChange, ...]
    totals: tuple[Change, ...]
    between_worlds: tuple[Change, ...]
    receivers: tuple[WorldChange, ...]
    pairs: tuple[Change, ...]
    """Pairs of ranks that carry another number of bytes, the greatest change first."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_plans(before: Plan, after: Plan) -> Difference:
    """What changed. Ranks count in their worlds, so a world that grew does not move all that follow it."""
    old, new = _pairs(before), _pairs(after)
    old_specs, new_specs = ({spec.name: spec for spec in plan.specs} for plan in (before, after))
    common = [name for name in old_specs if name in new_specs]
    retyped = {
        name
        for name in common
        if (old_specs[name].shape, old_specs[name].dtype) != (new_specs[name].shape, new_specs[name].dtype)
    }
    both = [name for name in common if name not in retyped]
    sizes = [{world.name: world.size for world in plan.worlds} for plan in (before, after)]
    names = list(dict.fromkeys([*sizes[0], *sizes[1]]))
    changed = [Change(" -> ".join(p), old.get(p, 0), new.get(p, 0), "bytes") for p in sorted({*old, *new})]
    return Difference(
        equal=before.digest == after.digest,
        digests=(before.digest, after.digest),
        options=_options(before, after),
        worlds=tuple(
            Change(name, sizes[0].get(name, 0), sizes[1].get(name, 0), "ranks")
            for name in names
            if sizes[0].get(name) != sizes[1].get(name)
        ),
        added=_families_of(after, {name for name in new_specs if name not in old_specs}),
        removed=_families_of(before, {name for name in old_specs if name not in new_specs}),
        retyped=_families_of(after, retyped),
        layouts=_layouts(before, after, both),
        totals=_totals(before, after),
        between_worlds=_between_worlds(before, after),
        receivers=_receivers(before, after, old, new),
        pairs=tuple(
            sorted((c for c in changed if c.before != c.after), key=lambda c: (-abs(c.after - c.before), c.label))
        ),
    )


def _pairs(plan: Plan) -> dict[Pair, int]:
    return {(plan.rank_name(a), plan.rank_name(b)): nbytes for (a, b), nbytes in plan.pair_nbytes().items()}


def _options(before: Plan, after: Plan) -> tuple[tuple[str, str, str], ...]:
    rows = [
        ("strategy", before.strategy, after.strategy),
        ("cut size", format_nbytes(before.cut_nbytes), format_nbytes(after.cut_nbytes)),
    ]
    rows = [row for row in rows if row[1] != row[2]]
    if before.topology != after.topology:
        rows.append(("topology", _topology_text(before), _topology_text(after)))
    return tuple(rows)


def _topology_text(plan: Plan) -> str:
    topology = plan.topology
    return f"{topology.name}, {count(len(topology.domains) or 1, 'domain')}, {count(len(topology.ports), 'port')}"


def _families_of(plan: Plan, names: set[str]) -> tuple[str, ...]:
    """The tensors by families; a family of which only some are meant is named by its members, the first few."""
    found: list[str] = []
    for family, members in _members(plan):
        mine = [name for name in members if name in names]
        if mine and len(mine) == len(members):
            found.append(family.name)
        elif mine:
            found += mine[:3] + ([f"{len(mine) - 3} more of {family.name}"] if len(mine) > 3 else [])
    return tuple(found)


def _members(plan: Plan) -> list[tuple[Family, list[str]]]:
    return [(family, [plan.specs[tensor].name for tensor in family.tensors]) for family in find_families(plan)]


def _layouts(before: Plan, after: Plan, names: list[str]) -> tuple[FamilyChange, ...]:
    """Families in which the boxes of either side changed."""
    old, new = _pattern_by_name(before), _pattern_by_name(after)
    known: dict[tuple[int, int], tuple[bool, bool]] = {}
    sides: dict[str, tuple[bool, bool]] = {}
    for name in names:
        pair = (old[name], new[name])
        if pair not in known:
            a, b = _claims(before, pair[0]), _claims(after, pair[1])
            known[pair] = (a[0] != b[0], a[1] != b[1])
        sides[name] = known[pair]
    changes: list[FamilyChange] = []
    entries = (_sides(before), _sides(after)) if any(any(which) for which in sides.values()) else ({}, {})
    for family, members in _members(after):
        counts: dict[tuple[bool, bool], int] = {}
        for name in members:
            if any(sides.get(name, (False, False))):
                counts[sides[name]] = counts.get(sides[name], 0) + 1
        for which, number in sorted(counts.items(), reverse=True):
            first = next(name for name in members if sides.get(name) == which)
            changes.append(FamilyChange(family.name, number, *which, _cuts(*entries, first)))
    return tuple(changes)


def _cuts(old: Sides, new: Sides, name: str) -> tuple[tuple[str, str, str], ...]:
    """How the sides that changed cut a tensor, before and after; equal cuts on other ranks are not among them."""
    rows = []
    for side in dict.fromkeys([*old, *new]):
        entries = [sides.get(side, {}).get(name) for sides in (old, new)]
        texts = ["not there" if entry is None else describe_cut(entry) for entry in entries]
        if texts[0] != texts[1]:
            rows.append((side, texts[0], texts[1]))
    return tuple(rows)


def _sides(plan: Plan) -> Sides:
    """The entries of both sides by name; a side is called by its world, where each is a world of its own."""
    manifests = (plan.src, *plan.dst)
    called = [manifest.world for manifest in manifests]
    if len(set(called)) < len(called):
        numbers = [f" {at + 1}" if len(plan.dst) > 1 else "" for at in range(len(plan.dst))]
        called = ["source", *(f"destination{number}" for number in numbers)]
    return {
        side: {entry.spec.name: entry for entry in manifest.entries}
        for side, manifest in zip(called, manifests, strict=True)
    }


def _pattern_by_name(plan: Plan) -> dict[str, int]:
    return {plan.specs[tensor].name: at for at, pattern in enumerate(plan.patterns) for tensor in pattern.tensors}


def _claims(plan: Plan, at: int) -> tuple[list[tuple[object, tuple[str, ...]]], ...]:
    pattern = plan.patterns[at]
    return tuple(
        [(box, tuple(plan.rank_name(rank) for rank in ranks_of(mask))) for box, mask in side]
        for side in (pattern.held, pattern.needed)
    )


def _totals(before: Plan, after: Plan) -> tuple[Change, ...]:
    both = (before, after)
    sent = [max(plan.sent_nbytes().values(), default=0) for plan in both]
    received = [max(plan.received_nbytes().values(), default=0) for plan in both]
    rows = [
        Change("wanted", before.needed_nbytes, after.needed_nbytes, "bytes"),
        Change("on the wire", before.wire_nbytes, after.wire_nbytes, "bytes"),
        Change("within ranks", before.local_nbytes, after.local_nbytes, "bytes"),
        Change("busiest sender", sent[0], sent[1], "bytes"),
        Change("busiest receiver", received[0], received[1], "bytes"),
        Change("pairs", len(before.pair_nbytes()), len(after.pair_nbytes())),
        Change("route classes", len(before.classes), len(after.classes)),
        Change("routes", len(before.routes), len(after.routes)),
    ]
    if all(plan.topology.is_flat for plan in both):
        return tuple(rows)
    old, new = before.reach, after.reach
    rows += [
        Change("between domains", old.crossing_nbytes, new.crossing_nbytes, "bytes"),
        Change("relayed", old.relayed_nbytes, new.relayed_nbytes, "bytes"),
        Change("busiest port", float(old.busiest_seconds), float(new.busiest_seconds), "seconds"),
        Change("bound", float(before.bound.seconds), float(after.bound.seconds), "seconds"),
    ]
    return tuple(rows)


def _between_worlds(before: Plan, after: Plan) -> tuple[Change, ...]:
    sums = [_by_worlds(plan) for plan in (before, after)]
    pairs = sorted({*sums[0], *sums[1]})
    return tuple(Change(" -> ".join(p), sums[0].get(p, 0), sums[1].get(p, 0), "bytes") for p in pairs)


def _by_worlds(plan: Plan) -> dict[Pair, int]:
    home = [world.name for world in plan.worlds for _ in range(world.size)]
    sums: dict[Pair, int] = {}
    for (a, b), nbytes in plan.pair_nbytes().items():
        sums[home[a], home[b]] = sums.get((home[a], home[b]), 0) + nbytes
    return sums


def _receivers(before: Plan, after: Plan, old: Mapping[Pair, int], new: Mapping[Pair, int]) -> tuple[WorldChange, ...]:
    """By world, the ranks that receive anything in either plan, and those of them that receive it otherwise."""
    ways: list[dict[str, dict[str, int]]] = [{}, {}]
    for way, pairs in zip(ways, (old, new), strict=True):
        for (sender, receiver), nbytes in pairs.items():
            way.setdefault(receiver, {})[sender] = nbytes
    home = {p.rank_name(w.first + r): w.name for p in (before, after) for w in p.worlds for r in range(w.size)}
    worlds: dict[str, list[bool]] = {}
    for receiver in sorted({*ways[0], *ways[1]}):
        worlds.setdefault(home[receiver], []).append(ways[0].get(receiver) != ways[1].get(receiver))
    return tuple(WorldChange(world, len(ranks), sum(ranks)) for world, ranks in sorted(worlds.items()))


# -- text ----------------------------------------------------------------------------------------------------------


def describe_difference(difference: Difference, *, limit: int = 20) -> str:
    """A difference in lines for a terminal.

    Args:
        difference: What changed.
        limit: The most pairs (and the most families) that are listed; 0 for all.
    """
    before, after = difference.digests
    if difference.equal:
        return f"The plans are equal: digest {before[:16]}."
    lines = [f"plan {before[:16]} -> {after[:16]}"]
    lines += [f"  {name}: {old} -> {new}" for name, old, new in difference.options]
    lines += [f"  ranks of {change.label}: {change.text}" for change in difference.worlds]
    for word, names in (
        ("added", difference.added),
        ("removed", difference.removed),
        ("of another shape or dtype", difference.retyped),
    ):
        lines += _listed(f"tensors {word}:", list(names), limit)
    lines += _listed("layouts that changed:", [_layout_text(change) for change in difference.layouts], limit)
    width = max(len(c.label) for c in (*difference.totals, *difference.between_worlds))
    lines += ["bytes and routes:", *(f"  {c.label:<{width}}  {c.text}" for c in difference.totals)]
    if len(difference.between_worlds) > 1:
        lines += ["from world to world:", *(f"  {c.label:<{width}}  {c.text}" for c in difference.between_worlds)]
    lines += [
        f"  {w.changed} of the {w.ranks} receiving ranks of {w.world} get other bytes or from other peers"
        for w in difference.receivers
    ]
    pairs = [f"{change.label}: {change.text}" for change in difference.pairs]
    return "\n".join(lines + _listed(f"pairs that changed: {len(pairs)}", pairs, limit))


def _layout_text(change: FamilyChange) -> str:
    side = "both sides" if change.source and change.destination else "source" if change.source else "destination"
    cuts = [f"{who}: {before} -> {after}" for who, before, after in change.cuts]
    return f"{change.name} ({change.count}): {'; '.join(cuts) or f'{side}, on other ranks'}"


def _listed(title: str, items: list[str], limit: int) -> list[str]:
    if not items:
        return []
    shown = items[:limit] if limit else items
    more = [f"  ... and {len(items) - len(shown)} more; --limit 0 shows all"] if len(shown) < len(items) else []
    return [title, *(f"  {item}" for item in shown), *more]
