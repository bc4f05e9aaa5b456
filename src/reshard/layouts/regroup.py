"""Regroup: explicit pieces of many ranks become a rule where a rule says exactly the same.

Engines whose layout was traced publish boxes, rank by rank. For a model of 45 thousand tensors on 128 ranks these are
millions of boxes, and nearly all of them follow from a few placements over a mesh: the rows of a tensor in equal runs
over eight ranks, the whole of it on sixteen. The rule is found from the boxes alone:

1. On each dim, a rank holds some runs of indices; the distinct ones are the dim's *parts*, and a rank's place is which
   part it holds on each dim. A mesh exists if every place is taken, by equally many ranks.
2. A dim's parts follow from a split rule if some chain of steps (one cut; a strided cut; a cut within a cut) gives just
   these parts. One rule, of ``even``, ``ceil`` and ``balanced``, must serve all dims.

What no such rule says (a padded vocabulary, heads that do not divide) stays explicit. Ranks that hold nothing are left
out.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from reshard.layouts.holding import Holding, Pieces, Rule
from reshard.layouts.mesh import Mesh
from reshard.layouts.placement import SPLITS, Strided, apply_step, axis_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.manifest import Manifest
    from reshard.layouts.placement import Interval, Split, Steps

Runs = tuple["Interval", ...]
"""What a rank holds on one dim, ascending."""


def regroup(manifest: Manifest) -> Manifest:
    """The same manifest with explicit pieces as rules, wherever a rule gives each rank exactly its boxes.

    Tensors that shared their pieces share the rule. Ranks that hold nothing of a tensor are not named by its rule.
    """
    seen: dict[tuple[tuple[int, ...], int], Holding] = {}
    known: dict[tuple[tuple[int, ...], Pieces], Holding] = {}
    rules: dict[Rule, Rule] = {}

    def again(shape: tuple[int, ...], holding: Holding) -> Holding:
        if isinstance(holding, Rule):
            return holding
        found = seen.get((shape, id(holding)))
        if found is None:
            found = known.get((shape, holding))
            if found is None:
                rule = find_rule(shape, holding)
                found = known[shape, holding] = holding if rule is None else rules.setdefault(rule, rule)
            seen[shape, id(holding)] = found
        return found

    entries = []
    for entry in manifest.entries:
        holdings = tuple(again(entry.spec.shape, holding) for holding in entry.holdings)
        entries.append(entry if holdings == entry.holdings else replace(entry, holdings=holdings))
    return replace(manifest, entries=tuple(entries))


def find_rule(shape: Sequence[int], pieces: Pieces) -> Rule | None:
    """The rule by which each rank holds exactly the boxes of ``pieces``; None where there is none of a known kind.

    >>> from reshard.layouts.box import Box
    >>> rows = Pieces(((3, (Box((0, 0), (2, 4)),)), (7, (Box((2, 0), (3, 4)),))))
    >>> find_rule((3, 4), rows)
    Rule(mesh=Mesh(axes=(('dim0', 2),), ranks=(3, 7)), placement=(('dim0',), ()), split='ceil')
    """
    held = [(rank, _runs_by_dim(boxes)) for rank, boxes in pieces.held if boxes]
    if not held or any(runs is None for _, runs in held):
        return None
    by_dim = [sorted({runs[dim] for _, runs in held if runs is not None}) for dim in range(len(shape))]
    numbers = [{part: at for at, part in enumerate(parts)} for parts in by_dim]
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, runs in held:
        place = tuple(number[part] for number, part in zip(numbers, runs or (), strict=True))
        ranks.setdefault(place, []).append(rank)
    replicas = len(held) // len(ranks)
    if len(ranks) != prod(map(len, by_dim)) or any(len(each) != replicas for each in ranks.values()):
        return None
    for split in SPLITS:
        ways = [
            _find_steps(dim, size, parts, split) for dim, (size, parts) in enumerate(zip(shape, by_dim, strict=True))
        ]
        chosen = [way for way in ways if way is not None]
        if len(chosen) == len(ways):
            axes = [axis for _, sizes, _ in chosen for axis in sizes]
            order = product(*(order for _, _, order in chosen))
            places = [tuple(numbers[dim][part] for dim, part in enumerate(place)) for place in order]
            listed = [sorted(ranks[place])[copy] for copy in range(replicas) for place in places]
            replica_axis = [("replica", replicas)] if replicas > 1 or not axes else []
            return Rule(Mesh([*replica_axis, *axes], listed), tuple(steps for steps, _, _ in chosen), split)
    return None


def _runs_by_dim(boxes: Sequence[Box]) -> tuple[Runs, ...] | None:
    """Per dim the runs whose product the boxes are; None where they are no product."""
    if len(boxes) == 1:
        (box,) = boxes
        return tuple(((lo, hi),) for lo, hi in zip(box.start, box.stop, strict=True))
    ndim = boxes[0].ndim
    per_dim = tuple(tuple(sorted({(box.start[dim], box.stop[dim]) for box in boxes})) for dim in range(ndim))
    if prod(map(len, per_dim)) != len(boxes):
        return None
    if any(a[1] >= b[0] for runs in per_dim for a, b in pairwise(runs)):
        return None  # runs that touch or overlap: a rule's runs do neither
    made = {tuple(zip(*combo, strict=True)) for combo in product(*per_dim)}
    return per_dim if made == {(box.start, box.stop) for box in boxes} else None


_Way = tuple["Steps", list[tuple[str, int]], list["Runs"]]
"""The steps of a dim, the mesh axes that they need, and the parts in the order of the places on these axes."""


def _find_steps(dim: int, size: int, parts: Sequence[Runs], split: Split) -> _Way | None:
    """Steps that cut ``size`` indices into just these parts; None where no steps of a known kind do."""
    if list(parts) == [((0, size),)]:
        return (), [], [((0, size),)]
    for steps, sizes in _chains(dim, parts):
        if split == "even" and not _divides(size, steps, sizes):
            continue
        made = [_cut(size, steps, sizes, place, split) for place in product(*(range(n) for n in sizes.values()))]
        if sorted(made) == list(parts):
            return steps, list(sizes.items()), made
    return None


def _chains(dim: int, parts: Sequence[Runs]) -> Iterator[tuple[Steps, Mapping[str, int]]]:
    """The steps that may have made these parts, the simplest first, with the sizes of their axes."""
    count, runs = len(parts), max(map(len, parts))
    if count == 1:
        return
    axis, outer, inner = f"dim{dim}", f"dim{dim}.outer", f"dim{dim}.inner"
    if runs > 1:
        yield (Strided(axis, runs),), {axis: count}
        return
    yield (axis,), {axis: count}
    for size in range(2, count):
        if count % size == 0:
            yield (outer, inner), {outer: size, inner: count // size}


def _divides(size: int, steps: Steps, sizes: Mapping[str, int]) -> bool:
    for step in steps:
        if size % (sizes[axis_of(step)] * (step.factor if isinstance(step, Strided) else 1)):
            return False
        size //= sizes[axis_of(step)]
    return True


def _cut(size: int, steps: Steps, sizes: Mapping[str, int], place: Sequence[int], split: Split) -> Runs:
    rows: Runs = ((0, size),)
    for step, index in zip(steps, place, strict=True):
        rows = apply_step(rows, step, sizes[axis_of(step)], index, split)
    return rows
