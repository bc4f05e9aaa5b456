"""Rank part: what one rank sends, receives and keeps under a plan, by peer and box by box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.report.listed import box_text, shortened
from reshard.units import count, format_nbytes

if TYPE_CHECKING:
    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Moved:
    """One box that a rank sends (``to`` a peer), receives (``from`` a peer) or copies in its own memory (``keep``)."""

    way: str
    peer: int
    name: str
    box: Box
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        box = {"start": list(self.box.start), "stop": list(self.box.stop)}
        return {"way": self.way, "peer": self.peer, "tensor": self.name, "box": box, "nbytes": self.nbytes}


def explain_rank(plan: Plan, rank: int) -> tuple[Moved, ...]:
    """All that one rank does: what it sends, then what it receives, then what it keeps, each by peer and tensor."""
    part = plan.for_rank(rank)
    rows = [("to", *row) for row in part.sends] + [("from", *row) for row in part.receives]
    rows += [("keep", rank, *row) for row in part.copies]
    return tuple(
        Moved(way, peer, plan.specs[at].name, box, box.numel * plan.specs[at].itemsize) for way, peer, at, box in rows
    )


def describe_rank(plan: Plan, rank: int, *, limit: int = 0) -> str:
    """What one rank does: totals by peer, then box by box.

    Args:
        plan: The plan.
        rank: In the plan's numbers.
        limit: The most lines of boxes; 0 for all.
    """
    moved = explain_rank(plan, rank)
    sums = {way: sum(row.nbytes for row in moved if row.way == way) for way in ("to", "from", "keep")}
    title = (
        f"{plan.rank_name(rank)}: sends {format_nbytes(sums['to'])}, receives {format_nbytes(sums['from'])}, "
        f"keeps {format_nbytes(sums['keep'])} of its own"
    )
    if not moved:
        return f"{title}: it has nothing to do"
    by_peer: dict[tuple[str, int], list[Moved]] = {}
    for row in moved:
        by_peer.setdefault((row.way, row.peer), []).append(row)
    peers = [
        f"  {_toward(plan, way, peer)}: {format_nbytes(sum(row.nbytes for row in rows))} in "
        f"{count(len(rows), 'box', 'boxes')} of {count(len({row.name for row in rows}), 'tensor')}"
        for (way, peer), rows in by_peer.items()
    ]
    cells = [(_toward(plan, r.way, r.peer), r.name, box_text(r.box), format_nbytes(r.nbytes)) for r in moved]
    widths = [max(len(cell[at]) for cell in cells) for at in range(4)]
    boxes = [
        f"  {toward:<{widths[0]}}  {name:<{widths[1]}}  {box:<{widths[2]}}  {size:>{widths[3]}}"
        for toward, name, box, size in cells
    ]
    return "\n".join([title, *shortened(peers, limit), "", *shortened(boxes, limit)])


def _toward(plan: Plan, way: str, peer: int) -> str:
    return "kept" if way == "keep" else f"{way} {plan.rank_name(peer)}"
