"""Merge: the manifests that the ranks of a world publish become the one manifest of that world.

Ranks that publish the same (replicas of an engine) may share one Manifest object, which is then read once; tensors
whose explicit pieces are equal on all ranks share one ``Pieces`` object, so that what follows can tell by identity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import LayoutError, ManifestError
from reshard.layouts.bound import BoundPiece, bind_shards
from reshard.layouts.holding import HERE, Entry, Holding, Pieces, Rule
from reshard.layouts.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec


def merge(parts: Mapping[int, Manifest], *, world: str = "world", size: int = 0) -> Manifest:
    """The manifest of a world from what each of its ranks published.

    Args:
        parts: By rank; explicit pieces of ``HERE`` become that rank's.
        world: The world's name.
        size: How many ranks the world has.

    Raises:
        ManifestError: Two ranks declare one name with different shapes or dtypes.
        LayoutError: No reading of a tensor's placements fits what all ranks hold.
    """
    sharing: dict[int, list[int]] = {}
    for rank, part in sorted(parts.items()):
        sharing.setdefault(id(part), []).append(rank)
    specs: dict[str, tuple[int, TensorSpec]] = {}
    rules: dict[str, dict[Holding, None]] = {}
    pieces: dict[str, list[tuple[int, int]]] = {}
    readings: dict[str, tuple[tuple[Holding, ...], list[tuple[int, tuple[bool, ...]]]]] = {}
    explicit = _Explicit(list(sharing.values()))
    for at, ranks in enumerate(sharing.values()):
        for entry in parts[ranks[0]].entries:
            name = entry.spec.name
            first, spec = specs.setdefault(name, (ranks[0], entry.spec))
            if spec is not entry.spec and spec != entry.spec:
                raise ManifestError(
                    f"{name!r}: rank {first} declares {_spec_text(spec)} and rank {ranks[0]} declares "
                    f"{_spec_text(entry.spec)}. All ranks of a world declare the global shape and the same dtype.",
                    tensor=name,
                    rank=ranks[0],
                )
            if entry.alternatives or entry.fits:
                all_readings = (*entry.holdings, *entry.alternatives)
                votes = readings.setdefault(name, (all_readings, []))[1]
                votes.extend((rank, entry.fits) for rank in ranks)
                continue
            for holding in entry.holdings:
                if isinstance(holding, Rule):
                    rules.setdefault(name, {})[holding] = None
                else:
                    pieces.setdefault(name, []).append((at, explicit.number(holding)))
    for name, (candidates, votes) in readings.items():
        rules.setdefault(name, {})[_first_that_fits(name, candidates, sorted(votes))] = None
    entries = tuple(
        Entry(spec, (*rules.get(name, ()), *explicit.of_all(tuple(pieces.get(name, ())))))
        for name, (_, spec) in specs.items()
    )
    return Manifest(entries, world, size, _agreed_aliases(parts))


class _Explicit:
    """Explicit pieces as parts publish them, and what they are together: each distinct combination is built once."""

    def __init__(self, ranks: Sequence[Sequence[int]]) -> None:
        self._ranks = ranks
        self._seen: dict[int, int] = {}  # by identity: within a part many tensors share their pieces
        self._numbers: dict[Pieces, int] = {}
        self._pieces: list[Pieces] = []
        self._together: dict[tuple[tuple[int, int], ...], tuple[Pieces, ...]] = {}

    def number(self, pieces: Pieces) -> int:
        found = self._seen.get(id(pieces))
        if found is None:
            found = self._numbers.setdefault(pieces, len(self._pieces))
            if found == len(self._pieces):
                self._pieces.append(pieces)
            self._seen[id(pieces)] = found
        return found

    def of_all(self, rows: tuple[tuple[int, int], ...]) -> tuple[Pieces, ...]:
        """What the rows (part, number of its pieces) say together: one ``Pieces``, or none."""
        found = self._together.get(rows)
        if found is None:
            held: dict[int, tuple[Box, ...]] = {}
            for part, number in rows:
                for at, boxes in self._pieces[number].held:
                    held.update((rank, boxes) for rank in (self._ranks[part] if at == HERE else (at,)))
            found = self._together[rows] = (Pieces(tuple(sorted(held.items()))),) if held else ()
        return found


def _agreed_aliases(parts: Mapping[int, Manifest]) -> tuple[tuple[str, str], ...]:
    """Aliases that hold on every rank that has both names."""
    said: dict[tuple[str, str], int] = {}
    for part in parts.values():
        for pair in part.aliases:
            said[pair] = said.get(pair, 0) + 1
    if not said:
        return ()
    names = [set(part.names) for part in parts.values()]
    both = {pair: sum(pair[0] in have and pair[1] in have for have in names) for pair in said}
    return tuple(sorted(pair for pair, count in said.items() if count == both[pair]))


def _first_that_fits(
    name: str, candidates: tuple[Holding, ...], votes: Sequence[tuple[int, tuple[bool, ...]]]
) -> Holding:
    for index, holding in enumerate(candidates):
        if all(fits[index] for _, fits in votes):
            return holding
    against = [rank for rank, fits in votes if not fits[0]]
    raise LayoutError(
        f"{name!r}: no reading of its placements gives the local shapes that the ranks hold (rank {against[0]} holds "
        f"another shape than its placement says). Describe the tensor by pieces (Manifest.from_views).",
        tensor=name,
        rank=against[0],
    )


def _spec_text(spec: TensorSpec) -> str:
    granule = f", granule {list(spec.granule)}" if spec.granule else ""
    group = f", group {spec.group!r}" if spec.group else ""
    return f"{spec.dtype} {list(spec.shape)}{granule}{group}"


def bound_pieces(part: Manifest, merged: Manifest) -> tuple[BoundPiece, ...]:
    """This rank's pieces once ``merge`` has chosen the reading of every placement.

    Args:
        part: What this rank published, with its memory.
        merged: What ``merge`` made of all ranks' parts, in the rank numbers of the parts.
    """
    chosen = list(part.local)
    for name, me, local in part.unread:
        for holding in merged.entry(name).holdings:
            if isinstance(holding, Rule) and me in holding.ranks:
                chosen.extend(bind_shards(name, holding.layout(merged.entry(name).spec), me, local))
    return tuple(chosen)
