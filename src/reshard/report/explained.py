"""Explained: one tensor under a plan, drawn and in words: who sends which box of it to whom, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.plan.cells import ranks_of
from reshard.report.drawing import Label, draw_boxes
from reshard.report.listed import box_text, shortened
from reshard.units import count, format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.classes import Pattern
    from reshard.plan.plan import Plan, Transfer, World

COLUMNS = 80


@dataclass(frozen=True, slots=True)
class Explained:
    """A transfer, who could have sent it, and whether it is wanted where it goes."""

    transfer: Transfer
    holders: tuple[int, ...]
    wanted: bool

    def to_json(self) -> dict[str, Any]:
        transfer = self.transfer
        return {
            "tensor": transfer.name,
            "box": {"start": list(transfer.box.start), "stop": list(transfer.box.stop)},
            "source": transfer.src,
            "destination": transfer.dst,
            "nbytes": transfer.nbytes,
            "rule": transfer.rule,
            "holders": list(self.holders),
            "wanted": self.wanted,
        }


def explain_transfers(plan: Plan, name: str, rank: int | None = None) -> tuple[Explained, ...]:
    """Every transfer of a tensor with its reason; only those from or to ``rank`` where one is given.

    Raises:
        PlanError: The plan has no tensor of this name; the message has the nearest ones.
    """
    transfers = [t for t in plan.transfers(name) if rank is None or rank in (t.src, t.dst)]
    pattern = _pattern(plan, name)
    return tuple(_explain(t, pattern) for t in transfers)


def _pattern(plan: Plan, name: str) -> Pattern:
    index = next(i for i, spec in enumerate(plan.specs) if spec.name == name)
    return next(pattern for pattern in plan.patterns if index in pattern.tensors)


def _explain(transfer: Transfer, pattern: Pattern) -> Explained:
    cell = next(cell for cell in pattern.cells if cell.box.contains(transfer.box))
    return Explained(transfer, ranks_of(cell.holders), bool(cell.needers >> transfer.dst & 1))


def describe_tensor(plan: Plan, name: str, rank: int | None = None, *, limit: int = 0, colour: bool = False) -> str:
    """Who sends which box of one tensor to whom, and why: a drawing where it fits, then a list.

    Args:
        plan: The plan.
        name: The tensor.
        rank: Only what this rank (in the plan's numbers) sends and gets.
        limit: The most lines of the list; 0 for all.
        colour: Colour the drawing by source rank, with ANSI escapes.

    Raises:
        PlanError: The plan has no tensor of this name.
    """
    rows = explain_transfers(plan, name, rank)
    spec = next(spec for spec in plan.specs if spec.name == name)
    moved = [row.transfer for row in rows if row.transfer.src != row.transfer.dst]
    kept = sum(row.transfer.nbytes for row in rows) - sum(t.nbytes for t in moved)
    title = f"{name}: {spec.dtype} {list(spec.shape)}, {format_nbytes(spec.nbytes)}"
    sums = f"{plan.strategy} sends {count(len(moved), 'box', 'boxes')}, {format_nbytes(sum(t.nbytes for t in moved))}"
    parts = [f"{title}; {sums}" + (f", and {format_nbytes(kept)} stay in their rank" if kept else "")]
    if rank is not None:
        parts[0] += f" ({plan.rank_name(rank)} only)"
    if not rows:
        return parts[0]
    drawing = _draw(plan, spec.shape, [row.transfer for row in rows], colour)
    if drawing is not None:
        parts.append(f"{drawing}\n{_legend(plan)}")
    elif len(spec.shape) in (1, 2):
        hint = "" if rank is not None else "; --rank draws one rank's part"
        parts.append(f"(too many boxes to draw in {COLUMNS} columns{hint})")
    lines = [line for to in sorted({r.transfer.dst for r in rows}) for line in _lines_to(plan, to, rows, name)]
    parts.append("\n".join(shortened(lines, limit)))
    return "\n\n".join(parts)


def _draw(plan: Plan, shape: tuple[int, ...], transfers: Sequence[Transfer], colour: bool) -> str | None:
    """The tensor cut at the edges of all transfers, each cell with its senders and receivers."""
    if len(shape) not in (1, 2):
        return None
    cells = _cells(transfers)
    if cells is None:
        return None
    tones = {src: at for at, src in enumerate(sorted({t.src for t in transfers}))}
    boxes: dict[Box, list[Label]] = {}
    for box, members in cells.items():
        by_source: dict[int, list[int]] = {}
        for transfer in members:
            by_source.setdefault(transfer.src, []).append(transfer.dst)
        boxes[box] = [
            Label(f"{_short(plan, src, 'source')} → {_shorts(plan, to)}", tones[src])
            for src, to in sorted(by_source.items())
        ]
    return draw_boxes(shape, boxes, width=COLUMNS, colour=colour)


_MOST_DRAWN = 400
"""More boxes than this never fit, and comparing them all would take long."""


def _cells(transfers: Sequence[Transfer]) -> dict[Box, list[Transfer]] | None:
    """Disjoint boxes with the transfers that cover them; None where there are too many."""
    cells: dict[Box, list[Transfer]] = {}
    for transfer in transfers:
        rest = [transfer.box]
        for box in list(cells):
            shared = [part.intersect(box) for part in rest]
            if not any(shared):
                continue
            members = cells.pop(box)
            outside = [box]
            for part in shared:
                if part is not None:
                    cells[part] = [*members, transfer]
                    outside = [left for old in outside for left in old.subtract(part)]
            cells.update((left, list(members)) for left in outside)
            rest = [left for old in rest for left in old.subtract(box)]
        cells.update((part, [transfer]) for part in rest)
        if len(cells) > _MOST_DRAWN:
            return None
    return cells


def _legend(plan: Plan) -> str:
    worlds = {plan.src.world, *(manifest.world for manifest in plan.dst)}
    if len(worlds) == 1:
        return "source rank → destination rank"
    return f"rank of {plan.src.world} → rank of {' or '.join(m.world for m in plan.dst)}"


def _short(plan: Plan, rank: int, side: str) -> str:
    """A rank in as few characters as are clear on its side of an arrow."""
    world = _world_of(plan, rank)
    ours = [plan.src.world] if side == "source" else [manifest.world for manifest in plan.dst]
    local = rank - world.first
    return str(local) if set(ours) == {world.name} else f"{world.name}:{local}"


def _world_of(plan: Plan, rank: int) -> World:
    return next(w for w in plan.worlds if w.first <= rank < w.first + w.size)


def _shorts(plan: Plan, ranks: Sequence[int]) -> str:
    """Several ranks: ``2,4`` or, where many follow one another, ``2-9``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1 and _world_of(plan, rank) == _world_of(plan, runs[-1][-1]):
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = []
    for run in runs:
        names = [_short(plan, rank, "destination") for rank in run]
        texts += [f"{names[0]}-{run[-1] - _world_of(plan, run[-1]).first}"] if len(run) > 2 else names
    return ",".join(texts)


def _lines_to(plan: Plan, to: int, rows: Iterable[Explained], name: str) -> list[str]:
    """What one destination rank wants, and where each part comes from."""
    spec = next(spec for spec in plan.specs if spec.name == name)
    wanted = [box for box, mask in _pattern(plan, name).needed if mask >> to & 1]
    shown = ", ".join(map(str, wanted[:4])) + (f" and {len(wanted) - 4} more" if len(wanted) > 4 else "")
    nbytes = sum(box.numel for box in wanted) * spec.itemsize
    lines = [f"{plan.rank_name(to)} wants " + (f"{shown}, {format_nbytes(nbytes)}" if wanted else "none of it")]
    mine = [row for row in rows if row.transfer.dst == to]
    cells = [(_origin(plan, r.transfer), box_text(r.transfer.box), format_nbytes(r.transfer.nbytes)) for r in mine]
    widths = [max(len(cell[at]) for cell in cells) for at in range(3)]
    for row, (origin, box, size) in zip(mine, cells, strict=True):
        lines.append(f"  {origin:<{widths[0]}}  {box:<{widths[1]}}  {size:>{widths[2]}}  {_why(plan, row)}")
    return lines


def _origin(plan: Plan, transfer: Transfer) -> str:
    return "kept" if transfer.src == transfer.dst else f"from {plan.rank_name(transfer.src)}"


def _why(plan: Plan, row: Explained) -> str:
    if row.transfer.rule == "local":
        return "it holds this already"
    if not row.wanted:
        return f"not wanted there: {plan.strategy} sends whole tensors"
    if len(row.holders) == 1:
        return "the only holder"
    others = ", ".join(plan.rank_name(r) for r in row.holders[:4]) + (" and more" if len(row.holders) > 4 else "")
    return f"one of {len(row.holders)} holders ({others}), dealt so that the busiest sends least"
