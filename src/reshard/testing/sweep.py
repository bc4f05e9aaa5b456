"""Sweep: layout pairs of the catalogue on several clusters, each planned and held against what every plan must keep to.

A plan must pass its proof; its busiest port must be within a factor of the bound; and of each slice that a domain needs
from outside, one copy must enter it. ``benchmarks/sweep.py`` goes through all of them, a test through some.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from reshard.cli.shorthand import WorldText, parallelism_of
from reshard.models.catalogue import find_model
from reshard.models.worlds import manifest_of
from reshard.plan.again import plan_again
from reshard.plan.cells import ranks_of
from reshard.plan.plan import plan_refit
from reshard.topology import presets
from reshard.topology.presets import GBIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reshard.layouts.manifest import Manifest
    from reshard.plan.plan import Plan
    from reshard.topology.topology import Topology


@dataclass(frozen=True, slots=True)
class LayoutPair:
    """A model, and the parallelism of its trainer and of its engine, as the command line has them."""

    model: str
    source: str
    destination: str

    def __str__(self) -> str:
        return f"{self.model}: {self.source} -> {self.destination}"


PAIRS: tuple[LayoutPair, ...] = tuple(
    LayoutPair(model, source, destination)
    for model, sides in (
        ("llama-3-8b", (("fsdp64", "tp8 dp8"), ("fsdp16", "tp4 dp16"), ("tp2 pp2 dp16", "tp4 dp16"))),
        ("llama-3-8b", (("hsdp8 fsdp8", "tp2 dp32"),)),
        ("llama-3-70b", (("fsdp128", "tp8 dp8"), ("tp8 pp4 dp2", "tp4 dp16"), ("tp4 pp4 vpp2 dp4", "tp8 dp8"))),
        ("qwen3-0.6b", (("fsdp4", "tp2 dp2"), ("fsdp64", "dp64"), ("dp64", "tp4 dp16"))),
        ("qwen3-4b", (("fsdp64", "tp2 dp32"), ("dp8", "tp8"))),
        ("qwen3-32b", (("tp8 dp8", "tp8 dp8"), ("fsdp64", "tp8 dp8"), ("fsdp16 tp4", "tp8 dp8"))),
        ("qwen3-32b", (("tp4 pp4 dp4", "tp4 pp2 dp8"),)),
        ("qwen3-30b-a3b", (("ep8 pp2 dp4", "tp8 dp8"), ("ep8 dp8", "tp2 dp32"), ("fsdp64 ep8", "tp4 dp16"))),
        ("qwen3-30b-a3b", (("tp2 ep8 pp2 dp4", "ep16 tp2 dp4"),)),
        ("qwen3-30b-a3b:stacked", (("fsdp64 ep16", "tp8 dp4"), ("ep8 dp8", "round_robin ep8 tp4 dp8"))),
        (
            "qwen3-235b-a22b",
            (("tp2 cp2 ep16 pp4", "tp8 dp8"), ("tp4 pp8 ep16", "tp8 dp16"), ("ep16 pp4 dp2", "ep32 tp4")),
        ),
        ("qwen3-235b-a22b:stacked", (("fsdp64 ep16", "tp8 dp4"), ("tp4 etp2 ep8 pp4", "tp8 dp8"))),
        ("deepseek-v3", (("ep16 pp4 dp2", "tp8 dp16"), ("pp16 ep16", "tp32 dp8"), ("ep32 pp4", "ep64 tp8 dp2"))),
        (
            "deepseek-v3:stacked",
            (("ep64 pp2", "tp16 dp4"), ("ep16 pp8 vpp2", "tp8 dp8"), ("tp4 ep32 pp4", "tp8 pp2 dp8")),
        ),
        ("nemotron-3-ultra", (("tp8 ep32 pp2", "tp8 dp8"), ("ep16 pp4", "tp8 dp4"))),
        ("generic-1t:stacked", (("ep32 pp8", "tp16 dp16"), ("ep64 pp4 dp2", "tp8 dp32"), ("ep48 pp4", "ep64 tp8 dp2"))),
        ("generic-2.4t:stacked", (("ep32 pp8", "tp32 dp8"),)),
        ("generic-2.8t:stacked", (("ep32 pp8", "tp32 dp8"),)),
    )
    for source, destination in sides
)
"""Dense and expert models, per-expert and stacked; Megatron-like and FSDP-like trainers, vLLM-like engines."""

CLUSTERS: dict[str, Callable[[int], Topology]] = {
    "dgx-h100": presets.dgx_h100,
    "gb200-nvl72": presets.gb200_nvl72,
    "gb200-nvl72, 72 a domain": lambda size: presets.gb200_nvl72(size, 72),
    "hosts of 8 with one 100 Gb/s port": lambda size: presets.hosts(
        [range(first, min(first + 8, size)) for first in range(0, size, 8)], port_bytes_per_second=100 * GBIT
    ),
}
"""A NIC a GPU in small and in large domains; domains that begin in the trainer and end in the engine; a shared NIC."""

MOST_OF_BOUND = Fraction(102, 100)


@dataclass(frozen=True)
class SweepRow:
    """One pair on one cluster.

    Args:
        pair: The model and its two sides.
        cluster: The cluster's name.
        ranks: Of trainer and engine.
        of_bound: The busiest port's time in times of the bound; None where nothing crosses.
        slack_of_bound: What a cut may leave on a port more than planned (``cut_nbytes``), likewise.
        entries: The most copies of a byte that enter a domain.
        delivered_nbytes: What the proof has counted.
        relayed_nbytes: Bytes that cross from a rank that is no source of them.
    """

    pair: LayoutPair
    cluster: str
    ranks: tuple[int, int]
    of_bound: Fraction | None
    slack_of_bound: Fraction
    entries: int
    delivered_nbytes: int
    relayed_nbytes: int

    @property
    def passes(self) -> bool:
        """Whether the plan keeps to what is asked; one whose proof fails raises instead."""
        is_near = self.of_bound is None or self.of_bound <= MOST_OF_BOUND + self.slack_of_bound
        return is_near and self.entries <= 1

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.pair.model,
            "source": self.pair.source,
            "destination": self.pair.destination,
            "cluster": self.cluster,
            "ranks": list(self.ranks),
            "busiest_of_bound": None if self.of_bound is None else float(self.of_bound),
            "entries": self.entries,
            "delivered_nbytes": self.delivered_nbytes,
            "relayed_nbytes": self.relayed_nbytes,
            "passes": self.passes,
        }


def sweep(
    pairs: Sequence[LayoutPair] = PAIRS, clusters: Sequence[str] = tuple(CLUSTERS), *, strategy: str = "reshard"
) -> Iterator[SweepRow]:
    """Plan, prove and measure every pair on every cluster; the cells of a pair are found once for all clusters.

    Raises:
        ProofError: A plan does not deliver every byte exactly once.
    """
    for pair in pairs:
        sides = _sides(pair)
        ranks = sides[0].size, sides[1].size
        topologies = {name: CLUSTERS[name](sum(ranks)) for name in clusters}
        made: Plan | None = None
        for name, topology in topologies.items():
            made = plan_again(made, topology) if made else plan_refit(*sides, topology, strategy=strategy)
            yield _row(pair, name, ranks, made)


def _sides(pair: LayoutPair) -> tuple[Manifest, Manifest]:
    model = find_model(pair.model)
    source, destination = (
        parallelism_of(WorldText.parse(text), is_source=at == 0)
        for at, text in enumerate((pair.source, pair.destination))
    )
    return manifest_of(model, source, world="trainer"), manifest_of(model, destination, world="engine")


def _row(pair: LayoutPair, cluster: str, ranks: tuple[int, int], plan: Plan) -> SweepRow:
    proof, bound, reach = plan.proof(), plan.bound.seconds, plan.reach
    slowest = min(min(port.out_bytes_per_second, port.in_bytes_per_second) for port in plan.topology.ports)
    return SweepRow(
        pair,
        cluster,
        ranks,
        reach.busiest_seconds / bound if bound else None,
        Fraction(plan.cut_nbytes, slowest) / bound if bound else Fraction(0),
        most_entries(plan),
        proof.delivered_nbytes,
        reach.relayed_nbytes,
    )


def most_entries(plan: Plan) -> int:
    """The most copies of one byte that enter one domain, from whichever other domains."""
    home = [plan.topology.domain_of(rank) for rank in range(plan.size)]
    entering: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for route in plan.routes:
        for sender, receiver in route.edges:
            if home[sender] != home[receiver]:
                marks = entering.setdefault((route.route_class, home[receiver]), [])
                marks += ((route.start, 1), (route.stop, -1))
    most = 0
    for (at, domain), marks in entering.items():
        inside = any(home[rank] == domain for rank in ranks_of(plan.classes[at].holders))
        open_now = 1 if inside else 0  # what a domain holds need not enter it
        for _, step in sorted(marks):
            open_now += step
            most = max(most, open_now)
    return most
