"""Match: whether the two sides of a refit fit together, and their tensors lined up in the plan's order and ranks."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.errors import ManifestError
from reshard.layouts.holding import HERE, Holding
from reshard.units import count

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.layouts.manifest import Manifest
    from reshard.layouts.piece import TensorSpec
    from reshard.plan.classes import Holdings


_NUMBER = re.compile("[0-9]+")


@dataclass(frozen=True, slots=True)
class World:
    """A world's place in the plan's ranks: its rank r is the plan's ``first + r``."""

    name: str
    first: int
    size: int


def place_worlds(src: Manifest, dst: Sequence[Manifest]) -> tuple[World, ...]:
    """The worlds one after the other; those of equal name are the same processes."""
    sizes: dict[str, int] = {}
    for manifest in (src, *dst):
        sizes[manifest.world] = max(manifest.size, sizes.get(manifest.world, 0))
    worlds, first = [], 0
    for name, size in sizes.items():
        worlds.append(World(name, first, size))
        first += size
    return tuple(worlds)


def check_merged(manifest: Manifest) -> None:
    """Check that every holder of a manifest has a number.

    Raises:
        ManifestError: The manifest is that of a single rank.
    """
    seen: set[int] = set()  # many tensors share a rule, and a rule may list many ranks
    for entry in manifest.entries:
        for holding in entry.holdings:
            if id(holding) in seen:
                continue
            seen.add(id(holding))
            if HERE in holding.ranks:
                raise ManifestError(
                    f"{entry.spec.name!r}: the manifest of {manifest.world} is that of a single rank, whose number is "
                    f"not known yet. Put the manifests of all ranks together first: merge({{rank: manifest, ...}}).",
                    tensor=entry.spec.name,
                )


def check_match(src: Manifest, dst: Sequence[Manifest]) -> None:
    """Check that every wanted tensor is held, with the same shape, dtype and granule; one error lists all that is not.

    Raises:
        ManifestError: With the nearest names for those that are missing.
    """
    have = {entry.spec.name: entry.spec for entry in src.entries}
    faults: list[str] = []
    missing: list[str] = []
    for manifest in dst:
        for entry in manifest.entries:
            spec = entry.spec
            theirs = have.get(spec.name)
            if theirs is None:
                ranks = sorted({rank for holding in entry.holdings for rank in holding.ranks})
                who = f"{manifest.world} rank {ranks[0]}" if ranks else manifest.world
                missing.append(spec.name)
                faults.append(f"{who} wants {spec.name!r}, which no source rank holds. {nearest(spec.name, have)}")
            elif theirs.shape != spec.shape:
                faults.append(
                    f"{spec.name!r}: the source's shape is {list(theirs.shape)}, {manifest.world}'s is "
                    f"{list(spec.shape)}. Global shapes must be equal; leave padding out of the pieces."
                )
            elif theirs.dtype != spec.dtype:
                faults.append(
                    f"{spec.name!r}: the source holds {theirs.dtype}, {manifest.world} wants {spec.dtype}. Bytes are "
                    f"never reinterpreted: convert one side, source.to(torch.{spec.dtype})."
                )
            elif theirs.granule != spec.granule and theirs.granule and spec.granule:
                faults.append(
                    f"{spec.name!r}: the source's granule is {list(theirs.granule)}, {manifest.world}'s is "
                    f"{list(spec.granule)}. Both sides must name the same block."
                )
    if faults:
        shown = faults[:20] + ([f"and {len(faults) - 20} more"] if len(faults) > 20 else [])
        raise ManifestError("\n".join(shown), faults=tuple(faults), missing=tuple(missing))


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with up to three known names that look like ``name``.

    Names that differ in numbers only are compared as one, so that it is quick among many; of these the one with the
    same numbers is shown.
    """
    kinds: dict[str, list[str]] = {}
    for other in known:
        kinds.setdefault(_NUMBER.sub("#", other), []).append(other)
    numbers = _NUMBER.findall(name)

    def likeness(other: str) -> int:
        return sum(a == b for a, b in zip(numbers, _NUMBER.findall(other), strict=False))

    close = difflib.get_close_matches(_NUMBER.sub("#", name), kinds, n=3, cutoff=0.5)
    if close:
        return f"Nearest source names: {', '.join(repr(max(kinds[kind], key=likeness)) for kind in close)}."
    names = [other for kind in kinds.values() for other in kind]
    if not names:
        return "The source has no tensor."
    more = " and more" if len(names) > _NAMED else ""
    return f"The source has {count(len(names), 'tensor')}: {', '.join(map(repr, names[:_NAMED]))}{more}."


_NAMED = 3


def line_up(
    src: Manifest, dst: Sequence[Manifest], first: Mapping[str, int]
) -> tuple[tuple[TensorSpec, ...], list[Holdings], list[Holdings]]:
    """The tensors that any destination wants, in plan order, with holders and wanters in the plan's ranks.

    Args:
        src: What the source holds.
        dst: What each destination wants; all of it must be held (``check_match``).
        first: By world, the plan's number of its rank 0.
    """
    held_by = {entry.spec.name: entry for entry in src.entries}
    specs: dict[str, TensorSpec] = {}
    wanted: dict[str, Holdings] = {}
    in_order = len(dst) == 1  # a manifest is in plan order, unless its tensors take the source's install groups
    for manifest in dst:
        ranks = _PlanRanks(first[manifest.world], manifest.size)
        for entry in manifest.entries:
            spec, name = entry.spec, entry.spec.name
            theirs = held_by[name].spec
            if (theirs.granule and not spec.granule) or (theirs.group and not spec.group):
                in_order = in_order and bool(spec.group or not theirs.group)
                spec = replace(spec, granule=spec.granule or theirs.granule, group=spec.group or theirs.group)
            specs.setdefault(name, spec)
            wanted[name] = wanted.get(name, ()) + ranks.of(entry.holdings)
    names = list(specs) if in_order else sorted(specs, key=lambda name: specs[name].order)
    ours = _PlanRanks(first[src.world], src.size)
    held = [ours.of(held_by[name].holdings) for name in names]
    return tuple(specs[name] for name in names), held, [wanted[name] for name in names]


class _PlanRanks:
    """Renumbers holdings from a world's ranks to the plan's, each distinct one once."""

    def __init__(self, first: int, size: int) -> None:
        self._to = {rank: rank + first for rank in range(size)}
        self._first = first
        self._seen: dict[int, Holding] = {}  # by identity: hashing a mesh of many ranks for every tensor is slow
        self._known: dict[Holding, Holding] = {}

    def of(self, holdings: Holdings) -> Holdings:
        return holdings if self._first == 0 else tuple(map(self._one, holdings))

    def _one(self, holding: Holding) -> Holding:
        found = self._seen.get(id(holding))
        if found is None:
            found = self._known.get(holding)
            if found is None:
                found = self._known[holding] = holding.renumber(self._to)
            self._seen[id(holding)] = found
        return found
