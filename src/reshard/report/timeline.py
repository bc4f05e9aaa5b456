"""Timeline: a trace by rank as lanes on a page; single bars where they are few, shares of time where they are many."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.report.ranks import short_rank, short_ranks
from reshard.units import format_nbytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.plan.plan import Plan
    from reshard.schedule.trace import Trace, TraceEvent

LANES = ("send", "recv", "memory")
"""Each row has these, from the top; ``wait`` is drawn nowhere: it is where a lane is empty."""

_LANE_OF = {"send": 0, "recv": 1, "pack": 2, "unpack": 2, "copy": 2}
_COLOURS = ((217, 119, 6), (37, 99, 235), (13, 148, 136))  # as the style sheet has them for bars
MOST_BARS = 3_000
_MOST_ROWS = 256
_BINS = 480


@dataclass(frozen=True, slots=True)
class Bar:
    """One event, in shares of the chart's width, with its row and lane."""

    row: int
    lane: int
    left: float
    width: float
    title: str


@dataclass(frozen=True)
class Timeline:
    """A trace on a page: either ``bars`` or ``picture`` (a PNG with a pixel for each lane and span of time)."""

    rows: tuple[str, ...]
    bars: tuple[Bar, ...]
    picture: str
    """A ``data:`` address; empty where the bars are drawn one by one."""

    seconds: float
    origin: str
    events: int
    busy: tuple[tuple[str, str], ...]
    """(lane, share of time that a row's lane is busy on average) in words."""

    @property
    def row_pixels(self) -> float:
        """How high a row is on the page."""
        return max(3.0, min(27.0, 600 / len(self.rows)))

    @property
    def is_labelled(self) -> bool:
        return len(self.rows) <= 40


def draw_timeline(plan: Plan, trace: Trace) -> Timeline | None:
    """Draw a trace, without ranks that the plan lacks; None where nothing in it took time."""
    events = [event for event in trace.events if event.rank < plan.size and event.kind in _LANE_OF]
    total = max((event.stop_seconds for event in events), default=0.0)
    if not total:
        return None
    ranks = sorted({event.rank for event in events})
    step = -(-len(ranks) // _MOST_ROWS)
    groups = [ranks[at : at + step] for at in range(0, len(ranks), step)]
    row_of = {rank: at for at, group in enumerate(groups) for rank in group}
    names = tuple(short_rank(plan, g[0]) if step == 1 else short_ranks(plan, g, most=1) for g in groups)
    few = len(events) <= MOST_BARS and step == 1
    shares = _busy_shares(events, row_of, [len(group) for group in groups], total)
    means = [sum(sum(lane) for lane in shares[at :: len(LANES)]) / (len(groups) * _BINS) for at in range(len(LANES))]
    return Timeline(
        rows=names,
        bars=tuple(_bar(plan, event, row_of[event.rank], total) for event in events) if few else (),
        picture="" if few else _png(shares),
        seconds=total,
        origin=trace.origin,
        events=len(events),
        busy=tuple((lane, f"{mean:.0%}") for lane, mean in zip(LANES, means, strict=True)),
    )


def _bar(plan: Plan, event: TraceEvent, row: int, total: float) -> Bar:
    other = ""
    if event.peer is not None:
        other = f" {'from' if event.kind == 'recv' else 'to'} {plan.rank_name(event.peer)}"
    during = "" if event.round is None else f", round {event.round}"
    title = (
        f"{plan.rank_name(event.rank)}: {event.kind} {format_nbytes(event.nbytes)}{other}{during}\n"
        f"{format_seconds(event.start_seconds)} to {format_seconds(event.stop_seconds)}"
    )
    return Bar(row, _LANE_OF[event.kind], event.start_seconds / total, event.seconds / total, title)


def _busy_shares(
    events: Iterable[TraceEvent], row_of: dict[int, int], sizes: Sequence[int], total: float
) -> list[list[float]]:
    """By row and lane, for each span of time the share in which it was busy; lanes of one row follow one another."""
    shares = [[0.0] * _BINS for _ in range(len(sizes) * len(LANES))]
    for event in events:
        row = row_of[event.rank]
        lane = shares[row * len(LANES) + _LANE_OF[event.kind]]
        begin, end = event.start_seconds / total * _BINS, event.stop_seconds / total * _BINS
        for at in range(int(begin), min(_BINS, int(end) + 1)):
            lane[at] += max(0.0, min(end, at + 1) - max(begin, at)) / sizes[row]
    return [[min(1.0, share) for share in lane] for lane in shares]


def _png(shares: Sequence[Sequence[float]]) -> str:
    """The shares as a picture: the lane's colour, as opaque as it was busy, so that it stands on any ground."""
    rows = bytearray()
    for at, lane in enumerate(shares):
        colour = bytes(_COLOURS[at % len(LANES)])
        rows += b"\x00" + b"".join(colour + bytes([round(share * 15) * 17]) for share in lane)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", _BINS, len(shares), 8, 6, 0, 0, 0)  # 8 bits, red green blue and opacity
    pixels = chunk(b"IDAT", zlib.compress(bytes(rows), 9))
    picture = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + pixels + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(picture).decode()
