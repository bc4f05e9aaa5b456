"""A cluster as the command line gives it: a preset with its spine, hosts with ranks and rate, or a topology file."""

from __future__ import annotations

import difflib
import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING, cast, get_args

from reshard.cli.json_files import made_from, read_json
from reshard.errors import ConfigError
from reshard.report.ranks import number_runs
from reshard.topology.presets import PRESETS, hosts, named, oversubscribed
from reshard.topology.topology import CrossRail, Topology
from reshard.units import parse_rate

if TYPE_CHECKING:
    from collections.abc import Sequence


def read_topology(text: str, size: int) -> Topology:
    """The topology of ``size`` ranks.

    ``dgx-h100`` and ``gb200-nvl72`` are presets; ``dgx-h100 spine=2`` has a spine that is oversubscribed 2 to 1, and
    with ``cross-rail=local`` bytes for another rail go over the fast link first; ``0-1 / 2-5 @ 2Gbit`` is two hosts
    with one port each, of one rate for all or one for each host (``@ 2Gbit, 1Gbit``); otherwise the text names a file
    that ``Topology.to_json`` wrote.

    Raises:
        ConfigError: The text is none of these, or the topology makes no sense.
    """
    if "@" in text:
        return _hosts(text, size)
    if os.path.isfile(text):
        return made_from(read_json(text), text, Topology.from_json, "a topology (Topology.to_json)", ConfigError)
    name, *words = text.split() or [text]
    if name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, n=1)
        meant = f" Is {close[0]!r} meant?" if close else ""
        raise ConfigError(
            f"Cluster {text!r} is neither a preset nor a file.{meant} Presets: {', '.join(sorted(PRESETS))}. Describe "
            f"any other by its hosts, as in '0-1 / 2-5 @ 2Gbit' (ranks of each host, and the rate of its port), or by "
            f"a file that Topology.to_json wrote.",
            value=text,
        )
    return _with_spine(text, named(name, size), words) if words else named(name, size)


def _with_spine(text: str, topology: Topology, words: list[str]) -> Topology:
    ratio, cross_rail = 1.0, "spine"
    for word in words:
        key, _, value = word.partition("=")
        if key == "spine" and re.fullmatch(r"\d+(\.\d+)?", value):
            ratio = float(value)
        elif key == "cross-rail" and value in get_args(CrossRail):
            cross_rail = value
        else:
            raise ConfigError(
                f"Cluster {text!r}: {word!r} says nothing of a preset's network. Write 'spine=2' for a spine that is "
                f"oversubscribed 2 to 1, and 'cross-rail=local' for bytes that reach another rail over the fast link."
            )
    return oversubscribed(topology, ratio, cast("CrossRail", cross_rail))


def _hosts(text: str, size: int) -> Topology:
    who, _, rates = text.partition("@")
    ranks = [_ranks(part) for part in who.split("/")]
    listed = sorted(rank for host in ranks for rank in host)
    if listed != list(range(size)):
        raise ConfigError(
            f"Cluster {text!r} names {_which(listed)}; the plan has {_which(range(size))}. Name each of them once.",
            value=text,
        )
    speeds = [parse_rate(rate.strip()) // 8 for rate in rates.split(",")]
    return hosts(ranks, port_bytes_per_second=speeds[0] if len(speeds) == 1 else speeds)


def _which(ranks: Sequence[int]) -> str:
    """Sorted ranks in words, those that are named twice too."""
    twice = sorted({a for a, b in pairwise(ranks) if a == b})
    named = f"ranks {number_runs(sorted(set(ranks)))}" if ranks else "no rank"
    return f"{named}, and {number_runs(twice)} more than once" if twice else named


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"{text.strip()!r} is not a list of ranks. Write it as in '0-3,8'.")
        ranks.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks
