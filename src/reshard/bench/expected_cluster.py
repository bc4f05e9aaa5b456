"""Expected: the rows of the cluster benchmark as the simulator predicts them from a calibration of the machine.

Hosts are namespaces of one machine: their links have the rate that was set, less what headers take (measured on a link
of another rate), and their ranks share the machine's cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.bench.case import DTYPE
from reshard.bench.cluster_scenarios import ITEMSIZE, TENSORS, Scenario, scenario_named
from reshard.bench.cluster_ways import CHUNKS_UNDER_WAY, FORMS, Chunk, chunks_of, raw_socket_ends
from reshard.bench.expected import GlooGroup, allgather
from reshard.layouts.manifest import Manifest
from reshard.layouts.piece import Piece, TensorSpec
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.simulate.simulator import simulate
from reshard.simulate.tasks import Tasks
from reshard.topology import presets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.schedule.trace import Trace
    from reshard.simulate.calibration import Calibration
    from reshard.topology.topology import Topology


def expected_cluster(name: str, side: int, bytes_per_second: float, machine: Calibration) -> dict[str, float]:
    """Seconds of each row of ``reshard bench cluster``, by name; the usual way also by form.

    Args:
        name: Of the scenario.
        side: Of the tensors, ``[side, side]``.
        bytes_per_second: The rate that links are given, headers included.
        machine: What was measured of it.
    """
    scenario = scenario_named(name)
    rows = {"raw_socket": _raw_socket(scenario, side, bytes_per_second, machine)}
    joined = _topology(scenario, list(scenario.hosts), bytes_per_second * machine.link_efficiency)
    for form in FORMS:
        rows[f"gather_broadcast/{form}"] = _Usual(scenario, side, joined, machine).seconds(form)
    rows["gather_broadcast"] = min(rows[f"gather_broadcast/{form}"] for form in FORMS)
    rows["gather_broadcast_host_aware"] = _Usual(scenario, side, joined, machine).host_aware()
    for row, strategy in (("point_to_point", "point-to-point"), ("reshard", "reshard")):
        rows[row] = refit_trace(scenario, list(scenario.hosts), side, bytes_per_second, machine, strategy).seconds
    if len(scenario.destination_hosts) > 2:
        hosts = [*scenario.source_hosts, scenario.destination_hosts[0]]
        rows["reshard_to_one_host"] = refit_trace(scenario, hosts, side, bytes_per_second, machine).seconds
    return rows


def refit_trace(
    scenario: Scenario,
    hosts: Sequence[str],
    side: int,
    bytes_per_second: float,
    machine: Calibration,
    strategy: str = "reshard",
) -> Trace:
    """A refit among the ranks of some hosts: planned for the rates that were set, simulated with what links carry."""
    ranks = [rank for host in hosts for rank in scenario.hosts[host]]
    specs = [TensorSpec(f"tensor{at:02}", (side, side), str(DTYPE).removeprefix("torch.")) for at in range(TENSORS)]
    pieces = [
        {
            at: [Piece(spec.name, scenario.box(rank, side)) for spec in specs]
            for at, rank in enumerate(ranks)
            if scenario.is_source(rank) == is_source
        }
        for is_source in (True, False)
    ]
    source, destination = (Manifest.from_pieces(specs, held, size=len(ranks)) for held in pieces)
    plan = plan_refit(source, destination, _topology(scenario, hosts, bytes_per_second), strategy=strategy)
    carried = _topology(scenario, hosts, bytes_per_second * machine.link_efficiency)
    return simulate(plan_schedule(plan), carried, machine.costs("shm"))


def _topology(scenario: Scenario, hosts: Sequence[str], bytes_per_second: float) -> Topology:
    """These hosts, whose ranks are numbered anew from 0 in their order."""
    ranks, at = [], 0
    for host in hosts:
        ranks.append(range(at, at + len(scenario.hosts[host])))
        at += len(scenario.hosts[host])
    rates = [int(bytes_per_second * scenario.part_of_rate(host)) for host in hosts]
    return presets.hosts(ranks, port_bytes_per_second=rates, local_bytes_per_second=_NO_LIMIT, names=hosts)


_NO_LIMIT = 10**12
"""Inside a host the cores are the limit."""


def _raw_socket(scenario: Scenario, side: int, bytes_per_second: float, machine: Calibration) -> float:
    bound = scenario.bound(TENSORS * side * side * ITEMSIZE, bytes_per_second)
    joined = _topology(scenario, list(scenario.hosts), bytes_per_second * machine.link_efficiency)
    tasks = Tasks(joined, machine.costs("gloo"))
    sender, receiver = (_place(scenario, rank) for rank in raw_socket_ends(scenario, bound))
    tasks.message(sender, receiver, bound.nbytes)
    return tasks.seconds()


def _place(scenario: Scenario, rank: int) -> int:
    """A rank's number in ``_topology``, which counts host by host."""
    return [other for ranks in scenario.hosts.values() for other in ranks].index(rank)


class _Usual:
    """The usual way: everybody gets every tensor whole, chunk by chunk, and cuts its columns out."""

    def __init__(self, scenario: Scenario, side: int, joined: Topology, machine: Calibration) -> None:
        self._scenario, self._side = scenario, side
        self._costs = machine.costs("gloo")
        self._tasks = Tasks(joined, self._costs)
        self._chunks = chunks_of(scenario, side)
        self._sources = range(len(scenario.sources))
        self._receivers = range(len(scenario.sources), scenario.size)
        self._at = {rank: _place(scenario, rank) for rank in range(scenario.size)}
        self._done: dict[int, list[int]] = {rank: [] for rank in range(scenario.size)}
        """By rank and chunk: what must be done before the chunk's buffer is used again."""

    def seconds(self, form: str) -> float:
        roots = self._sources if form == "own_shards" else range(1)
        groups = {root: GlooGroup(self._tasks, [self._at[r] for r in (root, *self._receivers)]) for root in roots}
        gathered: list[int] = []
        for at, chunk in enumerate(self._chunks):
            root = chunk.source if form == "own_shards" else 0
            after = {self._at[rank]: self._free(rank, at) for rank in self._receivers}
            after[self._at[root]] = self._gathered(form, at, chunk, gathered)
            has = groups[root].broadcast(self._nbytes(chunk), after)
            self._done[root].append(has[self._at[root]])
            for rank in self._receivers:
                self._done[rank].append(self._cut_out(rank, chunk, has[self._at[rank]]))
        return self._tasks.seconds()

    def host_aware(self) -> float:
        """Every source to one rank of each host, which broadcasts inside the host."""
        inside = {
            host: [rank for rank in self._scenario.hosts[host] if not self._scenario.is_source(rank)]
            for host in self._scenario.destination_hosts
        }
        leaders = [ranks[0] for ranks in inside.values()]
        across = {root: GlooGroup(self._tasks, [self._at[r] for r in (root, *leaders)]) for root in self._sources}
        within = {ranks[0]: GlooGroup(self._tasks, [self._at[r] for r in ranks]) for ranks in inside.values()}
        for at, chunk in enumerate(self._chunks):
            after = {self._at[rank]: self._free(rank, at) for rank in leaders}
            has = across[chunk.source].broadcast(self._nbytes(chunk), after)
            for leader, ranks in zip(leaders, inside.values(), strict=True):
                came = {leader: has[self._at[leader]]}
                sent = came[leader]
                if len(ranks) > 1:
                    before = {self._at[rank]: self._free(rank, at) for rank in ranks[1:]}
                    before[self._at[leader]] = [came[leader]]
                    got = within[leader].broadcast(self._nbytes(chunk), before)
                    came |= {rank: got[self._at[rank]] for rank in ranks[1:]}
                    sent = got[self._at[leader]]
                for rank in ranks:
                    cut = self._cut_out(rank, chunk, came[rank])
                    self._done[rank].append(sent if rank == leader and sent > cut else cut)
        return self._tasks.seconds()

    def _nbytes(self, chunk: Chunk) -> int:
        return (chunk.rows[1] - chunk.rows[0]) * self._side * ITEMSIZE

    def _free(self, rank: int, at: int) -> list[int]:
        """What the chunk's buffer waits for."""
        done = self._done[rank]
        return [done[at - CHUNKS_UNDER_WAY]] if at >= CHUNKS_UNDER_WAY and len(done) > at - CHUNKS_UNDER_WAY else []

    def _cut_out(self, rank: int, chunk: Chunk, came: int) -> int:
        """Copy a destination's columns out of a chunk; nothing where it wants whole rows, which land in place."""
        width = self._scenario.box(rank, self._side).shape[1]
        if width == self._side:
            return came
        nbytes = (chunk.rows[1] - chunk.rows[0]) * width * ITEMSIZE
        seconds = self._costs.copy_seconds(nbytes, "strided", run_nbytes=width * ITEMSIZE)
        return self._tasks.copy(self._at[rank], seconds, [came])

    def _gathered(self, form: str, at: int, chunk: Chunk, gathered: list[int]) -> list[int]:
        """What must be done before a chunk can be broadcast."""
        if form == "own_shards":
            return []
        nbytes, costs, tasks = self._nbytes(chunk), self._costs, self._tasks
        if form == "gather":
            if not chunk.source:
                return []
            return [tasks.message(self._at[chunk.source], self._at[0], nbytes, self._free(0, at))]
        if at % len(self._sources) == 0:  # chunks of all sources together
            sources = [self._at[rank] for rank in self._sources]
            gathered[:] = allgather(tasks, costs, sources, nbytes, [*self._free(0, at), *gathered])
        return list(gathered)
