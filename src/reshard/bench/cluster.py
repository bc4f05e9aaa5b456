"""The cluster benchmark: refits between hosts beside the usual way and a bare socket, in one run on one machine.

Hosts are namespaces of this machine, each link has a limited rate (``reshard.testing.hosts``). ``run_cluster`` leads:
it makes the hosts of a scenario, starts a process for every rank, tells all of them what to run next, and reads the
links' counters before and after; ``rank_main`` is the whole life of a rank. A run lasts from the first rank's start to
the last rank's end; all processes of one machine have one clock.
"""

from __future__ import annotations

import gc
import time
from dataclasses import astuple, dataclass, field
from datetime import timedelta
from itertools import product
from statistics import median, median_low
from typing import TYPE_CHECKING, Any

from reshard.bench.cluster_scenarios import (
    FULL_NBYTES,
    ITEMSIZE,
    SCENARIO_NAMES,
    TENSORS,
    Scenario,
    scenario_named,
    side_of,
)
from reshard.testing.hosts import Cluster, LinkCount, hear, parse_rate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch.distributed as dist

    from reshard.bench.cluster_scenarios import Bound
    from reshard.bench.operation import Operation
    from reshard.testing.hosts import Talk, Task

RAW, USUAL, HOST_AWARE = "raw_socket", "gather_broadcast", "gather_broadcast_host_aware"
POINT_TO_POINT, RESHARD, ONE_HOST = "point_to_point", "reshard", "reshard_to_one_host"
STRATEGIES = (USUAL, HOST_AWARE, POINT_TO_POINT, RESHARD)

_LEAST_SECONDS = 60.0
_SLOWEST = 30
"""How many times the bound a run may take before it is given up."""


@dataclass(frozen=True)
class Setup:
    """What every rank of a scenario is told."""

    scenario: Scenario
    side: int
    bound: Bound
    bytes_per_second: float
    addresses: Mapping[str, str]
    timeout: timedelta
    strategies: tuple[str, ...]


