"""Pair matrix: who sends how many bytes to whom, as paths of a drawing that stays small for hundreds of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from reshard.report.ranks import named_ranks
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.plan.plan import Plan

LEVELS = 5
MOST_CELLS = 20_000
_MOST_LABELLED = 16


@dataclass(frozen=True, slots=True)
class Shade:
    """All cells of one colour as one SVG path, in units of a cell; ``crosses``: between domains."""

    level: int
    crosses: bool
    path: str


@dataclass(frozen=True, slots=True)
class Border:
    """A line between ranks of different domains or worlds, before row (or column) ``at``."""

    at: int
    is_row: bool


@dataclass(frozen=True)
class PairMatrix:
    """Senders downwards, receivers across; a row or column is one rank, or several where there are too many."""

    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    cells: tuple[tuple[int, int, int], ...]
    """(row, column, bytes) of every pair that moves anything."""

    shades: tuple[Shade, ...]
    borders: tuple[Border, ...]
    step: tuple[int, int]
    """How many ranks a row and a column stand for."""

    most: tuple[tuple[bool, int], ...]
    """(between domains or not, the most bytes of a cell of that kind): each kind has a scale of its own."""

    has_domains: bool

    @property
    def texts(self) -> tuple[tuple[int, int, str], ...]:
        """What is written into the cells of a small matrix."""
        if max(len(self.senders), len(self.receivers)) > _MOST_LABELLED // 2:
            return ()
        return tuple((row, column, format_nbytes(n)) for row, column, n in self.cells)

    @property
    def is_labelled(self) -> bool:
        """Whether there is room for a name at each row and column."""
        return max(len(self.senders), len(self.receivers)) <= _MOST_LABELLED


def pair_matrix(plan: Plan) -> PairMatrix | None:
    """The matrix of a plan; None where no byte leaves its rank."""
    pairs = plan.pair_nbytes()
    if not pairs:
        return None
    senders, receivers = sorted({a for a, _ in pairs}), sorted({b for _, b in pairs})
    down = across = 1
    sums = _sums(plan, senders, receivers, down, across)
    while len(sums) > MOST_CELLS or max(len(senders) // down, len(receivers) // across) > 256:
        down, across = (down * 2, across) if len(senders) / down >= len(receivers) / across else (down, across * 2)
        sums = _sums(plan, senders, receivers, down, across)
    rows = [senders[at : at + down] for at in range(0, len(senders), down)]
    columns = [receivers[at : at + across] for at in range(0, len(receivers), across)]
    most = {kind: max(n for n, k in sums.values() if k == kind) for kind in sorted({k for _, k in sums.values()})}
    cells = tuple((row, column, n) for (row, column), (n, _) in sorted(sums.items()))
    level_of = {at: (min(LEVELS - 1, (n - 1) * LEVELS // most[crosses]), crosses) for at, (n, crosses) in sums.items()}
    return PairMatrix(
        senders=tuple(_name(plan, ranks) for ranks in rows),
        receivers=tuple(_name(plan, ranks) for ranks in columns),
        cells=cells,
        shades=_shades(level_of),
        borders=(*_borders(plan, rows, is_row=True), *_borders(plan, columns, is_row=False)),
        step=(down, across),
        most=tuple(most.items()),
        has_domains=not plan.topology.is_flat,
    )


def _sums(
    plan: Plan, senders: Sequence[int], receivers: Sequence[int], down: int, across: int
) -> dict[tuple[int, int], tuple[int, bool]]:
    """By row and column: bytes, and whether any of them go from one domain into another."""
    home = plan.topology.domain_of
    row = {rank: at // down for at, rank in enumerate(senders)}
    column = {rank: at // across for at, rank in enumerate(receivers)}
    sums: dict[tuple[int, int], tuple[int, bool]] = {}
    for (a, b), nbytes in plan.pair_nbytes().items():
        key = (row[a], column[b])
        before, crossed = sums.get(key, (0, False))
        sums[key] = (before + nbytes, crossed or home(a) != home(b))
    return sums


def _name(plan: Plan, ranks: Sequence[int]) -> str:
    return named_ranks(plan, ranks, most=2)


def _borders(plan: Plan, groups: Sequence[Sequence[int]], *, is_row: bool) -> list[Border]:
    """Where the domain changes, or in one domain the world."""

    def home(rank: int) -> object:
        world = next(w.name for w in plan.worlds if w.first <= rank < w.first + w.size)
        return (plan.topology.domain_of(rank), world)

    homes = [home(ranks[0]) for ranks in groups]
    return [Border(at, is_row) for at in range(1, len(homes)) if homes[at] != homes[at - 1]]


def _shades(level_of: Mapping[tuple[int, int], tuple[int, bool]]) -> tuple[Shade, ...]:
    """Neighbours of one colour in a row become one rectangle."""
    paths: dict[tuple[int, bool], list[str]] = {}
    for (row, shade), run in groupby(sorted(level_of), key=lambda at: (at[0], level_of[at])):
        columns = [column for _, column in run]
        at = 0
        while at < len(columns):
            stop = at + 1
            while stop < len(columns) and columns[stop] == columns[stop - 1] + 1:
                stop += 1
            width = stop - at
            paths.setdefault(shade, []).append(f"M{columns[at]} {row}h{width}v1h-{width}z")
            at = stop
    return tuple(Shade(level, crosses, "".join(parts)) for (level, crosses), parts in sorted(paths.items()))
