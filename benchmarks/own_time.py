"""Own time: a profile of one call as a short table, the functions that take most time by themselves first.

Seconds are the processor's. cProfile makes every call dearer, small functions most, so shares are to be compared and
seconds are not; what the call takes without a profiler stands in the benchmark's own line, which the files in
``benchmarks/profiles`` begin with.
"""

from __future__ import annotations

import cProfile
import pstats
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

Where = tuple[str, int, str]
"""File, line, function; as pstats has them."""


def own_time(what: Callable[[], T], *, most: int = 20) -> tuple[T, str]:
    """Call ``what`` under cProfile.

    Args:
        what: The call.
        most: How many functions the table lists; the rest is summed up in one line.

    Returns:
        What it gave, and the table.
    """
    profiler = cProfile.Profile(time.process_time)  # other work on the machine does not count
    result = profiler.runcall(what)
    rows: list[tuple[float, int, Where]] = [
        (own, calls, where)
        for where, (_, calls, own, _, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    rows.sort(reverse=True)
    whole = sum(own for own, _, _ in rows)
    lines = [f"{'own s':>8} {'share':>6} {'calls':>9}  function ({whole:.2f} s in all, under cProfile)"]
    lines += [f"{own:8.3f} {own / whole:6.1%} {calls:9}  {_name(where)}" for own, calls, where in rows[:most]]
    rest = rows[most:]
    left, calls = sum(own for own, _, _ in rest), sum(calls for _, calls, _ in rest)
    lines.append(f"{left:8.3f} {left / whole:6.1%} {calls:9}  {len(rest)} other functions")
    return result, "\n".join(lines)


def _name(where: Where) -> str:
    """``plan/supply.py share``: no line numbers, which change with every edit."""
    file, _, function = where
    if file == "~":
        return function
    parts = Path(file).parts
    at = len(parts) - 1 - parts[::-1].index("reshard") if "reshard" in parts else len(parts) - 2
    return f"{'/'.join(parts[at + 1 :])} {function}"