def run_cluster(
    *,
    scenarios: Sequence[str] = SCENARIO_NAMES,
    strategies: Sequence[str] = STRATEGIES,
    rate: str = "2Gbit",
    nbytes: int = FULL_NBYTES,
    repeat: int = 3,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure on hosts made of namespaces.

    Args:
        scenarios: Some of ``SCENARIO_NAMES``.
        strategies: Some of ``STRATEGIES``; the bare socket is measured always.
        rate: Of every link, in each direction.
        nbytes: About how large all tensors of a scenario are together.
        repeat: Measured runs of every operation.
        progress: Told what is being done.

    Returns:
        Plain data: ``scenarios``, each with its bound, the bare socket and all strategies.

    Raises:
        VerifyError: An operation brought a wrong element.
        ConfigError: A rate or a scenario that cannot be read.
        EnvironmentNotSupported: This machine does not let this process make namespaces.
        TransportError: A rank was lost, or was not done in time.
    """
    side, chosen = side_of(nbytes), tuple(strategies)
    return {
        "rate": rate,
        "bytes_per_second": parse_rate(rate) / 8,
        "shape": [side, side],
        "dtype": "bfloat16",
        "tensors": TENSORS,
        "repeat": repeat,
        "scenarios": [_run(scenario_named(name), chosen, rate, side, repeat, progress) for name in scenarios],
    }


def _run(
    scenario: Scenario,
    strategies: tuple[str, ...],
    rate: str,
    side: int,
    repeat: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    bits = parse_rate(rate)
    nbytes = TENSORS * side * side * ITEMSIZE
    bound = scenario.bound(nbytes, bits / 8)
    seconds = _LEAST_SECONDS + _SLOWEST * bound.seconds
    rates = {host: f"{int(bits * scenario.part_of_rate(host))}bit" for host in scenario.hosts}
    progress(f"{scenario.name}: starting {scenario.size} ranks on {len(rates)} hosts")
    with Cluster(rates) as cluster:
        addresses = {host: cluster.address(host) for host in cluster.hosts}
        setup = Setup(scenario, side, bound, bits / 8, addresses, timedelta(seconds=seconds), strategies)
        tasks = [
            cluster.start(host, rank_main, rank, setup, label=f"rank {rank} on host {host}")
            for rank, host in enumerate(scenario.host_of)
        ]
        leader = _Leader(cluster, tasks, seconds)
        leader.connect()
        samples = leader.measure(repeat, lambda doing: progress(f"{scenario.name}: {doing}"))
    return _report(setup, rates, nbytes, samples, leader.first_seconds)


# -- leading -----------------------------------------------------------------------------------------------------------


@dataclass
class Samples:
    """What was seen of one operation, by repetition."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    after_network: list[float | None] = field(default_factory=list)
    """Seconds from the last byte over the network to the last local one, where the ranks can tell."""
    links: list[dict[str, LinkCount]] = field(default_factory=list)
    compared: int = 0
    """Elements compared, all ranks together."""


class _Leader:
    """Tells all ranks what to do next, and waits until all have done it."""

    def __init__(self, cluster: Cluster, tasks: Sequence[Task], timeout: float) -> None:
        self._cluster, self._tasks, self._timeout = cluster, tasks, timeout
        self._names: list[str] = []
        self.first_seconds: dict[str, float] = {}
        """How long each operation took in the run that was compared."""

    def connect(self) -> None:
        port = self._hear()[0]
        self._tell(port)
        self._names = self._hear()[0]

    def measure(self, repeat: int, progress: Callable[[str], None]) -> dict[str, Samples]:
        """Compare what each operation brings, then run them by turns; of the usual forms only the fastest."""
        samples = {name: Samples() for name in self._names}
        for name in self._names:
            progress(f"comparing what {name} brings")
            self._ask("poison")
            self.first_seconds[name], _, _ = self._run(name)
            samples[name].compared = sum(self._ask("check", name))
        forms = [name for name in self._names if name.startswith(f"{USUAL}/")]
        fastest = min(forms, key=self.first_seconds.__getitem__, default=None)
        names = [name for name in self._names if name == fastest or name not in forms]
        for turn in range(repeat):
            progress(f"measuring {len(names)} operations, {turn + 1} of {repeat}")
            first = turn % len(names)  # so that no operation always follows the same one
            for name in (*names[first:], *names[:first]):
                before = self._counts()
                seconds, cpu_seconds, after_network = self._run(name)
                after = self._counts()
                samples[name].seconds.append(seconds)
                samples[name].cpu_seconds.append(cpu_seconds)
                samples[name].after_network.append(after_network)
                samples[name].links.append({host: after[host] - before[host] for host in after})
        self._tell(None)
        self._hear()
        return {USUAL if name == fastest else name: samples[name] for name in names}

    def _run(self, name: str) -> tuple[float, float, float | None]:
        """Run an operation on all ranks; returns seconds, CPU seconds, and the seconds after the network was done."""
        self._ask("ready", name)
        told: list[Timing] = self._ask("run", name)
        taking_part = [timing for timing in told if timing.takes_part]
        end = max(timing.end for timing in taking_part)
        network = [t.end - t.after_network for t in taking_part if t.after_network is not None]
        return (
            end - min(timing.start for timing in taking_part),
            sum(timing.cpu_seconds for timing in told),
            end - max(network) if network else None,
        )

    def _counts(self) -> dict[str, LinkCount]:
        return {host: self._cluster.link_count(host) for host in self._cluster.hosts}

    def _ask(self, *command: str) -> list[Any]:
        self._tell(command)
        return self._hear()

    def _tell(self, value: object) -> None:
        for task in self._tasks:
            task.send(value)

    def _hear(self) -> list[Any]:
        return hear(self._tasks, self._timeout)


# -- one rank ----------------------------------------------------------------------------------------------------------


def rank_main(talk: Talk, rank: int, setup: Setup) -> None:
    """Do what the leader tells, as one rank."""
    # The leader needs no torch; neither does it wait for it to load.
    import torch
    import torch.distributed as dist

    from reshard.bench.cluster_memory import Memory
    from reshard.bench.cluster_ways import Meet

    torch.set_num_threads(1)
    address = setup.addresses[setup.scenario.host_of[0]]
    hosted = dist.TCPStore(address, 0, None, is_master=True, wait_for_workers=False) if rank == 0 else None
    talk.send(hosted.port if hosted else None)
    port = talk.recv()
    store = dist.TCPStore(address, port, None, is_master=False, timeout=setup.timeout, wait_for_workers=False)
    memory = Memory(setup.scenario, rank, setup.side)
    operations = _operations(setup, memory, Meet(store, rank, setup.timeout))
    gc.collect()
    gc.freeze()
    gc.disable()
    talk.send(list(operations))
    while (command := talk.recv()) is not None:
        if command[0] == "poison":
            memory.poison()
            talk.send(None)
        elif command[0] == "check":
            talk.send(memory.check(command[1]) if operations[command[1]].brings else 0)
        elif command[0] == "ready":
            talk.send(None)
        else:
            talk.send(_timed(operations[command[1]]))


@dataclass(frozen=True)
class Timing:
    """One run of an operation on one rank, on the machine's monotonic clock."""

    start: float
    end: float
    cpu_seconds: float
    takes_part: bool
    after_network: float | None


def _timed(operation: Operation) -> Timing:
    cpu = time.process_time()
    start = time.monotonic()
    operation.run()
    end = time.monotonic()
    return Timing(start, end, time.process_time() - cpu, operation.takes_part, operation.after_network_seconds)


def _operations(setup: Setup, memory: Any, meet: Any) -> dict[str, Operation]:
    from reshard.bench.cluster_ways import FORMS, GatherBroadcast, HostAware, RawSocket, Refit, raw_socket_ends

    scenario, timeout = setup.scenario, setup.timeout
    ends = raw_socket_ends(scenario, setup.bound)
    made: list[Operation] = [RawSocket(RAW, meet, ends, setup.addresses[scenario.host_of[ends[1]]], setup.bound.nbytes)]
    if USUAL in setup.strategies:
        made += [GatherBroadcast(f"{USUAL}/{form}", meet, memory, form) for form in FORMS]
    if HOST_AWARE in setup.strategies:
        made.append(HostAware(HOST_AWARE, meet, memory))

    def refit(name: str, strategy: str, group: dist.ProcessGroup | None, hosts: Sequence[str]) -> Refit:
        topology = topology_of(setup, hosts)
        return Refit(name, group, memory, strategy=strategy, topology=topology, timeout=timeout)

    union = meet.group("union", range(scenario.size))
    for name, strategy in ((POINT_TO_POINT, "point-to-point"), (RESHARD, "reshard")):
        if name in setup.strategies:
            made.append(refit(name, strategy, union, list(scenario.hosts)))
    if RESHARD in setup.strategies and len(scenario.destination_hosts) > 2:
        hosts = [*scenario.source_hosts, scenario.destination_hosts[0]]
        ranks = [rank for host in hosts for rank in scenario.hosts[host]]
        made.append(refit(ONE_HOST, "reshard", meet.group("one-host", ranks), hosts))
    return {operation.name: operation for operation in made}


def topology_of(setup: Setup, hosts: Sequence[str]) -> Any:
    """What the planner is told: these hosts, whose ranks are numbered anew from 0 in their order, and their rates."""
    from reshard.topology import presets

    scenario, ranks, at = setup.scenario, [], 0
    for host in hosts:
        count = len(scenario.hosts[host])
        ranks.append(range(at, at + count))
        at += count
    rates = [int(setup.bytes_per_second * scenario.part_of_rate(host)) for host in hosts]
    return presets.hosts(ranks, port_bytes_per_second=rates, names=hosts)


# -- the report --------------------------------------------------------------------------------------------------------

REACH: dict[str, dict[str, Any]] = {
    "one-host": {"of_raw_socket": 1.06, "source_host_out_copies": 1.02, "part_after_network": 0.1},
    "replica-per-host": {"of_raw_socket": 1.15, "source_host_out_copies": 1.02, "part_after_network": 0.1},
    "tp-across-hosts": {"of_raw_socket": 1.06, "part_after_network": 0.1},
    "six-hosts": {"of_one_host": 1.25, "source_host_out_copies": 1.02, "part_after_network": 0.1},
}
"""What ``reshard`` is meant to be at most, at full size."""


def _report(
    setup: Setup, rates: Mapping[str, str], nbytes: int, samples: dict[str, Samples], first_seconds: Mapping[str, float]
) -> dict[str, Any]:
    scenario, bound = setup.scenario, setup.bound
    raw = median(samples[RAW].seconds)
    report: dict[str, Any] = {
        "name": scenario.name,
        "shows": scenario.shows,
        "hosts": {host: {"rate": rates[host], "ranks": list(ranks)} for host, ranks in scenario.hosts.items()},
        "source_hosts": list(scenario.source_hosts),
        "nbytes": nbytes,
        "bound_seconds": bound.seconds,
        "bound_host": bound.host,
        "raw_socket_seconds": raw,
        "raw_socket_nbytes": bound.nbytes,
        "strategies": {
            name: _figures(scenario, setup, nbytes, samples[name], raw) for name in STRATEGIES if name in samples
        },
    }
    if USUAL in samples:
        forms = {name: seconds for name, seconds in first_seconds.items() if name.startswith(f"{USUAL}/")}
        report["usual_forms"] = {name.removeprefix(f"{USUAL}/"): seconds for name, seconds in forms.items()}
    if RESHARD in samples:
        report |= _beside(scenario, report["strategies"][RESHARD], samples)
    if scenario.name in REACH and nbytes >= FULL_NBYTES:
        report["reach"] = REACH[scenario.name]
    return report


def _beside(scenario: Scenario, reached: dict[str, Any], samples: Mapping[str, Samples]) -> dict[str, Any]:
    """What a scenario's refit is compared with besides the bound and the bare socket."""
    beside: dict[str, Any] = {}
    if ONE_HOST in samples:
        beside["one_host_seconds"] = median(samples[ONE_HOST].seconds)
        reached["of_one_host"] = reached["seconds"] / beside["one_host_seconds"]
    if len(scenario.source_hosts) > 1:
        out = {host: reached["out_payload_nbytes"][host] for host in scenario.source_hosts}
        rate = {host: float(scenario.part_of_rate(host)) for host in out}
        beside["balance"] = {
            host: {"share_of_bytes": sent / sum(out.values()), "share_of_rates": rate[host] / sum(rate.values())}
            for host, sent in out.items()
        }
    return beside


def _figures(scenario: Scenario, setup: Setup, nbytes: int, samples: Samples, raw: float) -> dict[str, Any]:
    """One strategy; bytes as interfaces counted them, payload without the header of every counted packet."""
    seconds = median(samples.seconds)
    counted = {host: _typical([links[host] for links in samples.links]) for host in scenario.hosts}

    def load(end: tuple[str, str]) -> float:
        return float(getattr(counted[end[0]], f"{end[1]}_nbytes") / scenario.part_of_rate(end[0]))

    host, way = max(product(scenario.hosts, ("out", "in")), key=load)
    tails = [
        after / total for after, total in zip(samples.after_network, samples.seconds, strict=True) if after is not None
    ]
    sources = [counted[source] for source in scenario.source_hosts]
    return {
        "seconds": seconds,
        "seconds_range": [min(samples.seconds), max(samples.seconds)],
        "of_bound": seconds / setup.bound.seconds,
        "of_raw_socket": seconds / raw,
        "cpu_seconds": median(samples.cpu_seconds),
        "part_after_network": median(tails) if tails else None,
        "compared": samples.compared,
        "busiest_link": f"{host} {way}",
        "busiest_link_nbytes": getattr(counted[host], f"{way}_nbytes"),
        "busiest_link_payload_nbytes": getattr(counted[host], f"{way}_payload_nbytes"),
        "source_host_out_nbytes": sum(count.out_nbytes for count in sources),
        "source_host_out_payload_nbytes": sum(count.out_payload_nbytes for count in sources),
        "source_host_out_copies": sum(count.out_payload_nbytes for count in sources) / nbytes,
        "out_payload_nbytes": {host: count.out_payload_nbytes for host, count in counted.items()},
        "in_payload_nbytes": {host: count.in_payload_nbytes for host, count in counted.items()},
    }


def _typical(counts: Sequence[LinkCount]) -> LinkCount:
    return LinkCount(*(median_low(values) for values in zip(*(astuple(count) for count in counts), strict=True)))
