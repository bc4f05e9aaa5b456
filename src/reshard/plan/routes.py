"""Routes: the way of each part of a class's string, as edges from rank to rank.

An edge (a, b) carries the part from a to b; edges come in the order in which the bytes can move, so a rank that
forwards has received before. (a, a) is a copy inside a rank that is holder and needer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reshard.plan.balance import share_out
from reshard.plan.cells import ranks_of
from reshard.plan.strings import ByteString

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.piece import TensorSpec
    from reshard.plan.classes import Pattern, RouteClass

Rule = Literal["local", "direct", "whole"]
"""Why a route is what it is: in the same rank; to those who need it; to the audience, needed or not."""


@dataclass(frozen=True, slots=True, order=True)
class Route:
    """Bytes ``[start, stop)`` of a class's string and the edges that carry them."""

    route_class: int
    start: int
    stop: int
    edges: tuple[tuple[int, int], ...]
    rule: Rule

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def choose_routes(
    classes: Sequence[RouteClass],
    patterns: Sequence[Pattern],
    specs: Sequence[TensorSpec],
    *,
    cut_nbytes: int,
) -> tuple[Route, ...]:
    """Serve every rank of every class's audience from its holders, the busiest holder as little as possible.

    Classes with equal holders are laid out as one line, receiver by receiver, and the line is cut at the holders'
    shares: so that most receivers have one sender for a class, and few ranks have many peers.

    Args:
        classes: The route classes of the model.
        patterns: What their parts refer to.
        specs: The tensors in plan order.
        cut_nbytes: No cut leaves less than this of a receiver's string; smaller strings go whole.
    """
    routes = list(_local_routes(classes))
    groups: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for at, cls in enumerate(classes):
        receivers = ranks_of(cls.audience & ~cls.holders)
        if receivers:
            groups.setdefault(ranks_of(cls.holders), []).append((at, receivers))
    shares = share_out(
        {holders: sum(classes[at].nbytes * len(to) for at, to in members) for holders, members in groups.items()}
    )
    for holders, members in groups.items():
        for at, start, stop, sender, to in _deal(classes, patterns, specs, members, shares[holders], cut_nbytes):
            rule: Rule = "direct" if classes[at].audience == classes[at].needers else "whole"
            edges = tuple((holders[sender], receiver) for receiver in to)
            routes.append(Route(at, start, stop, edges, rule))
    return tuple(sorted(routes))


def _local_routes(classes: Sequence[RouteClass]) -> Iterator[Route]:
    for at, cls in enumerate(classes):
        both = ranks_of(cls.needers & cls.holders)
        if both:
            yield Route(at, 0, cls.nbytes, tuple((rank, rank) for rank in both), "local")


def _deal(
    classes: Sequence[RouteClass],
    patterns: Sequence[Pattern],
    specs: Sequence[TensorSpec],
    members: Sequence[tuple[int, tuple[int, ...]]],
    shares: Sequence[int],
    cut_nbytes: int,
) -> Iterator[tuple[int, int, int, int, list[int]]]:
    """Walk the line of (class, receiver) strings and cut it at the shares: (class, start, stop, holder, receivers)."""
    ends = [sum(shares[: i + 1]) for i in range(len(shares))]
    line = 0  # where the current receiver's string begins
    holder = 0
    for at, receivers in members:
        nbytes = classes[at].nbytes
        string: ByteString | None = None
        whole: dict[int, list[int]] = {}
        for receiver in receivers:
            done = 0
            while holder < len(ends) - 1 and ends[holder] < line + nbytes:
                cut = ends[holder] - line
                if cut >= cut_nbytes and nbytes - cut >= cut_nbytes:
                    string = string or ByteString(classes[at].items(patterns), specs)
                    cut = string.floor(cut, slack=nbytes // 256)
                elif 2 * cut < nbytes:
                    cut = 0
                else:
                    cut = nbytes
                if cut > done:
                    if (done, cut) == (0, nbytes):
                        break  # this holder serves the whole string, then its share is used up
                    yield at, done, cut, holder, [receiver]
                    done = cut
                if cut == nbytes:
                    break
                holder += 1
            if done == 0:
                whole.setdefault(holder, []).append(receiver)
            elif done < nbytes:
                yield at, done, nbytes, holder, [receiver]
            line += nbytes
            while holder < len(ends) - 1 and ends[holder] <= line:
                holder += 1
        for sender, served in whole.items():
            yield at, 0, nbytes, sender, served
