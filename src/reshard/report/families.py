"""Families: tensors whose names differ in numbers only, as one row; a model of 45,337 tensors has some thirty."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.report.ranks import number_runs

if TYPE_CHECKING:
    from reshard.plan.plan import Plan

_NUMBER = re.compile(r"(?<![0-9A-Za-z_])[0-9]+(?![0-9A-Za-z_])")
"""A number between dots, as of a layer or an expert; not the 2 of ``w2``."""


@dataclass(frozen=True, slots=True)
class Family:
    """Tensors of one shape and dtype whose names are ``parts`` with numbers between them.

    ``values`` are the numbers at each place in few characters, ``spans`` the least and the greatest of them. Not every
    combination need be the name of a tensor.
    """

    parts: tuple[str, ...]
    values: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    """Of one copy of all of them."""

    wanted_nbytes: int
    """Of all destination boxes, replicas counted each."""

    held_boxes: tuple[int, int]
    """The least and the greatest number of distinct boxes that the source cuts one such tensor into."""

    needed_boxes: tuple[int, int]
    tensors: tuple[int, ...]
    """Their indices in the plan."""

    pattern: int
    """The pattern of the first of them."""

    @property
    def count(self) -> int:
        """How many tensors it has."""
        return len(self.tensors)

    @property
    def name(self) -> str:
        """The name for people: ``layers.{0-60}.mlp.weight``; a number that never varies stands as it is."""
        text = self.parts[0]
        for value, (low, high), part in zip(self.values, self.spans, self.parts[1:], strict=True):
            text += (str(low) if low == high else f"{{{value}}}") + part
        return text


def find_families(plan: Plan) -> tuple[Family, ...]:
    """All tensors of a plan in families, in plan order of their first members."""
    pattern_of = {tensor: at for at, pattern in enumerate(plan.patterns) for tensor in pattern.tensors}
    wanted = [sum(box.numel * mask.bit_count() for box, mask in p.needed) * p.itemsize for p in plan.patterns]
    members: dict[tuple[object, ...], list[int]] = {}
    for index, spec in enumerate(plan.specs):
        members.setdefault((tuple(_NUMBER.split(spec.name)), spec.shape, spec.dtype), []).append(index)
    families = []
    for tensors in members.values():
        spec = plan.specs[tensors[0]]
        numbers = list(zip(*([int(n) for n in _NUMBER.findall(plan.specs[t].name)] for t in tensors), strict=True))
        patterns = {pattern_of[tensor] for tensor in tensors}
        held = [len(plan.patterns[at].held) for at in patterns]
        needed = [len(plan.patterns[at].needed) for at in patterns]
        families.append(
            Family(
                parts=tuple(_NUMBER.split(spec.name)),
                values=tuple(number_runs(sorted(set(place)), most=3) for place in numbers),
                spans=tuple((min(place), max(place)) for place in numbers),
                shape=spec.shape,
                dtype=spec.dtype,
                nbytes=spec.nbytes * len(tensors),
                wanted_nbytes=sum(wanted[pattern_of[tensor]] for tensor in tensors),
                held_boxes=(min(held), max(held)),
                needed_boxes=(min(needed), max(needed)),
                tensors=tuple(tensors),
                pattern=pattern_of[tensors[0]],
            )
        )
    return tuple(families)
