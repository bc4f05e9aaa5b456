"""Fingerprints: for each tensor one number of its bits, the same however it is laid out, kept at refit time.

That of some elements is a sum modulo 2**64 of their bits times numbers of their places in the global tensor. So parts
can be summed on the ranks that hold them, and two layouts give the same number.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from reshard.transports.verify import box_sum
from reshard.transports.views import BoundMemory

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec
    from reshard.plan.plan import Plan

_MODULUS = 1 << 64


def of_pieces(pieces: Iterable[BoundPiece], specs: Mapping[str, TensorSpec]) -> dict[str, int]:
    """By tensor: the sum over what this rank has of it."""
    sums: dict[str, int] = {}
    for bound in pieces:
        spec, name = specs[bound.piece.name], bound.piece.name
        value = int(box_sum(bound.piece.box, spec, BoundMemory([bound]), "fingerprint"))
        sums[name] = (sums.get(name, 0) + value) % _MODULUS
    return sums


def of_share(
    plan: Plan,
    rank: int,
    sources: Sequence[BoundPiece],
    cast: Container[str] = (),
    made: Mapping[int, Sequence[Mapping[Box, int]]] | None = None,
) -> dict[str, int]:
    """By tensor: the sum over those elements that are wanted and that this rank is the lowest holder of.

    Args:
        plan: What moves.
        rank: This rank.
        sources: Its source pieces, in whatever dtype they have; the sums are of the bits that travel.
        cast: The tensors that a side holds in another dtype than that in which they travel.
        made: By the plan's tensors: fingerprints of boxes that are known from a run, by box; in each mapping no two
            share an element. What they make up is not summed again.
    """
    memory, sums = BoundMemory(sources), dict[str, int]()
    for at, cls in enumerate(plan.classes):
        if (cls.holders & -cls.holders).bit_length() - 1 != rank:
            continue
        for index, box in plan.string(at).items:
            spec = plan.specs[index]
            value = _made_up(box, (made or {}).get(index, ()))
            if value is None:
                value = int(box_sum(box, spec, memory, "fingerprint", cast=spec.name in cast))
            sums[spec.name] = (sums.get(spec.name, 0) + value) % _MODULUS
    return sums


def _made_up(box: Box, made: Iterable[Mapping[Box, int]]) -> int | None:
    """The sum of boxes that make up ``box``, or None."""
    for row in made:
        inside = [part for part in row if part.intersect(box) == part]
        if sum(part.numel for part in inside) == box.numel:
            return sum(row[part] for part in inside)
    return None


def add_up(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The fingerprints of whole tensors from all ranks' shares, by name."""
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = (sums.get(name, 0) + value) % _MODULUS
    return dict(sorted(sums.items()))


def digest(fingerprints: Mapping[str, int]) -> str:
    """One short text for the fingerprints of a version."""
    return hashlib.sha256(json.dumps(sorted(fingerprints.items())).encode()).hexdigest()[:16]
