"""How one side cuts a tensor, in words: how many boxes of which shape, each on how many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.units import count

if TYPE_CHECKING:
    from reshard.layouts.holding import Entry


def describe_cut(entry: Entry) -> str:
    """One line: ``8 boxes of 320 x 2560``, with the ranks of each where there is more than one.

    >>> from reshard.layouts.layout import Layout
    >>> from reshard.layouts.manifest import Manifest
    >>> from reshard.layouts.mesh import Mesh
    >>> layout = Layout((10, 4), "uint8", Mesh({"dp": 2, "tp": 4}), ("tp",), "ceil")
    >>> describe_cut(Manifest.from_layouts({"w": layout}).entry("w"))
    '4 boxes of 1 to 3 x 4, each on 2 ranks'
    """
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for holding in entry.holdings:
        for box, ranks in holding.boxes(entry.spec):
            holders.setdefault((box.start, box.stop), set()).update(ranks)
    if not holders:
        return "on no rank"
    shapes = [[hi - lo for lo, hi in zip(*box, strict=True)] for box in holders]
    copies = sorted({len(ranks) for ranks in holders.values()})
    each = count(copies[0], "rank") if len(copies) == 1 else f"{copies[0]} to {copies[-1]} ranks"
    if all(tuple(shape) == entry.spec.shape for shape in shapes):
        return f"whole on {each}"
    sizes = " x ".join(_span(sorted(dim)) for dim in zip(*shapes, strict=True))
    return f"{count(len(holders), 'box', 'boxes')} of {sizes}" + ("" if copies == [1] else f", each on {each}")


def _span(sizes: list[int]) -> str:
    return str(sizes[0]) if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
