"""Tensor figure: the two layouts of one tensor as rectangles, coloured by the rank that each part comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.report.flows import tensor_flow
from reshard.report.ranks import named_ranks, short_ranks
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.report.flows import Part, TensorFlow, WantedBox

TONES = 8
"""How many colours the page has for origins; further origins begin again with the first."""

MOST_PARTS = 600
"""More coloured parts than this on one side are not told apart by eye, and make the page large."""

_WIDTH, _LEFT, _TOP = 360.0, 46.0, 20.0
_LEAST_RATIO = 0.6  # of height to width
_CHARACTER = 6.4  # the width of one at the figure's font size, in its own units


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle in the figure's units; ``tone`` numbers its colour; ``text`` is written in it where it has room."""

    x: float
    y: float
    width: float
    height: float
    tone: int
    text: str
    title: str

    @property
    def baseline(self) -> float:
        """Where the text's line is: in the middle of a low rectangle, near the top of a high one."""
        return round(self.y + min(self.height / 2 + 4, 22), 2)


@dataclass(frozen=True, slots=True)
class Mark:
    """A cut point, written on an edge at ``at``."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Side:
    """One layout: ``parts`` are what moves, coloured by origin; ``boxes`` are what ranks hold or want."""

    parts: tuple[Rect, ...]
    boxes: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class FlowRow:
    """One destination box in words; ``feeds`` are the indices of the source parts that it is made of."""

    box: str
    needers: str
    nbytes: int
    sources: tuple[str, ...]
    feeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorFigure:
    """Both layouts of a tensor, to scale except where the note says so."""

    name: str
    title: str
    note: str
    width: float
    height: float
    across: tuple[Mark, ...]
    down: tuple[Mark, ...]
    held: Side
    wanted: Side
    rows: tuple[FlowRow, ...]
    legend: tuple[tuple[int, str], ...]
    others: int
    """Tensors that are cut alike, beside this one."""


def draw_tensor(plan: Plan, name: str, *, others: int = 0) -> TensorFigure:
    """Draw one tensor.

    A destination box that several ranks want is coloured as its first rank gets it; the rows list all of them.

    Args:
        plan: The plan.
        name: The tensor.
        others: How many more tensors are cut alike.

    Raises:
        PlanError: The plan has no tensor of this name.
    """
    flow = tensor_flow(plan, name)
    canvas = _Canvas(flow)
    origins = sorted({part.origin for wanted in flow.wanted for part in wanted.parts[0]})
    tones = {origin: at % TONES for at, origin in enumerate(origins)}
    sources = sorted({(part.box, part.origin) for wanted in flow.wanted for part in wanted.parts[0]})
    drawn = [source for source in sources if canvas.shows(source[0])]
    too_many = len(drawn) > MOST_PARTS
    held_parts = [] if too_many else [_part(plan, canvas, box, origin, tones) for box, origin in drawn]
    wanted_parts = [
        _part(plan, canvas, part.box, part.origin, tones)
        for wanted in flow.wanted
        if not too_many
        for part in wanted.parts[0]
        if canvas.shows(part.box)
    ]
    place = {} if too_many else {source: at for at, source in enumerate(drawn)}
    rows = tuple(_row(plan, wanted, place) for wanted in flow.wanted if canvas.shows(wanted.box))
    spec = flow.spec
    notes = [canvas.note] if canvas.note else []
    if too_many:
        notes.append(f"{len(drawn)} parts are too many to colour; only the boxes of both sides are drawn.")
    if any(len(set(map(_ways, wanted.parts))) > 1 for wanted in flow.wanted):
        notes.append("Replicas get their bytes from different ranks; the colours show the first replica.")
    return TensorFigure(
        name=name,
        title=f"{spec.dtype} {list(spec.shape)}, {format_nbytes(spec.nbytes)}",
        note=" ".join(notes),
        width=canvas.width,
        height=canvas.height,
        across=canvas.marks(canvas.x_cuts, canvas.x, 0),
        down=canvas.marks(canvas.y_cuts, canvas.y, 1) if canvas.y_dim is not None else (),
        held=Side(tuple(held_parts), tuple(_outline(plan, canvas, b, r) for b, r in flow.held if canvas.shows(b))),
        wanted=Side(
            tuple(wanted_parts),
            tuple(_outline(plan, canvas, w.box, w.needers, w) for w in flow.wanted if canvas.shows(w.box)),
        ),
        rows=rows,
        legend=tuple((tones[origin], plan.rank_name(origin)) for origin in origins[: 3 * TONES]),
        others=others,
    )


class _Canvas:
    """Where indices of a tensor lie on the page: the two dims that are cut most, or one, or none."""

    def __init__(self, flow: TensorFlow) -> None:
        shape = flow.spec.shape
        boxes = [box for box, _ in flow.held] + [wanted.box for wanted in flow.wanted]
        cuts = [sorted({0, n} | {e for b in boxes for e in (b.start[d], b.stop[d])}) for d, n in enumerate(shape)]
        ranked = sorted(range(len(shape)), key=lambda d: (-len(cuts[d]), -shape[d], d))
        shown = sorted(ranked[:2])
        self.y_dim = shown[0] if len(shown) == 2 else None
        self.x_dim = shown[-1] if shown else None
        self._hidden = [d for d in range(len(shape)) if d not in shown]
        self._hidden_cut = [d for d in self._hidden if len(cuts[d]) > 2]
        self._columns = shape[self.x_dim] if self.x_dim is not None else 1
        self._rows = shape[self.y_dim] if self.y_dim is not None else 1
        self.x_cuts = cuts[self.x_dim] if self.x_dim is not None else [0, 1]
        self.y_cuts = cuts[self.y_dim] if self.y_dim is not None else [0, 1]
        inner = _WIDTH - _LEFT - 22
        # Tensors are drawn to scale as long as that leaves room for what is in them.
        ratio = self._rows / self._columns if self.y_dim is not None else 0.22
        self._inner_width, self._inner_height = inner, inner * min(1.0, max(_LEAST_RATIO, ratio))
        if self.y_dim is None:
            self._inner_height = 64.0
        self._to_scale = self.y_dim is None or _LEAST_RATIO <= ratio <= 1.0
        self.width, self.height = _WIDTH, self._inner_height + _TOP + 6

    @property
    def note(self) -> str:
        """What the drawing leaves out."""
        notes = []
        if self._hidden_cut:
            fixed = " and ".join(f"dim {d} at index 0" for d in self._hidden_cut)
            notes.append(f"Drawn: dims {self.y_dim} and {self.x_dim}, with {fixed}.")
        elif self._hidden:
            notes.append(f"Drawn: dims {self.y_dim} and {self.x_dim}; nothing cuts the others.")
        if not self._to_scale:
            notes.append("Rows and columns have different scales.")
        return " ".join(notes)

    def shows(self, box: Box) -> bool:
        """Whether the slice that is drawn has a part of the box."""
        return all(box.start[d] == 0 for d in self._hidden_cut)

    def x(self, index: int) -> float:
        return _LEFT + self._inner_width * index / max(1, self._columns)

    def y(self, index: int) -> float:
        return _TOP + self._inner_height * index / max(1, self._rows)

    def place(self, box: Box) -> tuple[float, float, float, float]:
        """(x, y, width, height) of a box."""
        left, right = (0, 1) if self.x_dim is None else (box.start[self.x_dim], box.stop[self.x_dim])
        top, bottom = (0, 1) if self.y_dim is None else (box.start[self.y_dim], box.stop[self.y_dim])
        x, y = self.x(left), self.y(top)
        return round(x, 2), round(y, 2), round(self.x(right) - x, 2), round(self.y(bottom) - y, 2)

    @staticmethod
    def marks(cuts: Sequence[int], at: Callable[[int], float], dim: int) -> tuple[Mark, ...]:
        """The cut points that have room for their numbers; the last always has."""
        needed = [len(str(cut)) * _CHARACTER + 6 if dim == 0 else 13.0 for cut in cuts]
        kept: list[int] = []
        for i in [len(cuts) - 1, *range(len(cuts) - 1)]:
            if all(abs(at(cuts[i]) - at(cuts[j])) >= (needed[i] + needed[j]) / 2 for j in kept):
                kept.append(i)
        return tuple(Mark(round(at(cuts[i]), 2), str(cuts[i])) for i in sorted(kept))


def _part(plan: Plan, canvas: _Canvas, box: Box, origin: int, tones: Mapping[int, int]) -> Rect:
    return Rect(*canvas.place(box), tones[origin], "", f"{box} from {named_ranks(plan, [origin])}")


def _outline(plan: Plan, canvas: _Canvas, box: Box, ranks: tuple[int, ...], wanted: WantedBox | None = None) -> Rect:
    x, y, width, height = canvas.place(box)
    who = short_ranks(plan, ranks, most=2)
    texts = [who, _number(plan, ranks), f"{len(ranks)} ranks"]
    room = next((t for t in texts if len(t) * _CHARACTER + 4 <= width and height >= 12), "")
    title = f"{box}\n{'wanted' if wanted else 'held'} by {named_ranks(plan, ranks)}"
    if wanted is not None:
        title += "".join(f"\n{line}" for line in _sources(plan, wanted.parts[0])[:8])
    return Rect(x, y, width, height, -1, room, title)


def _number(plan: Plan, ranks: tuple[int, ...]) -> str:
    """A single rank without its world: that stands above the figure."""
    if len(ranks) > 1:
        return f"{len(ranks)} ranks"
    return str(ranks[0] - max(w.first for w in plan.worlds if w.first <= ranks[0]))


def _row(plan: Plan, wanted: WantedBox, place: Mapping[tuple[Box, int], int]) -> FlowRow:
    """The sources of one destination box; ranks whose bytes come in the same way stand together."""
    groups: dict[tuple[tuple[Box, int, int], ...], list[int]] = {}
    for rank, parts in zip(wanted.needers, wanted.parts, strict=True):
        groups.setdefault(_ways(parts), []).append(rank)
    sources: list[str] = []
    for at, ranks in enumerate(groups.values()):
        lines = _sources(plan, wanted.parts[wanted.needers.index(ranks[0])])
        if len(groups) > 1:
            lines = [f"{named_ranks(plan, ranks, most=2)}: {line}" for line in lines]
        sources += lines if at < 4 else []
    if len(groups) > 4:
        left = sum(len(ranks) for ranks in list(groups.values())[4:])
        sources.append(f"{left} more ranks get other shares of the same bytes")
    feeds = tuple(place[part.box, part.origin] for part in wanted.parts[0] if (part.box, part.origin) in place)
    nbytes = sum(part.nbytes for part in wanted.parts[0])
    return FlowRow(str(wanted.box), named_ranks(plan, wanted.needers), nbytes, tuple(sources), feeds)


def _ways(parts: Iterable[Part]) -> tuple[tuple[Box, int, int], ...]:
    return tuple((part.box, part.origin, part.sender) for part in parts)


def _sources(plan: Plan, parts: Sequence[Part]) -> list[str]:
    """One line an origin: how much of it, which boxes, and over whom where it does not come directly."""
    by_origin: dict[int, list[Part]] = {}
    for part in parts:
        by_origin.setdefault(part.origin, []).append(part)
    lines = []
    for origin, mine in sorted(by_origin.items()):
        boxes = ", ".join(str(part.box) for part in mine[:2]) + (f" and {len(mine) - 2} more" if len(mine) > 2 else "")
        via = sorted({part.sender for part in mine if part.sender != origin})
        over = f", handed on by {named_ranks(plan, via, most=2)}" if via else ""
        nbytes = format_nbytes(sum(part.nbytes for part in mine))
        lines.append(f"{nbytes} from {named_ranks(plan, [origin])}: {boxes}{over}")
    return lines
