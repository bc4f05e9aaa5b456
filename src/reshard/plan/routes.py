"""Routes: the way of each part of a class's string, as edges from rank to rank.

An edge (a, b) carries the part from a to b; edges come in the order in which the bytes can move, so a rank that
forwards has received before. (a, a) is a copy inside a rank that is holder and needer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from reshard.plan.balance import share_out
from reshard.plan.cells import mask_of, ranks_of
from reshard.plan.entries import balance_entries, find_entries
from reshard.plan.strings import ByteString
from reshard.plan.trees import parts_of, tree
from reshard.topology.topology import ONE_HOST, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.piece import TensorSpec
    from reshard.plan.classes import Pattern, RouteClass
    from reshard.plan.entries import Entry

Rule = Literal["local", "inside", "direct", "striped", "relayed", "whole"]
"""Why a route is what it is: a copy in the same rank; from a holder inside the domain; over the network once, to one
rank of a domain; the same to several ranks that each take a stripe; handed on by a domain that got it; or sent whole to
the audience, needed or not."""


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
    topology: Topology = ONE_HOST,
    strategy: str = "reshard",
) -> tuple[Route, ...]:
    """Bring every class to its audience.

    In one domain, and for the strategies that serve every rank directly, each receiver is served by a holder. Over
    several domains each domain takes one copy in (``entries``), and exchanges it inside.

    Args:
        classes: The route classes of the model.
        patterns: What their parts refer to.
        specs: The tensors in plan order.
        cut_nbytes: No cut leaves less than this of a string; smaller strings go whole.
        topology: Domains and ports.
        strategy: ``"reshard"`` makes use of the domains.
    """
    if topology.is_flat or strategy != "reshard":
        return _serve_directly(classes, patterns, specs, cut_nbytes=cut_nbytes)
    inside = [_kept_inside(cls, topology) for cls in classes]
    routes = [
        replace(route, rule="inside") if route.rule == "direct" else route
        for route in _serve_directly(inside, patterns, specs, cut_nbytes=cut_nbytes)
    ]
    entries = find_entries(classes, topology)
    supply = balance_entries(entries, topology, cut_nbytes=cut_nbytes)
    for entry, suppliers, stripes in zip(entries, supply.suppliers, supply.stripes, strict=True):
        routes.extend(_enter(entry, suppliers, stripes, classes, patterns, specs))
    return tuple(sorted(routes))


def _kept_inside(cls: RouteClass, topology: Topology) -> RouteClass:
    """The class with only those needers that have a holder in their domain."""
    homes = {topology.domain_of(rank) for rank in ranks_of(cls.holders)}
    served = mask_of(rank for rank in ranks_of(cls.needers) if topology.domain_of(rank) in homes)
    return replace(cls, needers=served, audience=served)


def _enter(
    entry: Entry,
    suppliers: Sequence[tuple[int, int]],
    stripes: Sequence[Sequence[tuple[int, int]]],
    classes: Sequence[RouteClass],
    patterns: Sequence[Pattern],
    specs: Sequence[TensorSpec],
) -> Iterator[Route]:
    """The routes by which one class comes into its domains, cut where granules allow it."""
    string: ByteString | None = None
    at = 0
    for _, stop, supplying, takers in parts_of(entry, suppliers, stripes):
        if stop < entry.nbytes:
            string = string or ByteString(classes[entry.route_class].items(patterns), specs)
            stop = string.floor(stop, slack=entry.nbytes // 256)
        if stop <= at:
            continue
        edges, relays = tree(entry, supplying, takers)
        shared = any(len(row) > 1 for row in stripes)
        rule: Rule = "relayed" if relays else "striped" if shared else "direct"
        yield Route(entry.route_class, at, stop, edges, rule)
        at = stop


def _serve_directly(
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
