"""Saved plans: manifests and routes as plain JSON whose size follows from what is said, not from how many say it.

A large mixture of experts has 45,395 names, and they are most of a plan that lists them. Here names that differ in
numbers only are one template with the numbers beside it (``"model.layers.{}.mlp.experts.{}.up_proj.weight"`` at
``"3..15", "0..15"``), ranks are ranges, and a route's edges are who hands on to whom: ``"0>128..160/16+1..7"`` says
that rank 0 sends to 128, 144 and 160, and that each of these hands on to the seven ranks behind it. All of it is read
back to equal values in the same order.
"""

from __future__ import annotations

import re
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from reshard.layouts.box import Box
from reshard.layouts.holding import Entry, Holding, Pieces, Rule, holding_from_json
from reshard.layouts.manifest import Manifest
from reshard.layouts.piece import TensorSpec
from reshard.plan.ranges import ranges_text, read_ranges
from reshard.plan.routes import Route

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reshard.plan.routes import Rule as Why

Numbers = tuple[int, ...]
SpecFacts = tuple[str, Numbers, str, Numbers, str]

_NUMBER = re.compile(r"(?<![0-9A-Za-z])(?:0|[1-9][0-9]*)(?![0-9A-Za-z])")
"""A number that stands alone, as of a layer or an expert; not the 2 of ``w2``, and none with zeros before it."""

_TEMPLATE = re.compile(r"(?:[^{}]|\{\{|\}\}|\{[0-9]{0,3}\})*")
"""What ``str.format`` may be given from a file: places of numbers and doubled braces, nothing else."""


# -- manifests -----------------------------------------------------------------------------------------------------


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest in few words: a row for each template of names, holdings once in a table."""
    table: dict[Holding, int] = {}
    seen: dict[int, int] = {}  # by identity: hashing a mesh of many ranks for every tensor is slow

    def number(holding: Holding) -> int:
        if id(holding) not in seen:
            seen[id(holding)] = table.setdefault(holding, len(table))
        return seen[id(holding)]

    rows: dict[tuple[object, ...], dict[Numbers, list[Numbers]]] = {}
    for entry in manifest.entries:
        spec = entry.spec
        template, numbers = _template(spec.name)
        group = _group_template(spec.group, numbers) if spec.group else ""
        others = tuple(map(number, entry.alternatives))
        kind = (template, spec.shape, spec.dtype, spec.granule, group, others, entry.fits)
        held = tuple(map(number, entry.holdings))
        rows.setdefault(kind, {}).setdefault(held, []).append(numbers)
    return {
        "world": manifest.world,
        "size": manifest.size,
        "holdings": [_holding_to_json(holding) for holding in table],
        "tensors": [_row_to_json(kind, by_holding) for kind, by_holding in rows.items()],
        "aliases": [list(pair) for pair in manifest.aliases],
    }


def manifest_from_json(data: Mapping[str, Any], specs: dict[SpecFacts, TensorSpec]) -> Manifest:
    """Read back what ``manifest_to_json`` wrote.

    Args:
        data: What it wrote.
        specs: Filled with the tensors that are found, by what they are; the manifests of one plan share them.
    """
    table = [_holding_from_json(row) for row in data["holdings"]]
    entries = []
    for row in data["tensors"]:
        shape, dtype, granule = tuple(row["shape"]), row["dtype"], tuple(row.get("granule", ()))
        alternatives = tuple(table[at] for at in row.get("alternatives", ()))
        fits = tuple(row.get("fits", ()))
        name, group = _checked(row["name"]), _checked(row.get("group", ""))
        for *ranges, held in row["held"]:
            holdings = tuple(table[at] for at in held)
            for numbers in product(*map(read_ranges, ranges)):
                facts = (name.format(*numbers), shape, dtype, granule, group.format(*numbers))
                spec = specs.get(facts)
                if spec is None:
                    spec = specs[facts] = TensorSpec(*facts)
                entries.append(Entry(spec, holdings, alternatives, fits))
    return Manifest(tuple(entries), data["world"], data["size"], tuple((a, b) for a, b in data["aliases"]))


def _template(name: str) -> tuple[str, Numbers]:
    """A name with its numbers taken out, to be put back by ``str.format``."""
    plain = name.replace("{", "{{").replace("}", "}}")
    return _NUMBER.sub("{}", plain), tuple(map(int, _NUMBER.findall(plain)))


def _group_template(group: str, numbers: Numbers) -> str:
    """An install group with its numbers as places of the name's numbers, where these have them."""

    def place(match: re.Match[str]) -> str:
        number = int(match[0])
        return f"{{{numbers.index(number)}}}" if number in numbers else match[0]

    return _NUMBER.sub(place, group.replace("{", "{{").replace("}", "}}"))


def _checked(template: str) -> str:
    if not _TEMPLATE.fullmatch(template):
        raise ValueError(f"{template!r} is not a name with places for numbers")
    return template


