"""Ranges: whole numbers in order as short text, ``0..15,32..240/16``, so that saved plans are small and can be read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_RANGE = re.compile(r"(-?\d+)(?:\.\.(-?\d+)(?:/(\d+))?)?", re.ASCII)


def ranges_text(numbers: Sequence[int]) -> str:
    """Numbers as text that ``read_ranges`` reads back to the same numbers in the same order.

    ``a..b`` is all from a to b, both included; ``a..b/step`` every step-th of them.

    >>> ranges_text([3, 4, 5, 6]), ranges_text([0, 8, 16, 24, 5]), ranges_text([7, 8]), ranges_text([])
    ('3..6', '0..24/8,5', '7,8', '')
    """
    texts = []
    at = 0
    while at < len(numbers):
        upto, step = at + 1, 0
        if upto < len(numbers):
            step = numbers[upto] - numbers[at]
            while step > 0 and upto < len(numbers) and numbers[upto] - numbers[upto - 1] == step:
                upto += 1
        if upto - at < 3:
            texts.append(str(numbers[at]))
            at += 1
            continue
        texts.append(f"{numbers[at]}..{numbers[upto - 1]}" + (f"/{step}" if step > 1 else ""))
        at = upto
    return ",".join(texts)


def read_ranges(text: str) -> list[int]:
    """The numbers that ``ranges_text`` wrote.

    Raises:
        ValueError: The text is not such ranges.

    >>> read_ranges("3..6,-2,0..24/8")
    [3, 4, 5, 6, -2, 0, 8, 16, 24]
    """
    numbers: list[int] = []
    for part in text.split(",") if text else []:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a number, and not a range such as '0..15' or '0..240/16'")
        first = int(match[1])
        last = first if match[2] is None else int(match[2])
        numbers.extend(range(first, last + 1, int(match[3] or 1)))
    return numbers
