"""Drawing: the boxes of a tensor of one or two dims as lines of text, with the cut points on the edges.

Not to scale: every interval between two cut points is as wide as its label needs, and the numbers say where it lies.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.layouts.box import Box

# By (up, down, left, right): which of the four lines meet in a point.
_CORNERS = {
    (0, 0, 0, 0): " ",
    (0, 0, 1, 1): "─",
    (1, 1, 0, 0): "│",
    (0, 1, 0, 1): "┌",
    (0, 1, 1, 0): "┐",
    (1, 0, 0, 1): "└",
    (1, 0, 1, 0): "┘",
    (1, 1, 0, 1): "├",
    (1, 1, 1, 0): "┤",
    (0, 1, 1, 1): "┬",
    (1, 0, 1, 1): "┴",
    (1, 1, 1, 1): "┼",
}

_COLOURS = (36, 33, 32, 35, 34, 31)
"""ANSI colours (cyan, yellow, green, magenta, blue, red), by the number of a tone."""

MAX_LINES = 40


@dataclass(frozen=True, slots=True)
class Label:
    """One line of text inside a box; ``tone`` numbers its colour."""

    text: str
    tone: int


@dataclass(frozen=True, slots=True)
class _Area:
    """The part of the grid ``[top, bottom) x [left, right)``, in intervals, and what is written there."""

    top: int
    left: int
    bottom: int
    right: int
    labels: tuple[Label, ...]


def draw_boxes(
    shape: Sequence[int], boxes: Mapping[Box, Sequence[Label]], *, width: int = 80, colour: bool = False
) -> str | None:
    """Draw a tensor with the given boxes.

    Args:
        shape: Of one or two dims, none of them zero; rows downwards, columns to the right.
        boxes: What is written into each box. Boxes do not overlap; what no box covers stays empty.
        width: The most columns of text.
        colour: Colour the labels by their tones, with ANSI escapes.

    Returns:
        Lines without trailing blanks; None where the tensor has other dims, or the drawing would not fit.

    >>> from reshard.layouts.box import Box
    >>> halves = {Box((0,), (4,)): [Label("a", 0)], Box((4,), (8,)): [Label("b", 1)]}
    >>> print(draw_boxes((8,), halves))
    0   4   8
    ┌───┬───┐
    │ a │ b │
    └───┴───┘
    """
    if len(shape) not in (1, 2) or 0 in shape or not boxes:
        return None
    drawing = _Drawing(shape, boxes, colour)
    if drawing.width > width or drawing.height > MAX_LINES:
        return None
    return "\n".join(line.rstrip() for line in drawing.lines())


class _Drawing:
    """A grid of intervals with a size in characters each; one dim is drawn as a single row."""

    def __init__(self, shape: Sequence[int], boxes: Mapping[Box, Sequence[Label]], colour: bool) -> None:
        self._colour = colour
        self._has_rows = len(shape) == 2
        last = len(shape) - 1
        self._x = sorted({0, shape[last]} | {edge for b in boxes for edge in (b.start[last], b.stop[last])})
        rows = {0, shape[0]} | {edge for b in boxes for edge in (b.start[0], b.stop[0])}
        self._y = sorted(rows) if self._has_rows else [0, 1]
        self._areas = [self._area(box, tuple(labels)) for box, labels in sorted(boxes.items())]
        self._owner = [[-1] * (len(self._x) - 1) for _ in self._y[1:]]
        for at, area in enumerate(self._areas):
            for row in range(area.top, area.bottom):
                for column in range(area.left, area.right):
                    self._owner[row][column] = at
        self._widths = self._sizes(self._x, [(a.left, a.right, _needed_width(a)) for a in self._areas])
        self._widths = [max(w, len(str(x))) for w, x in zip(self._widths, self._x, strict=False)]
        self._heights = self._sizes(self._y, [(a.top, a.bottom, len(a.labels)) for a in self._areas])
        self._margin = max(len(str(y)) for y in self._y) + 1 if self._has_rows else 0

    def _area(self, box: Box, labels: tuple[Label, ...]) -> _Area:
        left, right = bisect_left(self._x, box.start[-1]), bisect_left(self._x, box.stop[-1])
        if not self._has_rows:
            return _Area(0, left, 1, right, labels)
        return _Area(bisect_left(self._y, box.start[0]), left, bisect_left(self._y, box.stop[0]), right, labels)

    def _sizes(self, edges: Sequence[int], spans: Sequence[tuple[int, int, int]]) -> list[int]:
        """Characters of each interval, so that every span has room; intervals of equal length get equal sizes."""
        sizes = [1] * (len(edges) - 1)
        for first, last, needed in sorted(spans, key=lambda s: s[1] - s[0]):
            lacking = needed - (sum(sizes[first:last]) + last - first - 1)
            for step in range(max(0, lacking)):
                sizes[first + step % (last - first)] += 1
        widest: dict[int, int] = {}
        for at, size in enumerate(sizes):
            length = edges[at + 1] - edges[at]
            widest[length] = max(widest.get(length, 0), size)
        return [widest[edges[at + 1] - edges[at]] for at in range(len(sizes))]

    @property
    def width(self) -> int:
        return self._margin + sum(self._widths) + len(self._widths) + len(str(self._x[-1]))

    @property
    def height(self) -> int:
        return sum(self._heights) + len(self._heights) + 2

    def lines(self) -> Iterator[str]:
        """The drawing from the top: the cut points of the columns first."""
        head = " " * self._margin
        for x, room in zip(self._x, [*self._widths, 0], strict=True):
            head += f"{x:<{room + 1}}"
        yield head
        inside = {line: text for area in self._areas for line, text in self._text_of(area)}
        for row in range(len(self._y)):
            mark = f"{self._y[row]:>{self._margin - 1}} " if self._has_rows else ""
            yield mark + self._across(row, inside)
            if row < len(self._heights):
                for at in range(self._heights[row]):
                    yield " " * self._margin + self._through(row, at, inside)

    def _text_of(self, area: _Area) -> Iterator[tuple[tuple[int, int, int], str]]:
        """Each label of an area with its place: (row, line of that row or -1 for the border above, first column)."""
        lines = [(row, at) for row in range(area.top, area.bottom) for at in range(-1, self._heights[row])][1:]
        room = sum(self._widths[area.left : area.right]) + area.right - area.left - 1
        skip = (len(lines) - len(area.labels)) // 2
        for (row, at), label in zip(lines[skip:], area.labels, strict=False):
            text = f"{label.text:^{room}}"
            if self._colour:
                coloured = f"\x1b[{_COLOURS[label.tone % len(_COLOURS)]}m{label.text}\x1b[0m"
                text = text.replace(label.text, coloured, 1)
            yield (row, at, area.left), text

    def _through(self, row: int, at: int, inside: Mapping[tuple[int, int, int], str]) -> str:
        """One line through a row of intervals."""
        text, column = "│", 0
        while column < len(self._widths):
            right = column + 1
            while right < len(self._widths) and not self._wall(row, right):
                right += 1
            room = sum(self._widths[column:right]) + right - column - 1
            text += inside.get((row, at, column), " " * room) + "│"
            column = right
        return text

    def _across(self, row: int, inside: Mapping[tuple[int, int, int], str]) -> str:
        """The line on the border above a row; where an area goes on through it, its text."""
        text, column = self._corner(row, 0), 0
        while column < len(self._widths):
            if self._floor(row, column):
                text += "─" * self._widths[column] + self._corner(row, column + 1)
                column += 1
                continue
            right = column + 1
            while right < len(self._widths) and not self._floor(row, right) and not self._wall(row, right):
                right += 1
            room = sum(self._widths[column:right]) + right - column - 1
            text += inside.get((row, -1, column), " " * room) + self._corner(row, right)
            column = right
        return text

    def _wall(self, row: int, column: int) -> bool:
        """Whether a line runs down on the left of an interval."""
        if not 0 <= row < len(self._heights):
            return False
        return column in (0, len(self._widths)) or self._owner[row][column - 1] != self._owner[row][column]

    def _floor(self, row: int, column: int) -> bool:
        """Whether a line runs along the top of an interval."""
        if not 0 <= column < len(self._widths):
            return False
        return row in (0, len(self._heights)) or self._owner[row - 1][column] != self._owner[row][column]

    def _corner(self, row: int, column: int) -> str:
        meets = (
            self._wall(row - 1, column),
            self._wall(row, column),
            self._floor(row, column - 1),
            self._floor(row, column),
        )
        return _CORNERS[tuple(map(int, meets))]  # type: ignore[index]


def _needed_width(area: _Area) -> int:
    return max((len(label.text) + 2 for label in area.labels), default=1)
