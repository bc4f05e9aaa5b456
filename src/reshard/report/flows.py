"""Flows: for one tensor, where each part of each destination box comes from, followed back to the rank that held it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import PlanError
from reshard.plan.cells import ranks_of
from reshard.plan.plan import nearest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec
    from reshard.plan.plan import Plan
    from reshard.plan.routes import Route


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A box that one destination rank gets: ``origin`` held it, ``sender`` handed it over (the same where direct)."""

    box: Box
    origin: int
    sender: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class WantedBox:
    """A destination box and who wants it; ``parts`` says for each of them, in order, what comes from where."""

    box: Box
    needers: tuple[int, ...]
    parts: tuple[tuple[Part, ...], ...]


@dataclass(frozen=True, slots=True)
class TensorFlow:
    """One tensor under a plan: the boxes of both sides, in order, and what goes from one to the other."""

    spec: TensorSpec
    held: tuple[tuple[Box, tuple[int, ...]], ...]
    wanted: tuple[WantedBox, ...]


def tensor_flow(plan: Plan, name: str) -> TensorFlow:
    """Follow every byte of one tensor.

    Parts are clipped to the destination boxes: what a strategy sends beyond them is not shown.

    Raises:
        PlanError: The plan has no tensor of this name; the message has the nearest ones.
    """
    index = next((i for i, spec in enumerate(plan.specs) if spec.name == name), None)
    if index is None:
        raise PlanError(f"The plan has no tensor {name!r}. {nearest(name, [s.name for s in plan.specs])}")
    spec = plan.specs[index]
    pattern = next(pattern for pattern in plan.patterns if index in pattern.tensors)
    arriving: dict[int, list[Part]] = {}
    for route, boxes in _routes_of(plan, index):
        for sender, receiver in route.edges:
            origin = _origin(route, sender)
            arriving.setdefault(receiver, []).extend(
                Part(box, origin, sender, box.numel * spec.itemsize) for box in boxes
            )
    wanted = tuple(
        WantedBox(box, ranks_of(mask), tuple(_clipped(arriving.get(rank, []), box, spec) for rank in ranks_of(mask)))
        for box, mask in sorted(pattern.needed)
    )
    return TensorFlow(spec, tuple((box, ranks_of(mask)) for box, mask in sorted(pattern.held)), wanted)


def _routes_of(plan: Plan, index: int) -> Iterator[tuple[Route, list[Box]]]:
    relevant = {at for at, cls in enumerate(plan.classes) for p, _ in cls.parts if index in plan.patterns[p].tensors}
    for route in plan.routes:
        if route.route_class in relevant:
            boxes = [box for tensor, box in plan.route_items(route) if tensor == index]
            if boxes:
                yield route, boxes


def _origin(route: Route, rank: int) -> int:
    """Who the bytes that ``rank`` passes on started from."""
    came_from = {receiver: sender for sender, receiver in route.edges if sender != receiver}
    while rank in came_from:
        rank = came_from.pop(rank)  # popped, so that a changed plan with a ring in it ends
    return rank


def _clipped(parts: Sequence[Part], wanted: Box, spec: TensorSpec) -> tuple[Part, ...]:
    clipped = []
    for part in parts:
        shared = part.box.intersect(wanted)
        if shared is not None:
            clipped.append(Part(shared, part.origin, part.sender, shared.numel * spec.itemsize))
    return tuple(sorted(clipped))


def kinds_of_pattern(plan: Plan) -> list[list[int]]:
    """Patterns that are cut alike on both sides, whoever holds the boxes; the kind whose bytes weigh most first."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for at, pattern in enumerate(plan.patterns):
        boxes = tuple(tuple(box for box, _ in side) for side in (pattern.held, pattern.needed))
        kinds.setdefault((pattern.shape, pattern.itemsize, boxes), []).append(at)

    def weight(patterns: list[int]) -> int:
        return sum(
            box.numel * mask.bit_count() * plan.patterns[at].itemsize * len(plan.patterns[at].tensors)
            for at in patterns
            for box, mask in plan.patterns[at].needed
        )

    return sorted(kinds.values(), key=lambda patterns: (-weight(patterns), patterns[0]))