def _row_to_json(kind: tuple[Any, ...], by_holding: Mapping[Numbers, Sequence[Numbers]]) -> dict[str, Any]:
    template, shape, dtype, granule, group, alternatives, fits = kind
    row: dict[str, Any] = {"name": template, "shape": list(shape), "dtype": dtype}
    if granule:
        row["granule"] = list(granule)
    if group:
        row["group"] = group
    if alternatives:
        row["alternatives"] = list(alternatives)
    if fits:
        row["fits"] = list(fits)
    row["held"] = [
        [*map(ranges_text, ranges), list(held)] for held, found in by_holding.items() for ranges in _products(found)
    ]
    return row


def _products(found: Sequence[Numbers]) -> Iterator[tuple[Numbers, ...]]:
    """Products of numbers that make up all of ``found``, each of them once."""
    if len(found[0]) < 2:
        yield (tuple(sorted(n for (n,) in found)),) if found[0] else ()
        return
    rests: dict[int, list[Numbers]] = {}
    for numbers in sorted(found):
        rests.setdefault(numbers[0], []).append(numbers[1:])
    alike: dict[tuple[Numbers, ...], list[int]] = {}
    for first, behind in rests.items():
        alike.setdefault(tuple(behind), []).append(first)
    for tails, firsts in alike.items():
        for ranges in _products(tails):
            yield tuple(firsts), *ranges


def _holding_to_json(holding: Holding) -> dict[str, Any]:
    if isinstance(holding, Rule):
        return {**holding.to_json(), "ranks": ranges_text(holding.ranks)}
    if list(holding.ranks) != sorted(set(holding.ranks)):
        return holding.to_json()
    by_boxes: dict[tuple[Box, ...], list[int]] = {}
    for rank, boxes in holding.held:
        by_boxes.setdefault(boxes, []).append(rank)
    return {
        "boxes": [
            [ranges_text(ranks), [[list(box.start), list(box.stop)] for box in boxes]]
            for boxes, ranks in by_boxes.items()
        ]
    }


def _holding_from_json(data: Mapping[str, Any]) -> Holding:
    if "boxes" not in data:
        return holding_from_json({**data, "ranks": read_ranges(data["ranks"])} if "ranks" in data else data)
    held: list[tuple[int, tuple[Box, ...]]] = []
    for ranks, rows in data["boxes"]:
        boxes = tuple(Box(tuple(start), tuple(stop)) for start, stop in rows)
        held.extend((rank, boxes) for rank in read_ranges(ranks))
    return Pieces(tuple(sorted(held, key=lambda row: row[0])))


# -- routes --------------------------------------------------------------------------------------------------------


def route_to_json(route: Route) -> list[Any]:
    """A route as a row: its class, the bytes of the class's string that it carries, why, and its edges."""
    return [route.route_class, route.start, route.stop, route.rule, edges_text(route.edges)]


def route_from_json(row: Sequence[Any]) -> Route:
    """Read back what ``route_to_json`` wrote."""
    route_class, start, stop, rule, edges = row
    return Route(route_class, start, stop, read_edges(edges), cast("Why", rule))


def edges_text(edges: Sequence[tuple[int, int]]) -> str:
    """Edges as text that ``read_edges`` reads back to the same edges in the same order.

    ``a>b`` is an edge; ``a>b+c`` is that, and then one from b to b + c.

    >>> edges_text([(0, 8), (8, 9), (8, 10), (0, 12), (12, 13), (12, 14), (1, 3), (4, 4)])
    '0>8,12+1,2 1>3 4>4'
    """
    groups: list[tuple[int, list[int], list[int]]] = []  # sender, who it sends to, how far these hand on
    at = 0
    while at < len(edges):
        sender, taker = edges[at]
        at += 1
        steps = []
        while taker != sender and at < len(edges) and edges[at][0] == taker:
            steps.append(edges[at][1] - taker)
            at += 1
        if groups and (groups[-1][0], groups[-1][2]) == (sender, steps):
            groups[-1][1].append(taker)
        else:
            groups.append((sender, [taker], steps))
    return " ".join(
        f"{sender}>{ranges_text(takers)}" + (f"+{ranges_text(steps)}" if steps else "")
        for sender, takers, steps in groups
    )


def read_edges(text: str) -> tuple[tuple[int, int], ...]:
    """The edges that ``edges_text`` wrote.

    Raises:
        ValueError: The text is not such edges.

    >>> read_edges("0>8,12+1,2 4>4")
    ((0, 8), (8, 9), (8, 10), (0, 12), (12, 13), (12, 14), (4, 4))
    """
    edges: list[tuple[int, int]] = []
    for group in text.split():
        sender, _, rest = group.partition(">")
        takers, _, offsets = rest.partition("+")
        start, steps = int(sender), read_ranges(offsets)
        for taker in read_ranges(takers):
            edges.append((start, taker))
            edges.extend((taker, taker + step) for step in steps)
    return tuple(edges)
