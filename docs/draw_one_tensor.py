"""Draw ``one-tensor.svg`` from the plan that it shows: ``python docs/draw_one_tensor.py > docs/one-tensor.svg``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard import Box, Layout, Mesh, Plan, plan_refit
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

CELL = 26
GAP = 14
LEFT, TOP = 34, 122
STRIPS, STRIDE = 478, 98

STYLE = """
  text { font: 14px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; text-anchor: middle; }
  .title { font-weight: 600; font-size: 16px; }
  .small { font-size: 12px; }
  .note { fill: #59636e; }
  .zero { fill: #9ec5fe; stroke: #1f4e9c; } .one { fill: #ffd8a8; stroke: #a8540a; }
  .grid { stroke: #1f2328; stroke-opacity: .18; } .cut { stroke: #1f2328; stroke-opacity: .7; stroke-dasharray: 5 4; }
  .way { stroke-width: 2; } .way.zero, .way.one { fill: none; }
  .way.zero { stroke: #2f6fd6; } .way.one { stroke: #d9730d; }
  .head.zero { fill: #2f6fd6; stroke: none; } .head.one { fill: #d9730d; stroke: none; }
  .pill { fill: #ffffff; stroke: #59636e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f3f6; } .note { fill: #b7bdc8; }
    .zero { fill: #1d3f73; stroke: #8fbaff; } .one { fill: #6b3d0c; stroke: #ffbe7a; }
    .grid, .cut { stroke: #f0f3f6; }
    .way.zero { stroke: #79aefc; } .way.one { stroke: #f5a356; }
    .head.zero { fill: #79aefc; } .head.one { fill: #f5a356; }
    .pill { fill: #151b23; stroke: #b7bdc8; }
  }
"""
TONES = ("zero", "one")


def make_plan() -> Plan:
    """The example: 8 x 8, two ranks by rows to four by columns."""
    rows = Layout((8, 8), "bfloat16", Mesh({"fsdp": 2}, ranks=[0, 1]), ("fsdp", None))
    columns = Layout((8, 8), "bfloat16", Mesh({"tp": 4}, ranks=[2, 3, 4, 5]), (None, "tp"))
    return plan_refit(rows, columns)


def box_lines(x: int, y: int, box: Box, tone: str) -> Iterator[str]:
    """A box with its element grid; its corner is at ``x, y``."""
    height, width = (size * CELL for size in box.shape)
    yield f'<rect class="{tone}" x="{x}" y="{y}" width="{width}" height="{height}"/>'
    for row in range(1, box.shape[0]):
        yield f'<path class="grid" d="M{x} {y + row * CELL}h{width}"/>'
    for column in range(1, box.shape[1]):
        yield f'<path class="grid" d="M{x + column * CELL} {y}v{height}"/>'


def pill(x: int, y: int, text: str) -> Iterator[str]:
    """A label on a ground of its own, centred on ``x, y``."""
    width = 14 + 8 * len(text)
    yield f'<rect class="pill" x="{x - width // 2}" y="{y - 13}" width="{width}" height="26" rx="13"/>'
    yield f'<text x="{x}" y="{y + 5}">{text}</text>'


def sources(plan: Plan) -> Iterator[str]:
    """The two row blocks, with the cuts that the destination's columns make in them."""
    for rank in (0, 1):
        boxes = [t.box for t in plan.transfers("tensor") if t.src == rank]
        whole = Box(min(b.start for b in boxes), max(b.stop for b in boxes))
        y = TOP + whole.start[0] * CELL + rank * GAP
        yield from box_lines(LEFT, y, whole, TONES[rank])
        for cut in sorted({box.start[1] for box in boxes} - {0}):
            yield f'<path class="cut" d="M{LEFT + cut * CELL} {y}v{whole.shape[0] * CELL}"/>'
        for box in boxes:
            to = next(t.dst for t in plan.transfers("tensor") if t.box == box)
            across, down = LEFT + (box.start[1] + 1) * CELL, y + (box.shape[0] - 1) * CELL + 18
            yield f'<text class="small" x="{across}" y="{down}">to {to}</text>'
        rows = f"rank {rank}: rows {whole.start[0]} to {whole.stop[0] - 1}"
        yield from pill(LEFT + whole.shape[1] * CELL // 2, y + whole.shape[0] * CELL // 2 - 8, rows)


def destinations(plan: Plan) -> Iterator[str]:
    """The four column blocks, each box in the colour of the rank it comes from, and the ways into them."""
    for at, rank in enumerate(range(2, 6)):
        x = STRIPS + at * STRIDE
        for transfer in plan.transfers("tensor"):
            if transfer.dst != rank:
                continue
            tone, up = TONES[transfer.src], transfer.src == 0
            y = TOP + GAP // 2 + transfer.box.start[0] * CELL
            yield from box_lines(x, y, transfer.box, tone)
            yield f'<text x="{x + CELL}" y="{y + (40 if up else 72)}">{format_nbytes(transfer.nbytes)}</text>'
            edge = y if up else y + transfer.box.shape[0] * CELL
            yield from way(at, x + CELL, edge, tone)
        yield from pill(x + CELL, TOP + GAP // 2 + 4 * CELL, f"rank {rank}")


def way(at: int, x: int, edge: int, tone: str) -> Iterator[str]:
    """The way from a source to its box in destination ``at``, in lanes that never cross, ending at ``x, edge``."""
    up = tone == "zero"
    out, bend = (-1, 10) if up else (1, 10)
    right, lane = LEFT + 8 * CELL, LEFT + 8 * CELL + 40 + 15 * (3 - at)
    begin = TOP + 24 + 15 * (3 - at) if up else TOP + 8 * CELL + GAP - 24 - 15 * (3 - at)
    level = edge + out * (30 + 15 * at)
    yield (
        f'<path class="way {tone}" d="M{right} {begin}H{lane - bend}q{bend} 0 {bend} {out * bend}V{level - out * bend}'
        f'q0 {out * bend} {bend} {out * bend}H{x - bend}q{bend} 0 {bend} {-out * bend}V{edge + out * 9}"/>'
    )
    yield f'<path class="head {tone}" d="M{x} {edge}l-6 {out * 11}h12z"/>'


def draw() -> str:
    """The whole picture as SVG."""
    plan = make_plan()
    boxes = len(list(plan.transfers("tensor")))
    sent = format_nbytes(plan.wire_nbytes)
    usual = format_nbytes(plan_refit(plan.src, plan.dst, strategy="gather-broadcast").wire_nbytes)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 870 470" role="img" aria-labelledby="t d">',
        '<title id="t">One tensor of 8 x 8 from two ranks by rows to four ranks by columns</title>',
        f'<desc id="d">Each destination rank gets one 4 x 2 box from each source rank: {boxes} boxes, {sent}.</desc>',
        f"<style>{STYLE}</style>",
        *sources(plan),
        *destinations(plan),
        f'<text class="title" x="{LEFT + 4 * CELL}" y="28">2 sources, by rows</text>',
        f'<text class="title" x="{STRIPS + 3 * STRIDE // 2 + CELL}" y="28">4 destinations, by columns</text>',
        f'<text class="note" x="435" y="456">{boxes} boxes of 4 x 2, {sent} in all. '
        f"The usual way sends all of the tensor to every destination: {usual}.</text>",
        "</svg>",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(draw())
