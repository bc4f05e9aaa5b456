"""Holding: who has which boxes of a tensor, by a rule or by explicit pieces; an Entry is that of one tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from reshard.errors import ManifestError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout, replace_ranks, rule_from_json, rule_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reshard.layouts.mesh import Mesh
    from reshard.layouts.piece import TensorSpec
    from reshard.layouts.placement import Split, Steps

HERE = -1
"""Stands for the rank that publishes a manifest, until ``merge`` gives it its number."""


@dataclass(frozen=True)
class Rule:
    """Holders by rule: a mesh and a placement; with a tensor's shape it makes a Layout."""

    mesh: Mesh
    placement: tuple[Steps, ...]
    split: Split

    def layout(self, spec: TensorSpec) -> Layout:
        granule = spec.granule or None
        return Layout(spec.shape, spec.dtype, self.mesh, self.placement, self.split, granule, name=spec.name)

    def boxes(self, spec: TensorSpec) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each distinct box with its holders."""
        return self.layout(spec).holders()

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def renumber(self, to: Mapping[int, int]) -> Rule:
        return replace(self, mesh=replace_ranks(self.mesh, to))

    def to_json(self) -> dict[str, Any]:
        return rule_to_json(self.mesh, self.placement, self.split)


@dataclass(frozen=True)
class Pieces:
    """Holders by explicit boxes: ``held`` lists (rank, boxes), by rank."""

    held: tuple[tuple[int, tuple[Box, ...]], ...]

    def boxes(self, spec: TensorSpec) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each distinct box with its holders."""
        del spec
        by_box: dict[Box, list[int]] = {}
        for rank, boxes in self.held:
            for box in boxes:
                by_box.setdefault(box, []).append(rank)
        yield from ((box, tuple(ranks)) for box, ranks in by_box.items())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.held)

    def renumber(self, to: Mapping[int, int]) -> Pieces:
        missing = [r for r in self.ranks if r not in to]
        if missing:
            raise ManifestError(f"Rank {missing[0]} is not a rank of this world ({sorted(to)}).", rank=missing[0])
        return Pieces(tuple(sorted((to[rank], boxes) for rank, boxes in self.held)))

    def to_json(self) -> dict[str, Any]:
        return {"pieces": [[rank, [[list(b.start), list(b.stop)] for b in boxes]] for rank, boxes in self.held]}


Holding = Rule | Pieces


def holding_from_json(data: Mapping[str, Any]) -> Holding:
    if "pieces" in data:
        return Pieces(tuple((rank, tuple(Box(tuple(a), tuple(b)) for a, b in boxes)) for rank, boxes in data["pieces"]))
    return Rule(*rule_from_json(data))


@dataclass(frozen=True)
class Entry:
    """One tensor of a manifest: what it is, who holds it, and what else its placements may mean.

    ``alternatives`` are further readings of the same placements where torch contradicts itself; ``fits`` says which of
    (the holding, the alternatives...) match what the publishing rank really holds. ``merge`` keeps the first reading
    that fits every rank.
    """

    spec: TensorSpec
    holdings: tuple[Holding, ...]
    alternatives: tuple[Holding, ...] = ()
    fits: tuple[bool, ...] = ()
