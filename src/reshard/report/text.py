"""Text for terminals: what a plan does as a whole, to one tensor, and for one rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reshard.plan.cells import ranks_of
from reshard.report.drawing import Label, draw_boxes
from reshard.schedule.schedule import plan_schedule
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.classes import Pattern
    from reshard.plan.plan import Plan, Transfer, World
    from reshard.plan.proof import Proof

COLUMNS = 80

# -- a plan as a whole ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Busiest:
    """The rank that sends (or receives) most."""

    rank: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Totals:
    """What a plan costs under one strategy; bytes count payload."""

    strategy: str
    digest: str
    wire_nbytes: int
    local_nbytes: int
    needed_nbytes: int
    pairs: int
    route_classes: int
    routes: int
    busiest_sender: Busiest | None
    busiest_receiver: Busiest | None
    messages: int
    rounds: int
    least_rounds: int
    bucket_nbytes: int
    staging_nbytes: int
    """The most staging memory that any rank uses."""

    bound_seconds: float
    """What no plan of this kind can beat on the topology; 0 where all ranks are in one domain."""

    busiest_of_bound: float | None
    rounds_of_bound: float
    crossings: int
    crossing_nbytes: int
    relayed_nbytes: int
    copies_into: dict[str, float]

    proof: Proof

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def total(plan: Plan, *, staging_nbytes: int, proof: Proof | None = None) -> Totals:
    """Prove a plan, put it in order, and add it up.

    Args:
        plan: The plan.
        staging_nbytes: The most staging memory a rank may use.
        proof: The plan's, where it has been made already.

    Raises:
        ProofError: The plan does not deliver every wanted byte exactly once.
        ScheduleError: Its buckets do not fit into the staging memory.
    """
    proof = proof or plan.proof()
    schedule = plan_schedule(plan, staging_nbytes=staging_nbytes)
    return Totals(
        strategy=plan.strategy,
        digest=plan.digest,
        wire_nbytes=plan.wire_nbytes,
        local_nbytes=plan.local_nbytes,
        needed_nbytes=plan.needed_nbytes,
        pairs=len(plan.pair_nbytes()),
        route_classes=len(plan.classes),
        routes=len(plan.routes),
        busiest_sender=_busiest(plan, plan.sent_nbytes()),
        busiest_receiver=_busiest(plan, plan.received_nbytes()),
        messages=schedule.messages,
        rounds=schedule.rounds,
        least_rounds=schedule.least_rounds,
        bucket_nbytes=schedule.size.nbytes,
        staging_nbytes=max((schedule.staging_nbytes(rank) for rank in range(plan.size)), default=0),
        bound_seconds=float(plan.bound.seconds),
        busiest_of_bound=float(plan.reach.busiest_seconds / plan.bound.seconds) if plan.bound.seconds else None,
        rounds_of_bound=schedule.rounds / schedule.least_rounds if schedule.least_rounds else 1.0,
        crossings=plan.crossings,
        crossing_nbytes=plan.reach.crossing_nbytes,
        relayed_nbytes=plan.reach.relayed_nbytes,
        copies_into={name: float(copies) for name, copies in plan.reach.copies_into},
        proof=proof,
    )


def _busiest(plan: Plan, nbytes: dict[int, int]) -> Busiest | None:
    if not nbytes:
        return None
    rank = max(nbytes, key=lambda r: (nbytes[r], -r))
    return Busiest(plan.rank_name(rank), nbytes[rank])


def describe_plan(plan: Plan, totals: Totals) -> str:
    """A plan in a few lines: totals, order in time, proof."""
    lines = [
        plan.summary(),
        f"  {count(totals.messages, 'message')} of up to {format_nbytes(totals.bucket_nbytes)} in "
        f"{count(totals.rounds, 'round')} (no order needs fewer than {totals.least_rounds}), "
        f"staging at most {format_nbytes(totals.staging_nbytes)} a rank",
        str(totals.proof),
    ]
    return "\n".join(lines)


def compare_strategies(rows: Sequence[Totals]) -> str:
    """A table with one column a strategy, and the ratios to the first below it."""

    def busiest(which: Busiest | None) -> str:
        return "-" if which is None else f"{format_nbytes(which.nbytes)} ({which.rank})"

    table = [
        ("", [row.strategy for row in rows]),
        ("on the wire", [format_nbytes(row.wire_nbytes) for row in rows]),
        ("within ranks", [format_nbytes(row.local_nbytes) for row in rows]),
        ("busiest sender", [busiest(row.busiest_sender) for row in rows]),
        ("busiest receiver", [busiest(row.busiest_receiver) for row in rows]),
        ("pairs", [str(row.pairs) for row in rows]),
        ("messages", [str(row.messages) for row in rows]),
        ("rounds", [str(row.rounds) for row in rows]),
        ("staging a rank", [format_nbytes(row.staging_nbytes) for row in rows]),
        ("digest", [row.digest[:16] for row in rows]),
        ("proof", ["passed" for _ in rows]),
    ]
    if any(row.crossing_nbytes for row in rows):
        table[3:3] = [
            ("between domains", [f"{format_nbytes(row.crossing_nbytes)} ({row.crossings} boxes)" for row in rows]),
            ("relayed", [format_nbytes(row.relayed_nbytes) for row in rows]),
            (
                "busiest port of bound",
                ["-" if r.busiest_of_bound is None else f"{r.busiest_of_bound:.3f}" for r in rows],
            ),
        ]
    widths = [max(len(cells[at]) for _, cells in table) for at in range(len(rows))]
    head = max(len(name) for name, _ in table)
    return "\n".join(
        f"{name:<{head}}  " + "  ".join(f"{c:<{w}}" for c, w in zip(cells, widths, strict=True)).rstrip()
        for name, cells in table
    )


# -- one tensor ----------------------------------------------------------------------------------------------------


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
    sums = f"{plan.strategy} sends {count(len(moved), 'box')}, {format_nbytes(sum(t.nbytes for t in moved))}"
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
    cells = [(_origin(plan, r.transfer), _box_text(r.transfer.box), format_nbytes(r.transfer.nbytes)) for r in mine]
    widths = [max(len(cell[at]) for cell in cells) for at in range(3)]
    for row, (origin, box, size) in zip(mine, cells, strict=True):
        lines.append(f"  {origin:<{widths[0]}}  {box:<{widths[1]}}  {size:>{widths[2]}}  {_why(plan, row)}")
    return lines


def _origin(plan: Plan, transfer: Transfer) -> str:
    return "kept" if transfer.src == transfer.dst else f"from {plan.rank_name(transfer.src)}"


def _box_text(box: Box) -> str:
    if len(box.shape) < 2:
        return f"{box}" if box.shape else "the scalar"
    return f"{' x '.join(map(str, box.shape))} box {box}"


def _why(plan: Plan, row: Explained) -> str:
    if row.transfer.rule == "local":
        return "it holds this already"
    if not row.wanted:
        return f"not wanted there: {plan.strategy} sends whole tensors"
    if len(row.holders) == 1:
        return "the only holder"
    others = ", ".join(plan.rank_name(r) for r in row.holders[:4]) + (" and more" if len(row.holders) > 4 else "")
    return f"one of {len(row.holders)} holders ({others}), dealt so that the busiest sends least"


# -- one rank ------------------------------------------------------------------------------------------------------


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
        f"  {_toward(plan, way, peer)}: {format_nbytes(sum(r.nbytes for r in rows))} in {count(len(rows), 'box')} of "
        f"{count(len({r.name for r in rows}), 'tensor')}"
        for (way, peer), rows in by_peer.items()
    ]
    cells = [(_toward(plan, r.way, r.peer), r.name, _box_text(r.box), format_nbytes(r.nbytes)) for r in moved]
    widths = [max(len(cell[at]) for cell in cells) for at in range(4)]
    boxes = [
        f"  {toward:<{widths[0]}}  {name:<{widths[1]}}  {box:<{widths[2]}}  {size:>{widths[3]}}"
        for toward, name, box, size in cells
    ]
    return "\n".join([title, *shortened(peers, limit), "", *shortened(boxes, limit)])


def _toward(plan: Plan, way: str, peer: int) -> str:
    return "kept" if way == "keep" else f"{way} {plan.rank_name(peer)}"


# -- words ---------------------------------------------------------------------------------------------------------


def shortened(lines: Sequence[str], limit: int) -> list[str]:
    """At most ``limit`` lines, and how many were left out; 0 for all.

    >>> shortened(["a", "b", "c"], 2)
    ['a', 'b', '... and 1 more line; --limit 0 shows all']
    """
    if not limit or len(lines) <= limit:
        return list(lines)
    return [*lines[:limit], f"... and {count(len(lines) - limit, 'more line')}; --limit 0 shows all"]


def count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "box"), count(8, "box"), count(0, "tensor")
    ('1 box', '8 boxes', '0 tensors')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('x') else 's'}"
