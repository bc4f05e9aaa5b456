"""Windows: which tensors move together, where room for those that are taken whole is used again and again."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")


def most_room(staging_nbytes: int) -> int:
    """Bytes of a rank's staging limit that room may take: the other half is for what is on its way."""
    return staging_nbytes // 2


def room_nbytes(sizes: Sequence[int], limit: int | None) -> int:
    """Bytes of the room for tensors of these sizes: all beside each other, or at most ``limit`` and the largest.

    >>> room_nbytes([3, 3, 3], None), room_nbytes([3, 3, 3], 8), room_nbytes([3, 9, 3], 8), room_nbytes([], 8)
    (9, 8, 9, 0)
    """
    together = sum(sizes)
    return together if limit is None else min(together, max(limit, max(sizes, default=0)))


def cut_windows(
    order: Iterable[str], taken: Sequence[Mapping[str, int]], limit: int | None
) -> tuple[tuple[str, ...], ...]:
    """Cut tensors that are taken whole into windows, such that the room of every rank is enough for each.

    Equal arguments give equal windows, so all ranks cut at the same tensors.

    Args:
        order: The tensors in the order in which they move.
        taken: By kind of rank: the tensors that it takes whole, each with the bytes that it has room for.
        limit: The room of a rank, unless the largest of its tensors needs more. None for all in one window.

    >>> cut_windows("abcde", [{"a": 4, "b": 4, "d": 9, "e": 1}, {"c": 6}], 8)
    (('a', 'b', 'c'), ('d',), ('e',))
    """
    windows: list[list[str]] = [[]]
    filled = [0] * len(taken)
    rooms = [room_nbytes([*each.values()], limit) for each in taken]
    for name in order:
        sizes = [each.get(name, 0) for each in taken]
        full = (had and size and had + size > room for had, size, room in zip(filled, sizes, rooms, strict=True))
        if any(full):
            windows.append([])
            filled = [0] * len(taken)
        windows[-1].append(name)
        filled = [had + size for had, size in zip(filled, sizes, strict=True)]
    return tuple(map(tuple, windows))


def by_window(things: Iterable[T], name_of: Callable[[T], str], windows: Sequence[Sequence[str]]) -> list[list[T]]:
    """Things of tensors, by window, in their order; those of tensors that no window names are in the first.

    >>> by_window(["a0", "b0", "a1", "c0"], lambda text: text[0], [["b"], ["a"]])
    [['b0', 'c0'], ['a0', 'a1']]
    """
    of = {name: at for at, names in enumerate(windows) for name in names}
    parts: list[list[T]] = [[] for _ in windows]
    for thing in things:
        parts[of.get(name_of(thing), 0)].append(thing)
    return parts
