"""Plan: which rank sends which bytes to which rank, for every tensor of a model.

A plan is for all ranks at once and equal on every rank. It never lists one object a transfer (a large model on many
ranks has millions of overlapping pairs): it keeps route classes and cut points, and expands what one rank does
(``for_rank``) or what becomes of one tensor (``transfers``) when asked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import PlanError
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.plan.bound import Bound, Reach, find_bound, measure_reach
from reshard.plan.cells import ranks_of
from reshard.plan.classes import Pattern, RouteClass, make_classes, make_patterns
from reshard.plan.match import World, check_match, check_merged, line_up, nearest, place_worlds
from reshard.plan.proof import Proof, prove
from reshard.plan.routes import Route, choose_routes
from reshard.plan.saved import manifest_from_json, manifest_to_json, route_from_json, route_to_json
from reshard.plan.strings import ByteString, ClassString, Item
from reshard.plan.transfer import RankPlan, Transfer
from reshard.topology.topology import ONE_HOST, Topology
from reshard.units import count, format_nbytes, format_seconds, parse_nbytes
from reshard.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.layouts.piece import TensorSpec
    from reshard.plan.saved import SpecFacts

Strategy = Literal["reshard", "point-to-point", "gather-broadcast"]
STRATEGIES: tuple[Strategy, ...] = ("reshard", "point-to-point", "gather-broadcast")

PLAN_FORMAT = "reshard-plan-2"
FIRST_FORMAT = "reshard-plan-1"
"""The format before: manifests as they are published, and edges one by one. It is what digests are taken of, still."""


@dataclass(frozen=True)
class Plan:
    """Route classes and cut points for one source and one or more destination worlds.

    Ranks are the plan's: the worlds one after the other as ``worlds`` lists them; worlds of equal name are the same
    processes. Byte totals count payload on the wire.
    """

    src: Manifest
    dst: tuple[Manifest, ...]
    topology: Topology
    strategy: Strategy
    cut_nbytes: int
    worlds: tuple[World, ...]
    specs: tuple[TensorSpec, ...]
    patterns: tuple[Pattern, ...]
    classes: tuple[RouteClass, ...]
    routes: tuple[Route, ...]

    # -- ranks -----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """How many ranks take part, all worlds together."""
        return max(world.first + world.size for world in self.worlds)

    def rank_of(self, world: str, rank: int) -> int:
        """The plan's number of a world's rank."""
        return next(w.first for w in self.worlds if w.name == world) + rank

    def rank_name(self, rank: int) -> str:
        """A rank of the plan as people call it: ``trainer 3``, or ``rank 3`` where there is one world."""
        return _rank_name(self.worlds, rank)

    # -- what it says ----------------------------------------------------------------------------------------------

    @property
    def digest(self) -> str:
        """SHA-256 over the manifests, the options and the routes: equal on every rank that planned the same."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        text = json.dumps(self._identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _identity(self) -> dict[str, Any]:
        return {
            "format": FIRST_FORMAT,
            "version": __version__,
            "src": self.src.digest,
            "dst": [manifest.digest for manifest in self.dst],
            "topology": self.topology.to_json(),
            "strategy": self.strategy,
            "cut_nbytes": self.cut_nbytes,
            "routes": [_route_in_digest(route) for route in self.routes],
        }

    def proof(self) -> Proof:
        """Replay the plan on labels; ProofError where it does not deliver every byte exactly once."""
        return prove(self.specs, self.patterns, self.classes, self.routes, self.rank_name)

    @cached_property
    def bound(self) -> Bound:
        """The least time of any plan in which each domain takes each slice in once."""
        return find_bound(self.classes, self.topology)

    @cached_property
    def reach(self) -> Reach:
        """What the ports carry under this plan: busiest port, copies into each domain, relayed bytes."""
        return measure_reach(self.classes, self.routes, self.topology)

    @cached_property
    def crossings(self) -> int:
        """How many boxes go from one domain into another, each box once for every domain it enters."""
        if self.topology.is_flat:
            return 0
        home = self.topology.domain_of
        return sum(
            len(self.route_items(route)) * sum(home(a) != home(b) for a, b in route.edges) for route in self.routes
        )

    def pair_nbytes(self) -> dict[tuple[int, int], int]:
        """Bytes from rank to rank over the wire."""
        return self._pair_nbytes

    @cached_property
    def _pair_nbytes(self) -> dict[tuple[int, int], int]:
        pairs: dict[tuple[int, int], int] = {}
        for route in self.routes:
            for edge in route.edges:
                if edge[0] != edge[1]:
                    pairs[edge] = pairs.get(edge, 0) + route.nbytes
        return dict(sorted(pairs.items()))

    @property
    def wire_nbytes(self) -> int:
        """Bytes that go from one rank to another."""
        return sum(self._pair_nbytes.values())

    @property
    def local_nbytes(self) -> int:
        """Bytes that a rank copies within its own memory."""
        return sum(route.nbytes * sum(a == b for a, b in route.edges) for route in self.routes)

    @property
    def needed_nbytes(self) -> int:
        """Bytes of all destination boxes, replicas counted each."""
        return sum(cls.nbytes * cls.needers.bit_count() for cls in self.classes)

    def sent_nbytes(self) -> dict[int, int]:
        """Bytes that each rank sends."""
        return _total(self._pair_nbytes, 0)

    def received_nbytes(self) -> dict[int, int]:
        """Bytes that each rank receives."""
        return _total(self._pair_nbytes, 1)

    def summary(self) -> str:
        """A few lines for people."""
        pairs = self._pair_nbytes
        sent, received = self.sent_nbytes(), self.received_nbytes()
        model_nbytes = sum(spec.nbytes for spec in self.specs)
        lines = [
            f"{self.strategy}: {count(len(self.specs), 'tensor')}, {format_nbytes(model_nbytes)} in one copy",
            f"  on the wire {format_nbytes(self.wire_nbytes)} over {count(len(pairs), 'pair')}, "
            f"within ranks {format_nbytes(self.local_nbytes)}, wanted {format_nbytes(self.needed_nbytes)}",
            f"  {count(len(self.patterns), 'pattern')}, {count(len(self.classes), 'route class', 'route classes')}, "
            f"{count(len(self.routes), 'route')}",
        ]
        if pairs:
            top, low = max(sent, key=lambda r: (sent[r], -r)), max(received, key=lambda r: (received[r], -r))
            lines.append(
                f"  busiest sender {self.rank_name(top)} {format_nbytes(sent[top])}, "
                f"busiest receiver {self.rank_name(low)} {format_nbytes(received[low])}"
            )
        if not self.topology.is_flat:
            lines.append(self._summary_of_domains())
        lines.append(f"  digest {self.digest[:16]}")
        return "\n".join(lines)

    def _summary_of_domains(self) -> str:
        bound, reach = self.bound.seconds, self.reach
        into = ", ".join(f"{name} {float(copies):.3g}" for name, copies in reach.copies_into[:8])
        more = f" and {len(reach.copies_into) - 8} more" if len(reach.copies_into) > 8 else ""
        of_bound = f"{float(reach.busiest_seconds / bound):.3f} of the bound" if bound else "no bound"
        return (
            f"  {self.topology.name}: {count(len(self.topology.domains), 'domain')}, crossing "
            f"{format_nbytes(reach.crossing_nbytes)}, relayed {format_nbytes(reach.relayed_nbytes)}\n"
            f"  busiest {reach.busiest_kind} {reach.busiest_port} {format_seconds(float(reach.busiest_seconds))}, "
            f"{of_bound} ({format_seconds(float(bound))})\n"
            f"  copies into {into or 'no domain'}{more}"
        )

    # -- parts of it -----------------------------------------------------------------------------------------------

    @cached_property
    def _strings(self) -> dict[int, ByteString]:
        return {}

    def string(self, route_class: int) -> ByteString:
        """The string of a class, expanded to (tensor index, box)."""
        if route_class not in self._strings:
            self._strings[route_class] = ClassString(self.classes[route_class], self.patterns, self.specs)
        return self._strings[route_class]

    def route_items(self, route: Route) -> list[Item]:
        """(tensor index, box) that a route carries, in order."""
        return self.string(route.route_class).between(route.start, route.stop)

    def for_rank(self, rank: int) -> RankPlan:
        """What ``rank`` (in the plan's numbers) sends, receives and copies to itself."""
        sends: list[tuple[int, int, Box]] = []
        receives: list[tuple[int, int, Box]] = []
        copies: list[Item] = []
        for route in self.routes:
            mine = [edge for edge in route.edges if rank in edge]
            if not mine:
                continue
            items = self.route_items(route)
            for sender, receiver in mine:
                if sender == receiver:
                    copies.extend(items)
                elif sender == rank:
                    sends.extend((receiver, tensor, box) for tensor, box in items)
                else:
                    receives.extend((sender, tensor, box) for tensor, box in items)
        return RankPlan(rank, tuple(sorted(sends)), tuple(sorted(receives)), tuple(sorted(copies)))

    def transfers(self, name: str) -> Iterator[Transfer]:
        """Every transfer of one tensor, by destination, then by box.

        Raises:
            PlanError: The plan has no tensor of this name.
        """
        index = next((i for i, spec in enumerate(self.specs) if spec.name == name), None)
        if index is None:
            raise PlanError(f"The plan has no tensor {name!r}. {nearest(name, [s.name for s in self.specs])}")
        relevant = {
            at for at, cls in enumerate(self.classes) for p, _ in cls.parts if index in self.patterns[p].tensors
        }
        itemsize = self.specs[index].itemsize
        found = [
            Transfer(name, box, src, dst, route.rule, box.numel * itemsize)
            for route in self.routes
            if route.route_class in relevant
            for tensor, box in self.route_items(route)
            if tensor == index
            for src, dst in route.edges
        ]
        yield from sorted(found, key=lambda t: (t.dst, t.box, t.src))

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Manifests, options and routes (``saved``); ``from_json`` reads it back to an equal plan."""
        return {
            "format": PLAN_FORMAT,
            "version": __version__,
            "digest": self.digest,
            "strategy": self.strategy,
            "cut_nbytes": self.cut_nbytes,
            "topology": self.topology.to_json(),
            "src": manifest_to_json(self.src),
            "dst": [manifest_to_json(manifest) for manifest in self.dst],
            "routes": [route_to_json(route) for route in self.routes],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """Read a saved plan. Its routes are taken as they are: ``proof`` says whether they are right.

        Raises:
            PlanError: The data is not a plan of this format, or of the one before.
        """
        if data.get("format") not in (PLAN_FORMAT, FIRST_FORMAT):
            raise PlanError(
                f"This is not a saved plan: its format is {data.get('format')!r}, not {PLAN_FORMAT!r} or "
                f"{FIRST_FORMAT!r}. A plan that a newer reshard saved is read by that one."
            )
        is_first = data["format"] == FIRST_FORMAT
        specs: dict[SpecFacts, TensorSpec] = {}

        def side(row: Mapping[str, Any]) -> Manifest:
            return Manifest.from_json(row) if is_first else manifest_from_json(row, specs)

        plan = _without_routes(
            side(data["src"]),
            [side(row) for row in data["dst"]],
            Topology.from_json(data["topology"]),
            data["strategy"],
            data["cut_nbytes"],
        )
        read = _route_from_first_format if is_first else route_from_json
        return replace(plan, routes=tuple(map(read, data["routes"])))


def plan_refit(
    src: Manifest | Layout,
    dst: Manifest | Layout | Sequence[Manifest],
    topology: Topology | None = None,
    *,
    strategy: str = "reshard",
    cut_nbytes: int | str = "64KiB",
) -> Plan:
    """Choose the way of every byte that a destination rank wants.

    Pure: equal arguments give an equal plan on every rank, and nothing is sent.

    Args:
        src: What each source rank holds; ranks count in its world. A Layout stands for one tensor named ``tensor``.
        dst: What each destination rank wants, same names; one manifest for each destination world. Manifests whose
            ``world`` is equal count the same processes (two Layouts always do).
        topology: What joins the ranks; one host for all of them if not given.
        strategy: ``"reshard"``, ``"point-to-point"`` (every needer is served directly) or ``"gather-broadcast"``
            (every tensor whole to every rank that needs a part of it).
        cut_nbytes: No cut leaves less than this of what one sender gives one receiver.

    Returns:
        Route classes and cut points, equal on every rank. Boxes in elements, global coordinates; totals in bytes.

    Raises:
        ManifestError: A destination tensor that the source lacks, or whose shape or dtype differs; all are listed.
        CoverageError: A destination box, or a part of one, is held by no source rank.
        PlanError: An unknown strategy.

    Cost: for each pattern (tensors of equal shape and holders) the product over dims of the cut points.
    Source: classes of replica sets and exact flow as in "On Optimizing the Communication of Model Parallelism"
    (arXiv 2211.05322) and COSTA (arXiv 2106.06601), with cut points in place of a search.
    """
    source, destinations = _as_manifests(src, dst)
    plan = _without_routes(source, destinations, topology or ONE_HOST, strategy, parse_nbytes(cut_nbytes))
    routes = choose_routes(
        plan.classes,
        plan.patterns,
        plan.specs,
        cut_nbytes=plan.cut_nbytes,
        topology=plan.topology,
        strategy=plan.strategy,
    )
    return replace(plan, routes=routes)


def _without_routes(src: Manifest, dst: Sequence[Manifest], topology: Topology, strategy: str, cut_nbytes: int) -> Plan:
    """A plan whose classes are known and whose routes are not."""
    if strategy not in STRATEGIES:
        raise PlanError(f"Strategy {strategy!r} is unknown; use one of {', '.join(STRATEGIES)}.")
    for manifest in (src, *dst):
        check_merged(manifest)
    check_match(src, dst)
    worlds = place_worlds(src, dst)
    specs, held, wanted = line_up(src, dst, {world.name: world.first for world in worlds})

    def rank_name(rank: int) -> str:
        return _rank_name(worlds, rank)

    patterns = make_patterns(specs, held, wanted, rank_name)
    classes = make_classes(patterns, whole=strategy == "gather-broadcast")
    return Plan(src, tuple(dst), topology, strategy, cut_nbytes, worlds, specs, patterns, classes, routes=())


def _as_manifests(
    src: Manifest | Layout, dst: Manifest | Layout | Sequence[Manifest]
) -> tuple[Manifest, list[Manifest]]:
    def one(side: Manifest | Layout) -> Manifest:
        return Manifest.from_layouts({"tensor": side}) if isinstance(side, Layout) else side

    return one(src), [one(dst)] if isinstance(dst, (Manifest, Layout)) else [one(manifest) for manifest in dst]


def _rank_name(worlds: Sequence[World], rank: int) -> str:
    if len(worlds) == 1:
        return f"rank {rank}"
    world = next(w for w in worlds if w.first <= rank < w.first + w.size)
    return f"{world.name} rank {rank - world.first}"


def _total(pairs: Mapping[tuple[int, int], int], end: int) -> dict[int, int]:
    totals: dict[int, int] = {}
    for pair, nbytes in pairs.items():
        totals[pair[end]] = totals.get(pair[end], 0) + nbytes
    return dict(sorted(totals.items()))


def _route_in_digest(route: Route) -> list[Any]:
    return [route.route_class, route.start, route.stop, [list(edge) for edge in route.edges], route.rule]


def _route_from_first_format(row: Sequence[Any]) -> Route:
    return Route(row[0], row[1], row[2], tuple((a, b) for a, b in row[3]), row[4])


__all__ = ["Plan", "RankPlan", "Transfer", "World", "check_match", "nearest", "plan_refit", "ranks_of"]
