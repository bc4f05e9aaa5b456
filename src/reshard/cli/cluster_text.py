"""A cluster as the command line gives it: a preset's name, hosts with their ranks and rate, or a topology file."""

from __future__ import annotations

import json
import re
from pathlib import Path

from reshard.errors import ConfigError
from reshard.topology.presets import hosts, named
from reshard.topology.topology import Topology

_RATES = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def read_topology(text: str, size: int) -> Topology:
    """The topology of ``size`` ranks.

    ``dgx-h100`` and ``gb200-nvl72`` are presets; ``0-1 / 2-5 @ 2Gbit`` is two hosts with one port each, of one rate for
    all or one for each host (``@ 2Gbit, 1Gbit``); otherwise the text names a file that ``Topology.to_json`` wrote.

    Raises:
        ConfigError: The text is none of these, or the topology makes no sense.
    """
    if "@" in text:
        return _hosts(text, size)
    if Path(text).is_file():
        try:
            return Topology.from_json(json.loads(Path(text).read_text("utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{text} is not a topology (Topology.to_json): {error}.") from error
    return named(text, size)


def _hosts(text: str, size: int) -> Topology:
    who, _, rates = text.partition("@")
    ranks = [_ranks(part) for part in who.split("/")]
    listed = sorted(rank for host in ranks for rank in host)
    if listed != list(range(size)):
        raise ConfigError(
            f"Cluster {text!r} names ranks {listed}; the plan has ranks 0 to {size - 1}. Name each of them once."
        )
    speeds = [parse_rate(rate) for rate in rates.split(",")]
    return hosts(ranks, port_bytes_per_second=speeds[0] if len(speeds) == 1 else speeds)


def _ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.replace(" ", "").split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(f"{text.strip()!r} is not a list of ranks. Write it as in '0-3,8'.")
        ranks.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return ranks


def parse_rate(text: str) -> int:
    """Bytes a second of a link rate.

    >>> parse_rate("2Gbit"), parse_rate(" 400 Gbit ")
    (250000000, 50000000000)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]+)(?:/s)?\s*", text)
    if match is None or match[2].lower() not in _RATES:
        raise ConfigError(f"{text.strip()!r} is not a link rate. Write it as in '2Gbit'.")
    return int(float(match[1]) * _RATES[match[2].lower()]) // 8
