"""Routes: the way of each part of a class's string, as edges from rank to rank.

An edge (a, b) carries the part from a to b; edges come in the order in which the bytes can move, so a rank that
forwards has received before. (a, a) is a copy inside a rank that is holder and needer at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reshard.plan.balance import share_out
from reshard.plan.cells import mask_of, ranks_of
from reshard.plan.entries import find_entries
from reshard.plan.strings import ClassString
from reshard.plan.supply import balance_entries
from reshard.plan.trees import Forest, parts_of
from reshard.topology.topology import ONE_HOST, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from reshard.layouts.piece import TensorSpec
    from reshard.plan.classes import Pattern, RouteClass

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
        wanted = [Wanted(at, cls.holders, cls.audience & ~cls.holders) for at, cls in enumerate(classes)]
        whole = [cls.audience != cls.needers for cls in classes]
        served = _serve_directly(classes, patterns, specs, wanted, cut_nbytes)
        routes = [Route(at, lo, hi, edges, "whole" if whole[at] else "direct") for at, lo, hi, edges in served]
    else:
        served = _serve_directly(classes, patterns, specs, list(_wanted_inside(classes, topology)), cut_nbytes)
        routes = [Route(at, lo, hi, edges, "inside") for at, lo, hi, edges in served]
        routes.extend(_entering(classes, patterns, specs, topology, cut_nbytes))
    routes.extend(_local_routes(classes))
    return tuple(sorted(routes, key=lambda r: (r.route_class, r.start, r.stop, r.edges, r.rule)))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A class that some ranks are to get from holders: masks of both."""

    route_class: int
    holders: int
    receivers: int


def _wanted_inside(classes: Sequence[RouteClass], topology: Topology) -> Iterator[Wanted]:
    """What ranks get from the holders in their own domain, by domain."""
    members = [mask_of(domain.ranks) for domain in topology.domains]
    homes: dict[int, list[int]] = {}
    for at, cls in enumerate(classes):
        if cls.holders not in homes:
            homes[cls.holders] = sorted({topology.domain_of(rank) for rank in ranks_of(cls.holders)})
        for home in homes[cls.holders]:
            receivers = cls.needers & ~cls.holders & members[home]
            if receivers:
                yield Wanted(at, cls.holders & members[home], receivers)


def _entering(
    classes: Sequence[RouteClass],
    patterns: Sequence[Pattern],
    specs: Sequence[TensorSpec],
    topology: Topology,
    cut_nbytes: int,
) -> Iterator[Route]:
    """The routes by which classes come into their domains, cut where granules allow it."""
    entries = find_entries(classes, topology)
    supply = balance_entries(entries, topology, cut_nbytes=cut_nbytes)
    forests: dict[int, Forest] = {}
    for entry, suppliers, stripes in zip(entries, supply.suppliers, supply.stripes, strict=True):
        if entry.needers not in forests:
            forests[entry.needers] = Forest(entry)
        string = ClassString(classes[entry.route_class], patterns, specs)
        shared = max(map(len, stripes)) > 1
        slack = min(entry.nbytes // 256, max(entry.nbytes // 2048, cut_nbytes))
        at = 0
        for _, stop, sender, other, takers in parts_of(entry, suppliers, stripes):
            stop = string.floor(stop, slack)
            if stop <= at:
                continue
            edges, relays = forests[entry.needers].tree(sender, other, takers)
            rule: Rule = "relayed" if relays else "striped" if shared else "direct"
            yield Route(entry.route_class, at, stop, edges, rule)
            at = stop


def _serve_directly(
    classes: Sequence[RouteClass],
    patterns: Sequence[Pattern],
    specs: Sequence[TensorSpec],
    wanted: Sequence[Wanted],
    cut_nbytes: int,
) -> Iterator[tuple[int, int, int, tuple[tuple[int, int], ...]]]:
    """Serve every receiver from holders, the busiest holder as little as possible: (class, start, stop, edges).

    Classes with equal holders are laid out as one line, receiver by receiver, and the line is cut at the holders'
    shares: so that most receivers have one sender for a class, and few ranks have many peers.
    """
    groups: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for one in wanted:
        if one.receivers:
            groups.setdefault(ranks_of(one.holders), []).append((one.route_class, ranks_of(one.receivers)))
    shares = share_out(
        {holders: sum(classes[at].nbytes * len(to) for at, to in members) for holders, members in groups.items()}
    )
    for holders, members in groups.items():
        for at, start, stop, sender, to in _deal(classes, patterns, specs, members, shares[holders], cut_nbytes):
            yield at, start, stop, tuple((holders[sender], receiver) for receiver in to)


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
        string: ClassString | None = None
        whole: dict[int, list[int]] = {}
        for receiver in receivers:
            done = 0
            while holder < len(ends) - 1 and ends[holder] < line + nbytes:
                cut = ends[holder] - line
                if cut >= cut_nbytes and nbytes - cut >= cut_nbytes:
                    string = string or ClassString(classes[at], patterns, specs)
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
