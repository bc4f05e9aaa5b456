"""Listed: how a list of boxes is written in a terminal, and where a long one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.units import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.box import Box


def box_text(box: Box) -> str:
    """A box with its sizes, where it has more than one dim: ``4 x 2 box [0:4, 2:4)``."""
    if len(box.shape) < 2:
        return f"{box}" if box.shape else "the scalar"
    return f"{' x '.join(map(str, box.shape))} box {box}"


def shortened(lines: Sequence[str], limit: int) -> list[str]:
    """At most ``limit`` lines, and how many were left out; 0 for all.

    >>> shortened(["a", "b", "c"], 2)
    ['a', 'b', '... and 1 more line; --limit 0 shows all']
    """
    if not limit or len(lines) <= limit:
        return list(lines)
    return [*lines[:limit], f"... and {count(len(lines) - limit, 'more line')}; --limit 0 shows all"]
