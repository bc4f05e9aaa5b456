"""Sides: from what each rank declares of one side to one manifest of that side, in the numbers of the group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard.errors import ManifestError
from reshard.layouts.holding import Entry, Pieces, Rule
from reshard.layouts.manifest import Manifest
from reshard.layouts.merge import merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SIDES = {"src": "source", "dst": "destination"}


@dataclass(frozen=True)
class Side:
    """What one world holds, or wants: the same manifest in two numberings."""

    world: str
    """The world's name; empty where the group is one world."""

    own: Manifest
    """In the numbers that the world's own meshes use."""

    group: Manifest
    """In the group's ranks."""

    numbers: Mapping[int, int]
    """By rank of the group that declared it: its number in the world's own meshes."""


def merge_side(told: Sequence[Mapping[str, Any]], side: str, size: int) -> tuple[Side, ...]:
    """Merge what the ranks of each world declare; one ``Side`` a world, in the order of their first ranks.

    Args:
        told: By rank of the group: its ``world``, and under ``side`` None, or its manifest (JSON) and its own number.
        side: ``"src"`` or ``"dst"``.
        size: Ranks of the group.

    Raises:
        ManifestError: Two ranks with one number, or a rank of a mesh that declared nothing.
    """
    by_world: dict[str, dict[int, int]] = {}
    for rank, row in enumerate(told):
        if row[side] is None:
            continue
        number = rank if row[side]["number"] is None else row[side]["number"]
        known = by_world.setdefault(row["world"], {})
        if number in known:
            raise ManifestError(
                f"Ranks {known[number]} and {rank} of the group both say that they are rank {number} of the "
                f"{_SIDES[side]} mesh. Each rank has its own number in the mesh.",
                ranks=(known[number], rank),
            )
        known[number] = rank
    return tuple(_merge_world(told, side, size, world, ranks) for world, ranks in by_world.items())


def _merge_world(
    told: Sequence[Mapping[str, Any]], side: str, size: int, world: str, group_rank: Mapping[int, int]
) -> Side:
    read: dict[int, Manifest] = {}
    parts: dict[int, Manifest] = {}
    for number, rank in group_rank.items():
        row = told[rank]
        if id(row) not in read:
            read[id(row)] = Manifest.from_json(row[side]["manifest"])
        parts[number] = read[id(row)]
    merged = merge(parts, world=world or side)
    seen: set[int] = set()  # many tensors share their holders
    for entry in merged.entries:
        for holding in entry.holdings:
            if id(holding) in seen:
                continue
            seen.add(id(holding))
            absent = [number for number in holding.ranks if number not in group_rank]
            if absent:
                raise ManifestError(
                    f"{entry.spec.name!r}: rank {absent[0]} is in the {_SIDES[side]} mesh but passed no tensor for it. "
                    f"Every rank of the mesh takes part (those that did: {sorted(group_rank)}).",
                    tensor=entry.spec.name,
                    rank=absent[0],
                )
    group = merged.renumber(group_rank, world="group", size=size)
    return Side(world, merged, group, {rank: number for number, rank in sorted(group_rank.items())})


def unite(manifests: Sequence[Manifest], size: int) -> Manifest:
    """One manifest of what several worlds want, all in the group's ranks.

    Shapes and dtypes are equal by now; the first world that names a granule or an install group decides it.
    """
    if len(manifests) == 1:
        return manifests[0]
    specs: dict[str, Any] = {}
    holdings: dict[str, tuple[Rule | Pieces, ...]] = {}
    for manifest in manifests:
        for entry in manifest.entries:
            name, spec = entry.spec.name, entry.spec
            first = specs.setdefault(name, spec)
            specs[name] = replace(first, granule=first.granule or spec.granule, group=first.group or spec.group)
            holdings[name] = holdings.get(name, ()) + entry.holdings
    together: dict[tuple[int, ...], tuple[Rule | Pieces, ...]] = {}  # tensors of equal holders go on sharing them
    for each in holdings.values():
        ids = tuple(map(id, each))
        if ids not in together:
            rows = sorted(row for holding in each if isinstance(holding, Pieces) for row in holding.held)
            rules = dict.fromkeys(holding for holding in each if isinstance(holding, Rule))
            together[ids] = (*rules, *((Pieces(tuple(rows)),) if rows else ()))
    entries = tuple(Entry(spec, together[tuple(map(id, holdings[name]))]) for name, spec in specs.items())
    return Manifest(entries, "group", size)


def without_aliases(
    src: Manifest, dst: Manifest, said: Mapping[int, Sequence[Sequence[str]]], called: Sequence[str]
) -> tuple[Manifest, dict[str, set[int]]]:
    """Let every rank write memory that has two names once, and refuse it where the source holds two tensors.

    Args:
        src: The source.
        dst: The destination, in the group's ranks.
        said: By rank of the group: (name, first name) of names that are one memory there.
        called: What each rank of the group is called.

    Returns:
        The destination without what is not written, and by name the ranks that do not write it.

    Raises:
        ManifestError: Two names are one buffer on the destination, and the source keeps a buffer for each.
    """
    tied, names = dict(src.aliases), set(src.names)
    dropped: dict[str, set[int]] = {}
    for rank, pairs in sorted(said.items()):
        for name, first in pairs:
            if name not in names:
                dropped.setdefault(name, set()).add(rank)
            elif first not in names:
                dropped.setdefault(first, set()).add(rank)
            elif tied.get(name, name) == tied.get(first, first):
                dropped.setdefault(name, set()).add(rank)
            else:
                raise ManifestError(
                    f"{first!r} and {name!r} are one buffer on {called[rank]}, but two on the source, whose "
                    f"values may differ: one would overwrite the other. Tie them on the source, or give the "
                    f"destination two buffers, or leave one name out of the destination.",
                    tensors=(first, name),
                    rank=rank,
                )
    entries = []
    for entry in dst.entries:
        gone = dropped.get(entry.spec.name)
        if not gone:
            entries.append(entry)
            continue
        holdings = tuple(h for h in (_without(h, gone) for h in entry.holdings) if h is not None)
        if holdings:
            entries.append(replace(entry, holdings=holdings))
    return replace(dst, entries=tuple(entries), aliases=()), dropped


def _without(holding: Rule | Pieces, ranks: Iterable[int]) -> Rule | Pieces | None:
    """The holding without some ranks. A rule names all its ranks: it goes as a whole, or stays."""
    gone = set(ranks)
    if isinstance(holding, Rule):
        return None if set(holding.ranks) <= gone else holding
    held = tuple(row for row in holding.held if row[0] not in gone)
    return Pieces(held) if held else None
